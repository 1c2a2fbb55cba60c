//! Everything that can end a run, each with the culprit in its text.

use crate::weights::WeightsError;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Model(#[from] models::vit::VitError),
    #[error(transparent)]
    Graph(#[from] graph::GraphError),
    #[error(transparent)]
    Cpu(#[from] cpu::CpuError),
    #[error(transparent)]
    Data(#[from] data::DataError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("--{flag} {value}: {why}")]
    Setting { flag: &'static str, value: String, why: String },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} already holds a run: choose another --out, or remove it", .0.display())]
    RunExists(PathBuf),
    #[error("{}: nothing to resume: it holds no checkpoint", .0.display())]
    NothingToResume(PathBuf),
    #[error("{}: {problem}", path.display())]
    Checkpoint { path: PathBuf, problem: String },
    #[error("step {step}: the gradient is not finite (the loss is {loss}); the parameters are as before it")]
    NotFinite { step: u64, loss: f64 },
}

impl TrainError {
    pub fn setting(flag: &'static str, value: impl ToString, why: impl Into<String>) -> Self {
        TrainError::Setting { flag, value: value.to_string(), why: why.into() }
    }
}
