//! `metrics.jsonl` and `metrics.csv`: a line for every step and every evaluation. The first has an object a line, with
//! only the numbers it concerns; the second the same as a table, for spreadsheets. Times, and what sensors of GPUs say, are means
//! over the ranks; with more ranks than one, `ranks.jsonl` has those of each: a line for every step and rank. Where pixels are judged,
//! `classes.jsonl` has the IoU of every class: a line for every evaluation.
//!
//! Lines are written without being built in memory first, so that a step allocates nothing.

mod lost;

use crate::account::{Parts, Step};
use crate::error::TrainError;
use crate::segmentation::scores::ClassScore;
use crate::session::{Evaluation, StepResult};
use crate::side_output::SideOutput;
use devices::sensors::Sensors;
use lost::{Lost, unreadable};
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
    /// All it has can be made from the objects.
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
    rewrite(&csv, |out| writeln!(out, "{}", COLUMNS.join(",")))?;
    rewrite(&jsonl, |_| Ok(()))
}

/// Whether there are metrics of a step.
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
        let heading = COLUMNS.join(",");
        let own = lost.any() && first_line(&csv)?.as_ref() == Some(&heading);
        rewrite(&csv, |out| {
            writeln!(out, "{heading}")?;
            if !own {
                return each_line(&jsonl, |line| line.map_or(Ok(()), |line| write_row(out, line)));
            }
            each_line(&csv, |line| {
                let Some(line) = line else { return Ok(()) };
                let whole = line.split(',').count() == COLUMNS.len();
                let stays = before(line.split(',').next(), next_step);
                if whole && stays { writeln!(out, "{line}") } else { Ok(()) }
            })
        })?;
        Ok((Self::open(folder)?, said))
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
        let mut lines = Lines::append(path)?;
        lines.write(format_args!("{line}\n"))?;
        lines.sync()
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        self.shown = Instant::now();
        self.jsonl.flush()?;
        self.csv.with(Lines::flush);
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
        self.csv.with(|csv| {
            for (i, cell) in row.iter().enumerate() {
                let comma = if i == 0 { "" } else { "," };
                match cell {
                    Some(cell) => csv.write(format_args!("{comma}{}", Shown(*cell, "")))?,
                    None => csv.write(format_args!("{comma}"))?,
                }
            }
            csv.write(format_args!("\n"))
        });
        Ok(())
    }

    fn write_ranks(&mut self, step: u64, account: &Step) -> Result<(), TrainError> {
        if self.ranks.is_none() {
            self.ranks = Some(Lines::append(ranks_path(&self.folder))?);
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
        self.csv.with(Lines::sync);
        self.ranks.as_mut().map_or(Ok(()), Lines::sync)
    }

    /// Why the table could not be written, if it could not.
    pub fn failure(&mut self) -> Option<TrainError> {
        self.csv.failure.take()
    }
}

/// Whether a step, as text, is before the next one.
fn before(step: Option<&str>, next_step: u64) -> bool {
    step.and_then(|step| step.parse().ok()).is_some_and(|step: u64| step < next_step)
}

/// Drops the lines of `next_step` and later ones, and shows those that stay. Returns how many can't be read: the last, cut short
/// by a crash, is none of them.
fn cut(path: &Path, next_step: u64, mut stays: impl FnMut(&str)) -> Result<usize, TrainError> {
    let mut damaged = 0;
    rewrite(path, |out| {
        each_line(path, |line| match line.map(|line| (line, field(line, "step"))) {
            Some((line, Some(step))) if before(Some(step), next_step) => {
                stays(line);
                writeln!(out, "{line}")
            }
            Some((_, Some(step))) if step.parse::<u64>().is_ok() => Ok(()),
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
        let file = files::append(&path).map_err(at(&path))?;
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

    /// Fails if the file was removed or replaced: what is written would be lost.
    fn sync(&mut self) -> Result<(), TrainError> {
        let synced = self.file.flush().and_then(|()| files::sync(self.file.get_ref()));
        let synced = synced.and_then(|()| files::is_at(self.file.get_ref(), &self.path));
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
