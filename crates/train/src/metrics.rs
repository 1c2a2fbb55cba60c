//! `metrics.jsonl` and `metrics.csv`: a line for every step and every evaluation. The first has an object a line, with
//! only the numbers it concerns; the second the same as a table, for spreadsheets. Times, and what sensors of GPUs read, are means
//! over the ranks; with more ranks than one, `ranks.jsonl` has those of each: a line for every step and rank. Of models for pixels,
//! `classes.jsonl` has the IoU of every class: a line for every evaluation.
//!
//! Lines are written without being built in memory first, so that a step allocates nothing.

mod lost;

use crate::account::Step;
use crate::error::TrainError;
use crate::segmentation::scores::ClassScore;
use crate::session::{Evaluation, StepResult};
use crate::side_output::SideOutput;
use devices::sensors::Sensors;
use lost::{Lost, unreadable};
use records::{ClassesLine, Metric, MetricsLine, RankLine, Schema, csv_heading};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub struct Metrics {
    jsonl: Lines,
    /// The table; all it has can be made from the objects.
    csv: SideOutput<Lines>,
    folder: PathBuf,
    /// Made when a step has more than one rank.
    ranks: Option<Lines>,
    /// When whoever follows the run last got to see its lines.
    shown: Instant,
}

/// Lines come into the file at least so often, for those who follow a run.
const SHOWN_EVERY: Duration = Duration::from_secs(1);

/// Writes the first metrics of a run: none.
pub fn begin(folder: &Path) -> Result<(), TrainError> {
    let (jsonl, csv) = (jsonl_path(folder), csv_path(folder));
    rewrite(&csv, |out| writeln!(out, "{}", csv_heading()))?;
    rewrite(&jsonl, |_| Ok(()))
}

/// Tells whether there are metrics of a step.
pub fn any(folder: &Path) -> Result<bool, TrainError> {
    let path = jsonl_path(folder);
    match std::fs::metadata(&path) {
        Ok(about) => Ok(about.len() > 0),
        Err(e) if e.kind() == ErrorKind::NotFound || e.kind() == ErrorKind::NotADirectory => Ok(false),
        Err(source) => Err(TrainError::Io { path, source }),
    }
}

/// All files of metrics that a folder may have.
pub fn paths(folder: &Path) -> [PathBuf; 4] {
    [jsonl_path(folder), csv_path(folder), ranks_path(folder), classes_path(folder)]
}

impl Metrics {
    /// Metrics in a folder of their own.
    pub fn create(folder: &Path) -> Result<Self, TrainError> {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
        begin(folder)?;
        Self::open(folder)
    }

