//! One rule per op: the shape of its results, its backward ops, its cost.

pub mod backward;
pub mod cost;
mod dense;
pub mod shape;
mod windows;
