//! RandAugment's operations and how strong they are, after torchvision.

use super::affine::{Affine, affine};
use super::colour;
use crate::Image;

/// Magnitudes are divided into so many steps.
pub const BINS: usize = 31;
/// More operations than this on one image are refused.
pub const MAX_OPS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum OpKind {
    Identity,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
    Rotate,
    Brightness,
    Color,
    Contrast,
    Sharpness,
    Posterize,
    Solarize,
    AutoContrast,
    Equalize,
}

/// One operation. What the magnitude counts depends on the kind: the shear, pixels, degrees counter-clockwise, the change
/// of a factor, bits to keep, or a threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Op {
    pub kind: OpKind,
    pub magnitude: f32,
}

/// Up to [`MAX_OPS`] operations, in the order in which they are applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ops {
    list: [Op; MAX_OPS],
    count: usize,
}

impl Default for Ops {
    fn default() -> Self {
        Self { list: [Op { kind: OpKind::Identity, magnitude: 0.0 }; MAX_OPS], count: 0 }
    }
}

impl Ops {
    /// Adds an operation; one that finds no room is left out.
    pub fn push(&mut self, op: Op) {
        if let Some(place) = self.list.get_mut(self.count) {
            *place = op;
            self.count += 1;
        }
    }

    pub fn as_slice(&self) -> &[Op] {
        &self.list[..self.count]
    }
}

impl OpKind {
    /// All operations, in torchvision's order.
    pub const ALL: [OpKind; 14] = [
        OpKind::Identity,
        OpKind::ShearX,
        OpKind::ShearY,
        OpKind::TranslateX,
        OpKind::TranslateY,
        OpKind::Rotate,
        OpKind::Brightness,
        OpKind::Color,
        OpKind::Contrast,
        OpKind::Sharpness,
        OpKind::Posterize,
        OpKind::Solarize,
        OpKind::AutoContrast,
        OpKind::Equalize,
    ];

    /// Returns whether the magnitude is negative half of the time.
    pub fn signed(self) -> bool {
        use OpKind::*;
        !matches!(self, Identity | Posterize | Solarize | AutoContrast | Equalize)
    }

    /// The magnitude at a step of [`BINS`], for an image of `size` × `size` pixels.
    pub fn magnitude(self, bin: usize, size: usize) -> f32 {
        match self {
            OpKind::Identity | OpKind::AutoContrast | OpKind::Equalize => 0.0,
            OpKind::ShearX | OpKind::ShearY => step(0.3, bin),
            OpKind::TranslateX | OpKind::TranslateY => {
                step((150.0 / 331.0 * size as f64) as f32, bin).trunc()
            }
            OpKind::Rotate => step(30.0, bin),
            OpKind::Brightness | OpKind::Color | OpKind::Contrast | OpKind::Sharpness => step(0.9, bin),
            OpKind::Posterize => 8.0 - (bin as f32 / 7.5).round_ties_even(),
            OpKind::Solarize => 255.0 - step(255.0, bin),
        }
    }
}

/// torch's `linspace(0, end, BINS)[bin]`: counted from the nearer end, in single precision. That decides how many whole
/// pixels a translation has.
fn step(end: f32, bin: usize) -> f32 {
    let step = end / (BINS - 1) as f32;
    if bin < BINS / 2 { step * bin as f32 } else { end - step * (BINS - 1).saturating_sub(bin) as f32 }
}

impl Op {
    /// Applies the operation to an image of 1 or 3 channels; `spare` is memory to work in.
    pub(super) fn apply(self, image: &mut Image, spare: &mut Image) {
        let magnitude = f64::from(self.magnitude);
        let factor = (1.0 + magnitude) as f32;
        match self.kind {
            OpKind::Identity => {}
            OpKind::ShearX => affine(Affine::shear(magnitude, 0.0), image, spare),
            OpKind::ShearY => affine(Affine::shear(0.0, magnitude), image, spare),
            OpKind::TranslateX => affine(Affine::translation(magnitude.trunc(), 0.0), image, spare),
            OpKind::TranslateY => affine(Affine::translation(0.0, magnitude.trunc()), image, spare),
            OpKind::Rotate => affine(Affine::rotation(magnitude, image), image, spare),
            OpKind::Brightness => colour::brightness(factor, image),
            OpKind::Color => colour::saturation(factor, image),
            OpKind::Contrast => colour::contrast(factor, image),
            OpKind::Sharpness => colour::sharpness(factor, image, spare),
            OpKind::Posterize => colour::posterize(self.magnitude as u32, image),
            OpKind::Solarize => colour::solarize(self.magnitude, image),
            OpKind::AutoContrast => colour::auto_contrast(image),
            OpKind::Equalize => colour::equalize(image),
        }
    }
}
