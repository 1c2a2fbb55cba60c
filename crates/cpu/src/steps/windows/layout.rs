//! Tokens of a window: gathered from the map into scratch, and scattered back.

use super::Sizes;
use crate::kernels::{BiasAndMasks, Float};
use crate::memory::View;
use std::ops::Range;

/// Score offset of tokens that don't see each other.
const APART: f64 = -100.0;
/// Place of a token that is padding.
const NOWHERE: u32 = u32::MAX;
/// Regions of a window, each with its mask.
pub const REGIONS: usize = 4;

/// Places of the tokens of one window in the batch, and which of them see each other.
pub struct Layout<'a, T> {
    places: &'a mut [u32],
    regions: &'a mut [u32],
    masks: &'a mut [T],
}

impl<'a, T: Float> Layout<'a, T> {
    /// # Safety
    /// `scratch` is the caller's own.
    pub unsafe fn new(sizes: &Sizes, scratch: View<T>) -> Self {
        let t = sizes.tokens();
        // SAFETY: passed on to the caller; the parts don't overlap.
        unsafe {
            Layout {
                places: scratch.part(0..t).cast(t).write(),
                regions: scratch.part(t..2 * t).cast(t).write(),
                masks: scratch.part(2 * t..(2 + REGIONS) * t).write(),
            }
        }
    }

    /// Lays out a window, numbered through the batch.
    pub fn of_window(&mut self, sizes: &Sizes, window: usize) {
        let Sizes { windows, map, .. } = sizes;
        let (b, window) = (window / windows.count(*map), window % windows.count(*map));
        let columns = windows.grid(*map)[1];
        let along = |axis: usize, at: usize| {
            let rolled = if at < map[axis] { at + windows.shift[axis] } else { return None };
            Some(if rolled >= map[axis] { rolled - map[axis] } else { rolled })
        };
        let corner = [window / columns * windows.size[0], window % columns * windows.size[1]];
        for (r, places) in self.places.chunks_exact_mut(windows.size[1]).enumerate() {
            let row = along(0, corner[0] + r).map(|row| (b * map[0] + row) * map[1]);
            for (c, place) in places.iter_mut().enumerate() {
                let at = row.zip(along(1, corner[1] + c)).map(|(row, column)| (row + column) as u32);
                *place = at.unwrap_or(NOWHERE);
            }
        }
        self.mask(sizes, window);
    }

    fn mask(&mut self, Sizes { windows, map, .. }: &Sizes, window: usize) {
        let (t, apart) = (self.places.len(), T::from_f64(APART));
        if !windows.is_masked(*map, window) {
            self.regions.fill(0);
            self.masks[..t].fill(T::ZERO);
            return;
        }
        for (token, region) in self.regions.iter_mut().enumerate() {
            *region = windows.region(*map, window, token) as u32;
        }
        for (region, mask) in self.masks.chunks_exact_mut(t).enumerate() {
            for (mask, &of) in mask.iter_mut().zip(self.regions.iter()) {
                *mask = if of == region as u32 { T::ZERO } else { apart };
            }
        }
    }

    /// A bias of the scores of some queries, with the masks of these.
    pub fn with_masks<'b>(&'b self, bias: &'b [T], queries: &Range<usize>) -> BiasAndMasks<'b, T> {
        BiasAndMasks { bias, masks: self.masks, mask_of: &self.regions[queries.clone()] }
    }

    /// Rows of `width` elements `stride` apart from `offset` on, token by token; zeros for padding.
    ///
    /// # Safety
    /// `from` is only read.
    pub unsafe fn gather(&self, from: View<T>, stride: usize, offset: usize, width: usize, to: &mut [T]) {
        for (&place, row) in self.places.iter().zip(to.chunks_exact_mut(width)) {
            if place == NOWHERE {
                row.fill(T::ZERO);
                continue;
            }
            let at = place as usize * stride + offset;
            // SAFETY: passed on to the caller.
            row.copy_from_slice(unsafe { from.part(at..at + width).read() });
        }
    }

    /// The reverse of `gather` for the tokens of `some`, whose rows are `from`.
    ///
    /// # Safety
    /// Nobody else touches these columns of these tokens.
    pub unsafe fn scatter(&self, some: Range<usize>, from: &[T], stride: usize, offset: usize, to: View<T>) {
        let width = from.len() / some.len();
        for (&place, row) in self.places[some].iter().zip(from.chunks_exact(width)) {
            if place != NOWHERE {
                let at = place as usize * stride + offset;
                // SAFETY: passed on to the caller.
                unsafe { to.part(at..at + width).write() }.copy_from_slice(row);
            }
        }
    }
}
