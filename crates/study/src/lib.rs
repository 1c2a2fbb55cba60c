//! Scaling studies: experiments as data, what they measured, and how that is read.

pub mod report;
pub mod results;
#[doc(hidden)]
pub mod sample;
pub mod serve;
