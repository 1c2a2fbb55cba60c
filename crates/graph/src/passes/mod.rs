//! Passes: small functions from graph to graph, and at the end from graph to plan. Each can be tested alone;
//! [`compile`](crate::compile()) has their lists.
//!
//! `prepare` begins with bytes where the model begins with images; `narrow`, `fuse` and `resized_loss` shape the forward graph;
//! `differentiate` adds the backward ops; `matrices` finds the weights of hidden layers; `lay_out` adds the states of training, `accumulate` and `defer` put sums and running
//! moments there; `peephole` merges epilogues; `recompute` trades activations for work; `precision` says which values are
//! in half precision; `late` delays values that are larger than what they are made of; `gather` puts small weight gradients next to each
//! other; `synchronise` adds what batch norms of several ranks know of each other, `shards` gathers what ranks divide where it is read,
//! `scatter` reduce-scatters gradients that they divide, `parallelise` adds the all-reduce of others, and `replicas` that of parts which several groups of ranks hold; `update` is the graph of an update; `sums` lets sums that a device makes in parts wait for each other. `schedule` orders
//! steps on lanes, `place` gives every value its memory, `wait` says what each step waits for, and `across` what of
//! the plans before.

mod accumulate;
mod across;
mod buckets;
mod defer;
mod differentiate;
mod fuse;
mod gather;
mod late;
mod layout;
mod matrices;
mod muon;
mod narrow;
mod parallelise;
mod pattern;
mod peephole;
mod place;
mod precision;
mod prepare;
mod recompute;
mod replicas;
mod resized_loss;
mod scatter;
mod schedule;
mod shards;
mod sums;
mod synchronise;
mod update;
mod wait;

pub use accumulate::accumulate;
pub use across::across;
pub use buckets::{Division, arrange};
pub use defer::defer;
pub use differentiate::{Gradients, differentiate};
pub use fuse::fuse;
pub use gather::gather;
pub use late::late;
pub use layout::{Bucket, Layout, Running, Trained, lay_out};
pub use matrices::matrices;
pub use narrow::narrow;
pub use parallelise::parallelise;
pub use peephole::peephole;
pub use place::{place, place_beside};
pub use precision::precision;
pub use prepare::{Delivery, prepare};
pub use recompute::recompute;
pub use replicas::replicas;
pub use resized_loss::resized_loss;
pub use scatter::scatter;
pub use schedule::{Schedule, schedule};
pub use shards::shards;
pub use sums::sums;
pub use synchronise::synchronise;
pub use update::update;
pub use wait::wait;
