//! Everything that can go wrong with a device.

use config::ConfigError;
use graph::memory::{Memory, size};
use std::path::PathBuf;

/// A device that can't be opened, or that failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Graph(#[from] graph::GraphError),
    #[error(transparent)]
    Cpu(#[from] cpu::CpuError),
    #[error(transparent)]
    Cuda(#[from] cuda::CudaError),
    #[error(transparent)]
    Data(#[from] data::DataError),
    #[error(transparent)]
    Comm(#[from] comm::CommError),
    /// Too little memory on this machine.
    #[error("not enough memory on this machine: {} needed ({needs}), {} available", size(.needs.total()), size(*.available))]
    HostMemory { needs: Box<Memory>, available: usize },
    /// Too little memory on a device, and what would fit.
    #[error("{problem}; {advice}")]
    Memory { problem: String, advice: String },
    /// Ranks that can't work together.
    #[error("{0}")]
    Disagree(String),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {problem}", path.display())]
    Algorithms { path: PathBuf, problem: String },
    #[error("VITESSE_FAULT: {0} is no fault that can be made")]
    Fault(String),
}

impl DeviceError {
    /// Refuses the value of a flag.
    pub fn setting(flag: &'static str, value: impl ToString, why: impl Into<String>) -> Self {
        ConfigError::setting(flag, value, why).into()
    }
}
