//! Why a program can't be bound or run.

use comm::CommError;
use graph::{DType, Type};

#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("{layer}: the CPU executor has no kernel for {op}")]
    NoKernel { layer: String, op: String },
    #[error("{layer}: {op} works in {} of memory, but the plan has {} for it", amount(*needs), amount(*has))]
    Scratch { layer: String, op: String, needs: usize, has: usize },
    #[error("{name} is {ty}, but this executor computes in {computes}")]
    DType { name: String, ty: Type, computes: DType },
    #[error("VITESSE_SIMD is {0:?}, but levels are baseline, avx2, avx512 and amx")]
    Level(String),
    #[error("VITESSE_SIMD asks for {0}, which this machine doesn't have, or doesn't let a process use")]
    NoLevel(String),
    #[error("can't start {threads} threads: {source}")]
    Threads { threads: usize, source: std::io::Error },
    #[error("out of memory: can't get {} for {what}", amount(*bytes))]
    Memory { what: &'static str, bytes: usize },
    #[error("{layer}: {op} is among {needs} ranks, but there {}", ranks(*are))]
    Ranks { layer: String, op: String, needs: usize, are: Option<usize> },
    #[error("{layer}: {op} takes values that lie side by side, but {second} doesn't follow {first}")]
    Scattered { layer: String, op: String, first: String, second: String },
    #[error("state {0} lies in memory that the CPU executor doesn't have")]
    Home(String),
    #[error("the new plans have other states: {0}")]
    OtherStates(String),
    #[error("the plans are for steps of one micro-step: nothing can be added to its gradients")]
    OneMicroStep,
    #[error(transparent)]
    Comm(#[from] CommError),
}

fn ranks(are: Option<usize>) -> String {
    match are {
        None => "is no communicator".into(),
        Some(1) => "is one".into(),
        Some(n) => format!("are {n}"),
    }
}

fn amount(bytes: usize) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.1} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{b} bytes"),
    }
}
