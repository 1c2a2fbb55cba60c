//! `metrics.jsonl` and `metrics.csv`: a line for every step and every evaluation. The first has an object a line, with
//! only the numbers it concerns; the second the same as a table, for spreadsheets. Times, and what sensors of GPUs say, are means
//! over the ranks; with more ranks than one, `ranks.jsonl` has those of each: a line for every step and rank. Where pixels are judged,
//! `classes.jsonl` has the IoU of every class: a line for every evaluation.
//!
//! Lines are written without being built in memory first, so that a step allocates nothing.

use crate::account::{Parts, Step};
use crate::error::TrainError;
use crate::files;
use crate::segmentation::scores::ClassScore;
use crate::sensors::Sensors;
use crate::session::{Evaluation, StepResult};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const COLUMNS: [&str; 28] = [
    "step",
    "epoch",
    "loss",
    "lr",
    "images_per_second",
    "grad_norm",
    "top1",
    "eval_loss",
    "eval_top1",
    "eval_top5",
    "seconds",
    "compute_seconds",
    "exchange_seconds",
    "wait_seconds",
    "data_seconds",
    "optimizer_seconds",
    "idle_seconds",
    "hidden_exchange_seconds",
    "slowest_rank",
    "fastest_rank",
    "loss_scale",
    "cpu_seconds",
    "eval_miou",
    "eval_pixel_accuracy",
    "gpu_load",
    "gpu_memory_used",
    "gpu_temperature",
    "gpu_power",
];

/// Where those of a GPU's sensors begin.
const GPU: usize = 24;

/// The numbers of a line, in the order of the columns.
type Row = [Option<Cell>; COLUMNS.len()];

#[derive(Clone, Copy)]
enum Cell {
    Whole(u64),
    /// With all its digits.
    Real(f64),
    /// A measurement, of which the leading digits say all.
    Measured(f64),
}

/// A cell, or what stands for NaN and the infinities, which neither JSON nor every reader of tables knows.
struct Shown(Cell, &'static str);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Cell::Whole(n) => write!(f, "{n}"),
            Cell::Real(x) if x.is_finite() => write!(f, "{x}"),
            Cell::Measured(x) if x.is_finite() => write!(f, "{x:.6}"),
            _ => f.write_str(self.1),
        }
    }
}

pub struct Metrics {
    jsonl: Lines,
    csv: Lines,
    folder: PathBuf,
    /// Made when a step has more than one rank.
    ranks: Option<Lines>,
    /// When whoever follows the run last got to see its lines.
    shown: Instant,
}

/// Lines come into the file at least so often, for those who follow a run.
const SHOWN_EVERY: Duration = Duration::from_secs(1);

