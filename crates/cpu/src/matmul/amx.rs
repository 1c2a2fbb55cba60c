//! Large f32 matmuls on AMX, whose tiles multiply bf16 alone: c (M,N) = a (M,K) · b (K,N).
//!
//! Every number is split into three bf16, x = hi + mid + lo, which hold its 24 bits. a·b is the sum of the six matmuls of parts
//! that are larger than f32's rounding: hi·hi, hi·mid, mid·hi, hi·lo, mid·mid and lo·hi. Tiles of 16 × 16 sums in f32 take 16
//! times as many multiply-adds a cycle as AVX-512 has of f32, so six of them are 2.7 times as fast.
//!
//! Both sides are split while they are packed, into tiles in the order in which they are read. A block of 2 × 2 tiles of c
//! stays in tile registers while a range of k runs, whose part of the left side stays in the first cache level while it meets
//! all panels of the right side.
//!
//! Sums of an element: for each 32 k the six matmuls one after the other, each adding 32 products at once. Neither cuts of M
//! and N, nor of K (at multiples of 32) change them.

#[cfg(test)]
mod plain;
#[cfg(test)]
mod precision;
mod split;
#[cfg(test)]
mod tests;
mod tiles;

pub use tiles::Amx;

use super::Matrix;
use super::blocks::{Right, is_contiguous, ranges};
use crate::memory::Block;
use std::cell::RefCell;
use std::ops::Range;

/// Rows of a tile, and columns of a tile of c.
const TILE: usize = 16;
/// Rows and columns of a block of c: two tiles each.
const BLOCK: usize = 2 * TILE;
/// k of a tile.
const STEP: usize = 32;
/// Parts of a number.
const PARTS: usize = 3;
/// Numbers of a tile in bf16.
const TILE_LEN: usize = TILE * STEP;

/// Steps of k that a block of c stays in registers for: of the left side 24 KB, half of the first cache level.
const STEPS: usize = 4;
/// Most of k that is packed at once.
const DEPTH: usize = 512;
/// Most rows that are packed at once: 1.8 MB.
const HEIGHT: usize = 576;
/// Most columns that rows meet, one after the other: 1.2 MB.
const WIDTH: usize = 384;

const LEFT: usize = HEIGHT * DEPTH * PARTS;
const RIGHT: usize = WIDTH * DEPTH * PARTS;
/// Numbers of the right side that there is room for: 3.5 MB, those of a weight of 384 × 1,536.
const STAYS: usize = 3 * RIGHT;

thread_local! {
    /// Memory that this thread packs into.
    static PACKED: RefCell<Packed> = const { RefCell::new(Packed { block: None, stays: None }) };
}

struct Packed {
    block: Option<Block>,
    /// The right side whose first panels are there.
    stays: Option<Right>,
}

impl Packed {
    /// Room for [`STAYS`] and for [`LEFT`].
    fn room(&mut self) -> (*mut u16, *mut u16) {
        let block = self.block.get_or_insert_with(|| {
            Block::new((STAYS + LEFT) * size_of::<u16>()).expect("5.3 MB to pack matmuls in")
        });
        (block.view(0, STAYS).at(0), block.view(STAYS * size_of::<u16>(), LEFT).at(0))
    }
}

/// What multiplies tiles, and what packs for it.
pub trait Engine {
    /// Packs up to two tiles of rows: for each 32 k the low parts of both tiles, the middle ones and the high ones.
    ///
    /// # Safety
    /// `a` has as many rows and `k` columns; `out` has room for whole tiles.
    unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut u16);

    /// Packs `cols` columns, two tiles of columns after the other, each as [`Engine::pack_left`] packs rows.
    ///
    /// # Safety
    /// `b` has `k` rows and `cols` columns; `out` has room for whole tiles.
    unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut u16);

    /// Called by a thread before its blocks.
    ///
    /// # Safety
    /// The CPU has what the engine is made of.
    unsafe fn begin();

    /// Called by a thread after its blocks.
    ///
    /// # Safety
    /// As [`Engine::begin`].
    unsafe fn end();

    /// Adds to a block of whole tiles, or overwrites it.
    ///
    /// # Safety
    /// `c` has as many rows and columns, and `a` and `b` as many steps, packed.
    unsafe fn block(block: &Work);
}

