//! Large f32 products on AVX-512: c (M,N) = a (M,K) · b (K,N).
//!
//! A tile of 8 × 48 of the result stays in registers while k runs. The right side is packed into panels of 48 columns, four
//! of them at a time, which lie in the second cache level; eight rows of the left side lie in the first while they meet all
//! four. Rows that are contiguous along k are read where they are, others are packed too. A last panel is narrower, by
//! whole vectors.
//!
//! In a training step operands come from memory, not from a cache, and waiting for them is what costs most. So every tile
//! fetches what comes after it, a line now and then: the left side's next rows, and what the next panels will be packed
//! from.

use super::Matrix;
use crate::memory::Block;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::mem::offset_of;
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
    /// Where this thread packs.
    static PACKED: RefCell<Packed> = const { RefCell::new(Packed { block: None, stays: None }) };
}

/// Room for panels of a right side, and for a left side; or where that is read in place, for panels that stay.
struct Packed {
    block: Option<Block>,
    /// The right side whose first panels are there.
    stays: Option<Right>,
}

/// The right side of a product, which is the same for as long as `moment` is.
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
            Block::new((RIGHT + LEFT) * size_of::<f32>()).expect("2.5 MB to pack products in")
        });
        (block.view(0, RIGHT).at(0), block.view(RIGHT * size_of::<f32>(), LEFT).at(0))
    }
}

/// Whether a product is large enough to pay for packing, and lies as this wants it.
pub fn suits(sizes: (usize, usize, usize), c: Matrix<f32>, a: Matrix<f32>, b: Matrix<f32>) -> bool {
    let contiguous = |x: Matrix<f32>| x.row_stride == 1 || x.col_stride == 1;
    is_large(sizes) && c.col_stride == 1 && contiguous(a) && contiguous(b)
}

pub fn is_large((m, n, k): (usize, usize, usize)) -> bool {
    m >= 64 && n >= 2 * COLS && k >= 128
}

