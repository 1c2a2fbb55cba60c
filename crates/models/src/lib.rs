//! Model families, written like the figures of their papers.

pub mod vit;
