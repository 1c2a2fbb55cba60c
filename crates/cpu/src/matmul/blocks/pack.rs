//! Packing of both sides of a matmul, so that tiles read them in order.

use super::super::Matrix;
use super::{COLS, LINE, ROWS, ranges};
use std::arch::x86_64::*;

/// Packs `cols` columns as panels: for each k 48 numbers, of a last panel fewer.
///
/// # Safety
/// `b` has `k` rows and `cols` columns; `out` has room.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub unsafe fn pack_right(k: usize, cols: usize, b: Matrix<f32>, out: *mut f32) {
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
/// Conditions of [`pack_right`].
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
pub unsafe fn pack_left(k: usize, rows: usize, a: Matrix<f32>, out: *mut f32) {
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
/// Conditions of [`pack_left`].
unsafe fn pack_ragged(k: usize, rows: usize, a: Matrix<f32>, out: *mut f32) {
    for col in 0..k {
        for row in 0..ROWS {
            // SAFETY: passed on to the caller.
            unsafe { *out.add(col * ROWS + row) = if row < rows { *a.from(row, col).ptr } else { 0.0 } };
        }
    }
}
