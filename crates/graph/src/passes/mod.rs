//! Passes: small functions from graph to graph, and at the end from graph to plan. Each can be tested alone.
//!
//! `prepare` begins with bytes where the model begins with images, `narrow`, `fuse` and `resized_loss` shape the forward graph, `differentiate` adds the backward ops, `peephole` merges epilogues,
//! `recompute` trades activations for work, `precision` says which values are halves, `synchronise` adds what batch norms exchange among ranks and `parallelise` what gradients do, `late` delays values that are larger than what they are made of, `gather` puts small weight gradients next to each other, `schedule` orders steps on lanes, `place` gives every value its memory.

mod differentiate;
mod fuse;
mod gather;
mod late;
mod narrow;
mod parallelise;
mod peephole;
mod place;
mod precision;
mod prepare;
mod recompute;
mod resized_loss;
mod schedule;
mod synchronise;

pub use differentiate::{Gradients, differentiate};
pub use fuse::fuse;
pub use gather::gather;
pub use late::late;
pub use narrow::narrow;
pub(crate) use parallelise::GRADIENT;
pub use parallelise::{Exchange, parallelise};
pub use peephole::peephole;
pub use place::{ALIGN, Scratch, place};
pub(crate) use precision::multiplied;
pub use precision::{Mixed, precision};
pub use prepare::{Delivery, prepare};
pub use recompute::{Recompute, recompute};
pub use resized_loss::resized_loss;
pub use schedule::{Clocks, Schedule, schedule};
pub use synchronise::synchronise;
