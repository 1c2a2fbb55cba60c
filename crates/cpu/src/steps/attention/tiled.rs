//! Attention over many tokens, in tiles of queries × keys: no row of scores is ever whole, so that tiles fit the caches and
//! memory is linear in the tokens.
//!
//! The keys of a range are packed once and met by all queries. Forward carries each query's maximum and sum from range to range;
//! backward has both from forward. A head is copied to where its rows are neighbours, padded to whole tiles.
//!
//! Legend: T tokens, D head size, R queries in a tile, S keys in a range.

use super::{Head, Sizes};
use crate::kernels::{self, Float};
use crate::matmul::Matrix;
use crate::matmul::panels::{COLS, Panels, ROWS};
use crate::memory::View;
use std::ops::Range;

/// Queries in a tile: as many as a matmul sums over for the gradients of keys and values, which are read and written for each.
const QUERIES: usize = 128;
/// Keys in a range, forward and backward: what is packed of them stays in the second cache level.
const KEYS_FORWARD: usize = 384;
const KEYS_BACKWARD: usize = 192;
/// Queries and keys of a tile, forward and backward.
pub const TILES: [(usize, usize); 2] = [(QUERIES, KEYS_FORWARD), (QUERIES, KEYS_BACKWARD)];

/// Scratch that is handed out piece by piece.
struct Rest<T>(View<T>);

impl<T> Rest<T> {
    fn take(&mut self, elements: usize) -> View<T> {
        let (taken, rest) = (self.0.part(0..elements), self.0.part(elements..self.0.len()));
        self.0 = rest;
        taken
    }
}

/// Sizes of what a thread works with.
#[derive(Clone, Copy)]
struct Padded {
    /// Tokens, to whole tiles of rows.
    tokens: usize,
    /// Head size, to whole vectors.
    head: usize,
    /// Keys in a range.
    keys: usize,
    /// Elements from one row of scores to the next. An odd number of vectors, or else columns of a tile would meet in
    /// few places of the cache.
    stride: usize,
}

impl Padded {
    fn of(sizes: &Sizes, keys: usize) -> Self {
        let keys = keys.min(sizes.tokens.next_multiple_of(COLS));
        let (tokens, head) = (sizes.tokens.next_multiple_of(ROWS), sizes.head.next_multiple_of(COLS));
        Padded { tokens, head, keys, stride: (keys.div_ceil(COLS) | 1) * COLS }
    }

    fn rows(&self) -> usize {
        self.tokens * self.head
    }

    fn tile(&self) -> usize {
        QUERIES * self.stride
    }
}

/// Elements of scratch of a thread: queries, sums of values, maximum and sum of each; keys and values of a range; a tile of scores.
pub fn forward_elements(sizes: &Sizes) -> usize {
    let padded = Padded::of(sizes, KEYS_FORWARD);
    let range = Panels::<f32>::elements(sizes.head, padded.keys) + padded.keys * padded.head;
    2 * padded.rows() + 2 * padded.tokens + range + padded.tile()
}

/// Elements of scratch of a thread: queries, gradients of outputs and of queries, a number for each query; keys two ways, values,
/// and the gradients of both; queries and gradients of a tile, packed; two tiles.
pub fn backward_elements(sizes: &Sizes) -> usize {
    let padded = Padded::of(sizes, KEYS_BACKWARD);
    let columns = Panels::<f32>::elements(sizes.head, padded.keys);
    let range = 2 * columns + 3 * padded.keys * padded.head;
    3 * padded.rows() + padded.tokens + range + 2 * QUERIES * padded.head + 2 * padded.tile()
}

fn ranges(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(step).map(move |start| start..(start + step).min(n))
}

/// Copies rows of a head to rows that are neighbours, with zeros for those of the padding.
///
/// # Safety
/// `from` has `rows` rows of `head` elements to read; `to` is the caller's own.
unsafe fn gather<T: Float>(
    rows: usize,
    head: usize,
    from: Matrix<T>,
    to: View<T>,
    width: usize,
) -> Matrix<T> {
    // SAFETY: passed on to the caller.
    unsafe {
        for (row, to) in to.write().chunks_exact_mut(width).enumerate() {
            if row < rows {
                let from = std::slice::from_raw_parts(from.ptr.add(row * from.row_stride), head);
                to[..head].copy_from_slice(from);
            } else {
                to.fill(T::ZERO);
            }
        }
    }
    Matrix::rows(to.at(0), width)
}