    /// Adds to the metrics in a folder.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let (jsonl, csv) = (Lines::append(jsonl_path(folder))?, Lines::append(csv_path(folder))?);
        let csv = SideOutput::new(csv);
        Ok(Metrics { jsonl, csv, folder: folder.to_path_buf(), ranks: None, shown: Instant::now() })
    }

    /// Continues the metrics of a run whose next step is `next_step`. Lines of that step and later ones are dropped, as
    /// is a last line cut short: the files become those of a run that was never interrupted, times apart. The table
    /// is made from the objects, unless those are damaged. Says what was lost, in a line for each file.
    pub fn resume(folder: &Path, next_step: u64) -> Result<(Self, Vec<String>), TrainError> {
        let (jsonl, csv) = (jsonl_path(folder), csv_path(folder));
        let mut lost = Lost::of(&jsonl, next_step)?;
        let damaged = cut(&jsonl, next_step, |line| lost.saw(line))?;
        lost.damaged = damaged;
        let mut said: Vec<String> = lost.line(&jsonl).into_iter().collect();
        for path in [ranks_path(folder), classes_path(folder)] {
            if path.try_exists().map_err(at(&path))? {
                let damaged = cut(&path, next_step, |_| {})?;
                said.extend((damaged > 0).then(|| unreadable(&path, damaged)));
            }
        }
        let heading = csv_heading();
        let own = lost.any() && first_line(&csv)?.as_ref() == Some(&heading);
        rewrite(&csv, |out| {
            writeln!(out, "{heading}")?;
            if !own {
                return each_line(&jsonl, |line| match line.and_then(parsed::<MetricsLine>) {
                    Some(line) => line.write_csv(out),
                    None => Ok(()),
                });
            }
            each_line(&csv, |line| {
                let Some(line) = line else { return Ok(()) };
                let whole = line.split(',').count() == heading.split(',').count();
                let stays = before(line.split(',').next(), next_step);
                if whole && stays { writeln!(out, "{line}") } else { Ok(()) }
            })
        })?;
        Ok((Self::open(folder)?, said))
    }

    /// Writes a step, and with more ranks than one the time of each.
    pub fn step(&mut self, line: &MetricsLine, account: &Step) -> Result<(), TrainError> {
        self.write(line)?;
        if account.parts.len() > 1 {
            self.write_ranks(line.step, account)?;
        }
        if self.shown.elapsed() >= SHOWN_EVERY {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes an evaluation.
    pub fn evaluation(&mut self, line: &MetricsLine) -> Result<(), TrainError> {
        self.write(line)?;
        self.flush()
    }

    /// Writes the IoU of each class after step `step` to `classes.jsonl`, in the order of the labels. Names of classes may come twice; the
    /// run's configuration has them in that order.
    pub fn classes(&mut self, step: u64, epoch: u64, scores: &[ClassScore]) -> Result<(), TrainError> {
        let path = classes_path(&self.folder);
        let iou = scores.iter().map(|score| score.iou).collect();
        let line = ClassesLine { step, epoch, iou, schema: Schema::CURRENT };
        let mut lines = Lines::append(path)?;
        lines.write(|file| {
            serde_json::to_writer(&mut *file, &line)?;
            writeln!(file)
        })?;
        lines.sync()
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        self.shown = Instant::now();
        self.jsonl.flush()?;
        self.csv.with(Lines::flush);
        self.ranks.as_mut().map_or(Ok(()), Lines::flush)
    }

    fn write(&mut self, line: &MetricsLine) -> Result<(), TrainError> {
        self.jsonl.write(|file| line.write_json(file))?;
        self.csv.with(|csv| csv.write(|file| line.write_csv(file)));
        Ok(())
    }

    fn write_ranks(&mut self, step: u64, account: &Step) -> Result<(), TrainError> {
        if self.ranks.is_none() {
            self.ranks = Some(Lines::append(ranks_path(&self.folder))?);
        }
        let Some(lines) = &mut self.ranks else { return Ok(()) };
        for (rank, parts) in account.parts.iter().enumerate() {
            let sensors = account.sensors.get(rank).copied().unwrap_or_else(Sensors::unknown);
            let [gpu_load, gpu_memory_used, gpu_temperature, gpu_power] = sensed(&sensors);
            let schema = Schema::CURRENT;
            let line = RankLine {
                step,
                rank,
                parts: *parts,
                gpu_load,
                gpu_memory_used,
                gpu_temperature,
                gpu_power,
                schema,
            };
            lines.write(|file| line.write_json(file))?;
        }
        Ok(())
    }

    /// Files whose lines so far are to be on the disk before a checkpoint is, so that no run goes on from a step whose metrics are lost.
    pub fn unsynced(&mut self) -> Result<Vec<Unsynced>, TrainError> {
        self.flush()?;
        [Some(&self.jsonl), self.ranks.as_ref()].into_iter().flatten().map(Lines::unsynced).collect()
    }

    /// Makes sure that every line so far is on the disk.
    pub fn sync(&mut self) -> Result<(), TrainError> {
        self.jsonl.sync()?;
        self.csv.with(Lines::sync);
        self.ranks.as_mut().map_or(Ok(()), Lines::sync)
    }

    /// Why the table could not be written, if it could not.
    pub fn failure(&mut self) -> Option<TrainError> {
        self.csv.failure.take()
    }
}

/// Tells whether a step, as text, is before the next one.
fn before(step: Option<&str>, next_step: u64) -> bool {
    step.and_then(|step| step.parse().ok()).is_some_and(|step: u64| step < next_step)
}

/// The step that a line of any of the files is of.
#[derive(Deserialize)]
struct OfStep {
    step: u64,
}

/// A line as what it should be, unless it is damaged.
fn parsed<T: DeserializeOwned>(line: &str) -> Option<T> {
    serde_json::from_str(line).ok()
}

/// Drops the lines of `next_step` and later ones, and shows those that stay. Returns how many can't be read: the last, cut short
/// by a crash, is none of them.
fn cut(path: &Path, next_step: u64, mut stays: impl FnMut(&str)) -> Result<usize, TrainError> {
    let mut damaged = 0;
    rewrite(path, |out| {
        each_line(path, |line| match line.map(|line| (line, parsed::<OfStep>(line))) {
            Some((line, Some(OfStep { step }))) if step < next_step => {
                stays(line);
                writeln!(out, "{line}")
            }
            Some((_, Some(_))) => Ok(()),
            _ => {
                damaged += 1;
                Ok(())
            }
        })
    })?;
    Ok(damaged)
}

fn first_line(path: &Path) -> Result<Option<String>, TrainError> {
    let mut first = None;
    let see = |line: Option<&str>| {
        first.get_or_insert_with(|| line.unwrap_or_default().to_string());
        Ok(())
    };
    each_line(path, see).map_err(at(path))?;
    Ok(first)
}

/// The metrics of a step.
pub fn step_line(step: u64, epoch: u64, result: &StepResult, account: &Step) -> MetricsLine {
    let StepResult { score, learning_rate, gradient_norm, loss_scale, .. } = result;
    let (slowest, fastest) = account.slowest_and_fastest();
    let mut line = MetricsLine::new(step, epoch);
    line.set(Metric::Loss, score.loss);
    line.set(Metric::LearningRate, *learning_rate);
    line.set(Metric::ImagesPerSecond, result.images / account.seconds());
    line.set(Metric::GradientNorm, *gradient_norm);
    line.set(Metric::Top1, score.top1);
    line.set(Metric::Seconds, account.seconds());
    line.set_parts(&account.mean());
    line.set(Metric::SlowestRank, slowest as f64);
    line.set(Metric::FastestRank, fastest as f64);
    line.set(Metric::LossScale, *loss_scale);
    line.set(Metric::CpuSeconds, account.cpu);
    let gpu = [Metric::GpuLoad, Metric::GpuMemoryUsed, Metric::GpuTemperature, Metric::GpuPower];
    for (metric, value) in gpu.into_iter().zip(sensed(&Sensors::mean(&account.sensors))) {
        line.set(metric, value);
    }
    line
}

/// The metrics of an evaluation after step `step`, to which it belongs.
pub fn evaluation_line(step: u64, epoch: u64, score: &Evaluation) -> MetricsLine {
    let mut line = MetricsLine::new(step, epoch);
    line.set(Metric::EvalLoss, score.loss());
    match score {
        Evaluation::Images(score) => {
            line.set(Metric::EvalTop1, score.top1);
            line.set(Metric::EvalTop5, score.top5);
        }
        Evaluation::Pixels(score) => {
            let scores = score.confusion.scores();
            line.set(Metric::EvalMeanIou, scores.mean_iou);
            line.set(Metric::EvalPixelAccuracy, scores.pixel_accuracy);
        }
    }
    line
}

/// Load, memory in use, temperature and power of a GPU, as far as its sensors have them.
fn sensed(sensors: &Sensors) -> [Option<f64>; 4] {
    let Sensors { load, memory_used, temperature, power, .. } = *sensors;
    [load, memory_used, temperature, power].map(|x| Some(x).filter(|x| x.is_finite()))
}

fn jsonl_path(folder: &Path) -> PathBuf {
    folder.join("metrics.jsonl")
}

fn csv_path(folder: &Path) -> PathBuf {
    folder.join("metrics.csv")
}

fn classes_path(folder: &Path) -> PathBuf {
    folder.join("classes.jsonl")
}

fn ranks_path(folder: &Path) -> PathBuf {
    folder.join("ranks.jsonl")
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> TrainError {
    let path = path.to_path_buf();
    move |source| TrainError::Io { path, source }
}

/// A file that grows by lines.
struct Lines {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Lines {
    fn append(path: PathBuf) -> Result<Self, TrainError> {
        let file = files::append(&path).map_err(at(&path))?;
        Ok(Lines { path, file: BufWriter::new(file) })
    }

    fn write(&mut self, line: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<(), TrainError> {
        let written = line(&mut self.file);
        self.check(written)
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        let flushed = self.file.flush();
        self.check(flushed)
    }

    fn sync(&mut self) -> Result<(), TrainError> {
        self.flush()?;
        let synced = synced(self.file.get_ref(), &self.path);
        self.check(synced)
    }

    /// What was flushed, for whoever syncs it.
    fn unsynced(&self) -> Result<Unsynced, TrainError> {
        let file = self.file.get_ref().try_clone().map_err(at(&self.path))?;
        Ok(Unsynced { path: self.path.clone(), file })
    }

    fn check(&self, result: io::Result<()>) -> Result<(), TrainError> {
        result.map_err(|source| TrainError::Io { path: self.path.clone(), source })
    }
}

/// A file whose lines may not be on the disk yet.
pub struct Unsynced {
    path: PathBuf,
    file: File,
}

impl Unsynced {
    /// Puts them there.
    pub fn sync(self) -> Result<(), TrainError> {
        synced(&self.file, &self.path).map_err(at(&self.path))
    }
}

/// Puts what a file has on the disk. Fails if the file was removed or replaced: what is written would be lost.
fn synced(file: &File, path: &Path) -> io::Result<()> {
    files::sync(file).and_then(|()| files::is_at(file, path))
}

/// Writes a file anew: aside, synced, then put in its place at once, so that a crash leaves the old one or the new one.
fn rewrite(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), TrainError> {
    files::replace(path, write).map_err(at(path))
}

/// Every whole line of a file, without its end, or none if it is no text; a last one that a crash cut short is left out. A missing
/// file has no lines.
fn each_line(path: &Path, mut see: impl FnMut(Option<&str>) -> io::Result<()>) -> io::Result<()> {
    let mut file = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let mut line = Vec::new();
    while file.read_until(b'\n', &mut line)? > 0 {
        if let Some(text) = line.strip_suffix(b"\n") {
            see(str::from_utf8(text).ok())?;
        }
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests;
