//! How ranks exchange data, and how they notice that one of them can't.
//!
//! An [`Engine`] does collectives between the ranks of a group: threads of one process, or processes. A
//! [`Communicator`] is what callers see: typed slices, a queue that works beside the caller, and a number and a name
//! for every call, which the rank's [`Pulse`] shows to whoever watches.
//!
//! Sums are made in the order of the ranks by every engine of the host, so that results are the same on every rank, in every
//! run and over every such engine. On devices [`nccl`] makes them in an order of its own.

mod call;
mod communicator;
mod control;
mod element;
mod engine;
mod lane;
pub mod launch;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod pulse;
mod reduce;
mod share;
mod signature;
mod solo;
mod start;
pub mod tcp;
pub mod threads;
mod transport;

pub use call::{Call, Collective, Counts, Span};
pub use communicator::{Communicator, Scope};
pub use control::{Busy, Ended, Failure, Verdict, Watch};
pub use element::{Element, Kind, Reduction};
pub use engine::{CommError, Engine};
pub use lane::{Ticket, Timing};
pub use launch::{Choice, Launcher, Place};
pub use pulse::{At, Name, Pulse, Snapshot};
pub use solo::Solo;
pub use start::{Member, Options, Refused, Start, start};

/// Whether this build has the exchange over MPI.
pub const HAS_MPI: bool = cfg!(feature = "mpi");
