//! Model families, written like the figures of their papers.

pub mod dense_names;
pub mod names;
pub mod positions;
mod segmenter;
pub mod upernet;
pub mod vit;
