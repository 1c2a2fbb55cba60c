//! Matmuls whose right side is packed once and meets many rows: those inside of attention.
//!
//! On AVX-512, f32 goes through the tiles of [`super::blocks`], whose right side lies in panels of up to three vectors, as even
//! as can be (64 columns are 32 and 32); all else through `gemm`, the right side in rows. Arrays are padded, to whole tiles of
//! rows and whole vectors of columns: there are no edges to take care of.

use super::{Matrix, has_tiles, matmul};
use crate::kernels::Float;
use crate::memory::View;

/// Rows of a left side and of a result are padded to a multiple of this.
pub(crate) const ROWS: usize = 8;
/// Columns of a right side and of a result are padded to a multiple of this.
pub(crate) const COLS: usize = 16;

/// A right side (K,N), packed.
#[derive(Clone, Copy)]
pub(crate) struct Panels<T> {
    data: View<T>,
    k: usize,
    n: usize,
}

impl<T: Float> Panels<T> {
    /// Elements that a right side takes, packed.
    pub fn elements(k: usize, n: usize) -> usize {
        k * n.next_multiple_of(COLS)
    }

    /// Rows of the left side that a call of [`Panels::matmul`] has best: few, so that what is done with them next finds them in
    /// the first cache, or `most`.
    pub fn best_rows(most: usize) -> usize {
        if has_tiles::<T>() { ROWS } else { most }
    }

    /// Packs `b` into `out`.
    ///
    /// # Safety
    /// `b` (K,N) may be read; one of its strides is 1. `out` is the caller's own.
    pub unsafe fn pack((k, n): (usize, usize), b: Matrix<T>, out: View<T>) -> Self {
        let data = out.part(0..Self::elements(k, n));
        // SAFETY: passed on to the caller.
        unsafe {
            match () {
                #[cfg(target_arch = "x86_64")]
                () if has_tiles::<T>() => avx512::pack((k, n), single(b), data.at(0).cast()),
                () => rows((k, n), b, data.at(0)),
            }
        }
        Panels { data, k, n }
    }

