//! Everything that can end a run, each with the culprit in its text.

use config::{ConfigError, FileError};
use devices::DeviceError;
use formats::{CheckpointError, WeightsError};
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file of settings, or a record of them.
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Graph(#[from] graph::GraphError),
    #[error(transparent)]
    Cpu(#[from] cpu::CpuError),
    /// What was computed since the last checkpoint is gone with it.
    #[error("rank {rank} lost {gpu} in step {step}: {why}")]
    GpuLost { rank: usize, gpu: String, step: u64, why: String },
    #[error(transparent)]
    Data(#[from] data::DataError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("can't start a thread for {what}: {source}")]
    Thread { what: &'static str, source: std::io::Error },
    #[error("--out {out}: already holds a run: go on with it (--resume {out}), choose another --out, or remove it", out = .0.display())]
    RunExists(PathBuf),
    #[error("{}: nothing to resume: it holds no run", .0.display())]
    NoRun(PathBuf),
    #[error("{} is in use by {by}", folder.display())]
    Locked { folder: PathBuf, by: String },
    #[error("{} was taken over by {by}: this run ends", folder.display())]
    TakenOver { folder: PathBuf, by: String },
    #[error("{} was removed while the run was going on: this run ends", .0.display())]
    FolderGone(PathBuf),
    #[error("{0}; no other checkpoint of the run can be read")]
    NoneWhole(Box<TrainError>),
    #[error("{} was started with other settings: {differences}", folder.display())]
    OtherSettings { folder: PathBuf, differences: String },
    #[error("{}: {problem}", path.display())]
    Record { path: PathBuf, problem: String },
    #[error(transparent)]
    Comm(#[from] comm::CommError),
    /// Ranks that can't work together.
    #[error("{0}")]
    Disagree(String),
    #[error("VITESSE_FAULT: {0} is no fault that can be made")]
    Fault(String),
    #[error("step {step}: none of its samples counts")]
    NoSamples { step: u64 },
    /// `later`: steps that were under way behind it and were applied.
    #[error("step {step}: {}", not_finite(*loss, culprit.as_deref(), *later))]
    NotFinite { step: u64, loss: f64, culprit: Option<String>, later: u64 },
}

fn not_finite(loss: f64, culprit: Option<&str>, later: u64) -> String {
    let kept = "parameters are as before the step";
    match (culprit, later) {
        (Some(bad), 0) => format!("loss is {loss}; {bad}; {kept}"),
        (None, 0) => format!("loss is {loss}; every gradient is finite, but their norm overflowed; {kept}"),
        (Some(bad), _) => format!("loss is {loss}; gone through again after {}, {bad}", steps(later)),
        (None, _) => format!("loss is {loss}; gone through again after {}, it is finite", steps(later)),
    }
}

fn steps(later: u64) -> String {
    if later == 1 { "one more step".to_string() } else { format!("{later} more steps") }
}

impl TrainError {
    /// With the rank, its GPU and the step, if it says that the GPU was lost.
    pub(crate) fn of_step(self, rank: usize, gpu: impl FnOnce() -> String, step: u64) -> Self {
        match self {
            TrainError::Device(DeviceError::Cuda(cuda::CudaError::Lost { doing, name, meaning })) => {
                let why = format!("{name}: {meaning} (while {doing})");
                TrainError::GpuLost { rank, gpu: gpu(), step, why }
            }
            other => other,
        }
    }

    /// Whether another start may go better.
    pub fn loses_device(&self) -> bool {
        matches!(
            self,
            TrainError::GpuLost { .. } | TrainError::Device(DeviceError::Cuda(cuda::CudaError::Lost { .. }))
        )
    }

    /// Whether a file was read that is not as it was written: another one may be.
    pub fn is_damage(&self) -> bool {
        match self {
            TrainError::Checkpoint(error) => error.is_damage(),
            TrainError::Weights(error) => error.is_damage(),
            _ => false,
        }
    }

    pub fn setting(flag: &'static str, value: impl ToString, why: impl Into<String>) -> Self {
        ConfigError::setting(flag, value, why).into()
    }
}