/// One block of c, and what goes into it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Work {
    /// Tiles of rows and of columns: 1 or 2.
    pub tiles: (usize, usize),
    pub steps: usize,
    pub a: *const u16,
    pub b: *const u16,
    pub c: *mut f32,
    /// Distance of the rows of c, in bytes.
    pub stride: usize,
    /// Flag: not 0 if sums are added to what c holds.
    pub add: usize,
    /// What is packed next of the left side, and of the right side, to be fetched ahead.
    pub near: Ahead,
    pub far: Ahead,
    /// The block of c that comes next.
    pub next: *const f32,
}

/// Four lines to fetch ahead, and how far from them the next four of another step; in bytes.
#[derive(Clone, Copy)]
pub struct Ahead {
    pub at: *const f32,
    pub step: usize,
}

/// Numbers of four lines.
const LINES: usize = 64;

impl Ahead {
    /// Share of the block with this number in fetching a matrix ahead, where each block has so many steps.
    fn share(number: usize, steps: usize, of: Matrix<f32>, (rows, cols): (usize, usize)) -> Option<Self> {
        if of.col_stride == 1 {
            // Lines of a row.
            let in_row = cols.div_ceil(LINES * steps);
            let (row, part) = (number / in_row, number % in_row);
            let at = of.from(row, part * LINES * steps).ptr;
            return (row < rows).then_some(Ahead { at, step: 4 * LINES });
        }
        // Four lines of as many columns.
        let in_column = rows.div_ceil(LINES);
        let (col, part) = (number / in_column * steps, number % in_column);
        let at = of.from(part * LINES, col).ptr;
        (col < cols).then_some(Ahead { at, step: 4 * of.col_stride })
    }

    /// What is in the cache already.
    fn nothing(at: *const f32) -> Self {
        Ahead { at, step: 0 }
    }
}

/// Checks whether a matmul is large enough to pay for packing, and has strides that suit the tiles.
pub fn suits(sizes: (usize, usize, usize), c: Matrix<f32>, a: Matrix<f32>, b: Matrix<f32>) -> bool {
    is_large(sizes) && c.col_stride == 1 && is_contiguous(a) && is_contiguous(b)
}

pub fn is_large((m, n, k): (usize, usize, usize)) -> bool {
    m >= BLOCK && n >= BLOCK && k >= STEP
}

/// Large matmul. A right side with a `moment` is the same in all calls with the same one, and may stay packed.
///
/// # Safety
/// Conditions of [`super::matmul`], of a matmul that [`suits`], on a CPU that has the engine.
pub unsafe fn matmul<E: Engine>(
    (m, n, k): (usize, usize, usize),
    c: Matrix<f32>,
    a: Matrix<f32>,
    b: Matrix<f32>,
    add: bool,
    moment: Option<u64>,
) {
    // As even as can be.
    let even = |n: usize, most: usize| n.div_ceil(n.div_ceil(most)).next_multiple_of(STEP);
    let (height, width, depth) = (even(m, HEIGHT), even(n, WIDTH), even(k, DEPTH));
    let numbers = |cols: usize, k: usize| cols.next_multiple_of(TILE) * k.next_multiple_of(STEP) * PARTS;
    PACKED.with_borrow_mut(|packed| {
        let (right, left) = packed.room();
        let (at, strides, sizes) = (b.ptr.cast_const(), (b.row_stride, b.col_stride), (k, n));
        let stays = moment.map(|moment| Right { moment, at, strides, sizes });
        let is_filled = stays.is_some() && packed.stays == stays;
        packed.stays = stays;
        // Panels for which there is no room are packed into the last of it, each time.
        let fits = if numbers(n, k) <= STAYS { STAYS } else { STAYS - RIGHT };
        // SAFETY: passed on to the caller; one call of a thread at a time packs here.
        unsafe { E::begin() };
        for rows in ranges(m, height) {
            let mut start = 0;
            for deep in ranges(k, depth) {
                let add = add || deep.start > 0;
                let (a, c) = (a.from(rows.start, deep.start), c.from(rows.start, 0));
                let sweep = Sweep { rows: rows.len(), deep: deep.len(), a, c, add, left };
                for cols in ranges(n, width) {
                    let len = numbers(cols.len(), deep.len());
                    let stays = start + len <= fits;
                    let panels = right.wrapping_add(if stays { start } else { STAYS - RIGHT });
                    start += len;
                    let next = if cols.end < n { (deep.start, cols.end) } else { (deep.end, 0) };
                    let is_packed = is_filled || rows.start > 0;
                    let far = (next.0 < k && !(is_packed && start + len <= fits)).then(|| {
                        let sizes = (depth.min(k - next.0), width.min(n - next.1));
                        (b.from(next.0, next.1), sizes)
                    });
                    // SAFETY: passed on to the caller.
                    unsafe {
                        if !stays || !is_packed {
                            E::pack_right(deep.len(), cols.len(), b.from(deep.start, cols.start), panels);
                        }
                        sweep.run::<E>(panels, cols.clone(), far);
                    }
                }
            }
        }
        // SAFETY: passed on to the caller.
        unsafe { E::end() };
    });
}

