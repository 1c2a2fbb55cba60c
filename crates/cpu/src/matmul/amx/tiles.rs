//! Tiles of AMX, in instructions of our own: the sums of a block stay in tile registers while its steps run.
//!
//! Sums are in tmm0 (upper left), tmm1 (upper right), tmm2 and tmm3 (below); tmm4 and tmm5 hold a part of the left side, tmm6 and
//! tmm7 one of the right side. The six matmuls of a step are in an order in which one of both sides stays, but for one load.

use super::super::Matrix;
use super::{Engine, STEP, TILE, Work, split};
use std::arch::asm;
use std::mem::offset_of;

/// The CPU's tiles.
pub struct Amx;

/// Configuration of the tile registers: palette 1, and for each its rows and their bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 2 * STEP as u16;
        config.rows[tile] = TILE as u8;
        tile += 1;
    }
    config
};

impl Engine for Amx {
    unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe { split::pack_left(k, rows, a, out) };
    }

    unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe { split::pack_right(k, cols, b, out) };
    }

    unsafe fn begin() {
        // SAFETY: the CPU has tiles, and this process may use them.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags));
        }
    }

    unsafe fn end() {
        // SAFETY: as in `begin`; no tile holds anything of use between two blocks.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    unsafe fn block(work: &Work) {
        // SAFETY: passed on to the caller.
        unsafe {
            match work.tiles {
                (2, 2) => two_by_two(work),
                (1, 2) => one_by_two(work),
                (2, 1) => two_by_one(work),
                _ => one_by_one(work),
            }
        }
    }
}

/// Instruction that loads a tile of a side.
macro_rules! load {
    ($tile:literal, $side:literal, $at:literal) => {
        concat!("tileloadd tmm", $tile, ", [{", $side, "} + {line} + ", $at, "]\n")
    };
}

/// Instructions that add to sums the tile at its left times that of the right side.
macro_rules! add {
    ($($sum:literal += $left:literal * $right:literal),*) => {
        concat!($("tdpbf16ps tmm", $sum, ", tmm", $left, ", tmm", $right, "\n"),*)
    };
}

/// Six matmuls: lo·hi, mid·hi, mid·mid, hi·mid, hi·lo, hi·hi.
#[rustfmt::skip]
macro_rules! step {
    (two_by_two) => { concat!(
        load!(4, "a", 0), load!(6, "b", 4096), load!(7, "b", 5120), load!(5, "a", 1024),
        add!(0 += 4 * 6, 1 += 4 * 7), load!(4, "a", 2048), add!(2 += 5 * 6, 3 += 5 * 7), load!(5, "a", 3072),
        add!(0 += 4 * 6, 2 += 5 * 6), load!(6, "b", 2048), add!(1 += 4 * 7, 3 += 5 * 7), load!(7, "b", 3072),
        add!(0 += 4 * 6, 1 += 4 * 7), load!(4, "a", 4096), add!(2 += 5 * 6, 3 += 5 * 7), load!(5, "a", 5120),
        add!(0 += 4 * 6, 2 += 5 * 6), load!(6, "b", 0), add!(1 += 4 * 7, 3 += 5 * 7), load!(7, "b", 1024),
        add!(0 += 4 * 6, 2 += 5 * 6), load!(6, "b", 4096), add!(1 += 4 * 7, 3 += 5 * 7), load!(7, "b", 5120),
        add!(0 += 4 * 6, 1 += 4 * 7, 2 += 5 * 6, 3 += 5 * 7),
        "add {a}, 6144\n",
        "add {b}, 6144\n",
    ) };
    (one_by_two) => { concat!(
        load!(4, "a", 0), load!(6, "b", 4096), load!(7, "b", 5120), load!(5, "a", 1024),
        add!(0 += 4 * 6, 1 += 4 * 7), load!(4, "a", 2048),
        add!(0 += 5 * 6, 1 += 5 * 7), load!(6, "b", 2048), load!(7, "b", 3072),
        add!(0 += 5 * 6, 1 += 5 * 7),
        add!(0 += 4 * 6, 1 += 4 * 7), load!(6, "b", 0), load!(7, "b", 1024),
        add!(0 += 4 * 6, 1 += 4 * 7), load!(6, "b", 4096), load!(7, "b", 5120),
        add!(0 += 4 * 6, 1 += 4 * 7),
        "add {a}, 3072\n",
        "add {b}, 6144\n",
    ) };
    (two_by_one) => { concat!(
        load!(4, "a", 0), load!(5, "a", 1024), load!(6, "b", 2048), load!(7, "b", 1024),
        add!(0 += 4 * 6, 2 += 5 * 6), load!(4, "a", 2048), load!(5, "a", 3072),
        add!(0 += 4 * 6, 2 += 5 * 6),
        add!(0 += 4 * 7, 2 += 5 * 7), load!(4, "a", 4096), load!(5, "a", 5120),
        add!(0 += 4 * 7, 2 += 5 * 7), load!(7, "b", 0),
        add!(0 += 4 * 7, 2 += 5 * 7),
        add!(0 += 4 * 6, 2 += 5 * 6),
        "add {a}, 6144\n",
        "add {b}, 3072\n",
    ) };
    (one_by_one) => { concat!(
        load!(4, "a", 0), load!(6, "b", 2048), load!(5, "a", 1024), load!(7, "b", 1024),
        add!(0 += 4 * 6), load!(4, "a", 2048),
        add!(0 += 5 * 6),
        add!(0 += 5 * 7),
        add!(0 += 4 * 7), load!(7, "b", 0),
        add!(0 += 4 * 7),
        add!(0 += 4 * 6),
        "add {a}, 3072\n",
        "add {b}, 3072\n",
    ) };
}

