//! How busy the processors were, and what memory and power runs took.

use super::{Study, scaling};
use crate::report::chart::{Across, Lines, Series, Up};
use crate::report::figure::{Chart, Figure, Panel};
use crate::report::numbers::{bytes, percent, short};
use crate::report::points::{self, Varies};
use crate::results::{Estimate, Usage};

/// A panel: its title, its axis, what it shows, and how that is written.
type Used = (&'static str, Up, fn(&Usage) -> Option<&Estimate>, fn(f64) -> String);

pub const BUSY: [Used; 3] = [
    ("CPU utilisation", Up::Share, |usage| usage.cpu_utilisation.as_ref(), percent),
    ("GPU utilisation: computing", Up::Share, |usage| usage.gpu_utilisation.as_ref(), percent),
    ("GPU load by its sensors", Up::Share, |usage| usage.gpu_load.as_ref(), percent),
];
const TAKEN: [Used; 5] = [
    ("memory of a rank, as planned", Up::Bytes, |usage| usage.planned_bytes.as_ref(), bytes),
    ("memory of the processes", Up::Bytes, |usage| usage.memory_bytes.as_ref(), bytes),
    ("memory of a GPU", Up::Bytes, |usage| usage.gpu_memory_bytes.as_ref(), bytes),
    ("power of the processors (W)", Up::Amount, |usage| usage.watts.as_ref(), short),
    ("power of a GPU (W)", Up::Amount, |usage| usage.gpu_watts.as_ref(), short),
];

pub fn utilisation(study: &Study) -> Option<Figure> {
    let note = format!(
        "Busy share of the cores that a run had, and of its GPUs, over the steps that count.{}{}",
        study.spread_sentence(),
        study.signs()
    );
    figure(study, "utilisation", "utilisation", note, &BUSY)
}

pub fn memory_and_power(study: &Study) -> Option<Figure> {
    let note = format!(
        "Memory at its most; of a rank, what its plans need of arena and states; of GPUs, what all programs took. Power is the mean over the steps that count.{}",
        study.spread_sentence()
    );
    figure(study, "memory", "memory and power", note, &TAKEN)
}

fn figure(study: &Study, id: &str, title: &str, note: String, of: &[Used]) -> Option<Figure> {
    let panels: Vec<Panel> = of.iter().filter_map(|used| panel(study, *used)).collect();
    (!panels.is_empty()).then(|| study.figure(id, title, note, vec![], panels))
}

pub fn panel(study: &Study, (title, up, of, text): Used) -> Option<Panel> {
    let Varies::Number(x_title, x) = points::varies(study.kind) else { return None };
    let mut series = scaling::ratios(study, x, |summary| of(&summary.usage), |_| true, text);
    series.retain(|line| !line.dots.is_empty());
    (!series.is_empty()).then(|| lines(scaling::across(study), (x_title, title), up, series))
}

/// A panel of lines without an ideal.
pub fn lines(across: Across, (x_title, title): (&str, &str), up: Up, series: Vec<Series>) -> Panel {
    let (x_title, y_title) = (x_title.into(), title.into());
    let chart = Lines { across, x_title, y_title, up, series, ideal: None };
    Panel { title: title.into(), chart: Chart::Lines(chart) }
}
