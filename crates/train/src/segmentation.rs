//! Semantic segmentation: its data ([`sets`]), and how well pixels are told apart ([`scores`]).

pub mod scores;
pub mod sets;

pub use scores::PixelConfusion;
pub use sets::MaskedSets;
