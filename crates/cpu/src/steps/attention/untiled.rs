//! Attention over few tokens: all scores of a head at once.
//!
//! Legend: T tokens, C channels, D head size.

use super::{Head, Sizes};
use crate::kernels::{self, Float};
use crate::matmul::{Matrix, matmul};
use crate::memory::View;

/// Scores that are made at once: half a megabyte of f32, which a core's second cache level holds.
pub const MOST_SCORES: usize = 1 << 17;

/// Elements of scratch of a thread: scores.
pub fn forward_elements(sizes: &Sizes) -> usize {
    sizes.tokens * sizes.tokens
}

/// Elements of scratch of a thread: keys and values by columns, probabilities, their gradients and one number a query.
pub fn backward_elements(sizes: &Sizes) -> usize {
    2 * sizes.tokens * sizes.head + 2 * sizes.tokens * sizes.tokens + sizes.tokens
}

/// # Safety
/// Conditions of [`Head::forward`].
pub unsafe fn forward<T: Float>(head: &Head<'_>, qkv: View<T>, out: View<T>, lse: View<T>, scratch: View<T>) {
    let (t, d) = (head.sizes.tokens, head.sizes.head);
    let p = scratch.part(0..t * t);
    let p_rows = Matrix::rows(p.at(0), t);
    // SAFETY: passed on to the caller.
    unsafe {
        matmul((t, t, d), p_rows, head.packed(qkv, 0, 0), head.packed(qkv, 1, 0).transposed(), false);
        if !head.matmuls_only {
            let lse = lse.part(head.stats()).write();
            kernels::softmax_rows(p.write(), t, T::from_f64(head.sizes.scale()), lse);
            head.mask(0..t, 0, p.write(), (t, t));
        }
        matmul((t, d, t), head.plain(out, 0), p_rows, head.packed(qkv, 2, 0), false);
    }
}

/// # Safety
/// Conditions of [`Head::backward`].
pub unsafe fn backward<T: Float>(head: &Head<'_>, inputs: [View<T>; 4], dqkv: View<T>, scratch: View<T>) {
    let [qkv, out, lse, dout] = inputs;
    let (t, d) = (head.sizes.tokens, head.sizes.head);
    let scale = T::from_f64(head.sizes.scale());
    let scores = 2 * t * d;
    let (p, dp) = (scratch.part(scores..scores + t * t), scratch.part(scores + t * t..scores + 2 * t * t));
    let delta = scratch.part(scores + 2 * t * t..scores + 2 * t * t + t);
    let (p_rows, dp_rows) = (Matrix::rows(p.at(0), t), Matrix::rows(dp.at(0), t));
    let (queries, keys, douts) = (head.packed(qkv, 0, 0), head.packed(qkv, 1, 0), head.plain(dout, 0));
    // SAFETY: passed on to the caller; ranges of scratch are apart.
    unsafe {
        let key_columns = by_columns(head, qkv, 1, scratch.part(0..t * d));
        let value_columns = by_columns(head, qkv, 2, scratch.part(t * d..2 * t * d));
        matmul((t, t, d), p_rows, queries, key_columns, false);
        matmul((t, t, d), dp_rows, douts, value_columns, false);
        if !head.matmuls_only {
            kernels::softmax_from_lse(p.write(), t, scale, lse.part(head.stats()).read());
            head.row_dots(out, dout, delta.write());
            head.mask(0..t, 0, dp.write(), (t, t));
            kernels::softmax_grad(p.read(), dp.write(), t, delta.read(), scale);
            head.mask(0..t, 0, p.write(), (t, t));
        }
        matmul((t, d, t), head.packed(dqkv, 2, 0), p_rows.transposed(), douts, false);
        matmul((t, d, t), head.packed(dqkv, 0, 0), dp_rows, keys, false);
        matmul((t, d, t), head.packed(dqkv, 1, 0), dp_rows.transposed(), queries, false);
    }
}

/// Writes keys (1) or values (2) by columns, (D,T): as the right side of a matmul they would be packed one element at a
/// time.
///
/// # Safety
/// `qkv` is only read, and `out` is the caller's own.
unsafe fn by_columns<T: Float>(head: &Head<'_>, qkv: View<T>, which: usize, out: View<T>) -> Matrix<T> {
    let (t, d) = (head.sizes.tokens, head.sizes.head);
    let from = head.packed(qkv, which, 0);
    // SAFETY: passed on to the caller.
    let (rows, columns) =
        unsafe { (std::slice::from_raw_parts(from.ptr, (t - 1) * from.row_stride + d), out.write()) };
    kernels::transpose(rows, t, d, from.row_stride, columns);
    Matrix::rows(out.at(0), t)
}
