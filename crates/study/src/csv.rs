//! `results.csv`: a line a run, for spreadsheets.

use crate::error::StudyError;
use crate::results::{Epoch, Measured, Outcome, Point, Results, Run};
use files;
use std::io::Write;
use std::path::Path;

const COLUMNS: &str = "point,kind,series,task,model,image_size,data,data_fraction,ranks,hosts,threads_per_rank,batch_per_rank,\
accumulation,global_batch,optimizer,precision,device,comm,images_per_epoch,steps,repeat,started,run_seconds,steps_counted,\
step_seconds,epoch_seconds,images_per_second,speedup,efficiency,compute,exchange,wait,data_stall,optimizer_seconds,idle,\
hidden_exchange,exchange_bytes,cpu_utilisation,gpu_utilisation,gpu_load,memory_bytes,gpu_memory_bytes,watts,gpu_watts,loss,eval_loss,\
eval_top1,eval_miou,eval_pixel_accuracy,limiter,error";

pub fn write(path: &Path, results: &Results) -> Result<(), StudyError> {
    let written = files::replace(path, |file| {
        writeln!(file, "{COLUMNS}")?;
        let runs = results.points.iter().flat_map(|point| point.runs.iter().map(move |run| (point, run)));
        runs.map(|(point, run)| row(point, run)).try_for_each(|row| writeln!(file, "{}", row.join(",")))
    });
    written.map_err(StudyError::io(path))
}

fn row(point: &Point, run: &Run) -> Vec<String> {
    let s = &point.settings;
    let mut row: Vec<String> =
        [&point.id, point.kind.name(), &point.series, &s.task, &s.model].map(quoted).to_vec();
    row.extend([s.image_size.to_string(), quoted(&s.data), s.data_fraction.to_string()]);
    let counts = [s.ranks, s.hosts, s.threads_per_rank, s.batch_per_rank, s.accumulation, s.global_batch];
    row.extend(counts.map(|n| n.to_string()));
    row.extend([&s.optimizer, &s.precision, &s.device, &s.comm].map(|text| quoted(text)));
    row.extend([s.images_per_epoch, s.steps, run.repeat as u64, run.started].map(|n| n.to_string()));
    row.push(run.seconds.to_string());
    let error = match &run.outcome {
        Outcome::Failed { error } => error.as_str(),
        Outcome::Done(_) => "",
    };
    let number = |x: Option<f64>| x.filter(|x| x.is_finite()).map_or(String::new(), |x| x.to_string());
    let m = run.measured();
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    // Of this run: the sample of each estimate that is its own.
    let place = point.runs.iter().filter(|r| r.measured().is_some()).position(|r| r.repeat == run.repeat);
    let sample = |e: Option<&crate::results::Estimate>| e.and_then(|e| e.samples.get(place?).copied());
    let summary = point.summary.as_ref().filter(|_| m.is_some());
    row.push(m.map_or(String::new(), |m| m.step_seconds.len().to_string()));
    row.extend([m.map(|m| mean(&m.step_seconds)), m.map(|m| mean(&m.epoch_seconds))].map(number));
    row.push(number(m.map(|m| m.images_per_second)));
    row.push(number(sample(summary.and_then(|s| s.speedup.as_ref()))));
    row.push(number(sample(summary.and_then(|s| s.efficiency.as_ref()))));
    let parts = m.map(|m| crate::measure::mean(&m.ranks));
    let parts = parts.map(|p| [p.compute, p.exchange, p.wait, p.data, p.optimizer, p.idle, p.hidden]);
    row.extend((0..7).map(|i| number(parts.map(|parts| parts[i]))));
    row.push(m.map_or(String::new(), |m| m.exchange_bytes.to_string()));
    let of = |f: fn(&Measured) -> Option<f64>| number(m.and_then(f));
    row.extend([of(|m| m.cpu_utilisation), of(|m| m.gpu_utilisation), of(|m| m.gpu_load)]);
    let bytes = |bytes: Option<u64>| bytes.map_or(String::new(), |bytes| bytes.to_string());
    row.extend([m.and_then(|m| m.memory_bytes), m.and_then(|m| m.gpu_memory_bytes)].map(bytes));
    row.extend([of(|m| m.watts), of(|m| m.gpu_watts)]);
    let last = |f: fn(&Epoch) -> Option<f64>| number(m.and_then(|m| m.curve.last()).and_then(f));
    row.extend([last(|e| e.loss), last(|e| e.eval_loss), last(|e| e.eval_top1), last(|e| e.eval_miou)]);
    row.push(last(|e| e.eval_pixel_accuracy));
    let limiter = point.limiter.as_ref().map_or("", |limiter| limiter.sentence.as_str());
    row.extend([quoted(limiter), quoted(error)]);
    row
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
        let columns: Vec<&str> = COLUMNS.split(',').collect();
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
