//! Packing of both sides: numbers are split into three bf16 and put into tiles.
//!
//! A row of a tile has 16 pairs of numbers, whose k are 16 apart: k and k + 16. So two vectors, of 16 k each of a row of the left
//! side, or of 16 columns each of two rows of the right side, make a row of a tile.

use super::super::Matrix;
use super::super::blocks::transpose;
use super::{BLOCK, PARTS, STEP, TILE, TILE_LEN, ranges};
use std::arch::x86_64::*;

/// Numbers of a tile, before they are split.
#[repr(align(64))]
struct Numbers([f32; TILE_LEN]);

/// Fetches lines of a part of a matrix into the second cache level.
pub fn fetch(x: Matrix<f32>, (rows, cols): (usize, usize)) {
    let (x, rows, cols) = if x.col_stride == 1 { (x, rows, cols) } else { (x.transposed(), cols, rows) };
    (0..rows).for_each(|row| (0..cols).step_by(LINE).for_each(|col| fetch_line(x.from(row, col).ptr)));
}

/// Numbers of a line of the cache.
const LINE: usize = 16;

#[inline]
fn fetch_line(at: *const f32) {
    // SAFETY: no access, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
}

/// Packs rows, and fetches those below.
///
/// # Safety
/// Conditions of [`Engine::pack_left`](super::Engine::pack_left), on a CPU with AVX-512 (F, VL, BW, DQ, BF16).
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")]
pub unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut u16) {
    let tiles = rows.div_ceil(TILE);
    for (step, deep) in ranges(k, STEP).enumerate() {
        for (tile, down) in ranges(rows, TILE).enumerate() {
            let from = a.from(down.start, deep.start);
            let out = out.wrapping_add((step * PARTS * tiles + tile) * TILE_LEN);
            // SAFETY: within a; there is room for whole tiles.
            unsafe {
                if a.col_stride == 1 && deep.len() == STEP {
                    for row in 0..TILE {
                        if row < down.len() {
                            let x = from.from(row, 0).ptr;
                            fetch_line(from.from(row + BLOCK, 0).ptr);
                            fetch_line(from.from(row + BLOCK, TILE).ptr);
                            put(_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(TILE)), row, tiles, out);
                        } else {
                            put(_mm512_setzero_ps(), _mm512_setzero_ps(), row, tiles, out);
                        }
                    }
                    continue;
                }
                let mut numbers = Numbers([0.0; TILE_LEN]);
                let to = numbers.0.as_mut_ptr();
                if a.row_stride == 1 && deep.len() == STEP && down.len() == TILE {
                    (0..STEP).for_each(|k| fetch_line(from.from(BLOCK, k).ptr));
                    transpose(from.ptr, a.col_stride, to, STEP);
                    transpose(from.from(0, TILE).ptr, a.col_stride, to.add(TILE), STEP);
                } else {
                    gather(from, (down.len(), deep.len()), &mut numbers, STEP);
                }
                for (row, x) in numbers.0.chunks_exact(STEP).enumerate() {
                    let x = x.as_ptr();
                    put(_mm512_load_ps(x), _mm512_load_ps(x.add(TILE)), row, tiles, out);
                }
            }
        }
    }
}

/// # Safety
/// Conditions of [`Engine::pack_right`](super::Engine::pack_right), on a CPU with AVX-512 (F, VL, BW, DQ, BF16).
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")]
pub unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut u16) {
    let tiles = cols.div_ceil(TILE);
    for (step, deep) in ranges(k, STEP).enumerate() {
        for (tile, across) in ranges(cols, TILE).enumerate() {
            let out = out.wrapping_add((step * PARTS * tiles + tile) * TILE_LEN);
            let from = b.from(deep.start, across.start);
            // SAFETY: within b; there is room for whole tiles.
            unsafe {
                if b.col_stride == 1 && deep.len() == STEP && across.len() == TILE {
                    for row in 0..TILE {
                        let (x, y) = (from.from(row, 0).ptr, from.from(row + TILE, 0).ptr);
                        put(_mm512_loadu_ps(x), _mm512_loadu_ps(y), row, tiles, out);
                    }
                    continue;
                }
                let mut numbers = Numbers([0.0; TILE_LEN]);
                let to = numbers.0.as_mut_ptr();
                if b.row_stride == 1 && deep.len() == STEP && across.len() == TILE {
                    transpose(from.ptr, b.col_stride, to, TILE);
                    transpose(from.from(TILE, 0).ptr, b.col_stride, to.add(TILE_LEN / 2), TILE);
                } else {
                    gather(from, (deep.len(), across.len()), &mut numbers, TILE);
                }
                for row in 0..TILE {
                    let x = to.add(row * TILE);
                    put(_mm512_load_ps(x), _mm512_load_ps(x.add(TILE_LEN / 2)), row, tiles, out);
                }
            }
        }
    }
}

/// Copies some rows and columns, however they lie, into rows of `width`.
///
/// # Safety
/// `from` has as many.
unsafe fn gather(from: Matrix<f32>, (rows, cols): (usize, usize), out: &mut Numbers, width: usize) {
    for (row, out) in out.0.chunks_exact_mut(width).enumerate().take(rows) {
        for (col, out) in out.iter_mut().enumerate().take(cols) {
            // SAFETY: passed on to the caller.
            *out = unsafe { *from.from(row, col).ptr };
        }
    }
}

/// Splits two vectors and writes them as a row of three tiles: low, middle and high parts, `tiles` tiles apart.
///
/// # Safety
/// There is room for them.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")]
#[inline]
unsafe fn put(x: __m512, y: __m512, row: usize, tiles: usize, out: *mut u16) {
    let (high, x, y) = round(x, y);
    let (middle, x, y) = round(x, y);
    let (low, ..) = round(x, y);
    for (part, of) in [low, middle, high].into_iter().enumerate() {
        let to = out.wrapping_add(part * tiles * TILE_LEN + row * STEP);
        // SAFETY: passed on to the caller.
        unsafe { _mm512_storeu_si512(to.cast(), of) };
    }
}

/// Pairs of x and y in bf16, and what rounding leaves of both, which is exact.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")]
#[inline]
fn round(x: __m512, y: __m512) -> (__m512i, __m512, __m512) {
    #[rustfmt::skip]
    let pairs = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0,
    );
    // SAFETY: both are 64 bytes, and any of them are numbers.
    let rounded: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(y, x)) };
    let rounded = _mm512_permutexvar_epi16(pairs, rounded);
    let of_x = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(rounded));
    let of_y = _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(-1 << 16)));
    (rounded, _mm512_sub_ps(x, of_x), _mm512_sub_ps(y, of_y))
}
