//! How a run was started: `run.json`, and what readers need of `config.json`.

use crate::schema::Schema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One start or continuation of a run: an entry of `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    pub command: Vec<String>,
    /// The folder it was typed in.
    pub folder: PathBuf,
    /// Seconds since 1970.
    pub started: u64,
    /// Version of vitesse.
    pub version: String,
    pub machine: Machine,
    #[serde(default)]
    pub schema: Schema<1>,
}

/// The machine that a run ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub host: String,
    pub os: String,
    pub kernel: String,
    pub cpu: String,
    /// Threads the operating system lets this program run at once.
    pub threads: usize,
    /// The instruction set the kernels use.
    pub simd: String,
    pub memory_bytes: u64,
}

/// Keys of `config.json` that readers need who know nothing of configurations; what a file lacks is empty.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ConfigView {
    pub model: String,
    pub steps: u64,
    pub epochs: u64,
    /// Ranks; 0 where the file has none.
    pub world: usize,
    /// Images of a micro-step of a rank.
    pub batch: usize,
    pub accumulate: usize,
    pub device: String,
    pub precision: String,
    pub threads: usize,
    pub seed: u64,
    pub data: DataView,
    pub network: NetworkView,
    pub optimizer: OptimizerView,
    pub schedule: ScheduleView,
}

/// Data set of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct DataView {
    pub source: String,
    pub facts: FactsView,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct FactsView {
    pub train_images: u64,
    pub test_images: u64,
    pub classes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NetworkView {
    /// Side of the images, in pixels.
    pub image: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct OptimizerView {
    #[serde(rename = "type")]
    pub name: String,
    pub weight_decay: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ScheduleView {
    #[serde(rename = "type")]
    pub name: String,
    /// Highest learning rate.
    pub peak: Option<f64>,
    /// Steps.
    pub warmup: Option<u64>,
}

/// How a run ended: `ended.json`. A run that goes on, or whose process was killed, has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    pub how: Ended,
    /// Signal that stopped it, or the error that it failed with.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// Steps that were made.
    pub steps: u64,
    /// Seconds since 1970.
    pub ended: u64,
    #[serde(default)]
    pub schema: Schema<1>,
}

impl Ending {
    /// Name of the file in a run's folder.
    pub const FILE: &str = "ended.json";
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// All steps were made, or those that `--early-stop` left.
    Finished,
    Stopped,
    Failed,
}
