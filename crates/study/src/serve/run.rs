//! A training run as its files tell it: `metrics.jsonl`, `ranks.jsonl`, and the records that `facts` and `state` read. Files count steps and
//! epochs from 0; whatever is shown counts from 1, as the terminal does.

use super::facts::{Facts, stamp};
use super::state::{State, Watch};
use crate::report::live::{self as drawn, Curve, Rank, RunCurves, grouped};
use crate::tail::{Follower, last_lines};
use records::{METRICS, Metric, MetricsLine, Parts, RankLine};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A curve has at most so many points; then neighbours become one.
const MOST: usize = 240;
/// The time that is left follows from so many last steps.
const RECENT: usize = 50;
/// The account is that of the last steps, as far as these bytes go.
const TAIL: u64 = 256 << 10;
/// Lines of the log.
const LOG: usize = 12;

pub struct Run {
    folder: PathBuf,
    metrics: Follower,
    /// Of every metric, in their order; only those with a curve are filled.
    curves: Vec<Means>,
    step: u64,
    epoch: u64,
    log: Vec<String>,
    pace: Progress,
    facts: Facts,
    watch: Watch,
    state: State,
}

/// What is known of the time that steps take.
#[derive(Default)]
struct Progress {
    steps: u64,
    evaluations: u64,
    /// Of all steps.
    seconds: f64,
    recent: VecDeque<f64>,
}

impl Progress {
    fn add(&mut self, line: &MetricsLine) {
        if !line.is_step() {
            self.evaluations += 1;
            return;
        }
        self.steps += 1;
        let Some(seconds) = line.get(Metric::Seconds).filter(|seconds| seconds.is_finite()) else { return };
        self.seconds += seconds;
        self.recent.push_back(seconds);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    /// Seconds that so many steps will take: those of the last steps, and what came between steps so far, evaluation above all.
    /// `elapsed`: since the run's only start, which after a few evaluations hardly counts.
    fn left(&self, steps: u64, elapsed: Option<f64>) -> Option<f64> {
        let step = self.recent.iter().sum::<f64>() / self.recent.len() as f64;
        let between =
            elapsed.filter(|_| self.evaluations > 2).map_or(0.0, |all| (all - self.seconds).max(0.0));
        Some(steps as f64 * (step + between / self.steps.max(1) as f64)).filter(|left| left.is_finite())
    }
}

/// Means of ever more neighbours, so that a long run has no more points than a short one.
#[derive(Default)]
struct Means {
    together: usize,
    /// Sum of steps, of values, and how many.
    sums: Vec<(f64, f64, usize)>,
}

impl Means {
    fn add(&mut self, step: u64, value: Option<f64>) {
        let Some(value) = value.filter(|value| value.is_finite()) else { return };
        self.together = self.together.max(1);
        match self.sums.last_mut().filter(|sum| sum.2 < self.together) {
            Some(sum) => *sum = (sum.0 + step as f64, sum.1 + value, sum.2 + 1),
            None => self.sums.push((step as f64, value, 1)),
        }
        if self.sums.len() > MOST {
            let both = |pair: &[(f64, f64, usize)]| {
                pair.iter().fold((0.0, 0.0, 0), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2))
            };
            self.sums = self.sums.chunks(2).map(both).collect();
            self.together *= 2;
        }
    }

    fn points(&self) -> Curve {
        self.sums.iter().map(|(step, value, n)| (step / *n as f64, value / *n as f64)).collect()
    }
}

impl Run {
    pub fn new(folder: &Path) -> Run {
        Run {
            folder: folder.to_path_buf(),
            metrics: Follower::new(folder.join("metrics.jsonl")),
            curves: METRICS.map(|_| Means::default()).into(),
            step: 0,
            epoch: 0,
            log: vec![],
            pace: Progress::default(),
            facts: Facts::default(),
            watch: Watch::default(),
            state: State::Starting,
        }
    }

    /// Reads what was written since the last look; `now` by any clock that goes on.
    pub fn look(&mut self, now: Duration) {
        let mut lines: Vec<MetricsLine> = vec![];
        let mut anew = false;
        self.metrics
            .follow(&mut || anew = true, &mut |line| lines.extend(serde_json::from_str::<MetricsLine>(line)));
        if anew {
            let metrics = std::mem::replace(&mut self.metrics, Follower::new(PathBuf::new()));
            let watch = std::mem::take(&mut self.watch);
            *self = Run { metrics, watch, ..Run::new(&self.folder) };
        }
        lines.iter().for_each(|line| self.take(line));
        self.facts.look(&self.folder);
        let complete = self.facts.config.steps > 0 && self.done() >= self.facts.config.steps;
        self.state = self.watch.look(&self.folder, complete, now);
    }

    /// Steps that were made.
    fn done(&self) -> u64 {
        if self.log.is_empty() { 0 } else { self.step + 1 }
    }

    fn take(&mut self, line: &MetricsLine) {
        (self.step, self.epoch) = (line.step, line.epoch);
        for (declared, curve) in METRICS.iter().zip(&mut self.curves).filter(|one| one.0.curve.is_some()) {
            curve.add(line.step + 1, line.get(declared.metric));
        }
        self.pace.add(line);
        if self.log.len() >= LOG {
            self.log.remove(0);
        }
        self.log.push(text(line));
    }

    /// The model, its data and its ranks.
    pub fn about(&self) -> String {
        self.facts.about()
    }

    pub fn goes_on(&self) -> bool {
        self.state.goes_on()
    }

    /// How it is and how far, in words.
    pub fn state(&self) -> String {
        let state = self.state.text(self.left());
        if self.log.is_empty() {
            return format!("{state} · no step is written yet");
        }
        format!("{} · {state}", self.progress())
    }