/// Copies rows of a head back.
///
/// # Safety
/// `from` is the caller's own and `to` has `rows` rows of `head` elements to write.
unsafe fn scatter<T: Float>(rows: usize, head: usize, from: View<T>, width: usize, to: Matrix<T>) {
    // SAFETY: passed on to the caller.
    unsafe {
        for (row, from) in from.read().chunks_exact(width).take(rows).enumerate() {
            let to = std::slice::from_raw_parts_mut(to.ptr.add(row * to.row_stride), head);
            to.copy_from_slice(&from[..head]);
        }
    }
}

fn down<T>(x: Matrix<T>, row: usize) -> Matrix<T> {
    Matrix { ptr: x.ptr.wrapping_add(row * x.row_stride), ..x }
}

/// # Safety
/// Conditions of [`Head::forward`].
pub unsafe fn forward<T: Float>(head: &Head<'_>, qkv: View<T>, out: View<T>, lse: View<T>, scratch: View<T>) {
    let (t, d) = (head.sizes.tokens, head.sizes.head);
    let padded = Padded::of(&head.sizes, KEYS_FORWARD);
    let scale = T::from_f64(head.sizes.scale());
    let mut rest = Rest(scratch);
    let (queries, sums) = (rest.take(padded.rows()), rest.take(padded.rows()));
    let (max, sum) = (rest.take(padded.tokens), rest.take(padded.tokens));
    let key_panels = rest.take(Panels::<T>::elements(d, padded.keys));
    let value_panels = rest.take(padded.keys * padded.head);
    let scores = rest.take(padded.tile());
    let p = Matrix::rows(scores.at(0), padded.stride);
    // SAFETY: passed on to the caller; all ranges of scratch are apart.
    unsafe {
        let q = gather(t, d, head.packed(qkv, 0, 0), queries, padded.head);
        let o = Matrix::rows(sums.at(0), padded.head);
        let (max, sum) = (max.write(), sum.write());
        max.fill(T::from_f64(f32::MIN.into()));
        sum.fill(T::ZERO);
        for keys in ranges(t, padded.keys) {
            let key_rows = head.packed(qkv, 1, keys.start);
            let k = Panels::pack((d, keys.len()), key_rows.transposed(), key_panels);
            let v = Panels::pack((keys.len(), d), head.packed(qkv, 2, keys.start), value_panels);
            for rows in ranges(t, Panels::<T>::best_rows(QUERIES)) {
                k.matmul(rows.len(), p, down(q, rows.start), false);
                if !head.matmuls_only {
                    let p = scores.part(0..rows.len() * padded.stride).write();
                    let acc = sums.part(rows.start * padded.head..rows.end * padded.head).write();
                    let (max, sum) = (&mut max[rows.clone()], &mut sum[rows.clone()]);
                    kernels::softmax_range(p, padded.stride, keys.len(), scale, max, sum, acc);
                    head.mask(rows.clone(), keys.start, p, (padded.stride, keys.len()));
                }
                v.matmul(rows.len(), down(o, rows.start), p, keys.start > 0);
            }
        }
        if !head.matmuls_only {
            let lse = lse.part(head.stats()).write();
            for (row, o) in sums.write().chunks_exact_mut(padded.head).take(t).enumerate() {
                let inverse = T::ONE / sum[row];
                o.iter_mut().for_each(|o| *o *= inverse);
                lse[row] = max[row] + sum[row].ln();
            }
        }
        scatter(t, d, sums, padded.head, head.plain(out, 0));
    }
}

