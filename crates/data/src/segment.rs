//! Semantic segmentation: images with a class for each pixel.
//!
//! * [`ade20k`] reads ADE20K, [`masks`] any folder of images with masks, [`synthetic`] draws a learnable set.
//! * [`MaskTransform`] chooses what happens to an image and its mask, and [`MaskPreparer`] does it.
//! * [`windows`] and [`whole_image`] say how a large image is evaluated; [`Canvas`] puts the predictions together.
//! * [`palette`] and [`overlay`] show masks to a person.
//!
//! A label is a class's number, from 0 on; [`IGNORED`] is none. Whatever a set's files hold becomes that when they are read.

pub mod ade20k;
mod canvas;
mod choice;
mod files;
pub mod masks;
pub mod overlay;
pub mod palette;
mod photometric;
mod prepare;
pub mod synthetic;
mod transform;
pub mod whole_image;
pub mod windows;

pub use canvas::{Canvas, Grid};
pub use choice::{MaskChoice, resized_mask};
pub use files::{MaskedFiles, Unpaired};
pub use photometric::Distortion;
pub use prepare::{MaskFinish, MaskPreparer};
pub use synthetic::{SyntheticMasks, SyntheticMasksSpec};
pub use transform::MaskTransform;
pub use whole_image::{Ladder, WholeImage};
pub use windows::Windows;

/// Label of a pixel that counts neither in training nor in evaluation.
pub const IGNORED: u8 = 255;

/// Labels are bytes, and one of them is [`IGNORED`].
pub const MAX_CLASSES: usize = 255;
