//! Settings in two stages: [`Raw`] is what the user typed (flags, a settings file, a DeepSpeed file), [`Resolved`] is what can be run.
//! Nothing after `resolve` fails for a bad setting. Each setting is declared once, in [`settings`].
//!
//! Resolving needs [`Facts`] of the data, which [`sets`] finds out: it opens what `--data` names.

mod all_reduce;
mod arithmetic;
pub mod augmentation;
mod batch;
pub mod card;
pub mod choice;
pub mod class_weights;
pub mod deepspeed;
mod error;
mod evaluations;
pub mod explain;
pub mod groups;
mod idle;
mod numbers;
pub mod offers;
mod optimize;
pub mod optimizers;
pub mod origin;
pub mod outputs;
mod page;
pub mod pixels;
pub mod place;
pub mod raw;
mod recipe;
mod resolve;
pub mod resolved;
pub mod schedule;
mod scheduler;
pub mod sets;
pub mod settings;
mod shard_group;
mod sharding;
pub mod shares;
pub mod source;
pub mod task;
mod transform;
mod whole;

pub use all_reduce::{AllReduce, CommDtype};
pub use arithmetic::{LossScale, NO_FP64, Residual};
pub use augmentation::{Augmentation, Crop, Geometry, Interpolation, Preset, RandAugment};
pub use card::Card;
pub use choice::{Device, Form, Precision};
pub use class_weights::ClassWeights;
pub use deepspeed::FileError;
pub use error::ConfigError;
pub use explain::{Explanation, KeyRow};
pub use groups::{Groups, LrScale};
pub use numbers::Betas;
pub use origin::{Note, Origin};
pub use page::{PAGE_PORT, PageAddress};
pub use pixels::{EvalMode, Pixels};
pub use place::Place;
pub use raw::{Every, Part, Span};
pub use resolve::LEAST_NORMALISED;
pub use resolved::Resolved;
pub use settings::record::Record;
pub use settings::{Plain, Raw};
pub use shard_group::ShardGroup;
pub use shares::Shares;
pub use source::{Cache, Data, Facts, Source, help as data_help};
pub use task::{DEFAULT_MODEL, Task};

#[cfg(test)]
mod tests;
