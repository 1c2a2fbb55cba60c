//! The run: what the user asked for (`config`), the loop (`run`), the session that owns the executor (`session`),
//! learning-rate schedules, metrics and weights on disk. Prints nothing: whoever calls it listens to [`run::Events`].

pub mod bench;
pub mod config;
pub mod metrics;
pub mod pth;
pub mod run;
pub mod schedule;
pub mod session;
pub mod tensors;
pub mod weights;

mod error;
#[cfg(test)]
mod testing;

pub use config::{Raw, Resolved};
pub use error::TrainError;
pub use session::Session;
