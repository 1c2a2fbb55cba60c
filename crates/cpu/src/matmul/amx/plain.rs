//! Tiles in plain Rust: the same numbers as AMX makes, as the manual of its instructions says.

use super::super::Matrix;
use super::{Engine, PARTS, STEP, TILE, TILE_LEN, Work, split};

/// Packs one number after the other.
pub struct Plain;

/// Packs by vectors, as AMX has it.
pub struct PackedByVectors;

impl Engine for Plain {
    unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe { pack((k, rows), a.transposed(), out) };
    }

    unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe { pack_as_right((k, cols), b, out) };
    }

    unsafe fn begin() {}

    unsafe fn end() {}

    unsafe fn block(work: &Work) {
        // SAFETY: passed on to the caller.
        unsafe { block(work) };
    }
}

impl Engine for PackedByVectors {
    unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe { split::pack_left(k, rows, a, out) };
    }

    unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut u16) {
        // SAFETY: passed on to the caller.
        unsafe { split::pack_right(k, cols, b, out) };
    }

    unsafe fn begin() {}

    unsafe fn end() {}

    unsafe fn block(work: &Work) {
        // SAFETY: passed on to the caller.
        unsafe { block(work) };
    }
}

/// bf16 nearest to a number, as an instruction has it that takes denormal numbers for zero.
fn rounded(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    if x.is_subnormal() || x == 0.0 {
        return (bits >> 16) as u16 & 0x8000;
    }
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn widened(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Low, middle and high part.
pub fn parts(x: f32) -> [u16; PARTS] {
    let high = rounded(x);
    let middle = rounded(x - widened(high));
    [rounded(x - widened(high) - widened(middle)), middle, high]
}

/// Place of a number in a row of a tile: pairs have k 16 apart.
fn place(k: usize) -> usize {
    k % TILE * 2 + k / TILE
}

unsafe fn pack((k, rows): (usize, usize), x: Matrix<f32>, out: *mut u16) {
    // SAFETY: passed on to the caller.
    unsafe { each((k, rows), x, |step, tile, part, row, k| (step, tile, part, row * STEP + place(k)), out) };
}

unsafe fn pack_as_right((k, cols): (usize, usize), x: Matrix<f32>, out: *mut u16) {
    // SAFETY: passed on to the caller.
    unsafe {
        each(
            (k, cols),
            x,
            |step, tile, part, col, k| (step, tile, part, k % TILE * STEP + 2 * col + k / TILE),
            out,
        );
    };
}

/// Writes the parts of all numbers of x (K,W), filled up with zeros, where `at` says.
unsafe fn each(
    (k, width): (usize, usize),
    x: Matrix<f32>,
    at: impl Fn(usize, usize, usize, usize, usize) -> (usize, usize, usize, usize),
    out: *mut u16,
) {
    let tiles = width.div_ceil(TILE);
    for i in 0..k.next_multiple_of(STEP) {
        for j in 0..width.next_multiple_of(TILE) {
            // SAFETY: passed on to the caller.
            let number = if i < k && j < width { unsafe { *x.from(i, j).ptr } } else { 0.0 };
            for (part, bits) in parts(number).into_iter().enumerate() {
                let (step, tile, part, place) = at(i / STEP, j / TILE, part, j % TILE, i % STEP);
                let tile = (step * PARTS + part) * tiles + tile;
                // SAFETY: passed on to the caller.
                unsafe { *out.add(tile * TILE_LEN + place) = bits };
            }
        }
    }
}

/// Zero for denormal numbers.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// One instruction on three tiles.
fn multiply(c: &mut [f32], a: &[u16], b: &[u16]) {
    for i in 0..TILE {
        for j in 0..TILE {
            let mut sums = [0.0f32; 2];
            for pair in 0..TILE {
                for (which, sum) in sums.iter_mut().enumerate() {
                    let [x, y] = [a[i * STEP + 2 * pair + which], b[pair * STEP + 2 * j + which]]
                        .map(|bits| f64::from(flushed(widened(bits))));
                    *sum = flushed((x * y + f64::from(*sum)) as f32);
                }
            }
            let both = flushed(sums[0] + sums[1]);
            let c = &mut c[i * TILE + j];
            *c = flushed(flushed(*c) + both);
        }
    }
}

/// Parts of both sides that are multiplied, in order: 0 are low ones, 1 middle ones, 2 high ones.
pub const ORDER: [(usize, usize); 6] = [(0, 2), (1, 2), (1, 1), (2, 1), (2, 0), (2, 2)];

unsafe fn block(work: &Work) {
    let (down, across) = work.tiles;
    // SAFETY: passed on to the caller.
    let [a, b] = unsafe {
        [(work.a, down), (work.b, across)]
            .map(|(at, tiles)| std::slice::from_raw_parts(at, work.steps * PARTS * tiles * TILE_LEN))
    };
    let tile_of = |x: &[u16], tiles: usize, step: usize, part: usize, tile: usize| {
        let at = ((step * PARTS + part) * tiles + tile) * TILE_LEN;
        x[at..at + TILE_LEN].to_vec()
    };
    for (i, j) in (0..down).flat_map(|i| (0..across).map(move |j| (i, j))) {
        let at = |row: usize| work.c.wrapping_byte_add((i * TILE + row) * work.stride).wrapping_add(j * TILE);
        let mut c = [0.0; TILE * TILE];
        for (row, c) in c.chunks_exact_mut(TILE).enumerate().filter(|_| work.add > 0) {
            // SAFETY: passed on to the caller.
            c.copy_from_slice(unsafe { std::slice::from_raw_parts(at(row), TILE) });
        }
        for step in 0..work.steps {
            for (left, right) in ORDER {
                multiply(&mut c, &tile_of(a, down, step, left, i), &tile_of(b, across, step, right, j));
            }
        }
        for (row, c) in c.chunks_exact(TILE).enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { std::slice::from_raw_parts_mut(at(row), TILE) }.copy_from_slice(c);
        }
    }
}
