//! What a study measured: `results.json`, and a file a point under `points/`.
//!
//! Samples are kept as they were taken. What follows from them (medians, intervals, speedup, the limiter) stands beside them, so
//! that a report draws what is written here and computes nothing of its own.

pub use crate::estimate::Estimate;
use crate::factors::Factors;
use crate::metrics::{Metric, Values};
use crate::parts::Parts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Raised whenever a reader of older files would misread a newer one.
pub const FORMAT: u32 = 1;

/// A study: `results.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    pub format: u32,
    pub version: String,
    pub name: String,
    /// What the study asks, for people.
    pub title: String,
    pub platform: Platform,
    /// Seconds since 1970.
    pub started: u64,
    pub points: Vec<Point>,
    /// What a reader must know before comparing: unequal work, noise, too few cores.
    pub warnings: Vec<String>,
    /// The answer in one sentence.
    pub summary: String,
    /// Amdahl's law over each series of strong scaling.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub serial: Vec<Serial>,
}

/// The part of the work that is not divided among ranks, by a fit of Amdahl's law to a series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Serial {
    pub kind: Kind,
    pub series: String,
    /// Absent where it would mean nothing; `reason` then says why.
    pub part: Option<Fit>,
    #[serde(default)]
    pub reason: String,
}

/// A fitted number, 0 to 1, with its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    pub value: f64,
    pub interval: (f64, f64),
    /// Numbers of ranks beyond the first that it was fitted to.
    pub points: usize,
}

/// Where it ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Platform {
    /// Short, for legends.
    pub name: String,
    pub host: String,
    pub cpu: String,
    pub cores: usize,
    pub gpus: Vec<String>,
    pub memory_bytes: u64,
}

/// What a group of points varies and holds constant; one figure or more each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The same images per epoch and the same global batch, over more ranks.
    Strong,
    /// The data grows with the ranks: each has the same number of images per epoch.
    Weak,
    /// The same images in all and a fixed batch per rank: the global batch grows.
    FixedPerRank,
    Batch,
    Accumulation,
    Optimizer,
    Precision,
    /// Stages of ZeRO over the same ranks, against the first of them.
    Zero,
    /// One rank on each of many hosts against many on one.
    Nodes,
    /// Anything else a file asks for.
    Grid,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Strong => "strong",
            Kind::Weak => "weak",
            Kind::FixedPerRank => "fixed-per-rank",
            Kind::Batch => "batch",
            Kind::Accumulation => "accumulation",
            Kind::Optimizer => "optimizer",
            Kind::Precision => "precision",
            Kind::Zero => "zero",
            Kind::Nodes => "nodes",
            Kind::Grid => "grid",
        }
    }

    /// Returns whether ranks divide one global batch among themselves.
    pub fn keeps_global_batch(self) -> bool {
        matches!(self, Kind::Strong | Kind::Nodes)
    }

    /// What its points have in common, for people.
    pub fn holds(self) -> &'static str {
        match self {
            Kind::Strong => "strong scaling: the same images and the same global batch over more ranks",
            Kind::Weak => "weak scaling: the data grows with the ranks, each has the same images and batch",
            Kind::FixedPerRank => {
                "the same images in all and a fixed batch per rank: the global batch grows with the ranks"
            }
            Kind::Batch => "batch sizes",
            Kind::Accumulation => "micro-steps for each all-reduce",
            Kind::Optimizer => "optimizers",
            Kind::Precision => "precisions",
            Kind::Zero => "stages of ZeRO: the same work with what ranks divide among each other",
            Kind::Nodes => "many hosts with a rank each against one host, the same images and global batch",
            Kind::Grid => "a grid of settings",
        }
    }
}

