//! From decoded pixels to what a model reads.
//!
//! Two things are kept apart:
//!
//! * **choosing**: [`Transform::choose`] draws everything random about one sample as plain data, a pure function of
//!   (seed, epoch, position in the epoch's global order) and of the image's size;
//! * **applying**: [`Preparer::prepare`] and [`Mix::apply`] carry a [`Choice`] out and draw nothing.
//!
//! A device may do the last part of it: [`Finish`] says what the host leaves to it, as bytes and numbers, and how it ends.
//!
//! So any thread, rank or device that knows a sample's position makes the same sample of it.
//!
//! Semantics and order are those of torchvision's training presets: geometry, flip, RandAugment, normalisation,
//! erasing, and mixup or cutmix over pairs of finished samples.

mod affine;
mod beta;
pub(crate) mod check;
mod choice;
mod colour;
mod finish;
mod mix;
mod ops;
mod prepare;

#[cfg(test)]
mod tests;

pub(crate) use choice::Part;
pub use choice::{Choice, Rect};
pub(crate) use finish::Side;
pub use finish::{CHOICES, Finish};
pub use mix::Mix;
pub use ops::{BINS, MAX_OPS, Op, OpKind, Ops};
pub use prepare::Preparer;

use crate::Interpolation;

/// Settings of what is done to an image on its way to a model. Nothing checks it until [`Transform::check`] does.
#[derive(Clone, Debug, PartialEq)]
pub struct Transform {
    /// Height and width of what a model reads.
    pub size: usize,
    pub channels: usize,
    /// For each channel, in units of 0..=1: (x/255 − mean) / std.
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    pub interpolation: Interpolation,
    pub geometry: Geometry,
    /// Probability of mirroring left to right.
    pub flip: f64,
    pub rand_augment: Option<RandAugment>,
    /// Probability of erasing a rectangle.
    pub erase: f64,
    /// α of λ ~ Beta(α, α); 0 turns it off. With both on, each pair takes one of the two at even odds.
    pub mixup: f64,
    pub cutmix: f64,
    /// Weight of each class's labels; 1 for classes that it doesn't reach.
    pub class_weights: Vec<f32>,
}

/// Choice of the part of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Geometry {
    /// All of it, whatever its aspect ratio.
    Resize,
    /// The short side is resized to `resize`, and the centre is cut out.
    CenterCrop { resize: usize },
    /// The whole image at the right size, moved by up to `padding` pixels; what comes in from outside is 0.
    PadCrop { padding: usize },
    /// A part of random area (as a share of the image) and aspect ratio.
    RandomResizedCrop { scale: (f64, f64), ratio: (f64, f64) },
}

/// `ops` operations of torchvision's fourteen, one after another, each at the same magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandAugment {
    pub ops: usize,
    /// Strength: one of 31 steps from nothing to the strongest.
    pub magnitude: usize,
}

impl Transform {
    /// Nothing random: the whole image, or with `resize` the centre after resizing the short side to it.
    pub fn evaluation(
        size: usize,
        resize: Option<usize>,
        mean: &[f32],
        std: &[f32],
        interpolation: Interpolation,
    ) -> Self {
        Self {
            size,
            channels: mean.len(),
            mean: mean.to_vec(),
            std: std.to_vec(),
            interpolation,
            geometry: resize.map_or(Geometry::Resize, |resize| Geometry::CenterCrop { resize }),
            flip: 0.0,
            rand_augment: None,
            erase: 0.0,
            mixup: 0.0,
            cutmix: 0.0,
            class_weights: vec![],
        }
    }

    /// Elements of one prepared sample (C, S, S).
    pub fn sample_len(&self) -> usize {
        self.channels * self.size * self.size
    }

    pub(crate) fn mixes(&self) -> bool {
        self.mixup > 0.0 || self.cutmix > 0.0
    }
}
