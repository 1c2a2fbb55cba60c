//! A whole image at once: resized to fit into a box, and padded to one of few shapes.

use super::canvas::{Grid, Taps};
use super::transform::fitted;
use crate::{CropBox, DataError, Image, Interpolation, Resizer};

/// The lengths that sides are padded to: multiples of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ladder {
    step: usize,
}

impl Ladder {
    /// Multiples of `multiple`, of which no more than `rungs` are needed for sides up to `longest`. So there are no more
    /// than `rungs`² shapes, and a plan for each can be kept.
    pub fn new(longest: usize, multiple: usize, rungs: usize) -> Result<Self, DataError> {
        if longest == 0 || multiple == 0 || rungs == 0 {
            let problem =
                format!("sides up to {longest}, multiples of {multiple}, {rungs} lengths: none may be 0");
            return Err(DataError::Call { what: "shapes", problem });
        }
        Ok(Ladder { step: multiple * longest.div_ceil(multiple * rungs) })
    }

    pub fn padded(self, side: usize) -> usize {
        side.max(1).next_multiple_of(self.step)
    }
}

/// Sizes of an image that is evaluated as a whole. All are (width, height).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeImage {
    pub original: (usize, usize),
    pub resized: (usize, usize),
    /// Size that a model reads; the image lies at its upper left.
    pub padded: (usize, usize),
}

impl WholeImage {
    /// `fit` is the box that an image is resized to fit in, by its longer and its shorter side.
    pub fn of(original: (usize, usize), fit: (usize, usize), ladder: Ladder) -> Self {
        let resized = fitted(original, fit);
        WholeImage { original, resized, padded: (ladder.padded(resized.0), ladder.padded(resized.1)) }
    }

    /// Resizes and pads: `out` is (H, W, C), with 0 for padding. Gives the rows and columns that are image.
    pub fn prepare(
        &self,
        image: &Image,
        resizer: &mut Resizer,
        sized: &mut Image,
        out: &mut [u8],
    ) -> Result<[i32; 2], DataError> {
        let &Image { width, height, channels, .. } = image;
        if (width, height) != self.original {
            return Err(DataError::Pixels { width, height, found: channels, channels });
        }
        let (expected, found) = (self.padded.0 * self.padded.1 * channels, out.len());
        if found != expected {
            return Err(DataError::BufferLength { buffer: "image", expected, found });
        }
        resizer.resize(image, CropBox::whole(image), self.resized, Interpolation::Bilinear, sized);
        out.fill(0);
        let lines = sized.pixels.chunks_exact((self.resized.0 * channels).max(1));
        for (out, line) in out.chunks_exact_mut(self.padded.0 * channels).zip(lines) {
            out[..line.len()].copy_from_slice(line);
        }
        Ok([self.resized.1 as i32, self.resized.0 as i32])
    }

    /// The most probable class of every original pixel, from logits over all that the model read, at any resolution. They
    /// are interpolated once, straight to the original pixels; nothing is taken from the padding.
    pub fn labels(&self, grid: &Grid, threads: usize) -> Result<Vec<u8>, DataError> {
        grid.check()?;
        let taps = |original: usize, resized: usize, padded: usize, grid: usize| {
            let scale = resized as f64 / original as f64 * (grid as f64 / padded as f64);
            let within = (resized * grid).div_ceil(padded);
            Taps::new(original, scale, within)
        };
        let columns = taps(self.original.0, self.resized.0, self.padded.0, grid.width);
        let rows = taps(self.original.1, self.resized.1, self.padded.1, grid.height);
        Ok(grid.labels(&columns, &rows, threads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn shapes_are_few_and_hold_their_images() {
        let ladder = Ladder::new(2048, 32, 8).unwrap();
        let mut shapes = HashSet::new();
        for width in (50..3000).step_by(37) {
            for height in (50..3000).step_by(41) {
                let WholeImage { resized, padded, .. } = WholeImage::of((width, height), (2048, 512), ladder);
                assert!(padded.0 >= resized.0 && padded.1 >= resized.1);
                assert!(padded.0 % 32 == 0 && padded.1 % 32 == 0);
                shapes.insert(padded);
            }
        }
        assert!(shapes.len() <= 64, "{}", shapes.len());
        assert_eq!(Ladder::new(512, 32, 100).unwrap().padded(33), 64);
        assert!(Ladder::new(512, 0, 1).is_err());
    }

    #[test]
    fn an_image_lies_at_the_upper_left() {
        let image = Image { width: 4, height: 2, channels: 1, pixels: vec![10, 10, 10, 10, 10, 10, 10, 10] };
        let whole = WholeImage::of((4, 2), (2, 1), Ladder::new(4, 4, 1).unwrap());
        assert_eq!((whole.resized, whole.padded), ((2, 1), (4, 4)));
        let mut out = [9; 16];
        let extent = whole.prepare(&image, &mut Resizer::new(), &mut Image::default(), &mut out);
        assert_eq!(extent, Ok([1, 2]));
        assert_eq!(out[..4], [10, 10, 0, 0]);
        assert!(out[4..].iter().all(|&byte| byte == 0));
    }

    /// Two classes, left and right of a line, and a third that rules the padding: it must not be seen.
    #[test]
    fn labels_come_back_at_the_original_size() {
        let whole = WholeImage { original: (90, 45), resized: (60, 30), padded: (64, 32) };
        let (width, height) = (16, 8);
        let mut logits = vec![];
        for y in 0..height {
            for x in 0..width {
                let padding = x * 4 >= 60 || y * 4 >= 30 + 2;
                logits.extend(if padding {
                    [0.0, 0.0, 99.0]
                } else {
                    [f32::from(x < 5), f32::from(x >= 5), 0.0]
                });
            }
        }
        let labels = whole.labels(&Grid { width, height, classes: 3, logits: &logits }, 3).unwrap();
        assert_eq!(labels.len(), 90 * 45);
        // Cells 4 and 5 meet at column 20 of the resized image, which is column 30 of the original.
        assert!(
            labels
                .chunks(90)
                .all(|row| row[..30].iter().all(|&l| l == 0) && row[30..].iter().all(|&l| l == 1))
        );
    }
}
