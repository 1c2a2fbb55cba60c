//! Large f32 matmuls on AVX-512: c (M,N) = a (M,K) · b (K,N).
//!
//! A tile of 8 × 48 of the result stays in registers while k runs. The right side is packed into panels of 48 columns, four
//! of them at a time, which lie in the second cache level; eight rows of the left side lie in the first while they meet all
//! four. Rows that are contiguous along k are read where they are, others are packed too. A last panel is narrower, by
//! whole vectors.
//!
//! In a training step operands come from memory, not from a cache, and waiting for them is what costs most. So every tile
//! fetches what comes after it, a line now and then: the left side's next rows, and what the next panels will be packed
//! from.

mod pack;
mod tile;

pub use pack::transpose;
pub use tile::{Ahead, LeftRows, fill};

use super::Matrix;
use crate::memory::Block;
use pack::{pack_left, pack_right};
use std::cell::RefCell;
use std::ops::Range;

/// A tile of the result.
const ROWS: usize = 8;
/// Rows of a last tile, if it has no more.
const HALF: usize = ROWS / 2;
const COLS: usize = 48;
/// Panels of the right side packed together.
const PANELS: usize = 4;
/// Most of k that one pass covers: 25 KB of the left side's rows, 600 KB of the right side.
const DEPTH: usize = 800;
/// Most rows of the left side packed together: 1.8 MB of it.
const PACKED_ROWS: usize = 576;
/// Numbers in a line of the cache; also the steps of k for which a tile fetches lines ahead once.
const LINE: usize = 16;

const RIGHT: usize = PANELS * COLS * DEPTH;
const LEFT: usize = PACKED_ROWS * DEPTH;

thread_local! {
    /// Memory that this thread packs into.
    static PACKED: RefCell<Packed> = const { RefCell::new(Packed { block: None, stays: None }) };
}

/// Room for panels of a right side, and for a left side; or where that is read in place, for panels that stay.
struct Packed {
    block: Option<Block>,
    /// The right side whose first panels are there.
    stays: Option<Right>,
}

/// The right side of a matmul, which is the same for as long as `moment` is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Right {
    moment: u64,
    at: *const f32,
    strides: (usize, usize),
    sizes: (usize, usize),
}

impl Packed {
    /// Room for [`RIGHT`] and for [`LEFT`].
    fn room(&mut self) -> (*mut f32, *mut f32) {
        let block = self.block.get_or_insert_with(|| {
            Block::new((RIGHT + LEFT) * size_of::<f32>()).expect("2.5 MB to pack matmuls in")
        });
        (block.view(0, RIGHT).at(0), block.view(RIGHT * size_of::<f32>(), LEFT).at(0))
    }
}

/// Checks whether a matmul is large enough to pay for packing, and has strides that suit the tiles.
pub fn suits(sizes: (usize, usize, usize), c: Matrix<f32>, a: Matrix<f32>, b: Matrix<f32>) -> bool {
    is_large(sizes) && c.col_stride == 1 && is_contiguous(a) && is_contiguous(b)
}

pub fn is_contiguous(x: Matrix<f32>) -> bool {
    x.row_stride == 1 || x.col_stride == 1
}

pub fn is_large((m, n, k): (usize, usize, usize)) -> bool {
    m >= 64 && n >= 2 * COLS && k >= 128
}

/// Large matmul. A right side with a `moment` is the same in all calls with the same one, and may stay packed.
///
/// # Safety
/// Conditions of [`super::matmul`], of a matmul that [`suits`], on a CPU with AVX-512 (F, VL, BW, DQ).
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub unsafe fn matmul(
    (m, n, k): (usize, usize, usize),
    c: Matrix<f32>,
    a: Matrix<f32>,
    b: Matrix<f32>,
    add: bool,
    moment: Option<u64>,
) {
    // As even as can be.
    let depth = k.div_ceil(k.div_ceil(DEPTH)).next_multiple_of(LINE);
    let in_place = a.col_stride == 1;
    let height = if in_place { m } else { m.div_ceil(m.div_ceil(PACKED_ROWS)).next_multiple_of(COLS) };
    PACKED.with_borrow_mut(|packed| {
        let (right, left) = packed.room();
        let (at, strides, sizes) = (b.ptr.cast_const(), (b.row_stride, b.col_stride), (k, n));
        let stays = moment.filter(|_| in_place).map(|moment| Right { moment, at, strides, sizes });
        let is_filled = stays.is_some() && packed.stays == stays;
        // Where so many numbers of panels stay, after so many others.
        let place = |start: usize, len: usize| {
            (stays.is_some() && start + len <= LEFT).then(|| left.wrapping_add(start))
        };
        if stays.is_some() || !in_place {
            packed.stays = stays;
        }
        for rows in ranges(m, height) {
            let mut start = 0;
            for deep in ranges(k, depth) {
                let add = add || deep.start > 0;
                let (a, c) = (a.from(rows.start, deep.start), c.from(rows.start, 0));
                let sweep = Sweep { rows: rows.len(), deep: deep.len(), a, c, add, left };
                for cols in ranges(n, PANELS * COLS) {
                    let len = deep.len() * cols.len().next_multiple_of(LINE);
                    let at = place(start, len);
                    start += len;
                    let next = if cols.end < n { (deep.start, cols.end) } else { (deep.end, 0) };
                    let next = match place(start, 1).filter(|_| is_filled) {
                        _ if next.0 >= k => Next::Nothing,
                        Some(packed) => Next::Packed(packed),
                        None => Next::From(b.from(next.0, next.1)),
                    };
                    let from = b.from(deep.start, cols.start);
                    // SAFETY: passed on to the caller; one call of a thread at a time packs here.
                    unsafe {
                        if at.is_none() || !is_filled {
                            pack_right(deep.len(), cols.len(), from, at.unwrap_or(right));
                        }
                        sweep.run(at.unwrap_or(right), cols, next);
                    }
                }
            }
        }
    });
}

