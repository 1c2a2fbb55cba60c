//! Runs plans on an NVIDIA GPU.
//!
//! A plan becomes a flat list of [`action::Action`]s: launches of our kernels, products for cuBLASLt, copies. `steps/` makes the
//! actions of each op, as pure functions of shapes, types and addresses, so that they can be tested without a GPU.
//! `kernels/*.cu` are templates that NVRTC compiles for the GPU found, just those that a program needs.

pub mod action;
mod error;
pub mod steps;

pub use error::CudaError;
