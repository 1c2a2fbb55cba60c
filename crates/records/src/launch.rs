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

/// Keys of `config.json` that readers need who know nothing of configurations.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ConfigView {
    pub model: String,
    pub steps: u64,
    pub epochs: u64,
    /// Ranks; 0 where the file has none.
    #[serde(default)]
    pub world: usize,
}
