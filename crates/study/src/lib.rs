//! Scaling studies: experiments as data, what they measured, and how that is read.

pub mod axes;
pub mod child;
pub mod compare;
mod csv;
pub mod engine;
mod error;
pub mod factors;
pub mod grid;
pub mod limiter;
mod measure;
pub mod presets;
pub mod report;
pub use records::study as results;
#[doc(hidden)]
pub mod sample;
mod serial;
pub mod serve;
pub mod spec;
pub mod stats;
pub mod store;
mod summary;
mod tail;
#[cfg(test)]
mod testing;

pub use error::StudyError;
