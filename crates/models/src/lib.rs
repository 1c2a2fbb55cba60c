//! Model families, written like the figures of their papers.

pub mod names;
pub mod positions;
pub mod vit;