/// Runs of the same settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Made from kind and settings: the name of its file, the same whenever the study is planned again.
    pub id: String,
    pub kind: Kind,
    /// Points of one series make one curve.
    pub series: String,
    pub settings: Settings,
    pub runs: Vec<Run>,
    /// Absent when no run succeeded.
    pub summary: Option<Summary>,
    pub limiter: Option<Limiter>,
    pub flags: Vec<Flag>,
    /// Where its efficiency went.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factors: Option<Factors>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub task: String,
    pub model: String,
    pub image_size: usize,
    pub data: String,
    pub data_fraction: f64,
    pub ranks: usize,
    pub hosts: usize,
    pub threads_per_rank: usize,
    /// Images of a rank in a micro-step.
    pub batch_per_rank: usize,
    pub accumulation: usize,
    pub global_batch: usize,
    pub optimizer: String,
    pub precision: String,
    pub device: String,
    pub comm: String,
    /// Images that every epoch trains on.
    pub images_per_epoch: u64,
    pub epochs: u64,
    /// Optimizer steps of a run, those of the warm-up included.
    #[serde(default)]
    pub steps: u64,
    /// Threads of a rank that prepare images.
    #[serde(default)]
    pub loader_threads: usize,
    /// Values of the axes that have no field of their own, by the axis's key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other: BTreeMap<String, String>,
}

/// The key of [`Settings::other`] for the stage of ZeRO.
pub const ZERO: &str = "zero";

impl Settings {
    /// The stage of ZeRO; 0 where the study says nothing of it.
    pub fn stage(&self) -> f64 {
        self.other.get(ZERO).and_then(|stage| stage.parse().ok()).unwrap_or(0.0)
    }
}

/// One repeat. Repeats differ in the seed of their training, unless the study gives one, so that scores spread as trainings do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub repeat: usize,
    /// Seconds since 1970.
    pub started: u64,
    /// From its start to its end, with everything before and after training.
    #[serde(default)]
    pub seconds: f64,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Done(Box<Measured>),
    Failed { error: String },
}

/// What one run measured, the warm-up left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Of every step that counts.
    pub step_seconds: Vec<f64>,
    /// Of every epoch, as if all its steps went like those that count.
    pub epoch_seconds: Vec<f64>,
    pub images_per_second: f64,
    /// Images trained on in the steps that count.
    pub images: u64,
    /// Seconds a step of each rank.
    pub ranks: Vec<Parts>,
    /// Steps in which each rank was the slowest, by its own work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slowest_steps: Vec<u64>,
    /// Bytes that a rank sends into collectives in a step.
    #[serde(rename = "exchange_bytes")]
    pub communication_bytes: u64,
    /// Bytes/s that came through.
    #[serde(rename = "exchange_bytes_per_second")]
    pub communication_bytes_per_second: f64,
    /// Busy share of the cores that the run had, 0 to 1.
    pub cpu_utilisation: Option<f64>,
    /// Of the time of a step, the part in which ranks computed on their GPUs, 0 to 1.
    pub gpu_utilisation: Option<f64>,
    /// Of the processes of a run on this host, at their most.
    pub memory_bytes: Option<u64>,
    /// Of a rank, as its plans have it: what lasts, and what a step needs.
    #[serde(default)]
    pub planned_bytes: Option<u64>,
    /// Collectives of a step, those of a kind together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<OfKind>,
    /// Of a GPU, as its sensors told it in the steps that count: memory at its most, load (0 to 1) and power as means.
    pub gpu_memory_bytes: Option<u64>,
    #[serde(default)]
    pub gpu_load: Option<f64>,
    #[serde(default)]
    pub gpu_watts: Option<f64>,
    /// Of the processors, by their own meters.
    pub watts: Option<f64>,
    pub curve: Vec<Epoch>,
}

/// All collectives of a kind in a mean step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OfKind {
    /// As plans call it: all_reduce, reduce_scatter, all_gather.
    pub kind: String,
    /// Bytes of their messages.
    pub bytes: f64,
    /// From the last rank's entering to the end.
    pub seconds: f64,
    /// In which ranks waited for them, and not for each other.
    pub exposed: f64,
}

impl OfKind {
    /// So many times it.
    pub fn scaled(&self, by: f64) -> Self {
        let OfKind { kind, bytes, seconds, exposed } = self;
        OfKind { kind: kind.clone(), bytes: by * bytes, seconds: by * seconds, exposed: by * exposed }
    }

    /// Both together.
    pub fn plus(&self, other: &Self) -> Self {
        let (bytes, seconds) = (self.bytes + other.bytes, self.seconds + other.seconds);
        OfKind { kind: self.kind.clone(), bytes, seconds, exposed: self.exposed + other.exposed }
    }
}

impl Run {
    pub fn measured(&self) -> Option<&Measured> {
        match &self.outcome {
            Outcome::Done(measured) => Some(measured),
            Outcome::Failed { .. } => None,
        }
    }
}

