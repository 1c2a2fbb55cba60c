//! Model families, written like the figures of their papers.

pub mod architecture;
pub mod dense_names;
pub mod identify;
pub mod layer_scale_vit;
pub mod names;
mod network;
pub mod positions;
mod segmenter;
pub mod swin;
mod timm;
pub mod upernet;
pub mod vit;

pub use architecture::{Architecture, NetworkError, RATES, Variation};
pub use network::Network;
pub use segmenter::{Head, Segmenter};
