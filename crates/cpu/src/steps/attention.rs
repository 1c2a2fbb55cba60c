//! Softmax attention, one head of one sample at a time: scores live in a thread's scratch and nowhere else. Those of few tokens
//! are made whole (`whole.rs`), of many a tile of queries × keys at a time (`tiled.rs`).
//!
//! Legend: B batch, T tokens, C channels, H heads, D = C/H.

#[cfg(test)]
mod tests;
mod tiled;
mod untiled;

use super::Context;
use super::random::{mask_range, stream};
use crate::kernels::{self, Float};
use crate::matmul::Matrix;
use crate::memory::View;
use graph::op::AttentionDrop;
use graph::random::drop_threshold;
use graph::{Header, Shape};
use std::ops::Range;

/// Elements of scratch, for all threads.
pub fn forward_scratch(qkv: &Shape, heads: usize, threads: usize) -> usize {
    threads * Sizes::of(qkv, heads).forward_elements()
}

/// Scratch of the backward op, like [`forward_scratch`].
pub fn backward_scratch(qkv: &Shape, heads: usize, threads: usize) -> usize {
    threads * Sizes::of(qkv, heads).backward_elements()
}

/// Queries and keys of the tiles that attention over so many tokens is made of: forward, and backward.
pub fn tiles(tokens: usize) -> [(usize, usize); 2] {
    if is_tiled(tokens) { tiled::TILES } else { [(tokens, tokens); 2] }
}

fn is_tiled(tokens: usize) -> bool {
    tokens * tokens > untiled::MOST_SCORES
}

#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    channels: usize,
    heads: usize,
    head: usize,
}

impl Sizes {
    fn of(qkv: &Shape, heads: usize) -> Self {
        let (tokens, channels) = (qkv.0[1], qkv.0[2] / 3);
        Sizes { tokens, channels, heads, head: channels / heads }
    }

    fn is_tiled(&self) -> bool {
        is_tiled(self.tokens)
    }

    /// Elements of scratch for a thread.
    fn forward_elements(&self) -> usize {
        if self.is_tiled() { tiled::forward_elements(self) } else { untiled::forward_elements(self) }
    }

    /// Elements of scratch for a thread.
    fn backward_elements(&self) -> usize {
        if self.is_tiled() { tiled::backward_elements(self) } else { untiled::backward_elements(self) }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head as f64).sqrt()
    }

    /// Runs `task(b, h, thread)` for every head of every sample.
    fn each_head<T: Float>(&self, cx: &Context<'_, T>, task: impl Fn(usize, usize, usize) + Sync) {
        let head = |piece: usize, thread: usize| task(piece / self.heads, piece % self.heads, thread);
        cx.by_sample_pieces(&cx.input(0).shape, self.heads, head);
    }
}

/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, heads: usize, drop: Option<AttentionDrop>) {
    let sizes = Sizes::of(&cx.input(0).shape, heads);
    let (qkv, out, lse) = (cx.input(0).data, cx.output(0).data, cx.output(1).data);
    let (own, header, matmuls_only) = (sizes.forward_elements(), cx.header, cx.matmuls_only);
    sizes.each_head(cx, |b, h, thread| {
        let scratch = cx.scratch::<T>().part(thread * own..(thread + 1) * own);
        // SAFETY: each head writes rows and columns of its own; scratch is this thread's own; inputs are only read.
        unsafe { Head { header, matmuls_only, sizes, b, h, drop }.forward(qkv, out, lse, scratch) };
    });
}

/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn backward<T: Float>(cx: &Context<'_, T>, heads: usize, drop: Option<AttentionDrop>) {
    let sizes = Sizes::of(&cx.input(0).shape, heads);
    let inputs = [0, 1, 2, 3].map(|i| cx.input(i).data);
    let dqkv = cx.output(0).data;
    let (own, header, matmuls_only) = (sizes.backward_elements(), cx.header, cx.matmuls_only);
    sizes.each_head(cx, |b, h, thread| {
        let scratch = cx.scratch::<T>().part(thread * own..(thread + 1) * own);
        // SAFETY: as in `forward`.
        unsafe { Head { header, matmuls_only, sizes, b, h, drop }.backward(inputs, dqkv, scratch) };
    });
}

