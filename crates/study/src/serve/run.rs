//! A training run as its files tell it: `metrics.jsonl`, `ranks.jsonl`, `config.json`.

use crate::report::live::{self as drawn, Curve, Rank, RunCurves, counted};
use crate::tail::{Follower, last_lines};
use records::{ConfigView, METRICS, Metric, MetricsLine, Parts, RankLine};
use std::path::{Path, PathBuf};

/// A curve has at most so many points; then neighbours become one.
const MOST: usize = 400;
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
        }
    }

    fn config(&self) -> ConfigView {
        let text = std::fs::read(self.folder.join("config.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Reads what was written since the last look.
    pub fn look(&mut self) {
        let mut lines: Vec<MetricsLine> = vec![];
        let mut anew = false;
        self.metrics
            .follow(&mut || anew = true, &mut |line| lines.extend(serde_json::from_str::<MetricsLine>(line)));
        if anew {
            let metrics = std::mem::replace(&mut self.metrics, Follower::new(PathBuf::new()));
            *self = Run { metrics, ..Run::new(&self.folder) };
        }
        lines.iter().for_each(|line| self.take(line));
    }

    fn take(&mut self, line: &MetricsLine) {
        (self.step, self.epoch) = (line.step, line.epoch);
        for (declared, curve) in METRICS.iter().zip(&mut self.curves).filter(|one| one.0.curve.is_some()) {
            curve.add(line.step, line.get(declared.metric));
        }
        if self.log.len() >= LOG {
            self.log.remove(0);
        }
        self.log.push(text(line));
    }

    /// The model and its ranks.
    pub fn about(&self) -> String {
        let config = self.config();
        let ranks = counted(config.world.max(1), "rank");
        if config.model.is_empty() { String::new() } else { format!("{} · {ranks}", config.model) }
    }

    /// How far it is, in words.
    pub fn state(&self) -> String {
        let config = self.config();
        if self.step == 0 && self.log.is_empty() {
            return "no step is written yet".to_string();
        }
        // Steps are numbered from 0.
        let done = self.step + 1;
        let (epochs, steps) = (config.epochs.max(self.epoch), config.steps.max(done));
        format!("epoch {} of {epochs} · step {done} of {steps}", self.epoch)
    }

    /// How far it is, from 0 to 1.
    pub fn share(&self) -> f64 {
        let steps = self.config().steps;
        if steps == 0 || self.log.is_empty() { 0.0 } else { ((self.step + 1) as f64 / steps as f64).min(1.0) }
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
    let MetricsLine { step, epoch, .. } = line;
    let word = |metric, show: fn(f64) -> String| line.get(metric).map_or(String::new(), show);
    match (line.get(Metric::EvalLoss), line.get(Metric::Loss)) {
        (Some(loss), _) => {
            let top1 = word(Metric::EvalTop1, |x| format!(" · top-1 {:.2}%", 100.0 * x));
            let miou = word(Metric::EvalMeanIou, |x| format!(" · mean IoU {:.2}%", 100.0 * x));
            format!("epoch {epoch} · validation: loss {loss:.4}{top1}{miou}")
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
}
