//! One tile of the result, in instructions of our own: its sums stay in registers while k runs.

use super::super::Matrix;
#[cfg(doc)]
use super::HALF;
use super::ROWS;
use std::mem::offset_of;

/// A pair of lines to fetch ahead, how far apart they lie, and how far from them the next pair; in bytes.
#[derive(Clone, Copy)]
pub struct Ahead {
    pub at: *const i8,
    pub gap: usize,
    pub step: usize,
}

/// Place of eight rows of the left side: rows `across` apart, and what follows in a row `along`; in bytes.
#[derive(Clone, Copy)]
pub struct LeftRows {
    pub at: *const f32,
    pub across: usize,
    pub along: usize,
}

/// One tile of c, of eight rows or [`HALF`] as many, and `parts` times 16 columns.
///
/// # Safety
/// Conditions of [`matmul`](super::matmul); `b` is a packed panel.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
#[inline]
#[allow(clippy::too_many_arguments)]
pub unsafe fn fill(
    (rows, parts): (usize, usize),
    k: usize,
    a: LeftRows,
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
    a: LeftRows,
    b: *const f32,
    c: *mut f32,
    /// Distance of the rows of c, in bytes.
    c_across: usize,
    /// Flag: not 0 if sums are added to what c holds.
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

/// Distance of the `$k`th number of a row from where the registers of a point: if numbers are any distance apart, they go along.
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
        /// Conditions of [`fill`].
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
