//! `results.csv`: a line per run, for spreadsheets.

use crate::axes::{AXES, unsettled};
use crate::error::StudyError;
use crate::results::{Estimate, Measured, Outcome, Point, Results, Run, Summary};
use records::{Declared, FACTORS, METRICS, PARTS, Parts};
use std::io::Write;
use std::path::Path;

/// A line: a run, and the point it is of.
struct Line<'a> {
    point: &'a Point,
    run: &'a Run,
    measured: Option<&'a Measured>,
    parts: Option<Parts>,
    /// Place of the run among the samples of the point's estimates.
    sample: Option<usize>,
}

/// A column: its name, and its cell in a line.
type Column = (&'static str, fn(&Line<'_>) -> String);

const COLUMNS: [Column; 38] = [
    ("point", |l| quoted(&l.point.id)),
    ("kind", |l| quoted(l.point.kind.name())),
    ("series", |l| quoted(&l.point.series)),
    ("task", |l| quoted(&l.point.settings.task)),
    ("model", |l| quoted(&l.point.settings.model)),
    ("image_size", |l| l.point.settings.image_size.to_string()),
    ("data", |l| quoted(&l.point.settings.data)),
    ("data_fraction", |l| l.point.settings.data_fraction.to_string()),
    ("ranks", |l| l.point.settings.ranks.to_string()),
    ("hosts", |l| l.point.settings.hosts.to_string()),
    ("threads_per_rank", |l| l.point.settings.threads_per_rank.to_string()),
    ("batch_per_rank", |l| l.point.settings.batch_per_rank.to_string()),
    ("accumulation", |l| l.point.settings.accumulation.to_string()),
    ("global_batch", |l| l.point.settings.global_batch.to_string()),
    ("optimizer", |l| quoted(&l.point.settings.optimizer)),
    ("precision", |l| quoted(&l.point.settings.precision)),
    ("device", |l| quoted(&l.point.settings.device)),
    ("comm", |l| quoted(&l.point.settings.comm)),
    ("images_per_epoch", |l| l.point.settings.images_per_epoch.to_string()),
    ("steps", |l| l.point.settings.steps.to_string()),
    ("repeat", |l| l.run.repeat.to_string()),
    ("started", |l| l.run.started.to_string()),
    ("run_seconds", |l| l.run.seconds.to_string()),
    ("steps_counted", |l| l.measured.map_or(String::new(), |m| m.step_seconds.len().to_string())),
    ("step_seconds", |l| l.of(|m| Some(mean(&m.step_seconds)))),
    ("epoch_seconds", |l| l.of(|m| Some(mean(&m.epoch_seconds)))),
    ("images_per_second", |l| l.of(|m| Some(m.images_per_second))),
    ("speedup", |l| l.estimated(|s| s.speedup.as_ref())),
    ("efficiency", |l| l.estimated(|s| s.efficiency.as_ref())),
    ("exchange_bytes", |l| l.of(|m| Some(m.communication_bytes as f64))),
    ("cpu_utilisation", |l| l.of(|m| m.cpu_utilisation)),
    ("gpu_utilisation", |l| l.of(|m| m.gpu_utilisation)),
    ("gpu_load", |l| l.of(|m| m.gpu_load)),
    ("memory_bytes", |l| l.of(|m| m.memory_bytes.map(|bytes| bytes as f64))),
    ("planned_bytes", |l| l.of(|m| m.planned_bytes.map(|bytes| bytes as f64))),
    ("gpu_memory_bytes", |l| l.of(|m| m.gpu_memory_bytes.map(|bytes| bytes as f64))),
    ("watts", |l| l.of(|m| m.watts)),
    ("gpu_watts", |l| l.of(|m| m.gpu_watts)),
];

/// Names of the columns of the account of time, in the order of [`PARTS`].
const TIMES: [&str; PARTS.len()] =
    ["compute", "exchange", "wait", "data_stall", "optimizer_seconds", "idle", "hidden_exchange"];

