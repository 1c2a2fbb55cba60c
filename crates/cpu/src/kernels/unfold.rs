//! Windows of a convolution, one row a pixel: the left side of its matmul.
//!
//! Legend: h and w height and width, C channels; channels-last.

use super::float::Float;
use std::ops::Range;

/// Geometry of windows over images (..,h,w,C).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unfold {
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// Height of the map of pixels that windows belong to.
    pub out_height: usize,
    pub out_width: usize,
    pub kernel: (usize, usize),
    /// Pixels from one window to the next.
    pub stride: usize,
    /// Offset of the first window's corner, above and to the left.
    pub pad: (isize, isize),
    /// The image with `spread` - 1 empty pixels after each of its own, in both directions.
    pub spread: usize,
}

impl Unfold {
    /// Elements of a row.
    pub fn window_len(&self) -> usize {
        self.kernel.0 * self.kernel.1 * self.channels
    }

    /// Checks whether the window of each pixel is that pixel.
    pub fn is_identity(&self) -> bool {
        let same = (self.height, self.width) == (self.out_height, self.out_width);
        same && (self.kernel, self.stride, self.pad, self.spread) == ((1, 1), 1, (0, 0), 1)
    }

    /// The same windows, but only `count` taps side by side of each, from one (row, column) on.
    pub fn taps(&self, (row, column): (usize, usize), count: usize) -> Self {
        let pad = (self.pad.0 - row as isize, self.pad.1 - column as isize);
        Unfold { kernel: (1, count), pad, ..*self }
    }

    /// The windows of pixels in `range`, counted through all images (row by row), one below the other.
    pub fn rows<T: Float>(&self, images: &[T], range: Range<usize>, out: &mut [T]) {
        let (pixels, len) = (self.out_height * self.out_width, self.window_len());
        let size = self.height * self.width * self.channels;
        for (pixel, row) in range.zip(out.chunks_exact_mut(len)) {
            let (image, at) = (pixel / pixels, pixel % pixels);
            let image = &images[image * size..(image + 1) * size];
            let corner = |i: usize, pad: isize| (i * self.stride) as isize - pad;
            let top = corner(at / self.out_width, self.pad.0);
            let left = corner(at % self.out_width, self.pad.1);
            for (ky, line) in row.chunks_exact_mut(self.kernel.1 * self.channels).enumerate() {
                match self.source(top + ky as isize, self.height) {
                    Some(y) => self.line(&image[y * self.width * self.channels..], left, line),
                    None => line.fill(T::ZERO),
                }
            }
        }
    }

    /// Rows like [`Unfold::rows`], of windows of one tap: some of its channels.
    pub fn tap_rows<T: Float>(
        &self,
        images: &[T],
        range: Range<usize>,
        channels: Range<usize>,
        out: &mut [T],
    ) {
        let pixels = self.out_height * self.out_width;
        for (pixel, row) in range.zip(out.chunks_exact_mut(channels.len())) {
            let (image, at) = (pixel / pixels, pixel % pixels);
            let place = |i: usize, pad: isize, len: usize| self.source((i * self.stride) as isize - pad, len);
            let y = place(at / self.out_width, self.pad.0, self.height);
            let x = place(at % self.out_width, self.pad.1, self.width);
            match y.zip(x) {
                Some((y, x)) => {
                    let start = ((image * self.height + y) * self.width + x) * self.channels;
                    row.copy_from_slice(&images[start + channels.start..start + channels.end]);
                }
                None => row.fill(T::ZERO),
            }
        }
    }

    /// The pixel of the image that lies at a place, if any.
    fn source(&self, at: isize, len: usize) -> Option<usize> {
        let at = usize::try_from(at).ok().filter(|at| at % self.spread == 0)? / self.spread;
        (at < len).then_some(at)
    }

    /// One row of a window from a row of the image.
    fn line<T: Float>(&self, image: &[T], left: isize, line: &mut [T]) {
        let c = self.channels;
        if self.spread > 1 {
            for (kx, pixel) in line.chunks_exact_mut(c).enumerate() {
                match self.source(left + kx as isize, self.width) {
                    Some(x) => pixel.copy_from_slice(&image[x * c..(x + 1) * c]),
                    None => pixel.fill(T::ZERO),
                }
            }
            return;
        }
        // Pixels side by side lie side by side: one copy, and zeros on either side.
        let width = self.kernel.1 as isize;
        let from = (-left).clamp(0, width);
        let to = (self.width as isize - left).clamp(from, width);
        let (from_c, to_c) = (from as usize * c, to as usize * c);
        line[..from_c].fill(T::ZERO);
        line[to_c..].fill(T::ZERO);
        if from < to {
            let start = (left + from) as usize * c;
            line[from_c..to_c].copy_from_slice(&image[start..start + to_c - from_c]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(unfold: &Unfold, images: &[f64], pixel: usize) -> Vec<f64> {
        let Unfold { height, width, channels, out_height, out_width, kernel, stride, pad, spread } = *unfold;
        let (image, at) = (pixel / (out_height * out_width), pixel % (out_height * out_width));
        let mut row = vec![];
        for ky in 0..kernel.0 {
            for kx in 0..kernel.1 {
                let place = |i: usize, k: usize, len: usize, pad: isize| {
                    let at = (i * stride + k) as isize - pad;
                    let inside =
                        at >= 0 && at % spread as isize == 0 && at / (spread as isize) < len as isize;
                    inside.then_some(at as usize / spread)
                };
                let (y, x) =
                    (place(at / out_width, ky, height, pad.0), place(at % out_width, kx, width, pad.1));
                for c in 0..channels {
                    let value =
                        y.zip(x).map(|(y, x)| images[((image * height + y) * width + x) * channels + c]);
                    row.push(value.unwrap_or(0.0));
                }
            }
        }
        row
    }

    #[test]
    fn windows_are_what_the_definition_says() {
        for (stride, pad, spread, kernel) in [
            (1, (1, 1), 1, (3, 3)),
            (2, (1, 0), 1, (3, 3)),
            (2, (0, 0), 1, (2, 2)),
            (1, (3, 2), 1, (3, 2)),
            (1, (2, 1), 2, (3, 3)),
            (1, (-1, 0), 1, (2, 2)),
        ] {
            let (height, width, channels, out_height, out_width) = (4, 5, 3, 6, 4);
            let unfold =
                Unfold { height, width, channels, out_height, out_width, kernel, stride, pad, spread };
            let images: Vec<f64> = (1..=2 * height * width * channels).map(|i| i as f64).collect();
            let range = 5..2 * out_height * out_width;
            let mut out = vec![-1.0; range.len() * unfold.window_len()];
            unfold.rows(&images, range.clone(), &mut out);
            for (pixel, row) in range.clone().zip(out.chunks_exact(unfold.window_len())) {
                assert_eq!(row, reference(&unfold, &images, pixel), "pixel {pixel} of {unfold:?}");
            }
            // Some channels of the last tap.
            let tap = unfold.taps((kernel.0 - 1, kernel.1 - 1), 1);
            let mut out = vec![-1.0; range.len() * 2];
            tap.tap_rows(&images, range.clone(), 1..3, &mut out);
            for (pixel, row) in range.zip(out.chunks_exact(2)) {
                let whole = reference(&unfold, &images, pixel);
                assert_eq!(row, &whole[whole.len() - 2..], "a tap of pixel {pixel} of {unfold:?}");
            }
        }
    }
}
