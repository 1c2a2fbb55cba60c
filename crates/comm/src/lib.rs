//! How ranks exchange data, and how they notice that one of them can't.
//!
//! An [`Engine`] does collectives between the ranks of a group: threads of one process, or processes. A
//! [`Communicator`] is what callers see: typed slices, a queue that works beside the caller, and a number and a name
//! for every call, which the rank's [`Pulse`] shows to whoever watches.
//!
//! Sums are made in the order of the ranks by every engine, so that results are the same on every rank, in every run and
//! over every engine.

mod call;
mod communicator;
mod element;
mod engine;
mod lane;
mod pulse;
mod solo;

pub use call::{Call, Collective, Counts, Span};
pub use communicator::{Communicator, Scope};
pub use element::{Element, Kind, Reduction};
pub use engine::{CommError, Engine};
pub use lane::{Ticket, Timing};
pub use pulse::{At, Name, Pulse, Snapshot};
pub use solo::Solo;
