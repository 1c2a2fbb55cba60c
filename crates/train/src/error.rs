//! Everything that can end a run, each with the culprit in its text.

use crate::deepspeed::ConfigError;
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
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Numbers of images that don't multiply.
    #[error("{0}")]
    Batch(String),
    #[error("--{flag}{}{value}: {why}", if value.is_empty() { "" } else { " " })]
    Setting { flag: &'static str, value: String, why: String },
    #[error(
        "{model} on {image} px, {channels} channels, {classes} classes, {batch} images at a time: no memory holds that"
    )]
    TooLarge { model: String, image: usize, channels: usize, classes: usize, batch: usize },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} already holds a run: choose another --out, or remove it", .0.display())]
    RunExists(PathBuf),
    #[error("step {step}: the gradient is not finite (the loss is {loss}); the parameters are as before it")]
    NotFinite { step: u64, loss: f64 },
}

impl TrainError {
    pub fn setting(flag: &'static str, value: impl ToString, why: impl Into<String>) -> Self {
        TrainError::Setting { flag, value: value.to_string(), why: why.into() }
    }
}