/// A right side with a `moment` is the same in all calls with the same one, and may stay packed.
///
/// # Safety
/// As [`super::product`], of a product that [`suits`], on a CPU with AVX-512 (F, VL, BW, DQ).
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub unsafe fn product(
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

fn ranges(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(step).map(move |start| start..(start + step).min(n))
}

/// A pair of lines to fetch ahead, how far apart they lie, and how far from them the next pair; in bytes.
#[derive(Clone, Copy)]
pub struct Ahead {
    pub at: *const i8,
    pub gap: usize,
    pub step: usize,
}

/// What comes after the panels that rows meet, to be fetched ahead.
#[derive(Clone, Copy)]
enum Next {
    Nothing,
    /// What the next panels are packed from.
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
    /// As [`product`].
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
            // makes them again, the same. A product has more rows than a tile.
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
                        Left { at: self.a.from(top, 0).ptr, across: 4 * self.a.row_stride, along: 4 }
                    } else {
                        Left { at: packed, across: 4, along: 4 * ROWS }
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

/// Where eight rows of the left side lie: rows `across` apart, and what follows in a row `along`; in bytes.
#[derive(Clone, Copy)]
pub struct Left {
    pub at: *const f32,
    pub across: usize,
    pub along: usize,
}

/// One tile of c, of eight rows or [`HALF`] as many, and `parts` times 16 columns.
///
/// # Safety
/// As [`product`]; `b` is a packed panel.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
#[allow(clippy::too_many_arguments)]
pub unsafe fn fill(
    (rows, parts): (usize, usize),
    k: usize,
    a: Left,
    b: *const f32,
    c: Matrix<f32>,
    add: bool,
    near: Ahead,
    far: Ahead,
) {
    let tile = Tile { k, a, b, c: c.ptr, c_across: 4 * c.row_stride, add: add.into(), near, far };
    // SAFETY: passed on to the caller.
    unsafe {
        match (parts, rows, a.along) {
            (3, ROWS, 4) => fill_three_in_place(&tile),
            (2, ROWS, 4) => fill_two_in_place(&tile),
            (_, ROWS, 4) => fill_one_in_place(&tile),
            (3, ROWS, 32) => fill_three_packed(&tile),
            (2, ROWS, 32) => fill_two_packed(&tile),
            (_, ROWS, 32) => fill_one_packed(&tile),
            (3, ROWS, _) => fill_three(&tile),
            (2, ROWS, _) => fill_two(&tile),
            (_, ROWS, _) => fill_one(&tile),
            (3, ..) => fill_half_of_three(&tile),
            (2, ..) => fill_half_of_two(&tile),
            _ => fill_half_of_one(&tile),
        }
    }
}

/// A tile and all that goes into it, as the instructions find it.
#[repr(C)]
struct Tile {
    k: usize,
    a: Left,
    b: *const f32,
    c: *mut f32,
    /// From one row of c to the next, in bytes.
    c_across: usize,
    /// Not 0 if sums are added to what c holds.
    add: usize,
    near: Ahead,
    far: Ahead,
}

/// Instructions of a row for the `$k`th of sixteen k: its number, wherever it is, times each part of b.
#[rustfmt::skip]
macro_rules! row {
    ($at:literal, $k:literal, $along:tt $(, $sum:literal += $part:literal)*) => {
        concat!(
            "vbroadcastss zmm27, dword ptr [", $at, along!($k, $along), "]\n",
            $("vfmadd231ps zmm", $sum, ", zmm27, zmm", $part, "\n",)*
        )
    };
}

/// How far the `$k`th number of a row is from where the registers of a point: if numbers are any distance apart, they go along.
#[rustfmt::skip]
macro_rules! along {
    ($k:literal, any) => { "" };
    ($k:literal, $along:literal) => { concat!(" + ", $k, " * ", $along) };
}

/// Instructions of the `$k`th of sixteen k, for as many parts of 16 columns: the first four rows, and the others where there are
/// eight. What three parts of b will be in eight k is fetched.
#[rustfmt::skip]
macro_rules! step {
    (3, 8, $k:literal, $along:tt) => { concat!(
        step!(3, 4, $k, $along),
        row!("{a4}", $k, $along, 12 += 24, 13 += 25, 14 += 26),
        row!("{a4} + {across}", $k, $along, 15 += 24, 16 += 25, 17 += 26),
        row!("{a4} + 2 * {across}", $k, $along, 18 += 24, 19 += 25, 20 += 26),
        row!("{a4} + {across3}", $k, $along, 21 += 24, 22 += 25, 23 += 26),
        step!(lower, $along),
    ) };
    (3, 4, $k:literal, $along:tt) => { concat!(
        "prefetcht0 byte ptr [{b} + ", $k, " * 192 + 1536]\n",
        "prefetcht0 byte ptr [{b} + ", $k, " * 192 + 1600]\n",
        "prefetcht0 byte ptr [{b} + ", $k, " * 192 + 1664]\n",
        "vmovups zmm24, zmmword ptr [{b} + ", $k, " * 192 + 0]\n",
        "vmovups zmm25, zmmword ptr [{b} + ", $k, " * 192 + 64]\n",
        "vmovups zmm26, zmmword ptr [{b} + ", $k, " * 192 + 128]\n",
        row!("{a}", $k, $along, 0 += 24, 1 += 25, 2 += 26),
        row!("{a} + {across}", $k, $along, 3 += 24, 4 += 25, 5 += 26),
        row!("{a} + 2 * {across}", $k, $along, 6 += 24, 7 += 25, 8 += 26),
        row!("{a} + {across3}", $k, $along, 9 += 24, 10 += 25, 11 += 26),
        step!(upper, $along),
    ) };
    (2, 8, $k:literal, $along:tt) => { concat!(
        step!(2, 4, $k, $along),
        row!("{a4}", $k, $along, 12 += 24, 13 += 25),
        row!("{a4} + {across}", $k, $along, 15 += 24, 16 += 25),
        row!("{a4} + 2 * {across}", $k, $along, 18 += 24, 19 += 25),
        row!("{a4} + {across3}", $k, $along, 21 += 24, 22 += 25),
        step!(lower, $along),
    ) };
    (2, 4, $k:literal, $along:tt) => { concat!(
        "vmovups zmm24, zmmword ptr [{b} + ", $k, " * 128 + 0]\n",
        "vmovups zmm25, zmmword ptr [{b} + ", $k, " * 128 + 64]\n",
        row!("{a}", $k, $along, 0 += 24, 1 += 25),
        row!("{a} + {across}", $k, $along, 3 += 24, 4 += 25),
        row!("{a} + 2 * {across}", $k, $along, 6 += 24, 7 += 25),
        row!("{a} + {across3}", $k, $along, 9 += 24, 10 += 25),
        step!(upper, $along),
    ) };
    (1, 8, $k:literal, $along:tt) => { concat!(
        step!(1, 4, $k, $along),
        row!("{a4}", $k, $along, 12 += 24),
        row!("{a4} + {across}", $k, $along, 15 += 24),
        row!("{a4} + 2 * {across}", $k, $along, 18 += 24),
        row!("{a4} + {across3}", $k, $along, 21 += 24),
        step!(lower, $along),
    ) };
    (1, 4, $k:literal, $along:tt) => { concat!(
        "vmovups zmm24, zmmword ptr [{b} + ", $k, " * 64 + 0]\n",
        row!("{a}", $k, $along, 0 += 24),
        row!("{a} + {across}", $k, $along, 3 += 24),
        row!("{a} + 2 * {across}", $k, $along, 6 += 24),
        row!("{a} + {across3}", $k, $along, 9 += 24),
        step!(upper, $along),
    ) };
    (upper, any) => { "add {a}, {along}\n" };
    (lower, any) => { "add {a4}, {along}\n" };
    ($rows:ident, $along:literal) => { "" };
}

/// Instructions after `$count` k: of b, and of a unless it went along.
#[rustfmt::skip]
macro_rules! go_on {
    ($count:literal, $parts:tt, any) => { concat!("add {b}, ", $count, " * 64 * ", $parts, "\n") };
    ($count:literal, $parts:tt, $along:literal) => { concat!(
        go_on!($count, $parts, any),
        "add {a}, ", $count, " * ", $along, "\n",
        "add {a4}, ", $count, " * ", $along, "\n",
    ) };
}

/// Instructions for each sum of a tile and its place in c, of which the registers of a have the address: `$each!` of both.
#[rustfmt::skip]
macro_rules! sums {
    ($each:ident, $parts:tt, 8) => { concat!(
        sums!($each, $parts, 4),
        sums!($each, $parts, "{a4}", 12, 13, 14),
        sums!($each, $parts, "{a4} + {across}", 15, 16, 17),
        sums!($each, $parts, "{a4} + 2 * {across}", 18, 19, 20),
        sums!($each, $parts, "{a4} + {across3}", 21, 22, 23),
    ) };
    ($each:ident, $parts:tt, 4) => { concat!(
        sums!($each, $parts, "{a}", 0, 1, 2),
        sums!($each, $parts, "{a} + {across}", 3, 4, 5),
        sums!($each, $parts, "{a} + 2 * {across}", 6, 7, 8),
        sums!($each, $parts, "{a} + {across3}", 9, 10, 11),
    ) };
    ($each:ident, 3, $at:literal, $x:literal, $y:literal, $z:literal) => { concat!(
        $each!($at, 0, $x), $each!($at, 64, $y), $each!($at, 128, $z),
    ) };
    ($each:ident, 2, $at:literal, $x:literal, $y:literal, $z:literal) => { concat!(
        $each!($at, 0, $x), $each!($at, 64, $y),
    ) };
    ($each:ident, 1, $at:literal, $x:literal, $y:literal, $z:literal) => { $each!($at, 0, $x) };
}

#[rustfmt::skip]
macro_rules! begin {
    ($at:literal, $offset:literal, $sum:literal) => { concat!(
        "prefetcht0 byte ptr [", $at, " + ", $offset, "]\n",
        "vpxord zmm", $sum, ", zmm", $sum, ", zmm", $sum, "\n",
    ) };
}

#[rustfmt::skip]
macro_rules! add {
    ($at:literal, $offset:literal, $sum:literal) => {
        concat!("vaddps zmm", $sum, ", zmm", $sum, ", zmmword ptr [", $at, " + ", $offset, "]\n")
    };
}

#[rustfmt::skip]
macro_rules! store {
    ($at:literal, $offset:literal, $sum:literal) => {
        concat!("vmovups zmmword ptr [", $at, " + ", $offset, "], zmm", $sum, "\n")
    };
}

/// Instructions after which the registers of a have the address of rows: those at `$at`, `$across` apart.
#[rustfmt::skip]
macro_rules! rows_at {
    ($at:literal, $across:literal) => { concat!(
        "mov {a}, qword ptr [{tile} + {", $at, "}]\n",
        "mov {across}, qword ptr [{tile} + {", $across, "}]\n",
        "lea {across3}, [{across} + 2 * {across}]\n",
        "lea {a4}, [{a} + 4 * {across}]\n",
    ) };
}

/// A function that makes a tile of as many parts of 16 columns and as many rows, whose numbers lie as many bytes apart. All of it is instructions of our own: compilers
/// keep the sums in registers too, but not the addresses, and bring a tile's sums to their place by way of the stack.
macro_rules! fill {
    ($name:ident, $parts:tt, $rows:tt, $along:tt) => {
        /// # Safety
        /// As [`fill`].
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        #[inline]
        #[rustfmt::skip]
        unsafe fn $name(tile: &Tile) {
            // SAFETY: reads a and b and writes c as far as the caller vouches for; prefetching is no access.
            unsafe {
                std::arch::asm!(
                    rows_at!("c_at", "c_across"),
                    sums!(begin, $parts, $rows),
                    rows_at!("a_at", "a_across"),
                    "mov {along}, qword ptr [{tile} + {a_along}]",
                    "mov {b}, qword ptr [{tile} + {b_at}]",
                    "mov {near}, qword ptr [{tile} + {near_at}]",
                    "mov {gap}, qword ptr [{tile} + {near_gap}]",
                    "mov {near_by}, qword ptr [{tile} + {near_step}]",
                    "mov {far}, qword ptr [{tile} + {far_at}]",
                    "mov {far_by}, qword ptr [{tile} + {far_step}]",
                    "mov {k}, qword ptr [{tile} + {depth}]",
                    "sub {k}, 16",
                    "jb 3f",
                    // While there are sixteen.
                    "2:",
                    "prefetcht1 byte ptr [{far}]",
                    "prefetcht0 byte ptr [{near}]",
                    "prefetcht0 byte ptr [{near} + {gap}]",
                    "add {far}, {far_by}",
                    "add {near}, {near_by}",
                    step!($parts, $rows, 0, $along), step!($parts, $rows, 1, $along), step!($parts, $rows, 2, $along), step!($parts, $rows, 3, $along),
                    step!($parts, $rows, 4, $along), step!($parts, $rows, 5, $along), step!($parts, $rows, 6, $along), step!($parts, $rows, 7, $along),
                    step!($parts, $rows, 8, $along), step!($parts, $rows, 9, $along), step!($parts, $rows, 10, $along), step!($parts, $rows, 11, $along),
                    step!($parts, $rows, 12, $along), step!($parts, $rows, 13, $along), step!($parts, $rows, 14, $along), step!($parts, $rows, 15, $along),
                    go_on!(16, $parts, $along),
                    "sub {k}, 16",
                    "jae 2b",
                    // And those left, fewer than sixteen.
                    "3:",
                    "add {k}, 16",
                    "jz 5f",
                    "4:",
                    step!($parts, $rows, 0, $along),
                    go_on!(1, $parts, $along),
                    "dec {k}",
                    "jnz 4b",
                    "5:",
                    rows_at!("c_at", "c_across"),
                    "cmp qword ptr [{tile} + {adds}], 0",
                    "je 6f",
                    sums!(add, $parts, $rows),
                    "6:",
                    sums!(store, $parts, $rows),
                    tile = in(reg) tile,
                    k = out(reg) _, a = out(reg) _, a4 = out(reg) _, across = out(reg) _, across3 = out(reg) _,
                    along = out(reg) _, b = out(reg) _, near = out(reg) _, gap = out(reg) _, near_by = out(reg) _,
                    far = out(reg) _, far_by = out(reg) _,
                    depth = const offset_of!(Tile, k),
                    a_at = const offset_of!(Tile, a.at), a_across = const offset_of!(Tile, a.across),
                    a_along = const offset_of!(Tile, a.along), b_at = const offset_of!(Tile, b),
                    c_at = const offset_of!(Tile, c), c_across = const offset_of!(Tile, c_across),
                    adds = const offset_of!(Tile, add),
                    near_at = const offset_of!(Tile, near.at), near_gap = const offset_of!(Tile, near.gap),
                    near_step = const offset_of!(Tile, near.step),
                    far_at = const offset_of!(Tile, far.at), far_step = const offset_of!(Tile, far.step),
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
                    options(nostack),
                );
            }
        }
    };
}
// Rows that are read in place, those that were packed, and any others.
fill!(fill_one_in_place, 1, 8, 4);
fill!(fill_two_in_place, 2, 8, 4);
fill!(fill_three_in_place, 3, 8, 4);
fill!(fill_one_packed, 1, 8, 32);
fill!(fill_two_packed, 2, 8, 32);
fill!(fill_three_packed, 3, 8, 32);
fill!(fill_one, 1, 8, any);
fill!(fill_two, 2, 8, any);
fill!(fill_three, 3, 8, any);
fill!(fill_half_of_one, 1, 4, any);
fill!(fill_half_of_two, 2, 4, any);
fill!(fill_half_of_three, 3, 4, any);

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

/// Packs `cols` columns as panels: for each k 48 numbers, of a last panel fewer.
///
/// # Safety
/// `b` has `k` rows and `cols` columns; `out` has room.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut f32) {
    let whole = cols / COLS;
    // SAFETY: passed on to the caller.
    unsafe {
        if b.col_stride == 1 {
            for row in 0..k {
                let from = b.from(row, 0).ptr;
                for panel in 0..whole {
                    for part in 0..3 {
                        let at = COLS * panel + 16 * part;
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(4 * b.row_stride + at).cast());
                        let to = out.add((panel * k + row) * COLS + 16 * part);
                        _mm512_storeu_ps(to, _mm512_loadu_ps(from.add(at)));
                    }
                }
            }
        } else {
            for panel in 0..whole {
                for part in 0..3 {
                    let (from, to) =
                        (b.from(0, COLS * panel + 16 * part), out.add(panel * k * COLS + 16 * part));
                    for row in (0..k - k % 16).step_by(16) {
                        transpose(from.from(row, 0).ptr, b.col_stride, to.add(row * COLS), COLS);
                    }
                    for row in k - k % 16..k {
                        for col in 0..16 {
                            *to.add(row * COLS + col) = *from.from(row, col).ptr;
                        }
                    }
                }
            }
        }
        if cols > whole * COLS {
            pack_narrow(k, cols - whole * COLS, b.from(0, whole * COLS), out.add(whole * k * COLS));
        }
    }
}

