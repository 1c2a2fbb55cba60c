//! Text for people: names that are nearly right ([`nearest()`]), and text from outside before a terminal gets it ([`printable`]).

mod nearest;
pub mod printable;

pub use nearest::*;