    /// How it is, in one word.
    pub fn word(&self) -> &'static str {
        self.state.word()
    }

    /// How far it is, in words.
    fn progress(&self) -> String {
        let config = &self.facts.config;
        let (epoch, done) = (self.epoch + 1, self.done());
        let (epochs, steps) = (config.epochs.max(epoch), config.steps.max(done));
        let count = |n: u64| grouped(n as f64);
        format!("epoch {} of {} · step {} of {}", count(epoch), count(epochs), count(done), count(steps))
    }

    /// Seconds that are left, of a run that goes on.
    fn left(&self) -> Option<f64> {
        let steps = self.facts.config.steps.checked_sub(self.done()).filter(|_| self.goes_on())?;
        // How long earlier launches took is not known.
        let only = if let [only] = &self.facts.launches[..] { Some(only.started) } else { None };
        let written = stamp(&self.folder.join("metrics.jsonl")).map(|stamp| stamp.1);
        let written = written.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let elapsed = only.zip(written).map(|(started, written)| written.as_secs_f64() - started as f64);
        self.pace.left(steps, elapsed)
    }

    /// How far it is, from 0 to 1.
    pub fn share(&self) -> f64 {
        match (self.facts.config.steps, &self.state) {
            (_, State::Finished) => 1.0,
            (0, _) => 0.0,
            (steps, _) => (self.done() as f64 / steps as f64).min(1.0),
        }
    }

    /// Settings, folder and command, as HTML.
    pub fn facts(&self) -> String {
        self.facts.html(&self.folder)
    }

    /// Curves and the account of time, as HTML.
    pub fn figures(&self) -> String {
        drawn::fragments(&drawn::run_figures(&RunCurves {
            curves: self.curves.iter().map(Means::points).collect(),
            ranks: self.ranks(),
        }))
    }

    /// The last lines, as HTML.
    pub fn log(&self) -> String {
        drawn::log(&self.log)
    }

    /// Where the time of the last steps went, rank by rank.
    fn ranks(&self) -> Vec<Rank> {
        let lines = last_lines(&self.folder.join("ranks.jsonl"), TAIL);
        let mut ranks: Vec<Rank> = vec![];
        for line in lines.iter().filter_map(|line| serde_json::from_str::<RankLine>(line).ok()) {
            add(&mut ranks, line.rank, line.parts);
        }
        if ranks.is_empty() {
            // A run of one rank has its times beside its losses.
            let lines = last_lines(&self.folder.join("metrics.jsonl"), TAIL);
            let lines = lines.iter().filter_map(|line| serde_json::from_str::<MetricsLine>(line).ok());
            lines.filter_map(|line| line.parts()).for_each(|parts| add(&mut ranks, 0, parts));
        }
        ranks.sort_by_key(|rank| rank.rank);
        ranks
    }
}

fn add(ranks: &mut Vec<Rank>, rank: usize, parts: Parts) {
    let place = ranks.iter().position(|known| known.rank == rank).unwrap_or_else(|| {
        ranks.push(Rank { rank, steps: 0, seconds: Parts::default() });
        ranks.len() - 1
    });
    let known = &mut ranks[place];
    known.steps += 1;
    known.seconds += parts;
}

/// A line of the log.
fn text(line: &MetricsLine) -> String {
    let (step, epoch) = (line.step + 1, line.epoch + 1);
    let word = |metric, show: fn(f64) -> String| line.get(metric).map_or(String::new(), show);
    match (line.get(Metric::EvalLoss), line.get(Metric::Loss)) {
        (Some(loss), _) => {
            let top1 = word(Metric::EvalTop1, |x| format!(" · top-1 {:.2}%", 100.0 * x));
            let miou = word(Metric::EvalMeanIou, |x| format!(" · mean IoU {:.2}%", 100.0 * x));
            format!("epoch {epoch} · step {step} · validation: loss {loss:.4}{top1}{miou}")
        }
        (None, Some(loss)) => {
            let lr = word(Metric::LearningRate, |lr| format!(" · lr {lr:.2e}"));
            let rate = word(Metric::ImagesPerSecond, |rate| format!(" · {rate:.0} images/s"));
            format!("epoch {epoch} · step {step} · loss {loss:.4}{lr}{rate}{}", line.log())
        }
        _ => format!("epoch {epoch} · step {step}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_curves_stay_short_and_keep_their_mean() {
        let mut means = Means::default();
        for step in 0..100_000 {
            means.add(step, Some(step as f64));
        }
        means.add(7, Some(f64::NAN));
        let points = means.points();
        assert!(points.len() <= MOST && points.len() > MOST / 4, "{}", points.len());
        assert!(points.iter().all(|(x, y)| (x - y).abs() < 1e-6));
        assert!(points.windows(2).all(|two| two[0].0 < two[1].0));
    }

    #[test]
    fn the_time_left_counts_the_last_steps_and_what_lies_between_steps() {
        let mut progress = Progress::default();
        assert_eq!(progress.left(5, None), None, "nothing is known yet");
        let mut step = MetricsLine::new(0, 0);
        for i in 0..100 {
            step.set(Metric::Seconds, if i < 50 { 9.0 } else { 1.0 });
            progress.add(&step);
        }
        assert_eq!(
            progress.left(10, Some(600.0)),
            Some(10.0),
            "without evaluations, what lies between is the start"
        );
        let mut evaluation = MetricsLine::new(99, 0);
        evaluation.set(Metric::EvalLoss, 1.0);
        (0..3).for_each(|_| progress.add(&evaluation));
        assert_eq!(progress.left(10, Some(800.0)), Some(10.0 * (1.0 + 300.0 / 100.0)));
        assert_eq!(progress.left(10, None), Some(10.0));
    }
}
