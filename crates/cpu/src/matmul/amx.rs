//! Large f32 matmuls on AMX, whose tiles multiply bf16 alone: c (M,N) = a (M,K) · b (K,N).
//!
//! Every number is split into three bf16, x = hi + mid + lo, which hold its 24 bits. a·b is the sum of the six matmuls of parts
//! that are larger than f32's rounding: hi·hi, hi·mid, mid·hi, hi·lo, mid·mid and lo·hi. Tiles of 16 × 16 sums in f32 take 16
//! times as many multiply-adds a cycle as AVX-512 has of f32, so six of them are 2.7 times as fast; but less than half of that
//! while another thread of the core is at work, which is why AMX has to be asked for.
//!
//! Both sides are split while they are packed, into tiles in the order in which they are read: the left side as a whole, for
//! the second cache level, the right side one panel of 32 columns after the other. A block of 2 × 2 tiles of c stays in tile
//! registers while k runs.
//!
//! Sums of an element: for each 32 k the six matmuls one after the other, each adding 32 numbers at once. Neither cuts of M and
//! N, nor of K (at multiples of 32) change them.

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
use super::blocks::{is_contiguous, ranges};
use crate::memory::Block;
use std::cell::RefCell;

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

/// Most rows that are packed at once.
const HEIGHT: usize = 512;
/// Most numbers of the left side that are packed at once: 1 MB, which the second cache level holds beside a panel.
const LEFT: usize = HEIGHT * 320;
/// Most of k that is packed at once.
const DEPTH: usize = 640;

thread_local! {
    /// Memory that this thread packs into.
    static PACKED: RefCell<Option<Block>> = const { RefCell::new(None) };
}

/// Room for a left side and for a panel of the right side.
fn room(block: &mut Option<Block>) -> (*mut u16, *mut u16) {
    let (left, panel) = (LEFT * PARTS, BLOCK * DEPTH * PARTS);
    let block = block.get_or_insert_with(|| {
        Block::new((left + panel) * size_of::<u16>()).expect("1.1 MB to pack matmuls in")
    });
    (block.view(0, left).at(0), block.view(left * size_of::<u16>(), panel).at(0))
}

/// What multiplies tiles, and what packs for it.
pub trait Engine {
    /// Packs up to two tiles of rows: for each 32 k the low parts of both tiles, the middle ones and the high ones.
    ///
    /// # Safety
    /// `a` has as many rows and `k` columns; `out` has room for whole tiles.
    unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut u16);

    /// Packs up to two tiles of columns, as [`Engine::pack_left`] packs rows.
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
    /// What is packed next, to be fetched ahead.
    pub ahead: Ahead,
    /// The block of c that comes next.
    pub next: *const f32,
}

/// Memory to fetch ahead: in each step two lines each of three rows, which are `gap` bytes apart.
#[derive(Clone, Copy)]
pub struct Ahead {
    pub at: *const f32,
    pub gap: usize,
}

/// Rows that are fetched in a step.
const FETCHED: usize = 3;

impl Ahead {
    /// Share of the block of this number in fetching a part of a matrix, where each block has so many steps.
    fn share(of: Matrix<f32>, (rows, cols): (usize, usize), number: usize, steps: usize) -> Option<Self> {
        let (stride, down, across) =
            if of.col_stride == 1 { (of.row_stride, rows, cols) } else { (of.col_stride, cols, rows) };
        let each = FETCHED * steps;
        let in_lines = down.div_ceil(each);
        let (lines, first) = (number / in_lines * BLOCK, number % in_lines * each);
        let at = of.ptr.wrapping_add(lines + first * stride);
        (lines < across).then_some(Ahead { at, gap: 4 * stride })
    }
}

/// Checks whether a matmul is large enough to pay for packing, and has strides that suit the tiles.
pub fn suits(sizes: (usize, usize, usize), c: Matrix<f32>, a: Matrix<f32>, b: Matrix<f32>) -> bool {
    is_large(sizes) && c.col_stride == 1 && is_contiguous(a) && is_contiguous(b)
}