/// What an epoch of a run came to: the metrics that say how an epoch's steps become one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Epoch {
    pub epoch: u64,
    #[serde(flatten)]
    pub values: Values,
}

impl Epoch {
    pub fn get(&self, metric: Metric) -> Option<f64> {
        self.values.get(metric)
    }

    /// The metric that the task is evaluated by, with its name: the first of these that is known.
    pub fn score(&self) -> Option<(&'static str, f64)> {
        let named = [
            ("validation mean IoU", Metric::EvalMeanIou),
            ("validation accuracy", Metric::EvalTop1),
            ("validation pixel accuracy", Metric::EvalPixelAccuracy),
            ("training accuracy", Metric::Top1),
        ];
        named.into_iter().find_map(|(name, metric)| Some((name, self.get(metric).filter(|x| x.is_finite())?)))
    }
}

/// What follows from the runs of a point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub epoch_seconds: Estimate,
    pub step_seconds: Estimate,
    pub images_per_second: Estimate,
    /// Against the series' point of the fewest ranks. Absent where that is missing, or the point may not be compared with it.
    pub speedup: Option<Estimate>,
    pub efficiency: Option<Estimate>,
    /// Karp and Flatt's experimentally determined serial fraction, where it is one: from 0 to 1.
    pub serial_fraction: Option<f64>,
    /// Medians over the runs of the mean over ranks.
    pub parts: Parts,
    /// After the last epoch.
    #[serde(default)]
    pub score: Option<Score>,
    #[serde(default)]
    pub usage: Usage,
    /// Means over the runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<OfKind>,
}

/// How well a task was learned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// As [`Epoch::score`] calls it.
    #[serde(deserialize_with = "current_name")]
    pub name: String,
    pub value: Estimate,
}

/// Name of a score; versions before had "accuracy, held out" for "validation accuracy".
fn current_name<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    Ok(name.strip_suffix(", held out").map(|metric| format!("validation {metric}")).unwrap_or(name))
}

/// What runs took of the machine, each where all of them tell it; as in [`Measured`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    pub cpu_utilisation: Option<Estimate>,
    pub gpu_utilisation: Option<Estimate>,
    pub gpu_load: Option<Estimate>,
    pub memory_bytes: Option<Estimate>,
    pub planned_bytes: Option<Estimate>,
    pub gpu_memory_bytes: Option<Estimate>,
    pub watts: Option<Estimate>,
    pub gpu_watts: Option<Estimate>,
}

/// What keeps a point from being faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limiter {
    pub cause: Cause,
    /// With its numbers.
    pub sentence: String,
    /// Where a point is compared with its base: all that is lost against it. Sums to 1 - efficiency.
    #[serde(default)]
    pub lost: Vec<Lost>,
}

/// A part of what is lost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    pub cause: Cause,
    /// Of the point's time; less than 0 where the point does better than its base.
    pub share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// Computing itself: nothing else takes a share worth naming.
    Compute,
    Data,
    #[serde(rename = "exchange")]
    Communication,
    /// One rank that is slower than the others, which wait for it.
    Straggler,
    /// Waiting for whoever is slowest in a step, a different rank each time.
    Waiting,
    TinyBatch,
    TooLittleWork,
    Oversubscribed,
    Optimizer,
    /// Threads with nothing to do.
    Idle,
    /// Of what is lost against the base: what the account of time doesn't show.
    Unexplained,
}

/// Why a point needs care.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flag {
    /// More threads than cores: stays out of efficiency curves.
    Oversubscribed,
    /// Did not do the same work as its series' baseline; says in what.
    UnequalWork(String),
    /// Runs (by repeat) far from the others.
    Outliers(Vec<usize>),
    /// Runs that failed (by repeat).
    Failed(Vec<usize>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_versions_before_have_the_name_of_now() {
        let name = |name: &str| {
            let text = format!(
                r#"{{"name": "{name}", "value": {{"median": 0.5, "samples": [0.5], "interval": null}}}}"#
            );
            serde_json::from_str::<Score>(&text).unwrap().name
        };
        assert_eq!(name("mean IoU, held out"), "validation mean IoU");
        assert_eq!(name("validation accuracy"), "validation accuracy");
    }
}
