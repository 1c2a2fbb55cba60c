//! Antialiased resizing, byte for byte as PIL does it.
//!
//! The support of the filter grows with the reduction. Rows are resized first and rounded to bytes, then columns;
//! weights are the same 22-bit numbers. torchvision's resize of images is PIL's, and that of tensors is within 1 of
//! it. (Pillow 13 works on columns first where the height shrinks far more than the width. Older ones don't, nor does
//! torchvision on tensors.)

mod convolve;
mod taps;

use crate::Image;
use convolve::Rows;
use taps::Taps;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interpolation {
    Bilinear,
    /// Cubic convolution with a = -0.5.
    Bicubic,
}

/// The part of an image that is read, in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CropBox {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

impl CropBox {
    pub fn whole(image: &Image) -> Self {
        Self { left: 0.0, top: 0.0, width: image.width as f64, height: image.height as f64 }
    }
}

/// Keeps its scratch memory; each thread has one.
#[derive(Default)]
pub struct Resizer {
    across: Taps,
    down: Taps,
    /// Rows resized, columns not yet: (seen rows, W, C) bytes.
    narrowed: Vec<u8>,
    scratch: convolve::Scratch,
}

impl Resizer {
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces `out` by the pixels of `from` within `crop`, resized to `to` (width, height).
    ///
    /// Filters see no pixel outside the box: a box of whole pixels gives what cropping first would give, as in
    /// torchvision. What of the box lies outside the image is cut off, but a pixel at least remains. Whole pixels
    /// that keep their size are copied.
    pub fn resize(
        &mut self,
        from: &Image,
        crop: CropBox,
        to: (usize, usize),
        how: Interpolation,
        out: &mut Image,
    ) {
        let Image { width, height, channels, .. } = *from;
        let pixels = out.reset(to.0, to.1, channels);
        if pixels.is_empty() || from.pixels.is_empty() {
            pixels.fill(0);
            return;
        }
        let columns = Span::new(crop.left, crop.width, width);
        let rows = Span::new(crop.top, crop.height, height);
        let stride = width * channels;
        let first = rows.start * stride + columns.start * channels;
        let seen = Rows { bytes: &from.pixels[first..], stride, len: columns.size * channels };

        let line = to.0 * channels;
        self.narrowed.resize(rows.size * line, 0);
        if columns.is_identity(to.0) {
            seen.copy_to(&mut self.narrowed);
        } else {
            self.across.set(columns.size, columns.crop, to.0, how);
            convolve::across(seen, channels, &self.across, &mut self.scratch, &mut self.narrowed, line);
        }
        if rows.is_identity(to.1) {
            pixels.copy_from_slice(&self.narrowed);
        } else {
            self.down.set(rows.size, rows.crop, to.1, how);
            convolve::down(&self.narrowed, line, &self.down, &mut self.scratch, pixels);
        }
    }
}

/// Resizing of one axis, for whoever does it elsewhere.
pub(crate) struct AxisTaps {
    /// The first pixel that is seen.
    pub start: usize,
    /// For each output pixel its first input pixel after `start`, and the weights from there.
    pub runs: Vec<(usize, Vec<i32>)>,
}

impl AxisTaps {
    /// Taps of the part of `within` pixels that begins at `start`, resized to `to` pixels.
    pub fn new(start: f64, size: f64, within: usize, to: usize, how: Interpolation) -> Self {
        let span = Span::new(start, size, within);
        let mut taps = Taps::default();
        taps.set(span.size, span.crop, to, how);
        let runs = taps.iter().map(|(first, weights)| (first, weights.to_vec())).collect();
        Self { start: span.start, runs }
    }
}

/// A sum of bytes times weights as a byte.
pub(crate) fn weighted(bytes: impl Iterator<Item = u8>, weights: &[i32]) -> u8 {
    convolve::weighted(bytes, weights)
}

/// Along one axis: the whole pixels that are seen, and the part of these that is resized, as (start, size).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Span {
    start: usize,
    size: usize,
    crop: (f64, f64),
}

impl Span {
    fn new(start: f64, size: f64, within: usize) -> Self {
        // `max` and `min` rather than `clamp`: they give a number where there is none.
        let first = start.max(0.0).min(within as f64 - 1.0);
        let last = (start + size).max(first).min(within as f64);
        let (low, high) = (first.floor() as usize, last.ceil() as usize);
        let crop = if last > first { (first - low as f64, last - first) } else { (0.0, 1.0) };
        Span { start: low, size: (high - low).max(1), crop }
    }

    fn is_identity(self, to: usize) -> bool {
        self.crop == (0.0, to as f64) && self.size == to
    }
}

#[cfg(test)]
mod tests;