/// Instructions for each tile of sums, and its place in c: `$each!` of both. `below` is 16 rows further down.
macro_rules! sums {
    ($each:ident, two_by_two) => {
        concat!(sums!($each, one_by_two), $each!(2, "below", 0), $each!(3, "below", 64))
    };
    ($each:ident, one_by_two) => {
        concat!($each!(0, "c", 0), $each!(1, "c", 64))
    };
    ($each:ident, two_by_one) => {
        concat!($each!(0, "c", 0), $each!(2, "below", 0))
    };
    ($each:ident, one_by_one) => {
        $each!(0, "c", 0)
    };
}

macro_rules! zero {
    ($sum:literal, $at:literal, $offset:literal) => {
        concat!("tilezero tmm", $sum, "\n")
    };
}

macro_rules! fetch {
    ($sum:literal, $at:literal, $offset:literal) => {
        concat!("tileloadd tmm", $sum, ", [{", $at, "} + {stride} + ", $offset, "]\n")
    };
}

macro_rules! store {
    ($sum:literal, $at:literal, $offset:literal) => {
        concat!("tilestored [{", $at, "} + {stride} + ", $offset, "], tmm", $sum, "\n")
    };
}

/// Instructions that fetch two lines each of three rows, and go on.
macro_rules! ahead {
    () => {
        concat!(
            "prefetcht1 byte ptr [{ahead}]\nprefetcht1 byte ptr [{ahead} + 64]\n",
            "prefetcht1 byte ptr [{ahead} + {gap}]\nprefetcht1 byte ptr [{ahead} + {gap} + 64]\n",
            "lea {ahead}, [{ahead} + 2 * {gap}]\n",
            "prefetcht1 byte ptr [{ahead}]\nprefetcht1 byte ptr [{ahead} + 64]\n",
            "add {ahead}, {gap}\n",
        )
    };
}

/// Instructions that fetch two rows of two tiles of c, and go on.
#[rustfmt::skip]
macro_rules! rows {
    ($at:literal) => {
        concat!(
            "prefetcht1 byte ptr [{", $at, "}]\nprefetcht1 byte ptr [{", $at, "} + 64]\n",
            "prefetcht1 byte ptr [{", $at, "} + {stride}]\nprefetcht1 byte ptr [{", $at, "} + {stride} + 64]\n",
            "lea {", $at, "}, [{", $at, "} + 2 * {stride}]\n",
        )
    };
}

/// A function that makes a block of as many tiles. Eight rows of the next block are fetched at each step.
macro_rules! block {
    ($name:ident) => {
        /// # Safety
        /// Conditions of [`Engine::block`], after [`Engine::begin`].
        unsafe fn $name(work: &Work) {
            // SAFETY: reads a and b and writes c as far as the caller vouches for; prefetching is no access.
            unsafe {
                asm!(
                    "mov {c}, qword ptr [{work} + {c_at}]",
                    "mov {stride}, qword ptr [{work} + {c_stride}]",
                    "mov {below}, {stride}",
                    "shl {below}, 4",
                    "add {below}, {c}",
                    "cmp qword ptr [{work} + {adds}], 0",
                    "jne 2f",
                    sums!(zero, $name),
                    "jmp 3f",
                    "2:",
                    sums!(fetch, $name),
                    "3:",
                    "mov {a}, qword ptr [{work} + {a_at}]",
                    "mov {b}, qword ptr [{work} + {b_at}]",
                    "mov {next}, qword ptr [{work} + {next_at}]",
                    "mov {ahead}, qword ptr [{work} + {ahead_at}]",
                    "mov {gap}, qword ptr [{work} + {ahead_gap}]",
                    "mov {steps}, qword ptr [{work} + {depth}]",
                    "mov {line}, 64",
                    "4:",
                    ahead!(),
                    rows!("next"),
                    rows!("next"),
                    rows!("next"),
                    rows!("next"),
                    step!($name),
                    "dec {steps}",
                    "jnz 4b",
                    sums!(store, $name),
                    work = in(reg) work,
                    c = out(reg) _, stride = out(reg) _, below = out(reg) _, a = out(reg) _, b = out(reg) _,
                    next = out(reg) _, ahead = out(reg) _, gap = out(reg) _, steps = out(reg) _, line = out(reg) _,
                    c_at = const offset_of!(Work, c), c_stride = const offset_of!(Work, stride),
                    adds = const offset_of!(Work, add), depth = const offset_of!(Work, steps),
                    a_at = const offset_of!(Work, a), b_at = const offset_of!(Work, b),
                    next_at = const offset_of!(Work, next),
                    ahead_at = const offset_of!(Work, ahead.at), ahead_gap = const offset_of!(Work, ahead.gap),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}
block!(two_by_two);
block!(one_by_two);
block!(two_by_one);
block!(one_by_one);