/// Numbers of both sides are packed for m·n/(m+n) multiply-adds each: it takes 64 of them to pay.
pub fn is_large((m, n, k): (usize, usize, usize)) -> bool {
    m * n >= 64 * (m + n) && k >= 96
}

/// Large matmul.
///
/// # Safety
/// Conditions of [`super::matmul`], of a matmul that [`suits`], on a CPU that has the engine.
pub unsafe fn matmul<E: Engine>(
    (m, n, k): (usize, usize, usize),
    c: Matrix<f32>,
    a: Matrix<f32>,
    b: Matrix<f32>,
    add: bool,
) {
    // As even as can be.
    let even = |n: usize, most: usize| n.div_ceil(n.div_ceil(most)).next_multiple_of(STEP);
    let height = even(m, HEIGHT);
    let depth = even(k, DEPTH.min(LEFT / height / STEP * STEP));
    PACKED.with_borrow_mut(|packed| {
        let (left, panel) = room(packed);
        // SAFETY: passed on to the caller; one call of a thread at a time packs here.
        unsafe { E::begin() };
        for rows in ranges(m, height) {
            for deep in ranges(k, depth) {
                let (a, b) = (a.from(rows.start, deep.start), b.from(deep.start, 0));
                let (c, add) = (c.from(rows.start, 0), add || deep.start > 0);
                let sizes = (rows.len(), n, deep.len());
                // SAFETY: passed on to the caller.
                unsafe { Sweep { sizes, c, a, b, add, left, panel }.run::<E>() };
            }
        }
        // SAFETY: passed on to the caller.
        unsafe { E::end() };
    });
}

/// Rows of the left side and a range of k for which there is room, and all columns.
struct Sweep {
    sizes: (usize, usize, usize),
    c: Matrix<f32>,
    a: Matrix<f32>,
    b: Matrix<f32>,
    add: bool,
    left: *mut u16,
    panel: *mut u16,
}

impl Sweep {
    /// # Safety
    /// Conditions of [`matmul`].
    unsafe fn run<E: Engine>(&self) {
        let (m, n, k) = self.sizes;
        let steps = k.div_ceil(STEP);
        let left = |row: usize| self.left.wrapping_add(row * steps * STEP * PARTS);
        split::fetch(self.a, (BLOCK.min(m), k));
        split::fetch(self.b, (k, BLOCK.min(n)));
        for rows in ranges(m, BLOCK) {
            // SAFETY: within a, and within the rows that there is room to pack.
            unsafe { E::pack_left(k, rows.len(), self.a.from(rows.start, 0), left(rows.start)) };
        }
        for cols in ranges(n, BLOCK) {
            // SAFETY: within b; there is room for a panel.
            unsafe { E::pack_right(k, cols.len(), self.b.from(0, cols.start), self.panel) };
            for (number, rows) in ranges(m, BLOCK).enumerate() {
                let c = self.c.from(rows.start, cols.start);
                let next = if rows.end < m { c.from(BLOCK, 0) } else { self.c.from(0, cols.end) };
                let ahead = (cols.end < n).then(|| {
                    let sizes = (k, BLOCK.min(n - cols.end));
                    Ahead::share(self.b.from(0, cols.end), sizes, number, steps)
                });
                let work = Work {
                    tiles: (rows.len().div_ceil(TILE), cols.len().div_ceil(TILE)),
                    steps,
                    a: left(rows.start),
                    b: self.panel,
                    c: c.ptr,
                    stride: 4 * c.row_stride,
                    add: self.add.into(),
                    // What is in the cache, if nothing else.
                    ahead: ahead.flatten().unwrap_or(Ahead { at: c.ptr, gap: 0 }),
                    next: next.ptr,
                };
                // SAFETY: within c and what was packed.
                unsafe {
                    if rows.len().is_multiple_of(TILE) && cols.len().is_multiple_of(TILE) {
                        E::block(&work);
                    } else {
                        at_an_edge::<E>(work, (rows.len(), cols.len()));
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
