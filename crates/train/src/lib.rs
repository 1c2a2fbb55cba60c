//! The run: the loop ([`run`]), the session that owns the executor ([`session`]), metrics and the run's folder. Prints nothing: whoever
//! calls it listens to [`run::Events`].

pub mod account;
mod agree;
pub mod balance;
pub mod bench;
pub mod confusion;
pub mod continuation;
pub mod evaluated;
mod fault;
pub mod folder;
mod gpu_log;
pub mod inference;
pub mod machine;
pub mod metrics;
pub mod record;
pub mod run;
mod saver;
pub mod segmentation;
pub mod session;
mod side_output;
pub mod tensorboard;
mod trace;
mod updates;

mod error;

pub use error::TrainError;
pub use session::Session;
