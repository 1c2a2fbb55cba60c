//! Control plane: how ranks watch each other apart from collectives, so that it works when one of those hangs.
//!
//! Rank 0 runs the [`coordinator`]. Every other rank is its [`client`] and sends it a heartbeat with its activity several times a
//! second. The coordinator finds out what went wrong ([`diagnosis`]), sends the diagnosis to all ranks, and every rank ends. Ranks
//! that are threads of one process have a coordinator without clients. A rank's own handle is its [`Monitor`].

pub(crate) mod addresses;
pub(crate) mod client;
mod clock;
mod connection;
pub(crate) mod coordinator;
mod diagnosis;
pub(crate) mod mesh;
mod messages;
mod monitor;
mod panics;
mod phrases;
pub(crate) mod process;
mod process_control;

pub use diagnosis::Diagnosis;
pub(crate) use diagnosis::Limits;
pub(crate) use messages::{Hello, Peer};
pub use monitor::{BusyGuard, ExitReport, Failure, Monitor};
pub(crate) use phrases::ranks;
pub(crate) use process_control::{LocalRank, ProcessControl};
