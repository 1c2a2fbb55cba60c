//! Everything that a run or a study leaves on disk, as types: `train` writes them; studies, tables, live pages, CSV and TensorBoard
//! read them.
//!
//! | file | type |
//! |---|---|
//! | `metrics.jsonl`, `metrics.csv`, TensorBoard's events | [`MetricsLine`], whose columns are declared once in [`METRICS`] |
//! | `ranks.jsonl` | [`RankLine`] |
//! | `gpus.jsonl` | [`GpuLine`] |
//! | `classes.jsonl` | [`ClassesLine`] |
//! | `run.json` | [`Launch`], one for each start |
//! | `ended.json` | [`Ending`] |
//! | `.lock` | [`Holder`]: the process that works in the folder |
//! | `config.json` | [`ConfigView`]: what readers need of it; all of it is the configuration's own |
//! | the JSON that `train --json` prints | [`Summary`] |
//! | `results.json`, `points/*.json` | [`study`] |
//!
//! Each has a schema version; what has none was written before there were any, and is read. A newer one is refused.

mod estimate;
mod factors;
mod holder;
mod launch;
mod lines;
mod metrics;
mod parts;
mod schema;
pub mod study;
mod summary;

pub use factors::{FACTORS, Factor, Factors, Slowest};
pub use holder::{Holder, host, process_started};
pub use launch::{ConfigView, Ended, Ending, Launch, Machine};
pub use lines::{ClassesLine, GpuLine, RankLine, read_lines};
pub use metrics::{
    Chart, Curve, Declared, Digits, FIGURES, Figure, LayerValues, METRICS, Metric, MetricsLine, Over, Scale,
    Values, csv_heading,
};
pub use parts::{PARTS, Part, Parts};
pub use schema::Schema;
pub use summary::{Collective, Evaluation, Summary};
