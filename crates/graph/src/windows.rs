//! Windows of a feature map (Swin Transformer): shape rules and kernels read the same geometry.
//!
//! Everything is a function of indices, so that nothing is rolled, padded, partitioned or masked in memory. As in timm, the
//! map is rolled up and left by the shift, padded with zeros below and to the right to whole windows, and cut; padded
//! tokens are keys and values like others. In the last window along an axis, tokens that came from the other end of the map
//! (or the padding behind them) and the rest don't see each other.

use serde::{Deserialize, Serialize};

/// Sizes along (rows, columns).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// Size of one window.
    pub size: [usize; 2],
    /// Distance by which the map is rolled before it is cut; less than the size.
    pub shift: [usize; 2],
}

impl Windows {
    /// T, the tokens of a window.
    pub fn tokens(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Number of windows that cover a map of `map` tokens.
    pub fn grid(&self, map: [usize; 2]) -> [usize; 2] {
        [map[0].div_ceil(self.size[0]), map[1].div_ceil(self.size[1])]
    }

    /// Windows of a map.
    pub fn count(&self, map: [usize; 2]) -> usize {
        let [rows, columns] = self.grid(map);
        rows * columns
    }

    /// Place of token `t` of window number `window` in the map: row · columns + column. None for padding.
    pub fn place(&self, map: [usize; 2], window: usize, t: usize) -> Option<usize> {
        let (window, t) = (self.split(self.grid(map)[1], window), self.split(self.size[1], t));
        let along = |axis: usize| {
            let rolled = window[axis] * self.size[axis] + t[axis];
            (rolled < map[axis]).then(|| (rolled + self.shift[axis]) % map[axis])
        };
        Some(along(0)? * map[1] + along(1)?)
    }

    /// Checks whether any two tokens of a window don't see each other.
    pub fn is_masked(&self, map: [usize; 2], window: usize) -> bool {
        let (grid, window) = (self.grid(map), self.split(self.grid(map)[1], window));
        (0..2).any(|axis| self.shift[axis] > 0 && window[axis] + 1 == grid[axis])
    }

    /// Tokens of a window see each other if this is the same for both; 0 to 3.
    pub fn region(&self, map: [usize; 2], window: usize, t: usize) -> usize {
        let (grid, window) = (self.grid(map), self.split(self.grid(map)[1], window));
        let t = self.split(self.size[1], t);
        let behind = |axis: usize| {
            let last = window[axis] + 1 == grid[axis];
            last && self.shift[axis] > 0 && t[axis] + self.shift[axis] >= self.size[axis]
        };
        usize::from(behind(0)) * 2 + usize::from(behind(1))
    }

    fn split(&self, columns: usize, index: usize) -> [usize; 2] {
        [index / columns, index % columns]
    }
}

/// Relative positions of two tokens of a window: (2·rows - 1)·(2·columns - 1) places, of which each has one position
/// bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    size: [usize; 2],
    /// The window that the bias was learned for; offsets are measured against it.
    pretrained: [usize; 2],
}

impl Offsets {
    /// The offsets within a window.
    pub fn new(size: [usize; 2], pretrained: Option<[usize; 2]>) -> Self {
        Offsets { size, pretrained: pretrained.unwrap_or(size) }
    }

    /// Number of different offsets.
    pub fn count(&self) -> usize {
        (2 * self.size[0] - 1) * (2 * self.size[1] - 1)
    }

    /// The number of the offset from token `to` to token `from`.
    pub fn number(&self, from: usize, to: usize) -> usize {
        let columns = self.size[1];
        let rows_apart = from / columns + self.size[0] - 1 - to / columns;
        let columns_apart = from % columns + columns - 1 - to % columns;
        rows_apart * (2 * columns - 1) + columns_apart
    }

    /// The numbers of the offsets from all tokens of a row of the window to `from`, the last token's first.
    pub fn run(&self, from: usize, row: usize) -> std::ops::Range<usize> {
        let last = self.number(from, row * self.size[1] + self.size[1] - 1);
        last..last + self.size[1]
    }

