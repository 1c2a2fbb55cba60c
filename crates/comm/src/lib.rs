//! Communication between ranks: collectives, launchers, and the diagnosis of lost or hung ranks.
//!
//! An [`Engine`] implements collectives between the ranks of a group: threads of one process, or processes. A
//! [`Communicator`] is what callers use: typed slices, a queue that runs concurrently with the caller, and a number and a name
//! for every call, which the rank's [`Activity`] shows to the control plane. [`start`] brings the ranks of a run together.
//!
//! Every host engine sums in the order of the ranks, so that results are the same on every rank, in every
//! run and over every such engine. On devices [`nccl`] sums in an order of its own.

mod activity;
mod call;
mod communicator;
mod control;
mod cores;
mod element;
mod engine;
pub mod installed;
pub mod launch;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod pending;
mod queue;
mod reduce;
mod share;
mod signature;
mod solo;
mod start;
pub mod supervisor;
pub mod tcp;
pub mod threads;
mod transport;

pub use activity::{Activity, CallInfo, Name, Snapshot};
pub use call::{Call, Collective, Counts, Span};
pub use communicator::{Communicator, Scope};
pub use control::{BusyGuard, Diagnosis, ExitReport, Failure, Monitor};
pub use element::{Element, ElementType, Reduction};
pub use engine::{CommError, Engine};
pub use launch::{Backend, Launcher, Place};
pub use pending::PendingGather;
pub use queue::{Ticket, Timing};
pub use solo::Solo;
pub use start::{Member, Options, Start, StartError, start};

/// True if this build has the MPI engine.
pub const HAS_MPI: bool = cfg!(feature = "mpi");
