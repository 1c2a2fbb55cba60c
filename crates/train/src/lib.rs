//! The run: what the user asked for (`config`), the loop (`run`), the session that owns the executor (`session`),
//! learning-rate schedules, metrics and weights on disk. Prints nothing: whoever calls it listens to [`run::Events`].

pub mod bench;
pub mod config;
pub mod deepspeed;
pub mod metrics;
pub mod run;
pub mod schedule;
pub mod session;
pub mod weights;

mod error;
mod nearest;

pub use config::{Facts, Raw, Resolved};
pub use error::TrainError;
pub use session::Session;
