//! Scaling studies: experiments as data, what they measured, and how that is read.

pub mod results;