/// All rows of the left side against panels that are packed.
struct Sweep {
    rows: usize,
    deep: usize,
    a: Matrix<f32>,
    c: Matrix<f32>,
    add: bool,
    left: *mut u16,
}

impl Sweep {
    /// `far` is what is packed after these panels.
    ///
    /// # Safety
    /// Conditions of [`matmul`].
    unsafe fn run<E: Engine>(
        &self,
        panels: *const u16,
        cols: Range<usize>,
        far: Option<(Matrix<f32>, (usize, usize))>,
    ) {
        let steps = self.deep.div_ceil(STEP);
        let mut number = 0;
        for rows in ranges(self.rows, BLOCK) {
            let left = self.left.wrapping_add(rows.start * steps * STEP * PARTS);
            if cols.start == 0 {
                // SAFETY: within a, and within the rows that there is room to pack.
                unsafe { E::pack_left(self.deep, rows.len(), self.a.from(rows.start, 0), left) };
            }
            let below = (cols.start == 0 && rows.end < self.rows).then(|| {
                (self.a.from(rows.end, 0), (BLOCK.min(self.rows - rows.end), self.deep))
            });
            let mut in_rows = 0;
            for chunk in ranges(steps, STEPS) {
                for across in ranges(cols.len(), BLOCK) {
                    let tiles = (rows.len().div_ceil(TILE), across.len().div_ceil(TILE));
                    let of = |side: *const u16, tiles: usize| {
                        side.wrapping_add(chunk.start * tiles * TILE_LEN * PARTS)
                    };
                    let panel = panels.wrapping_add(across.start * steps * STEP * PARTS);
                    let c = self.c.from(rows.start, cols.start + across.start);
                    let next = match () {
                        () if across.end < cols.len() => c.from(0, BLOCK),
                        () if chunk.end < steps => self.c.from(rows.start, cols.start),
                        () => self.c.from(rows.end, cols.start),
                    };
                    let share = |of: Option<(Matrix<f32>, (usize, usize))>, number: usize| {
                        of.and_then(|(of, sizes)| Ahead::share(number, chunk.len(), of, sizes))
                            .unwrap_or(Ahead::nothing(c.ptr))
                    };
                    let work = Work {
                        tiles,
                        steps: chunk.len(),
                        a: of(left, tiles.0),
                        b: of(panel, tiles.1),
                        c: c.ptr,
                        stride: 4 * c.row_stride,
                        add: usize::from(self.add || chunk.start > 0),
                        near: share(below, in_rows),
                        far: share(far, number),
                        next: next.ptr,
                    };
                    (in_rows, number) = (in_rows + 1, number + 1);
                    // SAFETY: within c and what was packed.
                    unsafe {
                        if rows.len().is_multiple_of(TILE) && across.len().is_multiple_of(TILE) {
                            E::block(&work);
                        } else {
                            at_an_edge::<E>(work, (rows.len(), across.len()));
                        }
                    }
                }
            }
        }
    }
}

/// Sums of a block at an edge of c.
#[repr(align(64))]
struct Edge([f32; BLOCK * BLOCK]);

/// A block that is not whole tiles.
///
/// # Safety
/// Conditions of [`Engine::block`], where c has these rows and columns only.
unsafe fn at_an_edge<E: Engine>(work: Work, (rows, cols): (usize, usize)) {
    let mut edge = Edge([0.0; BLOCK * BLOCK]);
    let row = |i: usize| work.c.wrapping_byte_add(i * work.stride);
    // SAFETY: passed on to the caller.
    unsafe {
        if work.add > 0 {
            for (i, edge) in edge.0.chunks_exact_mut(BLOCK).enumerate().take(rows) {
                edge[..cols].copy_from_slice(std::slice::from_raw_parts(row(i), cols));
            }
        }
        E::block(&Work { c: edge.0.as_mut_ptr(), stride: 4 * BLOCK, ..work });
        for (i, edge) in edge.0.chunks_exact(BLOCK).enumerate().take(rows) {
            std::slice::from_raw_parts_mut(row(i), cols).copy_from_slice(&edge[..cols]);
        }
    }
}
