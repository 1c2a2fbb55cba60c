//! Text for people: names that are nearly right ([`nearest()`]), counts with their units ([`many()`]), and text from outside before a
//! terminal gets it ([`printable`]).

pub mod count;
mod nearest;
pub mod printable;

pub use count::many;
pub use nearest::*;
