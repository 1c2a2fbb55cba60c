//! Rules of an op beside its description: its backward ops and its cost.

pub mod backward;
pub mod cost;
