//! Errors of binding a program to a GPU, or running it there.

use crate::action::Facts;
use crate::executor::MemoryNeeds;
use graph::memory::size;

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("{layer}: the CUDA executor has no kernel for {op}{}", of_types(.types))]
    NoKernel { layer: String, op: String, types: String },
    #[error(
        "{library} was not found: it {purpose}; install {install}, or name its folder in VITESSE_CUDA_PATH"
    )]
    NoLibrary { library: &'static str, purpose: &'static str, install: &'static str },
    #[error("no NVIDIA GPU was found ({0})")]
    NoDevice(String),
    #[error("there is no GPU {wanted}: this machine has {there}, numbered from 0")]
    NoSuchDevice { wanted: usize, there: usize },
    #[error("the NVIDIA driver is too old: it supports CUDA {}, but {needed} is needed", version(*.found))]
    DriverTooOld { found: i32, needed: &'static str },
    #[error("{library} is of CUDA {major}, but 12 or 13 is needed")]
    LibraryTooOld { library: &'static str, major: i32 },
    #[error("{library} is of CUDA {major}, which the NVIDIA driver, of CUDA {}, can't serve", version(*.driver))]
    LibraryTooNew { library: &'static str, major: i32, driver: i32 },
    #[error("{name} is too old: it has compute capability {}.{}, but 7.5 is needed", .capability.0, .capability.1)]
    DeviceTooOld { name: String, capability: (u32, u32) },
    #[error(
        "not enough memory on {}: {} needed ({}, staging {}, workspace and tables {}), {} of {} free",
        .gpu.name, size(.needs.total()), .needs.uses, size(.needs.staging),
        size(.needs.workspace + .needs.tables), size(*.free), size(*.total)
    )]
    Memory { gpu: Box<Facts>, needs: Box<MemoryNeeds>, free: usize, total: usize },
    /// A call of the driver that failed.
    #[error("{doing}: {name}: {meaning}")]
    Driver { doing: String, name: String, meaning: String },
    /// The GPU was lost: no later call in this process succeeds.
    #[error("the GPU was lost while {doing}: {name}: {meaning}")]
    Lost { doing: String, name: String, meaning: String },
    #[error("{doing}: cuBLASLt says {status}")]
    Matmul { doing: String, status: String },
    #[error("{doing}: cuDNN says {status}")]
    Cudnn { doing: String, status: String },
    #[error("cuDNN {found} is too old: it makes convolutions, and version 9 is needed")]
    CudnnTooOld { found: String },
    #[error("NVRTC can't compile {file} for {arch}: {why}{}", said(.log))]
    Compile { file: &'static str, arch: String, why: String, log: String },
    #[error("{layer}: {op} is among {needs} ranks, but there {}", ranks(*.are))]
    Ranks { layer: String, op: String, needs: usize, are: Option<usize> },
    #[error("{layer}: {op} takes values that lie side by side, but {second} doesn't follow {first}")]
    Scattered { layer: String, op: String, first: String, second: String },
    #[error(transparent)]
    Comm(#[from] comm::CommError),
    #[error("a state of the other plans differs: {0}")]
    OtherStates(String),
    #[error("{0}")]
    Misuse(String),
}

fn ranks(are: Option<usize>) -> String {
    match are {
        None => "is no communicator".to_string(),
        Some(1) => "is one".to_string(),
        Some(ranks) => format!("are {ranks}"),
    }
}

fn of_types(types: &str) -> String {
    if types.is_empty() { String::new() } else { format!(" of {types}") }
}

/// Formats a version number of the driver: 12020 is 12.2.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Joins the lines of a log: an error is one line.
fn said(log: &str) -> String {
    let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| format!("; {line}")).collect()
}
