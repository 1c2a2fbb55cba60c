//! Matrix products, by the `gemm` crate, one thread a call.

use crate::kernels::Float;
use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside `gemm` right now. The `gemm` crate allocates its packing buffers on every call; tests
/// that count allocations use this to count those apart.
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
}

/// c (m,n) = a (m,k) · b (k,n), added to what `c` holds if `add`.
///
/// # Safety
/// The three matrices lie in memory the caller may read (`a`, `b`) and write (`c`); `c` overlaps neither.
pub unsafe fn product<T: Float>(
    (m, n, k): (usize, usize, usize),
    c: Matrix<T>,
    a: Matrix<T>,
    b: Matrix<T>,
    add: bool,
) {
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
