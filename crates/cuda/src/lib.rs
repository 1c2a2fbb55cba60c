//! Runs plans on an NVIDIA GPU.
//!
//! A plan becomes a flat list of [`action::Action`]s: launches of our kernels, matmuls, copies. `steps/` makes the
//! actions of each op, as pure functions of shapes, types and addresses, so that they can be tested without a GPU, and `bind.rs`
//! binds them into a list. `kernels/*.cu` are templates that NVRTC compiles for the GPU found, just those that a program needs
//! (`compile.rs`, `modules.rs`, `launch.rs`); `matmul.rs` runs cuBLASLt's matmuls, and `tuner.rs` chooses between its
//! algorithms and our kernel; `convolution.rs` and `attention.rs` run the convolutions and the attention of cuDNN (`cudnn.rs`).
//! `executor.rs` holds the memory and runs the lists, as CUDA graphs. `collectives.rs` makes the actions of collectives, which
//! `executor/communicator.rs` runs over NCCL or through the host.

pub mod action;
mod attention;
pub mod bind;
mod cache;
pub mod collectives;
pub mod compile;
mod convolution;
mod cudnn;
mod driver;
mod error;
mod executor;
#[cfg(test)]
mod gpu_tests;
mod launch;
mod libraries;
mod matmul;
mod modules;
pub mod moves;
#[cfg(test)]
mod nccl_ranks_tests;
#[cfg(test)]
mod nccl_tests;
pub mod steps;
mod tuner;
mod warm;

pub use error::CudaError;
pub use executor::{
    CallTime, Captured, CollectiveTimes, Executor, GpuComm, KernelTime, Kernels, MemoryNeeds, MemoryUse,
    Options, Readback, Snapshot, Startup, Ticket, TimedSteps, Traced, Which, kernels_of,
};
pub use graph::bad::{BadValue, Origin};
pub use graph::run::MatmulTuning;
pub use libraries::{available, device, devices, driver_version, identity, memory};
pub use steps::Target;
pub use tuner::{AlgorithmChoices, AttentionBy};
pub use warm::{Warm, warm};
