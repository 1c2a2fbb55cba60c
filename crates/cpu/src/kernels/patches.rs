//! An image cut into the rows of the patch embedding's matmul, and back.
//!
//! image: (C, H, W); rows: (N, C·p·p) with N = H/p · W/p patches in reading order and the features in the order
//! (c, dy, dx) of a flattened convolution weight (O, C, p, p).

/// (C, H, W) of one image and the side of its square patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchGrid {
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    pub patch: usize,
}

impl PatchGrid {
    /// Runs of `patch` consecutive pixels: where each starts in the image and in the rows.
    fn runs(self) -> impl Iterator<Item = (usize, usize)> {
        let PatchGrid { channels, height, width, patch } = self;
        assert!(
            height.is_multiple_of(patch) && width.is_multiple_of(patch),
            "patches: {self:?} does not divide"
        );
        let (across, features) = (width / patch, channels * patch * patch);
        (0..channels * height).flat_map(move |line| {
            let (c, y) = (line / height, line % height);
            let row = (y / patch) * across * features + (c * patch + y % patch) * patch;
            (0..across).map(move |n| (line * width + n * patch, row + n * features))
        })
    }

    fn assert_lengths(self, image: usize, rows: usize) {
        let pixels = self.channels * self.height * self.width;
        assert!(image == pixels && rows == pixels, "patches: {image} pixels, {rows} features for {self:?}");
    }
}

pub fn patches<T: Copy>(image: &[T], grid: PatchGrid, rows: &mut [T]) {
    grid.assert_lengths(image.len(), rows.len());
    for (from, to) in grid.runs() {
        rows[to..to + grid.patch].copy_from_slice(&image[from..from + grid.patch]);
    }
}

pub fn unpatches<T: Copy>(rows: &[T], grid: PatchGrid, image: &mut [T]) {
    grid.assert_lengths(image.len(), rows.len());
    for (to, from) in grid.runs() {
        image[to..to + grid.patch].copy_from_slice(&rows[from..from + grid.patch]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_channel_then_row_then_column() {
        let grid = PatchGrid { channels: 2, height: 4, width: 6, patch: 2 };
        let image: Vec<usize> = (0..48).collect();
        let mut rows = vec![0; 48];
        patches(&image, grid, &mut rows);
        for n in 0..6 {
            for (c, dy, dx) in (0..8).map(|i| (i / 4, i / 2 % 2, i % 2)) {
                let pixel = c * 24 + (n / 3 * 2 + dy) * 6 + n % 3 * 2 + dx;
                assert_eq!(rows[n * 8 + c * 4 + dy * 2 + dx], pixel);
            }
        }
    }

    #[test]
    fn unpatches_undoes_patches() {
        let grid = PatchGrid { channels: 3, height: 32, width: 48, patch: 16 };
        let image: Vec<usize> = (0..3 * 32 * 48).collect();
        let (mut rows, mut back) = (vec![0; image.len()], vec![0; image.len()]);
        patches(&image, grid, &mut rows);
        unpatches(&rows, grid, &mut back);
        assert_eq!(image, back);
    }
}
