//! One rule per op: the shape of its results, its backward ops, its cost.

pub mod backward;
pub mod cost;
pub mod shape;
mod windows;