impl Metrics {
    /// Creates the run's folder and its metrics; refuses a folder that has some already.
    pub fn create(folder: &Path) -> Result<Self, TrainError> {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
        let create = |path: PathBuf| match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => Ok(Lines { path, file: BufWriter::new(file) }),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                Err(TrainError::RunExists(folder.to_path_buf()))
            }
            Err(source) => Err(TrainError::Io { path, source }),
        };
        let (jsonl, mut csv) = (create(jsonl_path(folder))?, create(csv_path(folder))?);
        csv.write(format_args!("{}\n", COLUMNS.join(",")))?;
        Ok(Metrics { jsonl, csv, folder: folder.to_path_buf(), ranks: None, shown: Instant::now() })
    }

    /// Continues the metrics of a run whose next step is `next_step`. Lines of that step and later ones are dropped, as
    /// is a last line cut short: the files become those of a run that was never interrupted, times apart. A table that
    /// is missing, or has other columns, is made from the objects.
    pub fn resume(folder: &Path, next_step: u64) -> Result<Self, TrainError> {
        let (jsonl, csv, ranks) = (jsonl_path(folder), csv_path(folder), ranks_path(folder));
        let stays =
            |step: Option<&str>| step.and_then(|s| s.parse().ok()).is_some_and(|s: u64| s < next_step);
        let cut = |path: &Path| {
            rewrite(path, |out| {
                each_line(
                    path,
                    |line| {
                        if stays(field(line, "step")) { writeln!(out, "{line}") } else { Ok(()) }
                    },
                )
            })
        };
        cut(&jsonl)?;
        for path in [ranks, classes_path(folder)] {
            if path.try_exists().map_err(at(&path))? {
                cut(&path)?;
            }
        }
        let heading = COLUMNS.join(",");
        let mut first = None;
        each_line(&csv, |line| {
            first.get_or_insert_with(|| line.to_string());
            Ok(())
        })
        .map_err(at(&csv))?;
        rewrite(&csv, |out| {
            writeln!(out, "{heading}")?;
            if first.as_ref() != Some(&heading) {
                return each_line(&jsonl, |line| write_row(out, line));
            }
            each_line(&csv, |line| {
                let whole = line.split(',').count() == COLUMNS.len();
                if whole && stays(line.split(',').next()) { writeln!(out, "{line}") } else { Ok(()) }
            })
        })?;
        let (jsonl, csv) = (Lines::append(jsonl)?, Lines::append(csv)?);
        Ok(Metrics { jsonl, csv, folder: folder.to_path_buf(), ranks: None, shown: Instant::now() })
    }

    pub fn step(
        &mut self,
        step: u64,
        epoch: u64,
        result: &StepResult,
        account: &Step,
    ) -> Result<(), TrainError> {
        let StepResult { score, learning_rate, gradient_norm, loss_scale, .. } = result;
        let (seconds, mean) = (account.seconds(), account.mean());
        let (slowest, fastest) = account.slowest_and_fastest();
        let Parts { compute, exchange, wait, data, update, idle, hidden } = mean;
        let mut row: Row = [None; _];
        row[0] = Some(Cell::Whole(step));
        row[1] = Some(Cell::Whole(epoch));
        row[2] = Some(Cell::Real(score.loss));
        row[3] = Some(Cell::Real(*learning_rate));
        row[4] = Some(Cell::Measured(result.images / seconds));
        row[5] = Some(Cell::Real(*gradient_norm));
        row[6] = Some(Cell::Real(score.top1));
        let times = [seconds, compute, exchange, wait, data, update, idle, hidden];
        row[10..18].iter_mut().zip(times).for_each(|(cell, x)| *cell = Some(Cell::Measured(x)));
        row[18] = Some(Cell::Whole(slowest as u64));
        row[19] = Some(Cell::Whole(fastest as u64));
        row[20] = loss_scale.map(Cell::Real);
        row[21] = Some(Cell::Measured(account.cpu));
        row[GPU..].copy_from_slice(&sensed(&Sensors::mean(&account.sensors)));
        self.write(&row)?;
        if account.parts.len() > 1 {
            self.write_ranks(step, account)?;
        }
        if self.shown.elapsed() >= SHOWN_EVERY {
            self.flush()?;
        }
        Ok(())
    }

    /// An evaluation after step `step`, to which it belongs.
    pub fn evaluation(&mut self, step: u64, epoch: u64, score: &Evaluation) -> Result<(), TrainError> {
        let mut row: Row = [None; _];
        row[0] = Some(Cell::Whole(step));
        row[1] = Some(Cell::Whole(epoch));
        row[7] = Some(Cell::Real(score.loss()));
        let (first, numbers) = match score {
            Evaluation::Images(score) => (8, [score.top1, score.top5]),
            Evaluation::Pixels(score) => {
                let scores = score.confusion.scores();
                (22, [scores.mean_iou, scores.pixel_accuracy])
            }
        };
        row[first..].iter_mut().zip(numbers).for_each(|(cell, x)| *cell = Some(Cell::Real(x)));
        self.write(&row)?;
        self.flush()
    }

    /// How well each class is recognised after step `step`: a line in `classes.jsonl`, in the order of the labels. Names of classes may
    /// come twice; the run's configuration has them in that order.
    pub fn classes(&mut self, step: u64, epoch: u64, scores: &[ClassScore]) -> Result<(), TrainError> {
        let path = classes_path(&self.folder);
        let iou: Vec<Option<f64>> = scores.iter().map(|score| score.iou).collect();
        let line = serde_json::json!({"step": step, "epoch": epoch, "iou": iou});
        let file = File::options().append(true).create(true).open(&path).map_err(at(&path))?;
        let mut lines = Lines { path, file: BufWriter::new(file) };
        lines.write(format_args!("{line}\n"))?;
        lines.sync()
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        self.shown = Instant::now();
        self.jsonl.flush()?;
        self.csv.flush()?;
        self.ranks.as_mut().map_or(Ok(()), Lines::flush)
    }

    fn write(&mut self, row: &Row) -> Result<(), TrainError> {
        let mut before = '{';
        for (column, cell) in COLUMNS.iter().zip(row) {
            if let Some(cell) = cell {
                self.jsonl.write(format_args!("{before}\"{column}\":{}", Shown(*cell, "null")))?;
                before = ',';
            }
        }
        self.jsonl.write(format_args!("}}\n"))?;
        for (i, cell) in row.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match cell {
                Some(cell) => self.csv.write(format_args!("{comma}{}", Shown(*cell, "")))?,
                None => self.csv.write(format_args!("{comma}"))?,
            }
        }
        self.csv.write(format_args!("\n"))
    }

    fn write_ranks(&mut self, step: u64, account: &Step) -> Result<(), TrainError> {
        if self.ranks.is_none() {
            let path = ranks_path(&self.folder);
            let file = File::options().append(true).create(true).open(&path).map_err(at(&path))?;
            self.ranks = Some(Lines { path, file: BufWriter::new(file) });
        }
        let Some(lines) = &mut self.ranks else { return Ok(()) };
        for (rank, parts) in account.parts.iter().enumerate() {
            let Parts { compute, exchange, wait, data, update, idle, hidden } = parts;
            lines.write(format_args!(
                "{{\"step\":{step},\"rank\":{rank},\"seconds\":{:.6},\"compute\":{compute:.6},\
                 \"exchange\":{exchange:.6},\"wait\":{wait:.6},\"data\":{data:.6},\"optimizer\":{update:.6},\
                 \"idle\":{idle:.6},\"hidden_exchange\":{hidden:.6}",
                parts.wall()
            ))?;
            for (name, cell) in
                COLUMNS[GPU..].iter().zip(account.sensors.get(rank).map(sensed).into_iter().flatten())
            {
                if let Some(cell) = cell {
                    lines.write(format_args!(",\"{name}\":{}", Shown(cell, "null")))?;
                }
            }
            lines.write(format_args!("}}\n"))?;
        }
        Ok(())
    }

    /// Makes sure that every line so far is on the disk. A checkpoint is to be written after this, so that no run goes
    /// on from a step whose metrics are lost.
    pub fn sync(&mut self) -> Result<(), TrainError> {
        self.jsonl.sync()?;
        self.csv.sync()?;
        self.ranks.as_mut().map_or(Ok(()), Lines::sync)
    }
}

