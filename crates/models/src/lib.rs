//! Model families, written like the figures of their papers.

pub mod names;
mod network;
pub mod positions;
pub mod swin;
pub mod vit;

pub use network::{Network, NetworkError};
