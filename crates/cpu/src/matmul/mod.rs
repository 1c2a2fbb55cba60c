//! Matmuls, one thread a call: by the `gemm` crate, and large ones of f32 on AVX-512 by `blocks`, on AMX by `amx`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod blocks;
pub(crate) mod panels;

use crate::kernels::{Float, Level, level};
use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Checks whether this thread is inside `gemm` right now. The `gemm` crate allocates its packing buffers on every call;
/// tests that count allocations use this to count those apart.
pub fn inside() -> bool {
    INSIDE.get()
}

/// A matrix in memory: address and strides, in elements.
#[derive(Clone, Copy)]
pub struct Matrix<T> {
    pub ptr: *mut T,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<T> Matrix<T> {
    /// Rows of `width` elements one after the other.
    pub fn rows(ptr: *mut T, width: usize) -> Self {
        Matrix { ptr, row_stride: width, col_stride: 1 }
    }

    pub fn transposed(self) -> Self {
        Matrix { ptr: self.ptr, row_stride: self.col_stride, col_stride: self.row_stride }
    }

    /// Part of the matrix below and right of a place, which may also lie outside.
    #[cfg(target_arch = "x86_64")]
    fn from(self, row: usize, col: usize) -> Self {
        Matrix { ptr: self.ptr.wrapping_add(row * self.row_stride + col * self.col_stride), ..self }
    }
}

/// c (m,n) = a (m,k) · b (k,n), added to what `c` holds if `add`.
///
/// # Safety
/// The three matrices lie in memory the caller may read (`a`, `b`) and write (`c`); `c` overlaps neither.
pub unsafe fn matmul<T: Float>(
    (m, n, k): (usize, usize, usize),
    c: Matrix<T>,
    a: Matrix<T>,
    b: Matrix<T>,
    add: bool,
) {
    // SAFETY: passed on to the caller.
    unsafe { matmul_at((m, n, k), c, a, b, add, None) };
}

/// Matmul like [`matmul`]. If `b` is a weight, of which other matmuls of this thread follow, `moment` is a number that
/// stands for its content: a thread may keep it packed for as long as the number is the same.
///
/// # Safety
/// Conditions of [`matmul`]; what `b` holds is the same for all calls with the same `moment`.
pub unsafe fn matmul_at<T: Float>(
    (m, n, k): (usize, usize, usize),
    c: Matrix<T>,
    a: Matrix<T>,
    b: Matrix<T>,
    add: bool,
    moment: Option<u64>,
) {
    #[cfg(target_arch = "x86_64")]
    if let Some(([c, a, b], tiles)) = in_tiles((m, n, k), [c, a, b]) {
        // SAFETY: passed on to the caller; `in_tiles` knows the CPU.
        return unsafe {
            match tiles {
                Tiles::Amx => amx::matmul::<amx::Amx>((m, n, k), c, a, b, add),
                Tiles::Avx512 => blocks::matmul((m, n, k), c, a, b, add, moment),
            }
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = moment;
    INSIDE.set(true);
    // SAFETY: passed on to the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.ptr,
            c.col_stride as isize,
            c.row_stride as isize,
            add,
            a.ptr,
            a.col_stride as isize,
            a.row_stride as isize,
            b.ptr,
            b.col_stride as isize,
            b.row_stride as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    INSIDE.set(false);
}

/// Checks whether matmuls of at least this size, of matrices with contiguous rows or columns, give the same numbers
/// however the result is cut into tiles: those of `blocks` and of `amx` do, in `gemm` an element's sum may depend on the
/// result's size.
pub fn is_the_same_in_tiles<T: Float>(sizes: (usize, usize, usize)) -> bool {
    #[cfg(target_arch = "x86_64")]
    return match level() {
        Level::Amx => is_single::<T>() && amx::is_large(sizes),
        Level::Avx512 => is_single::<T>() && blocks::is_large(sizes),
        _ => false,
    };
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Checks whether numbers and CPU are those that the tiles of `blocks` are for: f32, and AVX-512.
fn has_tiles<T: Float>() -> bool {
    cfg!(target_arch = "x86_64") && is_single::<T>() && level() >= Level::Avx512
}

fn is_single<T: Float>() -> bool {
    std::any::TypeId::of::<T>() == std::any::TypeId::of::<f32>()
}

/// Instructions that a large matmul has tiles in.
#[cfg(target_arch = "x86_64")]
enum Tiles {
    Amx,
    Avx512,
}

/// The matrices of a matmul for `amx` or `blocks`, if it has tiles for them, and it suits: a function of shapes and the CPU.
#[cfg(target_arch = "x86_64")]
fn in_tiles<T: Float>(
    sizes: (usize, usize, usize),
    matrices: [Matrix<T>; 3],
) -> Option<([Matrix<f32>; 3], Tiles)> {
    if !has_tiles::<T>() {
        return None;
    }
    let matrices =
        matrices.map(|x| Matrix { ptr: x.ptr.cast(), row_stride: x.row_stride, col_stride: x.col_stride });
    let [c, a, b] = matrices;
    if level() == Level::Amx && amx::suits(sizes, c, a, b) {
        return Some((matrices, Tiles::Amx));
    }
    blocks::suits(sizes, c, a, b).then_some((matrices, Tiles::Avx512))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::*;

    /// A matrix of m × n in rows or columns that are longer than it needs.
    fn placed(seed: u64, (m, n): (usize, usize), by_columns: bool) -> (Vec<f32>, usize, usize) {
        let stride = if by_columns { m } else { n } + 5;
        let data = narrow(&noise(seed, if by_columns { n } else { m } * stride, 1.0));
        if by_columns { (data, 1, stride) } else { (data, stride, 1) }
    }

    fn check((m, n, k): (usize, usize, usize), a_by_columns: bool, b_by_columns: bool, add: bool) {
        let (mut a, ars, acs) = placed(1, (m, k), a_by_columns);
        let (mut b, brs, bcs) = placed(2, (k, n), b_by_columns);
        let (mut c, crs, _) = placed(3, (m, n), false);
        let before = c.clone();
        let [pc, pa, pb] = [(&mut c, crs, 1), (&mut a, ars, acs), (&mut b, brs, bcs)]
            .map(|(x, row_stride, col_stride)| Matrix { ptr: x.as_mut_ptr(), row_stride, col_stride });
        // SAFETY: three arrays that hold as much.
        unsafe { matmul((m, n, k), pc, pa, pb, add) };
        let mut want: Vec<f64> = before.iter().map(|&x| x.into()).collect();
        for (i, row) in want.chunks_exact_mut(crs).enumerate() {
            for (j, want) in row[..n].iter_mut().enumerate() {
                let terms = (0..k).map(|x| f64::from(a[i * ars + x * acs]) * f64::from(b[x * brs + j * bcs]));
                *want = terms.sum::<f64>() + if add { *want } else { 0.0 };
            }
        }
        let what = format!("{m}×{n}×{k}, columns {a_by_columns} {b_by_columns}, added {add}");
        assert_close(&c, &want, 2e-6 * (k as f64).sqrt(), &what);
        let between = |x: &[f32]| x.chunks_exact(crs).flat_map(|row| row[n..].to_vec()).collect::<Vec<_>>();
        assert_eq!(between(&c), between(&before), "{what}: what lies between rows is not touched");
    }

    #[test]
    fn products_of_all_sizes_and_layouts() {
        // On and off the borders of tiles, panels, passes over k and packed rows.
        let sizes = [
            (64, 96, 128),
            (65, 100, 129),
            (71, 192, 801),
            (100, 250, 143),
            (197, 320, 196),
            (793, 113, 130),
            (1600, 97, 135),
            (197, 64, 197),
            (3, 100, 200),
            (100, 3, 200),
            (100, 100, 3),
            (1, 1, 1),
        ];
        at_every_level(|_| {
            for size in sizes {
                for flags in 0..8 {
                    check(size, flags & 1 > 0, flags & 2 > 0, flags & 4 > 0);
                }
            }
        });
    }

    /// a (m,k) · b (k,n), b by columns as a weight is in forward.
    fn of_weight((m, n, k): (usize, usize, usize), a: &[f32], b: &[f32], moment: Option<u64>) -> Vec<f32> {
        let mut c = vec![f32::NAN; m * n];
        let place = |x: &[f32], width| Matrix::rows(x.as_ptr().cast_mut(), width);
        let to = Matrix::rows(c.as_mut_ptr(), n);
        // SAFETY: three arrays that hold as much, of which two are only read.
        unsafe { matmul_at((m, n, k), to, place(a, k), place(b, k).transposed(), false, moment) };
        c
    }

    #[test]
    fn weights_that_stay_packed_change_nothing() {
        // The last is larger than what is kept.
        for (n, k) in [(100, 150), (384, 1000), (700, 1700)] {
            let [first, second] = [1, 2].map(|seed| narrow(&noise(seed, n * k, 1.0)));
            for (number, m) in [64, 100, 131].into_iter().enumerate() {
                let a = narrow(&noise(3 + number as u64, m * k, 1.0));
                let plain = |b: &[f32]| of_weight((m, n, k), &a, b, None);
                let at = |b: &[f32], moment| of_weight((m, n, k), &a, b, Some(moment));
                assert_eq!(at(&first, 1), plain(&first));
                assert_eq!(at(&first, 1), plain(&first), "again");
                assert_eq!(at(&second, 1), plain(&second), "another in the same moment");
                assert_eq!(at(&first, 1), plain(&first), "the first again");
                // A left side that is packed, at the same place.
                check((96, 96, 800), true, false, false);
                assert_eq!(at(&first, 1), plain(&first), "after another matmul");
            }
            // The same place, with another content.
            let (a, mut b) = (narrow(&noise(9, 64 * k, 1.0)), first);
            of_weight((64, n, k), &a, &b, Some(2));
            b.iter_mut().for_each(|b| *b += 1.0);
            let (new, plain) = (of_weight((64, n, k), &a, &b, Some(3)), of_weight((64, n, k), &a, &b, None));
            assert_eq!(new, plain, "another moment");
        }
    }

    #[test]
    fn in_tiles_the_numbers_are_the_same() {
        let (m, n, k) = (328, 400, 1000);
        let (a, b) = (narrow(&noise(1, m * k, 1.0)), narrow(&noise(2, n * k, 1.0)));
        at_every_level(|_| {
            if !is_the_same_in_tiles::<f32>((64, 96, k)) {
                return;
            }
            let whole = of_weight((m, n, k), &a, &b, None);
            for (height, width) in [(64, 400), (66, 400), (328, 144), (100, 128)] {
                for (top, left) in
                    (0..m).step_by(height).flat_map(|i| (0..n).step_by(width).map(move |j| (i, j)))
                {
                    let (rows, cols) = (height.min(m - top), width.min(n - left));
                    if is_the_same_in_tiles::<f32>((rows, cols, k)) {
                        let tile = of_weight((rows, cols, k), &a[top * k..], &b[left * k..], None);
                        let same = (0..rows)
                            .all(|i| tile[i * cols..][..cols] == whole[(top + i) * n + left..][..cols]);
                        assert!(same, "{rows}×{cols} at {top}, {left}");
                    }
                }
            }
        });
    }
}