/// The cells of a GPU's sensors, of those that it has.
fn sensed(sensors: &Sensors) -> [Option<Cell>; COLUMNS.len() - GPU] {
    let Sensors { load, memory_used, temperature, power, .. } = *sensors;
    let measured = |x: f64| x.is_finite().then_some(Cell::Measured(x));
    let used = memory_used.is_finite().then_some(Cell::Whole(memory_used as u64));
    [measured(load), used, measured(temperature), measured(power)]
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
        let file = File::options().append(true).open(&path).map_err(at(&path))?;
        Ok(Lines { path, file: BufWriter::new(file) })
    }

    fn write(&mut self, line: fmt::Arguments<'_>) -> Result<(), TrainError> {
        let written = self.file.write_fmt(line);
        self.check(written)
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        let flushed = self.file.flush();
        self.check(flushed)
    }

    fn sync(&mut self) -> Result<(), TrainError> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        self.check(synced)
    }

    fn check(&self, result: io::Result<()>) -> Result<(), TrainError> {
        result.map_err(|source| TrainError::Io { path: self.path.clone(), source })
    }
}

/// Writes a file anew: aside, synced, then put in its place at once, so that a crash leaves the old one or the new one.
fn rewrite(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), TrainError> {
    files::replace(path, write).map_err(at(path))
}

/// Every whole line of a file, without its end; one that a crash cut short has none. A missing file has no lines.
fn each_line(path: &Path, mut see: impl FnMut(&str) -> io::Result<()>) -> io::Result<()> {
    let mut file = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let mut line = Vec::new();
    while file.read_until(b'\n', &mut line)? > 0 {
        if let Some(Ok(text)) = line.strip_suffix(b"\n").map(str::from_utf8) {
            see(text)?;
        }
        line.clear();
    }
    Ok(())
}

/// A number of an object as [`Metrics`] writes it, digit for digit.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let mut fields = line.strip_prefix('{')?.strip_suffix('}')?.split(',');
    fields.find_map(|f| f.strip_prefix('"')?.strip_prefix(key)?.strip_prefix("\":"))
}

/// The row of the table that an object is.
fn write_row(out: &mut impl Write, line: &str) -> io::Result<()> {
    for (i, column) in COLUMNS.iter().enumerate() {
        let number = field(line, column).filter(|number| *number != "null").unwrap_or_default();
        write!(out, "{}{number}", if i == 0 { "" } else { "," })?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests;
