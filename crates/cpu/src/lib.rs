//! Runs plans on host threads: the reference executor, and the one that is always there.
//!
//! `executor.rs` binds a program to memory and walks its steps, `steps/` cuts each op into pieces for the thread pool,
//! `kernels/` holds the arithmetic of a piece, `product.rs` the matrix products.

pub mod ceilings;
mod executor;
pub mod kernels;
mod memory;
pub mod pool;
pub mod product;
mod steps;

pub use executor::{BadValue, Batch, CpuError, Executor, Origin, StepTime, Which};
pub use kernels::Float;
pub use steps::scratch;