pub fn ranges(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(step).map(move |start| start..(start + step).min(n))
}

/// Data after the panels that rows meet, to be fetched ahead.
#[derive(Clone, Copy)]
enum Next {
    Nothing,
    /// Source of the next panels.
    From(Matrix<f32>),
    /// The next panels, which are packed already.
    Packed(*const f32),
}

/// All rows of the left side against panels that are packed.
struct Sweep {
    rows: usize,
    deep: usize,
    a: Matrix<f32>,
    c: Matrix<f32>,
    add: bool,
    left: *mut f32,
}

impl Sweep {
    /// # Safety
    /// Conditions of [`matmul`].
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    unsafe fn run(&self, right: *const f32, cols: Range<usize>, next: Next) {
        let in_place = self.a.col_stride == 1;
        let mut tile = 0;
        for top in (0..self.rows).step_by(ROWS) {
            let rows = ROWS.min(self.rows - top);
            let packed = self.left.wrapping_add(top * self.deep);
            if !in_place && cols.start == 0 && top.is_multiple_of(COLS) {
                // SAFETY: within a, and within the rows that there is room to pack.
                unsafe { pack_left(self.deep, COLS.min(self.rows - top), self.a.from(top, 0), packed) };
            }
            // Where rows are read in place, the last tile is whole too, or a whole half: it begins with rows that are done, and
            // makes them again, the same. A matmul has more rows than a tile.
            let tall = if in_place && rows <= HALF { HALF } else { ROWS };
            let again = if in_place { tall - rows } else { 0 };
            let top = top - again;
            for (panel, across) in ranges(cols.len(), COLS).enumerate() {
                // SAFETY: within c and what was packed.
                unsafe {
                    let c = self.c.from(top, cols.start + across.start);
                    let b = right.add(panel * COLS * self.deep);
                    let far = self.far(tile, next);
                    let near = self.near(&cols, top, panel);
                    tile += 1;
                    let parts = across.len().div_ceil(LINE);
                    let whole = rows == tall || again > 0 && !self.add;
                    let a = if in_place {
                        LeftRows { at: self.a.from(top, 0).ptr, across: 4 * self.a.row_stride, along: 4 }
                    } else {
                        LeftRows { at: packed, across: 4, along: 4 * ROWS }
                    };
                    if whole && across.len().is_multiple_of(LINE) {
                        fill((tall, parts), self.deep, a, b, c, self.add, near, far);
                    } else {
                        let mut edge = [0.0; ROWS * COLS];
                        let all = Matrix::rows(edge.as_mut_ptr(), COLS);
                        fill((tall, parts), self.deep, a, b, all, false, near, far);
                        write_edge(&edge, again..again + rows, across.len(), c, self.add);
                    }
                }
            }
        }
    }

    /// This tile's share of the rows below, two for each panel; or of those that are packed next.
    fn near(&self, cols: &Range<usize>, top: usize, panel: usize) -> Ahead {
        let half = self.deep / LINE;
        if self.a.col_stride == 1 {
            let rows = self.a.from(top + ROWS + 2 * panel, 0);
            return Ahead { at: rows.ptr.cast(), gap: 4 * self.a.row_stride, step: 64 };
        }
        if cols.start > 0 {
            let packed = self.left.wrapping_add((top + ROWS) * self.deep).cast::<i8>();
            return Ahead { at: packed.wrapping_add(2 * panel * half * 64), gap: half * 64, step: 64 };
        }
        let tile = top % COLS / ROWS * PANELS + panel;
        let from = self.a.from(top - top % COLS + COLS + LINE * (tile % 3), tile / 3 * 2 * half);
        let step = 4 * self.a.col_stride;
        Ahead { at: from.ptr.cast(), gap: half * step, step }
    }

    /// This tile's share of what comes next: one line after the other.
    fn far(&self, tile: usize, next: Next) -> Ahead {
        let nothing = Ahead { at: std::ptr::null(), gap: 0, step: 0 };
        let lines = (self.deep / LINE).max(1);
        let wide = PANELS * COLS;
        match next {
            Next::From(b) if b.col_stride == 1 => {
                // One line of as many rows.
                let (across, down) = (tile % (wide / LINE), tile / (wide / LINE) * lines);
                let from =
                    Ahead { at: b.from(down, LINE * across).ptr.cast(), gap: 0, step: 4 * b.row_stride };
                if down < self.deep { from } else { nothing }
            }
            // A row, whose lines are as many.
            Next::From(b) if tile < wide => Ahead { at: b.from(0, tile).ptr.cast(), gap: 0, step: 4 * LINE },
            Next::Packed(panels) if tile < wide => {
                Ahead { at: panels.wrapping_add(tile * lines * LINE).cast(), gap: 0, step: 4 * LINE }
            }
            _ => nothing,
        }
    }
}

/// Some rows of a tile, and as many columns as there are.
///
/// # Safety
/// `c` has as many rows and columns.
unsafe fn write_edge(edge: &[f32; ROWS * COLS], rows: Range<usize>, cols: usize, c: Matrix<f32>, add: bool) {
    for row in rows {
        let edge = &edge[row * COLS..][..cols];
        // SAFETY: passed on to the caller.
        let c = unsafe { std::slice::from_raw_parts_mut(c.from(row, 0).ptr, cols) };
        for (c, &sum) in c.iter_mut().zip(edge) {
            *c = if add { *c + sum } else { sum };
        }
    }
}