/// # Safety
/// Conditions of [`Head::backward`].
pub unsafe fn backward<T: Float>(head: &Head<'_>, inputs: [View<T>; 4], dqkv: View<T>, scratch: View<T>) {
    let [qkv, out, lse, dout] = inputs;
    let (t, d) = (head.sizes.tokens, head.sizes.head);
    let padded = Padded::of(&head.sizes, KEYS_BACKWARD);
    let mut rest = Rest(scratch);
    let [queries, douts, dqueries] = [(); 3].map(|()| rest.take(padded.rows()));
    let delta = rest.take(padded.tokens).part(0..t);
    let [key_columns, value_columns] = [(); 2].map(|()| rest.take(Panels::<T>::elements(d, padded.keys)));
    let [key_panels, dkeys, dvalues] = [(); 3].map(|()| rest.take(padded.keys * padded.head));
    let [query_panels, dout_panels] = [(); 2].map(|()| rest.take(QUERIES * padded.head));
    let (p_tile, dp_tile) = (rest.take(padded.tile()), rest.take(padded.tile()));
    let [p, dp] = [p_tile, dp_tile].map(|tile| Matrix::rows(tile.at(0), padded.stride));
    let [dq, dk, dv] = [dqueries, dkeys, dvalues].map(|x| Matrix::rows(x.at(0), padded.head));
    // SAFETY: passed on to the caller; all ranges of scratch are apart.
    unsafe {
        let q = gather(t, d, head.packed(qkv, 0, 0), queries, padded.head);
        let dout_rows = gather(t, d, head.plain(dout, 0), douts, padded.head);
        head.row_dots(out, dout, delta.write());
        let (lse, delta) = (lse.part(head.stats()).read(), delta.read());
        for keys in ranges(t, padded.keys) {
            let (key_rows, values) = (head.packed(qkv, 1, keys.start), head.packed(qkv, 2, keys.start));
            let k = Panels::pack((d, keys.len()), key_rows.transposed(), key_columns);
            let v = Panels::pack((d, keys.len()), values.transposed(), value_columns);
            let k_by_rows = Panels::pack((keys.len(), d), key_rows, key_panels);
            for rows in ranges(t, QUERIES) {
                let (q, dout) = (down(q, rows.start), down(dout_rows, rows.start));
                let q_panels = Panels::pack((rows.len(), d), q, query_panels);
                let dout_panels = Panels::pack((rows.len(), d), dout, dout_panels);
                for some in ranges(rows.len(), Panels::<T>::best_rows(QUERIES)) {
                    k.matmul(some.len(), down(p, some.start), down(q, some.start), false);
                    v.matmul(some.len(), down(dp, some.start), down(dout, some.start), false);
                    if !head.matmuls_only {
                        let at = some.start * padded.stride..some.end * padded.stride;
                        let tiles = [p_tile.part(at.clone()).write(), dp_tile.part(at).write()];
                        let some = rows.start + some.start..rows.start + some.end;
                        let (lse, delta) = (&lse[some.clone()], &delta[some.clone()]);
                        gradients(head, (some, &keys), tiles, padded.stride, (lse, delta));
                    }
                }
                dout_panels.matmul(keys.len(), dv, p.transposed(), rows.start > 0);
                q_panels.matmul(keys.len(), dk, dp.transposed(), rows.start > 0);
                k_by_rows.matmul(rows.len(), down(dq, rows.start), dp, keys.start > 0);
            }
            scatter(keys.len(), d, dkeys, padded.head, head.packed(dqkv, 1, keys.start));
            scatter(keys.len(), d, dvalues, padded.head, head.packed(dqkv, 2, keys.start));
        }
        scatter(t, d, dqueries, padded.head, head.packed(dqkv, 0, 0));
    }
}

/// Scores and gradients of probabilities become probabilities, as values saw them, and gradients of scores.
fn gradients<T: Float>(
    head: &Head<'_>,
    (queries, keys): (Range<usize>, &Range<usize>),
    [p, dp]: [&mut [T]; 2],
    stride: usize,
    (lse, delta): (&[T], &[T]),
) {
    let scale = T::from_f64(head.sizes.scale());
    head.mask(queries.clone(), keys.start, dp, (stride, keys.len()));
    kernels::softmax_and_grad(p, dp, stride, keys.len(), scale, lse, delta);
    head.mask(queries, keys.start, p, (stride, keys.len()));
}
