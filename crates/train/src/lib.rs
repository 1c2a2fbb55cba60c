//! train

pub mod weights;