/// Packs a last panel, narrower than others: as many times 16 columns as it takes.
///
/// # Safety
/// As [`pack_right`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn pack_narrow(k: usize, cols: usize, b: Matrix<f32>, out: *mut f32) {
    let width = cols.next_multiple_of(LINE);
    for part in ranges(cols, LINE) {
        let (from, mask) = (b.from(0, part.start), ((1u32 << part.len()) - 1) as u16);
        for row in 0..k {
            // SAFETY: passed on to the caller; a lane outside of the mask is not read.
            unsafe {
                let to = out.add(row * width + part.start);
                if b.col_stride == 1 {
                    _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(mask, from.from(row, 0).ptr));
                } else {
                    let lanes: [f32; LINE] =
                        std::array::from_fn(
                            |col| {
                                if col < part.len() { *from.from(row, col).ptr } else { 0.0 }
                            },
                        );
                    _mm512_storeu_ps(to, _mm512_loadu_ps(lanes.as_ptr()));
                }
            }
        }
    }
}

/// 16 × 16 numbers turned over: from rows `stride` apart into rows of a panel, `width` apart.
///
/// # Safety
/// All of them may be read and written.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
#[inline]
pub unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, width: usize) {
    let mut rows = [_mm512_setzero_ps(); 16];
    for (i, row) in rows.iter_mut().enumerate() {
        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(i * stride + 64).cast());
        // SAFETY: passed on to the caller.
        *row = unsafe { _mm512_loadu_ps(from.add(i * stride)) };
    }
    let (pairs, numbers) = (_mm512_castps_pd, _mm512_castpd_ps);
    let mut twos = rows;
    for i in (0..16).step_by(2) {
        twos[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    // Of four rows from 4i on, the one at 4i + j then has columns j, 4 + j, 8 + j and 12 + j.
    let mut fours = rows;
    for i in (0..16).step_by(4) {
        for (j, from) in [(0, 0), (2, 1)] {
            let (a, b) = (pairs(twos[i + from]), pairs(twos[i + from + 2]));
            fours[i + j] = numbers(_mm512_unpacklo_pd(a, b));
            fours[i + j + 1] = numbers(_mm512_unpackhi_pd(a, b));
        }
    }
    for j in 0..4 {
        let [even, odd] = [(fours[j], fours[4 + j]), (fours[8 + j], fours[12 + j])]
            .map(|(a, b)| (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b)));
        let whole = [
            _mm512_shuffle_f32x4::<0x88>(even.0, odd.0),
            _mm512_shuffle_f32x4::<0x88>(even.1, odd.1),
            _mm512_shuffle_f32x4::<0xdd>(even.0, odd.0),
            _mm512_shuffle_f32x4::<0xdd>(even.1, odd.1),
        ];
        for (i, whole) in whole.into_iter().enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { _mm512_storeu_ps(to.add((4 * i + j) * width), whole) };
        }
    }
}