    /// The log-spaced coordinates of an offset: ±log₂(1 + 8·|offset|/(window - 1)) / 3, in f32 as timm has them.
    pub fn coordinates(&self, number: usize) -> [f32; 2] {
        let columns = 2 * self.size[1] - 1;
        let apart = [number / columns, number % columns];
        std::array::from_fn(|axis| {
            let offset = apart[axis] as f32 - (self.size[axis] - 1) as f32;
            let whole = (self.pretrained[axis] - 1).max(1) as f32;
            let scaled = offset / whole * 8.0;
            // A sign of ±0 is 0 in torch; ln(1) makes it so here.
            scaled.signum() * (scaled.abs() + 1.0).log2() / 3.0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rolling, padding and cutting an array of numbered tokens, step by step.
    fn by_hand(windows: &Windows, [h, w]: [usize; 2]) -> Vec<Vec<Option<usize>>> {
        let ([sh, sw], [rows, columns]) = (windows.shift, windows.grid([h, w]));
        let rolled = |r: usize, c: usize| ((r + sh) % h) * w + (c + sw) % w;
        let padded = |r: usize, c: usize| (r < h && c < w).then(|| rolled(r, c));
        let [wh, ww] = windows.size;
        let window = |i: usize, j: usize| -> Vec<_> {
            (0..wh).flat_map(|r| (0..ww).map(move |c| padded(i * wh + r, j * ww + c))).collect()
        };
        (0..rows).flat_map(|i| (0..columns).map(move |j| window(i, j))).collect()
    }

    const CASES: [(Windows, [usize; 2]); 5] = [
        (Windows { size: [4, 4], shift: [0, 0] }, [8, 8]),
        (Windows { size: [4, 4], shift: [2, 2] }, [8, 12]),
        (Windows { size: [4, 4], shift: [2, 2] }, [7, 9]),
        (Windows { size: [3, 4], shift: [0, 2] }, [4, 10]),
        (Windows { size: [2, 5], shift: [1, 0] }, [5, 5]),
    ];

    #[test]
    fn every_token_is_in_one_window() {
        for (windows, map) in CASES {
            let cut: Vec<Vec<_>> = (0..windows.count(map))
                .map(|n| (0..windows.tokens()).map(|t| windows.place(map, n, t)).collect())
                .collect();
            assert_eq!(cut, by_hand(&windows, map));
            let mut seen: Vec<usize> = cut.into_iter().flatten().flatten().collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..map[0] * map[1]).collect::<Vec<_>>());
        }
    }

    /// timm numbers nine regions of the padded map, by slices from its far end.
    #[test]
    fn regions_are_those_of_the_padded_map() {
        for (windows, map) in CASES {
            let grid = windows.grid(map);
            let slice = |axis: usize, at: usize| {
                let (size, shift) = (windows.size[axis], windows.shift[axis]);
                let end = grid[axis] * size;
                if shift == 0 { 0 } else { usize::from(at >= end - size) + usize::from(at >= end - shift) }
            };
            for n in 0..windows.count(map) {
                let number = |t: usize| {
                    let at = |axis: usize, window: usize, t: usize| window * windows.size[axis] + t;
                    let row = at(0, n / grid[1], t / windows.size[1]);
                    let column = at(1, n % grid[1], t % windows.size[1]);
                    3 * slice(0, row) + slice(1, column)
                };
                let mut apart = false;
                for (i, j) in (0..windows.tokens()).flat_map(|i| (0..windows.tokens()).map(move |j| (i, j))) {
                    let same = windows.region(map, n, i) == windows.region(map, n, j);
                    assert_eq!(same, number(i) == number(j), "{windows:?} {map:?} window {n}: {i}, {j}");
                    apart |= !same;
                }
                assert_eq!(apart, windows.is_masked(map, n));
            }
        }
    }

    #[test]
    fn offsets_are_numbered_by_rows_and_columns_apart() {
        let offsets = Offsets::new([2, 3], None);
        assert_eq!(offsets.count(), 15);
        assert_eq!([offsets.number(0, 5), offsets.number(0, 0), offsets.number(5, 0)], [0, 7, 14]);
        assert_eq!(offsets.run(4, 1), offsets.number(4, 5)..offsets.number(4, 3) + 1);
        assert_eq!(offsets.coordinates(7), [0.0, 0.0]);
        let far = (9f32).log2() / 3.0;
        assert_eq!((offsets.coordinates(0), offsets.coordinates(14)), ([-far, -far], [far, far]));
        let wider = Offsets::new([2, 3], Some([3, 5]));
        let near = (5f32).log2() / 3.0;
        assert_eq!(wider.coordinates(14), [near, near]);
        assert_eq!(
            Offsets::new([1, 2], None).coordinates(0)[0],
            0.0,
            "a window of one row has no row offsets"
        );
    }
}
