//! What an op has beside its description: its backward ops and its cost, one rule each.

pub mod backward;
pub mod cost;