/// Metrics of the last epoch that have a column each.
fn metrics() -> impl Iterator<Item = &'static Declared> {
    METRICS.iter().map(|declared| declared.metric.declared()).filter(|declared| declared.over.is_some())
}

pub fn write(path: &Path, results: &Results) -> Result<(), StudyError> {
    let written = files::replace(path, |file| {
        writeln!(file, "{}", heading().join(","))?;
        let runs = results.points.iter().flat_map(|point| point.runs.iter().map(move |run| (point, run)));
        runs.map(|(point, run)| row(point, run)).try_for_each(|row| writeln!(file, "{}", row.join(",")))
    });
    written.map_err(StudyError::io(path))
}

fn heading() -> Vec<&'static str> {
    let mut names: Vec<&str> = COLUMNS.iter().map(|column| column.0).collect();
    names.extend(AXES.iter().filter(|axis| !axis.settled).map(|axis| axis.key));
    names.extend(TIMES);
    names.extend(FACTORS.iter().map(|factor| factor.key));
    names.extend(metrics().map(|declared| declared.name));
    names.extend(["limiter", "error"]);
    names
}

fn row(point: &Point, run: &Run) -> Vec<String> {
    let measured = run.measured();
    let parts = measured.map(|m| Parts::mean(&m.ranks));
    let sample = point.runs.iter().filter(|r| r.measured().is_some()).position(|r| r.repeat == run.repeat);
    let line = Line { point, run, measured, parts, sample: sample.filter(|_| measured.is_some()) };
    let mut row: Vec<String> = COLUMNS.iter().map(|(_, cell)| cell(&line)).collect();
    row.extend(unsettled(&point.settings).map(|(_, value)| quoted(&value)));
    row.extend(PARTS.iter().map(|part| number(line.parts.as_ref().map(part.of))));
    row.extend(FACTORS.iter().map(|factor| {
        let estimate = point.factors.as_ref().and_then(factor.of);
        line.sample_of(estimate)
    }));
    let last = measured.and_then(|m| m.curve.last());
    row.extend(metrics().map(|declared| number(last.and_then(|epoch| epoch.get(declared.metric)))));
    let limiter = point.limiter.as_ref().map_or("", |limiter| limiter.sentence.as_str());
    let error = match &run.outcome {
        Outcome::Failed { error } => error.as_str(),
        Outcome::Done(_) => "",
    };
    row.extend([quoted(limiter), quoted(error)]);
    row
}

impl Line<'_> {
    fn of(&self, f: fn(&Measured) -> Option<f64>) -> String {
        number(self.measured.and_then(f))
    }

    /// The sample of an estimate that is this run's.
    fn estimated(&self, f: fn(&Summary) -> Option<&Estimate>) -> String {
        self.sample_of(self.point.summary.as_ref().and_then(f))
    }

    fn sample_of(&self, estimate: Option<&Estimate>) -> String {
        number(estimate.and_then(|estimate| estimate.samples.get(self.sample?).copied()))
    }
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

fn number(x: Option<f64>) -> String {
    x.filter(|x| x.is_finite()).map_or(String::new(), |x| x.to_string())
}

fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::point;

    #[test]
    fn every_row_has_every_column() {
        let mut point = point(2, &[100.0, 110.0]);
        point.series = "vit-nano/4, \"small\"".into();
        point.runs.push(Run {
            repeat: 2,
            started: 0,
            seconds: 0.0,
            outcome: Outcome::Failed { error: "no memory".into() },
        });
        let rows: Vec<Vec<String>> = point.runs.iter().map(|run| row(&point, run)).collect();
        let columns = heading();
        assert!(rows.iter().all(|row| row.len() == columns.len()), "{rows:?}");
        let at = |name| columns.iter().position(|column| *column == name).unwrap();
        assert_eq!(rows[0][at("series")], "\"vit-nano/4, \"\"small\"\"\"");
        assert_eq!(rows[1][at("images_per_second")], "110");
        assert_eq!(rows[1][at("steps_counted")], "10");
        assert_eq!(
            (rows[2][at("error")].as_str(), rows[2][at("images_per_second")].as_str()),
            ("no memory", "")
        );
    }
}
