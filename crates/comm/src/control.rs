//! How ranks know of each other beside the exchange, so that it works when a collective hangs.
//!
//! Rank 0 has the [`hub`]: every other rank is its [`guest`], and tells it a few times a second what it does. The hub
//! [`judge`]s, tells everyone the verdict, and every rank ends. Ranks that are threads of one process have a hub without
//! guests. A rank's side of all this is its [`Watch`].

pub(crate) mod addresses;
mod clock;
pub(crate) mod guest;
pub(crate) mod hub;
mod judge;
mod link;
pub(crate) mod mesh;
mod office;
mod panics;
mod phrases;
pub(crate) mod process;
mod watch;
mod wire;

pub(crate) use judge::Limits;
pub use judge::Verdict;
pub(crate) use office::{Local, Office};
pub(crate) use phrases::ranks;
pub use watch::{Busy, Ended, Failure, Watch};
pub(crate) use wire::{Hello, Person};
