//! Runs plans on host threads: the reference executor, and the one that is always there.
//!
//! `executor.rs` binds a program to memory and walks its steps, `account.rs` says where the time went, `steps/` cuts each op into pieces for the thread pool,
//! `kernels/` holds the arithmetic of a piece, `matmul/` the matmuls.

mod account;
pub mod ceilings;
mod error;
mod executor;
pub mod kernels;
pub mod matmul;
mod memory;
pub mod pool;
pub mod reference;
mod slow;
mod steps;

pub use error::CpuError;
pub use executor::{BadValue, Batch, Executor, Options, Origin, StepTime, Which};
pub use graph::run::{Account, CollectiveTime, Event};
pub use kernels::Float;
pub use steps::{Target, attention_tiles};
