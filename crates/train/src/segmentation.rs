//! Semantic segmentation: evaluation of images of any size ([`evaluate`]), and scores of pixels ([`scores`]).

pub mod evaluate;
pub mod scores;

pub use evaluate::Answer;
pub use scores::{PixelConfusion, PixelScore};