/// A head of one sample.
#[derive(Clone, Copy)]
struct Head<'a> {
    header: &'a Header,
    /// Flag for benchmarks: leave out all but the matmuls.
    matmuls_only: bool,
    sizes: Sizes,
    b: usize,
    h: usize,
    drop: Option<AttentionDrop>,
}

impl Head<'_> {
    /// # Safety
    /// Nobody else touches this head of `out` and `lse`, nor `scratch`; `qkv` is only read.
    unsafe fn forward<T: Float>(&self, qkv: View<T>, out: View<T>, lse: View<T>, scratch: View<T>) {
        // SAFETY: passed on to the caller.
        unsafe {
            if self.sizes.is_tiled() {
                tiled::forward(self, qkv, out, lse, scratch);
            } else {
                untiled::forward(self, qkv, out, lse, scratch);
            }
        }
    }

    /// Backward pass of a head: with P the probabilities, dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP − rowsum(dO ∘ O)), dQ =
    /// dS·K, dK = dSᵀ·Q.
    ///
    /// # Safety
    /// Nobody else touches this head of `dqkv`, nor `scratch`; the inputs (qkv, out, lse, dout) are only read.
    unsafe fn backward<T: Float>(&self, inputs: [View<T>; 4], dqkv: View<T>, scratch: View<T>) {
        // SAFETY: passed on to the caller.
        unsafe {
            if self.sizes.is_tiled() {
                tiled::backward(self, inputs, dqkv, scratch);
            } else {
                untiled::backward(self, inputs, dqkv, scratch);
            }
        }
    }

    /// Queries (0), keys (1) or values (2) from row `row` on, in a (B,T,3C) array.
    fn packed<T>(&self, qkv: View<T>, which: usize, row: usize) -> Matrix<T> {
        let Sizes { tokens, channels, head, .. } = self.sizes;
        let at = (self.b * tokens + row) * 3 * channels + which * channels + self.h * head;
        Matrix::rows(qkv.at(at), 3 * channels)
    }

    /// This head from row `row` on, in a (B,T,C) array.
    fn plain<T>(&self, x: View<T>, row: usize) -> Matrix<T> {
        Matrix::rows(x.at(self.plain_at(row)), self.sizes.channels)
    }

    fn plain_at(&self, row: usize) -> usize {
        (self.b * self.sizes.tokens + row) * self.sizes.channels + self.h * self.sizes.head
    }

    /// Range of the queries' statistics in a (B,H,T) array.
    fn stats(&self) -> Range<usize> {
        let at = (self.b * self.sizes.heads + self.h) * self.sizes.tokens;
        at..at + self.sizes.tokens
    }

    /// Dropout of the probabilities of `queries` for the keys from `first` on, a multiple of 4: `cols` of them in each of rows that
    /// lie `stride` apart. The mask of query q is that of "token" h·T + q.
    fn mask<T: Float>(
        &self,
        queries: Range<usize>,
        first: usize,
        rows: &mut [T],
        (stride, cols): (usize, usize),
    ) {
        let Some(AttentionDrop { rate, site }) = self.drop else { return };
        let (threshold, scale) = (drop_threshold(rate), T::from_f64(1.0 / (1.0 - rate)));
        let stream = stream(self.header, site, self.b);
        for (query, row) in queries.zip(rows.chunks_mut(stride)) {
            let token = (self.h * self.sizes.tokens + query) as u32;
            mask_range(&stream, token, first, threshold, scale, &mut row[..cols]);
        }
    }

    /// rowsum(dO ∘ O), whose rows lie C apart.
    ///
    /// # Safety
    /// `out` and `dout` are only read.
    unsafe fn row_dots<T: Float>(&self, out: View<T>, dout: View<T>, delta: &mut [T]) {
        let head = self.sizes.head;
        for (i, delta) in delta.iter_mut().enumerate() {
            let row = self.plain_at(i)..self.plain_at(i) + head;
            // SAFETY: passed on to the caller.
            let (o, d) = unsafe { (out.part(row.clone()).read(), dout.part(row).read()) };
            kernels::row_dot(o, d, head, std::slice::from_mut(delta));
        }
    }
}
