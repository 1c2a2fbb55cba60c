//! Preparation of images from bytes, as in `data::Finish` and as plainly: window, mirror, resize, normalise, erase,
//! mix. The host prepares images for the CPU's own plans; this is for plans that were made for a device that does it
//! itself.

use super::Context;
use crate::kernels::Float;
use graph::op::CHOICES;
use std::ops::Range;

/// Numbers of a sample in a row of choices: the sample itself, its partner, then how they are mixed.
const SIDE: usize = 14;
/// The fraction bits of a tap's weight.
const BITS: u32 = 22;

/// All that is the same for every image.
struct Images<'a, T> {
    /// (P,h,w,C).
    pixels: &'a [u8],
    height: usize,
    width: usize,
    channels: usize,
    /// Value of each byte, (C,256).
    levels: &'a [T],
    /// Rows of (first pixel, how many, their weights), and how many numbers a row has; none where nothing is resized.
    taps: Option<(&'a [i32], usize)>,
    size: i32,
}

/// A pixel of a sample: channel, row, column.
type At = (usize, i32, i32);

impl<T: Float> Images<'_, T> {
    /// A pixel of one sample, before it is mixed.
    fn pixel(&self, side: &[i32], (channel, y, x): At) -> T {
        let Some((numbers, rect)) = side.split_first_chunk() else { return T::ZERO };
        let &[image, row_x, resized_x, start_x, row_y, resized_y, start_y, right, below, flip] = numbers;
        if covers(rect, y, x) {
            return T::ZERO;
        }
        let (from_x, from_y) = (if flip != 0 { self.size - 1 - x } else { x } + right, y + below);
        let inside = (0..resized_x).contains(&from_x) && (0..resized_y).contains(&from_y);
        let image = image as usize * self.height;
        let byte = |y: usize, x: usize| self.pixels[((image + y) * self.width + x) * self.channels + channel];
        let byte = match self.taps {
            _ if !inside => 0,
            None => byte((start_y + from_y) as usize, (start_x + from_x) as usize),
            // Columns first: each row that this pixel is made of, then those.
            Some(_) => {
                let (rows, down) = self.taps(row_y + from_y, start_y);
                let (columns, across) = self.taps(row_x + from_x, start_x);
                weighted(rows.map(|y| weighted(columns.clone().map(|x| byte(y, x)), across)), down)
            }
        };
        self.levels[channel * 256 + usize::from(byte)]
    }

    /// The pixels of an axis that one of the resized is made of, and their weights.
    fn taps(&self, row: i32, start: i32) -> (Range<usize>, &[i32]) {
        let (taps, len) = self.taps.unwrap_or((&[], 0));
        let row = &taps[row as usize * len..][..len];
        let (first, count) = ((start + row[0]) as usize, row[1] as usize);
        (first..first + count, &row[2..2 + count])
    }
}

fn weighted(bytes: impl Iterator<Item = u8>, weights: &[i32]) -> u8 {
    let sum: i32 = bytes.zip(weights).map(|(byte, weight)| i32::from(byte) * weight).sum();
    ((sum + (1 << (BITS - 1))) >> BITS).clamp(0, 255) as u8
}

/// Checks whether a rectangle (left, top, width, height) has this pixel.
fn covers(rect: &[i32], y: i32, x: i32) -> bool {
    let &[left, top, width, height] = rect else { return false };
    (left..left + width).contains(&x) && (top..top + height).contains(&y)
}

/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn prepare<T: Float>(cx: &Context<'_, T>) {
    let (pixels, out) = (cx.input(0), cx.output(0));
    let [_, height, width, channels] = pixels.shape.axes();
    let size = out.shape.last();
    let taps = cx.step.inputs.get(3);
    // SAFETY: inputs are only read.
    let (choices, images) = unsafe {
        let taps = taps.map(|taps| (taps.ints.read(), taps.shape.last()));
        let (pixels, levels, size) = (pixels.stored.read(), cx.input(2).data.read(), size as i32);
        (cx.input(1).ints.read(), Images { pixels, height, width, channels, levels, taps, size })
    };
    cx.each(out.shape.0[0], |b, _| {
        let (row, len) = (&choices[b * CHOICES..][..CHOICES], channels * size * size);
        let ((own, rest), mixed) = (row.split_at(SIDE), &row[2 * SIDE..]);
        let lambda = T::from_f64(f64::from(f32::from_bits(mixed[1] as u32)));
        // SAFETY: each image is one piece.
        let out = unsafe { out.data.part(b * len..(b + 1) * len).write() };
        for (i, out) in out.iter_mut().enumerate() {
            let at = (i / (size * size), (i / size % size) as i32, (i % size) as i32);
            let own = images.pixel(own, at);
            let partner = || images.pixel(&rest[..SIDE], at);
            *out = match mixed[0] {
                0 => own,
                1 => lambda * own + (T::ONE - lambda) * partner(),
                _ if covers(&mixed[2..], at.1, at.2) => partner(),
                _ => own,
            };
        }
    });
}