/// Packs `rows` rows that are contiguous across, 48 at most: for each tile and k 8 numbers.
///
/// # Safety
/// `a` has as many rows and `k` columns; `out` has room for whole tiles.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut f32) {
    // SAFETY: passed on to the caller.
    unsafe {
        if rows < COLS {
            return (0..rows).step_by(ROWS).for_each(|top| {
                pack_ragged(k, ROWS.min(rows - top), a.from(top, 0), out.add(top * k));
            });
        }
        for col in 0..k {
            let from = a.from(0, col).ptr;
            for part in 0..3 {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(8 * a.col_stride + 16 * part).cast());
            }
            for tile in 0..COLS / ROWS {
                _mm256_storeu_ps(out.add((tile * k + col) * ROWS), _mm256_loadu_ps(from.add(ROWS * tile)));
            }
        }
    }
}

/// Packs the `rows` rows of one tile, filled up with zeros.
///
/// # Safety
/// As [`pack_left`].
unsafe fn pack_ragged(k: usize, rows: usize, a: Matrix<f32>, out: *mut f32) {
    for col in 0..k {
        for row in 0..ROWS {
            // SAFETY: passed on to the caller.
            unsafe { *out.add(col * ROWS + row) = if row < rows { *a.from(row, col).ptr } else { 0.0 } };
        }
    }
}
