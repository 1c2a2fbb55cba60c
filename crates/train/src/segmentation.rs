//! Semantic segmentation: its data ([`sets`]), how images of any size are judged ([`evaluate`]), and how well pixels are told apart
//! ([`scores`]).

pub mod evaluate;
pub mod scores;
pub mod sets;

pub use evaluate::Answer;
pub use scores::{PixelConfusion, PixelScore};
pub use sets::MaskedSets;