    /// c (M,N) = a (M,K) · self, added to what `c` holds if `add`. Rows and columns of padding get anything.
    ///
    /// # Safety
    /// `a` may be read and `c` written, both with their padding; rows of `c` are contiguous, and it overlaps nothing else.
    pub unsafe fn matmul(&self, m: usize, c: Matrix<T>, a: Matrix<T>, add: bool) {
        let Panels { data, k, n } = *self;
        // SAFETY: passed on to the caller.
        unsafe {
            match () {
                #[cfg(target_arch = "x86_64")]
                () if has_tiles::<T>() => {
                    avx512::matmul((m, n, k), single(c), single(a), data.at(0).cast(), add)
                }
                () => {
                    matmul((m, n, k), c, a, Matrix::rows(data.at(0), n.next_multiple_of(COLS)), add);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn single<T>(x: Matrix<T>) -> Matrix<f32> {
    Matrix { ptr: x.ptr.cast(), row_stride: x.row_stride, col_stride: x.col_stride }
}

/// Copies `b` into rows as long as their padding makes them.
///
/// # Safety
/// Conditions of [`Panels::pack`].
unsafe fn rows<T: Float>((k, n): (usize, usize), b: Matrix<T>, out: *mut T) {
    let width = n.next_multiple_of(COLS);
    // A line of the cache of each at a time, whichever way they lie.
    for top in (0..k).step_by(COLS) {
        for left in (0..n).step_by(COLS) {
            for row in top..(top + COLS).min(k) {
                for col in left..(left + COLS).min(n) {
                    // SAFETY: passed on to the caller.
                    unsafe {
                        *out.add(row * width + col) = *b.ptr.add(row * b.row_stride + col * b.col_stride)
                    };
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::super::blocks::{Ahead, LeftRows, fill, transpose};
    use super::{COLS, Matrix, ROWS};
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// Vectors in a panel at most.
    const WIDEST: usize = 3;

    /// The vectors of each panel.
    fn panels(n: usize) -> impl Iterator<Item = Range<usize>> {
        let vectors = n.div_ceil(COLS);
        let count = vectors.div_ceil(WIDEST);
        (0..count).map(move |panel| vectors * panel / count..vectors * (panel + 1) / count)
    }

    /// # Safety
    /// Conditions of [`super::Panels::pack`], on a CPU with AVX-512 (F, VL, BW, DQ).
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    pub unsafe fn pack((k, n): (usize, usize), b: Matrix<f32>, out: *mut f32) {
        for panel in panels(n) {
            let width = panel.len() * COLS;
            // SAFETY: there is room for whole panels.
            let start = unsafe { out.add(panel.start * COLS * k) };
            for vector in panel.clone() {
                let (left, to) = (vector * COLS, start.wrapping_add((vector - panel.start) * COLS));
                let cols = COLS.min(n - left);
                let from = b.from(0, left);
                // SAFETY: passed on to the caller.
                unsafe {
                    if b.col_stride == 1 {
                        copy_rows(k, cols, from, to, width);
                    } else if cols == COLS {
                        let whole = k - k % COLS;
                        for row in (0..whole).step_by(COLS) {
                            transpose(from.from(row, 0).ptr, b.col_stride, to.add(row * width), width);
                        }
                        copy_each(whole..k, cols, from, to, width);
                    } else {
                        copy_each(0..k, cols, from, to, width);
                    }
                }
            }
        }
    }

    /// # Safety
    /// `from` has as many rows and columns, contiguous across, and `to` room for whole vectors.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    unsafe fn copy_rows(rows: usize, cols: usize, from: Matrix<f32>, to: *mut f32, width: usize) {
        let mask = ((1u32 << cols) - 1) as u16;
        for row in 0..rows {
            // SAFETY: passed on to the caller; a lane outside of the mask is not read.
            unsafe {
                _mm512_storeu_ps(to.add(row * width), _mm512_maskz_loadu_ps(mask, from.from(row, 0).ptr));
            }
        }
    }

    /// # Safety
    /// Conditions of [`copy_rows`], however `from` lies.
    unsafe fn copy_each(rows: Range<usize>, cols: usize, from: Matrix<f32>, to: *mut f32, width: usize) {
        for row in rows {
            for col in 0..COLS {
                // SAFETY: passed on to the caller.
                unsafe {
                    *to.add(row * width + col) = if col < cols { *from.from(row, col).ptr } else { 0.0 };
                }
            }
        }
    }

    /// # Safety
    /// Conditions of [`super::Panels::matmul`], on a CPU with AVX-512 (F, VL, BW, DQ); `b` was packed by [`pack`].
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    pub unsafe fn matmul(
        (m, n, k): (usize, usize, usize),
        c: Matrix<f32>,
        a: Matrix<f32>,
        b: *const f32,
        add: bool,
    ) {
        for top in (0..m).step_by(ROWS) {
            // Arrays are padded to whole tiles, but half of one will do.
            let rows = if m - top <= ROWS / 2 { ROWS / 2 } else { ROWS };
            let at = a.from(top, 0).ptr;
            let left = LeftRows { at, across: 4 * a.row_stride, along: 4 * a.col_stride };
            let nothing = Ahead { at: at.cast(), gap: 0, step: 0 };
            for (number, panel) in panels(n).enumerate() {
                // Rows below, two for each panel.
                let below = a.from(top + ROWS + 2 * (number % 4), 0).ptr.cast();
                let near = Ahead { at: below, gap: 4 * a.row_stride, step: 64 };
                let near = if a.col_stride == 1 { near } else { nothing };
                // SAFETY: passed on to the caller.
                unsafe {
                    let b = b.add(panel.start * COLS * k);
                    fill(
                        (rows, panel.len()),
                        k,
                        left,
                        b,
                        c.from(top, panel.start * COLS),
                        add,
                        near,
                        nothing,
                    );
                }
            }
        }
    }
}
