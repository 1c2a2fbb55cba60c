//! Settings in two stages: [`Raw`] is what the user typed (flags, and a DeepSpeed file), [`Resolved`] is what can be run.
//! Nothing after `resolve` fails for a bad setting.
//!
//! Data is not opened here: whoever opens it states its [`Facts`].

mod arithmetic;
pub mod augmentation;
mod batch;
pub mod choice;
mod exchange;
pub mod explain;
pub mod groups;
mod idle;
mod optimize;
pub mod origin;
pub mod pixels;
pub mod place;
pub mod raw;
mod recipe;
mod resolve;
pub mod resolved;
mod scheduler;
pub mod source;
pub mod task;
mod transform;
mod whole;

pub use arithmetic::{LossScale, Residual};
pub use augmentation::{Augmentation, Crop, Geometry, Interpolation, Preset, RandAugment};
pub use choice::{Device, Form, Precision};
pub use exchange::{Exchange, Wire};
pub use explain::{Explanation, KeyRow};
pub use groups::{Groups, LrScale};
pub use origin::{Note, Origin};
pub use pixels::{EvalMode, Pixels};
pub use place::Place;
pub use raw::{Every, Raw, Span};
pub(crate) use resolve::LEAST_NORMALISED;
pub use resolved::Resolved;
pub use source::{Cache, Data, Facts, Source};
pub use task::{DEFAULT_MODEL, Task};

#[cfg(test)]
mod tests;
