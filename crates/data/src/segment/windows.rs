//! A large image, looked at through windows of one size.
//!
//! Windows lie a stride apart; the last of a row or column is moved back to end with the image. Where they overlap, what a
//! model says of a pixel is averaged ([`super::Canvas`]). An image smaller than a window is padded. So every batch has the same
//! shape, whatever the images are.

use crate::{DataError, Image};

/// Places of the windows of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Width and height of the image.
    pub image: (usize, usize),
    /// Width and height of a window.
    pub size: (usize, usize),
    /// Distance of each from the left and from the top, row by row.
    pub places: Vec<(usize, usize)>,
}

impl Windows {
    /// All are (width, height). As in mmsegmentation's slide inference.
    pub fn of(
        image: (usize, usize),
        size: (usize, usize),
        stride: (usize, usize),
    ) -> Result<Self, DataError> {
        if image.0 == 0 || image.1 == 0 || size.0 == 0 || size.1 == 0 {
            let problem = format!("{}×{} pixels of an image of {}×{}", size.0, size.1, image.0, image.1);
            return Err(DataError::Call { what: "window", problem });
        }
        if !(1..=size.0).contains(&stride.0) || !(1..=size.1).contains(&stride.1) {
            let problem = format!(
                "{}×{} pixels from window to window of {}×{}: some pixels would be seen by none",
                stride.0, stride.1, size.0, size.1
            );
            return Err(DataError::setting("eval-stride", stride.0, problem));
        }
        let columns = begins(image.0, size.0, stride.0);
        let rows = begins(image.1, size.1, stride.1);
        let places = rows.flat_map(|top| columns.clone().map(move |left| (left, top))).collect();
        Ok(Windows { image, size, places })
    }

    /// Rows and columns of a window that are image; the rest is padding.
    pub fn extent(&self, window: usize) -> [usize; 2] {
        let (left, top) = self.places[window];
        [self.size.1.min(self.image.1 - top), self.size.0.min(self.image.0 - left)]
    }

    /// Cuts a window out of the image: `out` is (H, W, C), with 0 for padding. Gives the extent.
    pub fn cut(&self, image: &Image, window: usize, out: &mut [u8]) -> Result<[i32; 2], DataError> {
        let &Image { width, height, channels, ref pixels } = image;
        if (width, height) != self.image || pixels.len() != width * height * channels {
            return Err(DataError::Pixels { width, height, found: channels, channels });
        }
        let (expected, found) = (self.size.0 * self.size.1 * channels, out.len());
        if found != expected {
            return Err(DataError::BufferLength { buffer: "window", expected, found });
        }
        let [rows, columns] = self.extent(window);
        let (left, top) = self.places[window];
        out.fill(0);
        let lines = pixels.chunks_exact(width * channels).skip(top).take(rows);
        for (out, line) in out.chunks_exact_mut(self.size.0 * channels).zip(lines) {
            out[..columns * channels].copy_from_slice(&line[left * channels..][..columns * channels]);
        }
        Ok([rows as i32, columns as i32])
    }
}

fn begins(side: usize, size: usize, stride: usize) -> impl Iterator<Item = usize> + Clone {
    let last = side.saturating_sub(size);
    (0..=last.div_ceil(stride)).map(move |step| (step * stride).min(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(image: (usize, usize), size: (usize, usize), stride: (usize, usize)) -> Vec<(usize, usize)> {
        Windows::of(image, size, stride).unwrap().places
    }

    #[test]
    fn the_last_window_ends_with_the_image() {
        assert_eq!(places((683, 512), (512, 512), (341, 341)), [(0, 0), (171, 0)]);
        assert_eq!(places((512, 512), (512, 512), (341, 341)), [(0, 0)]);
        assert_eq!(places((10, 7), (4, 4), (3, 3)), [(0, 0), (3, 0), (6, 0), (0, 3), (3, 3), (6, 3)]);
        // Smaller than a window.
        let small = Windows::of((5, 3), (8, 8), (4, 4)).unwrap();
        assert_eq!((small.places.clone(), small.extent(0)), (vec![(0, 0)], [3, 5]));
    }

    #[test]
    fn every_pixel_is_seen_and_no_window_leaves_the_image() {
        for (width, height) in [(1, 1), (7, 30), (16, 16), (33, 17), (40, 9)] {
            for stride in 1..=6 {
                let windows = Windows::of((width, height), (6, 8), (stride, stride)).unwrap();
                let mut seen = vec![0; width * height];
                for (window, &(left, top)) in windows.places.iter().enumerate() {
                    let [rows, columns] = windows.extent(window);
                    assert_eq!(
                        (columns, rows),
                        (width.min(6), height.min(8)),
                        "windows are full where they can be"
                    );
                    (top..top + rows)
                        .for_each(|y| (left..left + columns).for_each(|x| seen[y * width + x] += 1));
                }
                assert!(seen.iter().all(|&times| times > 0), "{width}×{height}, stride {stride}");
            }
        }
    }

    #[test]
    fn windows_are_cut_and_padded() {
        let image = Image { width: 3, height: 2, channels: 1, pixels: vec![1, 2, 3, 4, 5, 6] };
        let windows = Windows::of((3, 2), (2, 3), (1, 1)).unwrap();
        let mut out = [9; 6];
        assert_eq!(windows.cut(&image, 1, &mut out), Ok([2, 2]));
        assert_eq!(out, [2, 3, 5, 6, 0, 0]);
        assert!(windows.cut(&Image { width: 2, ..image.clone() }, 0, &mut out).is_err());
        assert!(windows.cut(&image, 0, &mut out[..5]).is_err());
    }

    #[test]
    fn strides_that_leave_gaps_are_refused() {
        for stride in [(0, 4), (4, 0), (9, 4), (4, 9)] {
            assert!(Windows::of((20, 20), (8, 8), stride).unwrap_err().to_string().contains("stride"));
        }
        assert!(Windows::of((20, 20), (0, 8), (1, 1)).is_err());
    }
}
