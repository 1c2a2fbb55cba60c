//! Devices that run the plans of a rank: the CPU's executor, or a GPU's, behind a few small traits ([`device`]); the plans of a run
//! for them ([`program`]); and a GPU's sensors.

mod algorithms;
mod assignment;
pub mod device;
mod error;
pub mod finishing;
mod gpu;
mod kernel_sampler;
pub mod memory_advice;
pub mod program;
mod real;
pub mod sensors;

pub use algorithms::{ALGORITHMS, algorithms, write_algorithms};
pub use device::{Device, Seat};
pub use error::DeviceError;
pub use real::{Real, copy};
