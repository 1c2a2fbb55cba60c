//! Softmax attention, one head of one sample at a time, in blocks of queries: the scores of a block live in a
//! thread's scratch and nowhere else.
//!
//! Legend: B batch, T tokens, C channels, H heads, D = C/H, R queries in a block.

use super::Context;
use super::blocks::Blocks;
use super::random::{mask_row, stream};
use crate::kernels::{self, Float};
use crate::memory::View;
use crate::product::{Matrix, product};
use graph::Shape;
use graph::op::AttentionDrop;
use graph::random::drop_threshold;
use std::ops::Range;

/// Scores a block may have: half a megabyte of f32, which a core's second cache level holds.
const BLOCK: usize = 1 << 17;

fn queries_in_block(tokens: usize) -> usize {
    (BLOCK / tokens.max(1)).clamp(1, tokens)
}

/// Elements of scratch: keys by columns and the scores of a block, for each thread.
pub fn forward_scratch(qkv: &Shape, heads: usize, threads: usize) -> usize {
    threads * Sizes::of(qkv, heads).forward_elements()
}

/// Elements of scratch: keys and values by columns, probabilities, their gradients and one number a query, for each
/// thread.
pub fn backward_scratch(qkv: &Shape, heads: usize, threads: usize) -> usize {
    threads * Sizes::of(qkv, heads).backward_elements()
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    tokens: usize,
    channels: usize,
    heads: usize,
    head: usize,
}

impl Sizes {
    fn of(qkv: &Shape, heads: usize) -> Self {
        let (batch, tokens, channels) = (qkv.0[0], qkv.0[1], qkv.0[2] / 3);
        Sizes { batch, tokens, channels, heads, head: channels / heads }
    }

    fn block(&self) -> usize {
        queries_in_block(self.tokens) * self.tokens
    }

    fn head_elements(&self) -> usize {
        self.tokens * self.head
    }

    fn forward_elements(&self) -> usize {
        self.head_elements() + self.block()
    }

    fn backward_elements(&self) -> usize {
        2 * self.head_elements() + 2 * self.block() + queries_in_block(self.tokens)
    }

    /// Writes keys (1) or values (2) of a head by columns, (D,T): as the right side of a product they would be packed
    /// one element at a time.
    ///
    /// # Safety
    /// `qkv` is only read, and `out` is the caller's own.
    unsafe fn by_columns<T: Float>(
        &self,
        qkv: View<T>,
        which: usize,
        b: usize,
        h: usize,
        out: View<T>,
    ) -> Matrix<T> {
        let start = b * self.tokens * 3 * self.channels + which * self.channels + h * self.head;
        let rows = qkv.part(start..start + (self.tokens - 1) * 3 * self.channels + self.head);
        // SAFETY: passed on to the caller.
        let (rows, columns) = unsafe { (rows.read(), out.write()) };
        kernels::transpose(rows, self.tokens, self.head, 3 * self.channels, columns);
        Matrix::rows(out.at(0), self.tokens)
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head as f64).sqrt()
    }

    /// Queries (0), keys (1) or values (2) of a head from row `row` on, in a (B,T,3C) array.
    fn packed<T>(&self, qkv: View<T>, which: usize, b: usize, h: usize, row: usize) -> Matrix<T> {
        let at = (b * self.tokens + row) * 3 * self.channels + which * self.channels + h * self.head;
        Matrix::rows(qkv.at(at), 3 * self.channels)
    }

    /// A head from row `row` on, in a (B,T,C) array.
    fn plain<T>(&self, x: View<T>, b: usize, h: usize, row: usize) -> Matrix<T> {
        Matrix::rows(x.at((b * self.tokens + row) * self.channels + h * self.head), self.channels)
    }

    /// Runs `task(b, h, thread)` for every head of every sample.
    fn each_head<T: Float>(&self, cx: &Context<'_, T>, task: impl Fn(usize, usize, usize) + Sync) {
        let head = |piece: usize, thread: usize| task(piece / self.heads, piece % self.heads, thread);
        match Blocks::of(&cx.input(0).shape) {
            Some(blocks) => cx.by_block(blocks, 1, |block, thread| {
                let Range { start, end } = blocks.samples(block);
                (start * self.heads..end * self.heads).for_each(|piece| head(piece, thread));
            }),
            None => cx.each(self.batch * self.heads, head),
        }
    }

    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (tokens, size) = (self.tokens, queries_in_block(self.tokens));
        (0..tokens).step_by(size).map(move |start| (start, size.min(tokens - start)))
    }

    /// Where a block's row statistics lie in a (B,H,T) array.
    fn stats(&self, b: usize, h: usize, start: usize, rows: usize) -> Range<usize> {
        let at = (b * self.heads + h) * self.tokens + start;
        at..at + rows
    }
}

/// Dropout of probabilities: the mask of query q of head h is that of "token" h·T + q.
fn mask<T: Float>(
    cx: &Context<'_, T>,
    drop: Option<AttentionDrop>,
    (b, first): (usize, usize),
    rows: &mut [T],
    t: usize,
) {
    let Some(AttentionDrop { rate, site }) = drop else { return };
    let (threshold, scale) = (drop_threshold(rate), T::from_f64(1.0 / (1.0 - rate)));
    let stream = stream(cx.header, site, b);
    for (i, row) in rows.chunks_exact_mut(t).enumerate() {
        mask_row(&stream, (first + i) as u32, threshold, scale, row);
    }
}

