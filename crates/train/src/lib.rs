//! The run: what the user asked for (`config`), the loop (`run`), the session that owns the executor (`session`),
//! learning-rate schedules, metrics and weights on disk. Prints nothing: whoever calls it listens to [`run::Events`].

pub mod account;
mod agree;
mod aside;
pub mod balance;
pub mod bench;
pub mod card;
pub mod checkpoint;
mod closely;
pub mod config;
pub mod confusion;
pub mod deepspeed;
pub mod device;
pub mod evaluated;
mod fault;
mod finishing;
mod fitting;
pub mod folder;
mod gpu;
mod gpu_log;
mod gpus;
pub mod machine;
pub mod metrics;
pub mod outputs;
pub mod pth;
mod real;
pub mod record;
pub mod run;
pub mod schedule;
pub mod segmentation;
pub mod sensors;
pub mod session;
pub mod sets;
pub mod shares;
pub mod stored;
pub mod tensorboard;
pub mod tensors;
mod trace;
pub mod weights;

mod error;
pub mod files;
pub mod nearest;
pub mod printable;
#[cfg(test)]
mod testing;

pub use config::{Facts, Raw, Resolved};
pub use error::TrainError;
pub use real::Real;
pub use session::Session;