/// # Safety
/// As [`super::run`].
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, heads: usize, drop: Option<AttentionDrop>) {
    let sizes = Sizes::of(&cx.input(0).shape, heads);
    let (t, d) = (sizes.tokens, sizes.head);
    let (qkv, out, lse) = (cx.input(0).data, cx.output(0).data, cx.output(1).data);
    let block = queries_in_block(t) * t;
    let scale = T::from_f64(sizes.scale());
    sizes.each_head(cx, |b, h, thread| {
        let scores = cx.scratch::<T>().part(thread * block..(thread + 1) * block);
        for (start, rows) in sizes.blocks() {
            let p = scores.part(0..rows * t);
            // SAFETY: each head writes rows and columns of its own; scratch is this thread's own.
            unsafe {
                let keys = sizes.packed(qkv, 1, b, h, 0).transposed();
                product(
                    (rows, t, d),
                    Matrix::rows(p.at(0), t),
                    sizes.packed(qkv, 0, b, h, start),
                    keys,
                    false,
                );
                if !cx.products_only {
                    let lse = lse.part(sizes.stats(b, h, start, rows)).write();
                    kernels::softmax_rows(p.write(), t, scale, lse);
                    mask(cx, drop, (b, h * t + start), p.write(), t);
                }
                let (o, values) = (sizes.plain(out, b, h, start), sizes.packed(qkv, 2, b, h, 0));
                product((rows, d, t), o, Matrix::rows(p.at(0), t), values, false);
            }
        }
    });
}

/// With P the probabilities, dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP − rowsum(dO ∘ O)), dQ = dS·K, dK = dSᵀ·Q.
///
/// # Safety
/// As [`super::run`].
pub unsafe fn backward<T: Float>(cx: &Context<'_, T>, heads: usize, drop: Option<AttentionDrop>) {
    let sizes = Sizes::of(&cx.input(0).shape, heads);
    let (t, d) = (sizes.tokens, sizes.head);
    let (qkv, out, lse, dout) = (cx.input(0).data, cx.input(1).data, cx.input(2).data, cx.input(3).data);
    let dqkv = cx.output(0).data;
    let (own, columns, block) = (sizes.backward_elements(), sizes.head_elements(), sizes.block());
    let scale = T::from_f64(sizes.scale());
    sizes.each_head(cx, |b, h, thread| {
        let scratch = cx.scratch::<T>().part(thread * own..(thread + 1) * own);
        let (key_columns, value_columns) = (scratch.part(0..columns), scratch.part(columns..2 * columns));
        // SAFETY: scratch is this thread's own; inputs are only read.
        let (key_columns, value_columns) = unsafe {
            (sizes.by_columns(qkv, 1, b, h, key_columns), sizes.by_columns(qkv, 2, b, h, value_columns))
        };
        let scratch = scratch.part(2 * columns..own);
        for (start, rows) in sizes.blocks() {
            let (p, dp) = (scratch.part(0..rows * t), scratch.part(block..block + rows * t));
            let delta = scratch.part(2 * block..2 * block + rows);
            let first = (b, h * t + start);
            let add = start > 0;
            let (queries, keys) = (sizes.packed(qkv, 0, b, h, start), sizes.packed(qkv, 1, b, h, 0));
            let dout_rows = sizes.plain(dout, b, h, start);
            let (p_rows, dp_rows) = (Matrix::rows(p.at(0), t), Matrix::rows(dp.at(0), t));
            // SAFETY: each head writes rows and columns of its own; scratch is this thread's own; inputs are only
            // read.
            unsafe {
                product((rows, t, d), p_rows, queries, key_columns, false);
                product((rows, t, d), dp_rows, dout_rows, value_columns, false);
                if !cx.products_only {
                    let lse = lse.part(sizes.stats(b, h, start, rows)).read();
                    kernels::softmax_from_lse(p.write(), t, scale, lse);
                    row_dots(&sizes, (out, dout), b, h, start, delta.write());
                    mask(cx, drop, first, dp.write(), t);
                    kernels::softmax_grad(p.read(), dp.write(), t, delta.read(), scale);
                    mask(cx, drop, first, p.write(), t);
                }

                product((t, d, rows), sizes.packed(dqkv, 2, b, h, 0), p_rows.transposed(), dout_rows, add);
                product((rows, d, t), sizes.packed(dqkv, 0, b, h, start), dp_rows, keys, false);
                product((t, d, rows), sizes.packed(dqkv, 1, b, h, 0), dp_rows.transposed(), queries, add);
            }
        }
    });
}

/// rowsum(dO ∘ O) of a head, whose rows lie C apart.
unsafe fn row_dots<T: Float>(
    sizes: &Sizes,
    (out, dout): (View<T>, View<T>),
    b: usize,
    h: usize,
    start: usize,
    delta: &mut [T],
) {
    for (i, delta) in delta.iter_mut().enumerate() {
        let at = (b * sizes.tokens + start + i) * sizes.channels + h * sizes.head;
        let row = at..at + sizes.head;
        // SAFETY: inputs are only read.
        let (o, d) = unsafe { (out.part(row.clone()).read(), dout.part(row).read()) };
        kernels::row_dot(o, d, sizes.head, std::slice::from_mut(delta));
    }
}
