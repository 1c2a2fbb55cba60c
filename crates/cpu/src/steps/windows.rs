//! Scaled cosine attention in shifted windows, one head of one window at a time. The tokens of a window are gathered into
//! a thread's scratch and results scattered from there, so that nothing is rolled, padded or partitioned in memory; scores
//! live there and nowhere else.
//!
//! Legend: B batch, W windows of a map, T tokens of a window, C channels, H heads, D = C/H, R queries in a block.

mod layout;

use super::Context;
use super::blocks::Blocks;
use crate::kernels::{self, Float};
use crate::matmul::{Matrix, matmul};
use crate::memory::View;
use graph::{Op, Shape, Type, Windows};
use layout::{Layout, REGIONS};
use std::ops::Range;

/// Scores a block may have: half a megabyte of f32, which a core's second cache level holds.
const BLOCK: usize = 1 << 17;
/// Pieces that heads and windows are shared out in, about.
const PIECES: usize = 64;

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    map: [usize; 2],
    channels: usize,
    heads: usize,
    head: usize,
    windows: Windows,
}

/// Elements of scratch: what a thread works on, and going backward the sums of each piece.
pub fn scratch_elements(op: &Op, qkv: &Type, threads: usize) -> usize {
    match op {
        Op::WindowAttention { heads, windows } => {
            threads * Sizes::of(&qkv.shape, *heads, *windows).forward_elements()
        }
        Op::WindowAttentionGrad { heads, windows } => {
            let sizes = Sizes::of(&qkv.shape, *heads, *windows);
            threads * sizes.backward_elements() + sizes.pieces() * sizes.sums()
        }
        _ => 0,
    }
}

impl Sizes {
    fn of(qkv: &Shape, heads: usize, windows: Windows) -> Self {
        let (batch, map, channels) = (qkv.0[0], [qkv.0[1], qkv.0[2]], qkv.0[3] / 3);
        Sizes { batch, map, channels, heads, head: channels / heads, windows }
    }

    fn tokens(&self) -> usize {
        self.windows.tokens()
    }

    /// Elements of one head of a window.
    fn rows(&self) -> usize {
        self.tokens() * self.head
    }

    fn queries_in_block(&self) -> usize {
        (BLOCK / self.tokens()).clamp(1, self.tokens())
    }

    fn block(&self) -> usize {
        self.queries_in_block() * self.tokens()
    }

    fn query_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (tokens, size) = (self.tokens(), self.queries_in_block());
        (0..tokens).step_by(size).map(move |start| start..(start + size).min(tokens))
    }

    /// Places, regions, masks.
    fn layout_elements(&self) -> usize {
        (2 + REGIONS) * self.tokens()
    }

    fn forward_elements(&self) -> usize {
        self.layout_elements() + 2 * self.tokens() + 5 * self.rows() + self.block()
    }

    fn backward_elements(&self) -> usize {
        self.layout_elements() + 2 * self.tokens() + 9 * self.rows() + 2 * self.block()
    }

    /// Sums of a piece: of the position bias, both biases, and the logit scale.
    fn sums(&self) -> usize {
        self.tokens() * self.tokens() + 2 * self.head + 1
    }

    fn all_windows(&self) -> usize {
        self.batch * self.windows.count(self.map)
    }

    fn blocks(&self) -> Option<Blocks> {
        Blocks::cut(self.batch, self.map[0] * self.map[1])
    }

    /// Ranges that the windows of a batch are cut into, for each head: parts of blocks of samples, or if there are few about as
    /// many as make up all pieces.
    fn chunks(&self) -> usize {
        let few = || PIECES.div_ceil(self.heads).min(self.all_windows()).max(1);
        self.blocks().map_or_else(few, |blocks| blocks.all_parts())
    }

    fn windows_of(&self, chunk: usize) -> Range<usize> {
        let (windows, chunks) = (self.all_windows(), self.chunks());
        match self.blocks() {
            Some(blocks) => blocks.share(chunk, windows / self.batch),
            None => chunk * windows / chunks..(chunk + 1) * windows / chunks,
        }
    }

    fn pieces(&self) -> usize {
        self.chunks() * self.heads
    }

    /// Runs `task(head, windows, piece, thread)` on every piece; windows are numbered through the batch.
    fn each_piece<T: Float>(
        &self,
        cx: &Context<'_, T>,
        task: impl Fn(usize, Range<usize>, usize, usize) + Sync,
    ) {
        let head = |piece: usize, thread: usize| {
            task(piece % self.heads, self.windows_of(piece / self.heads), piece, thread);
        };
        match self.blocks() {
            Some(blocks) => cx.by_block(blocks, blocks.parts() * self.heads, head),
            None => cx.each(self.pieces(), head),
        }
    }

    /// Range of the row statistics of some queries of a window in a (B,W,H,T) array.
    fn stats(&self, window: usize, h: usize, queries: Range<usize>) -> Range<usize> {
        let at = (window * self.heads + h) * self.tokens();
        at + queries.start..at + queries.end
    }
}

/// The next `len` elements of a thread's scratch.
fn take<T>(scratch: &mut View<T>, len: usize) -> View<T> {
    let taken = scratch.part(0..len);
    *scratch = scratch.part(len..scratch.len());
    taken
}

/// Queries, keys and values of one head of a window, as matmuls want them.
struct Head<'a, T> {
    q: &'a mut [T],
    k: &'a mut [T],
    v: &'a mut [T],
    /// (D,T)
    k_columns: &'a mut [T],
}

impl<'a, T: Float> Head<'a, T> {
    /// # Safety
    /// `scratch` is the caller's own.
    unsafe fn new(sizes: &Sizes, scratch: &mut View<T>) -> Self {
        let mut next = || {
            // SAFETY: passed on to the caller; the parts don't overlap.
            unsafe { take(scratch, sizes.rows()).write() }
        };
        Head { q: next(), k: next(), v: next(), k_columns: next() }
    }

    /// Gathers them; queries and keys get length 1.
    ///
    /// # Safety
    /// `qkv` is only read.
    unsafe fn of_window(
        &mut self,
        sizes: &Sizes,
        layout: &Layout<'_, T>,
        (qkv, q_bias): (View<T>, &[T]),
        h: usize,
        (q_lengths, k_lengths): (&mut [T], &mut [T]),
    ) {
        let (c, d) = (sizes.channels, sizes.head);
        for (which, rows) in [&mut *self.q, &mut *self.k, &mut *self.v].into_iter().enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { layout.gather(qkv, 3 * c, which * c + h * d, d, rows) };
        }
        kernels::add_bias(self.q, &q_bias[h * d..(h + 1) * d]);
        kernels::normalise_rows(self.q, d, q_lengths);
        kernels::normalise_rows(self.k, d, k_lengths);
        kernels::transpose(self.k, sizes.tokens(), d, d, self.k_columns);
    }
}

fn matrix<T>(rows: &[T], width: usize) -> Matrix<T> {
    Matrix::rows(rows.as_ptr().cast_mut(), width)
}

/// The factor of the cosine: exp(min(logit scale, ln 100)).
fn factor<T: Float>(logit_scale: T) -> f64 {
    logit_scale.to_f64().min(100f64.ln()).exp()
}

/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, heads: usize, windows: Windows) {
    let sizes = Sizes::of(&cx.input(0).shape, heads, windows);
    let (t, d, c) = (sizes.tokens(), sizes.head, sizes.channels);
    let (qkv, out, lse) = (cx.input(0).data, cx.output(0).data, cx.output(1).data);
    // SAFETY: inputs are only read.
    let [q_bias, v_bias, scales, bias] = [1, 2, 3, 4].map(|i| unsafe { cx.input(i).data.read() });
    let own = sizes.forward_elements();
    sizes.each_piece(cx, |h, some, _, thread| {
        let mut scratch = cx.scratch::<T>().part(thread * own..(thread + 1) * own);
        // SAFETY: scratch is this thread's own, inputs are only read, and each head of a window writes rows and columns of
        // its own.
        unsafe {
            let mut layout = Layout::new(&sizes, take(&mut scratch, sizes.layout_elements()));
            let [q_lengths, k_lengths] = [(); 2].map(|()| take(&mut scratch, t).write());
            let mut head = Head::new(&sizes, &mut scratch);
            let (o, scores) =
                (take(&mut scratch, sizes.rows()).write(), take(&mut scratch, sizes.block()).write());
            let factor = T::from_f64(factor(scales[h]));
            for window in some {
                layout.of_window(&sizes, window);
                head.of_window(&sizes, &layout, (qkv, q_bias), h, (q_lengths, k_lengths));
                for queries in sizes.query_blocks() {
                    let p = &mut scores[..queries.len() * t];
                    let (q, o) = (&head.q[queries.start * d..], &mut o[..queries.len() * d]);
                    matmul(
                        (queries.len(), t, d),
                        matrix(p, t),
                        matrix(q, d),
                        matrix(head.k_columns, t),
                        false,
                    );
                    if !cx.matmuls_only {
                        let bias = &bias[(h * t + queries.start) * t..(h * t + queries.end) * t];
                        let lse = lse.part(sizes.stats(window, h, queries.clone())).write();
                        kernels::biased_softmax_rows(p, t, factor, layout.with_masks(bias, &queries), lse);
                    }
                    matmul((queries.len(), d, t), matrix(o, d), matrix(p, t), matrix(head.v, d), false);
                    // Probabilities sum to 1, so that the bias of values comes out as it is.
                    kernels::add_bias(o, &v_bias[h * d..(h + 1) * d]);
                    layout.scatter(queries, o, c, h * d, out);
                }
            }
        }
    });
}

/// Working memory of a thread going backward.
struct Work<'a, T> {
    layout: Layout<'a, T>,
    head: Head<'a, T>,
    q_lengths: &'a mut [T],
    k_lengths: &'a mut [T],
    v_columns: &'a mut [T],
    dout: &'a mut [T],
    dq: &'a mut [T],
    dk: &'a mut [T],
    dv: &'a mut [T],
    p: &'a mut [T],
    dp: &'a mut [T],
}

impl<'a, T: Float> Work<'a, T> {
    /// # Safety
    /// `scratch` is the caller's own.
    unsafe fn new(sizes: &Sizes, mut scratch: View<T>) -> Self {
        let (t, rows, block) = (sizes.tokens(), sizes.rows(), sizes.block());
        // SAFETY: passed on to the caller; the parts don't overlap.
        unsafe {
            let layout = Layout::new(sizes, take(&mut scratch, sizes.layout_elements()));
            let head = Head::new(sizes, &mut scratch);
            let mut next = |len: usize| take(&mut scratch, len).write();
            Work {
                layout,
                head,
                q_lengths: next(t),
                k_lengths: next(t),
                v_columns: next(rows),
                dout: next(rows),
                dq: next(rows),
                dk: next(rows),
                dv: next(rows),
                p: next(block),
                dp: next(block),
            }
        }
    }
}

/// Sums over the windows of a piece.
struct Sums<'a, T> {
    bias: &'a mut [T],
    q_bias: &'a mut [T],
    v_bias: &'a mut [T],
    factor: f64,
}

/// Backward pass: with P the probabilities and V the values with their bias: dV = Pᵀ·dO, dS = P ∘ (dP − rowsum(P ∘ dP))
/// with dP = dO·Vᵀ, then the gradients of the unit queries and keys, f·dS·K̂ and f·dSᵀ·Q̂, through their norms. Σ
/// dS·cos = Σ Q̂ ∘ (dS·K̂). Rows of P sum to 1, so that the gradient of the bias of values is Σ dO. Padded queries have
/// dO = 0 and so no part in any of it.
///
/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn backward<T: Float>(cx: &Context<'_, T>, heads: usize, windows: Windows) {
    let sizes = Sizes::of(&cx.input(0).shape, heads, windows);
    let (t, d) = (sizes.tokens(), sizes.head);
    let own = sizes.backward_elements();
    let sums_at = |piece: usize| {
        let start = cx.threads() * own + piece * sizes.sums();
        cx.scratch::<T>().part(start..start + sizes.sums())
    };
    sizes.each_piece(cx, |h, some, piece, thread| {
        // SAFETY: scratch is this thread's or this piece's own.
        let (mut work, all) = unsafe {
            let scratch = cx.scratch::<T>().part(thread * own..(thread + 1) * own);
            (Work::new(&sizes, scratch), sums_at(piece).write())
        };
        all.fill(T::ZERO);
        let (bias, rest) = all.split_at_mut(t * t);
        let (q_bias, rest) = rest.split_at_mut(d);
        let (v_bias, factor) = rest.split_at_mut(d);
        let mut sums = Sums { bias, q_bias, v_bias, factor: 0.0 };
        for window in some {
            // SAFETY: inputs are only read, and each head of a window writes rows and columns of its own.
            unsafe { window_backward(cx, &sizes, h, window, &mut work, &mut sums) };
        }
        factor[0] = T::from_f64(sums.factor);
    });
    let [_, dq_bias, dv_bias, dscale, dbias] = [0, 1, 2, 3, 4].map(|i| cx.output(i).data);
    cx.shared(heads, |h, _| {
        // SAFETY: the pieces are done; each head has gradients of its own.
        unsafe {
            let scale = cx.input(3).data.read()[h];
            let dbias = dbias.part(h * t * t..(h + 1) * t * t).write();
            let [dq_bias, dv_bias] = [dq_bias, dv_bias].map(|b| b.part(h * d..(h + 1) * d).write());
            let dscale = dscale.part(h..h + 1).write();
            for sum in [&mut *dbias, &mut *dq_bias, &mut *dv_bias, &mut *dscale] {
                sum.fill(T::ZERO);
            }
            for chunk in 0..sizes.chunks() {
                let sums = sums_at(chunk * heads + h).read();
                kernels::add_assign(dbias, &sums[..t * t]);
                kernels::add_assign(dq_bias, &sums[t * t..t * t + d]);
                kernels::add_assign(dv_bias, &sums[t * t + d..t * t + 2 * d]);
                dscale[0] += sums[t * t + 2 * d];
            }
            let slope = if scale.to_f64() > 100f64.ln() { 0.0 } else { factor(scale) };
            dscale[0] *= T::from_f64(slope);
        }
    });
}

/// One head of one window.
unsafe fn window_backward<T: Float>(
    cx: &Context<'_, T>,
    sizes: &Sizes,
    h: usize,
    window: usize,
    work: &mut Work<'_, T>,
    sums: &mut Sums<'_, T>,
) {
    let (t, d, c) = (sizes.tokens(), sizes.head, sizes.channels);
    let (qkv, lse, dout, dqkv) = (cx.input(0).data, cx.input(6).data, cx.input(7).data, cx.output(0).data);
    // SAFETY: inputs are only read.
    let [q_bias, v_bias, scales, bias] = [1, 2, 3, 4].map(|i| unsafe { cx.input(i).data.read() });
    let factor = T::from_f64(factor(scales[h]));
    let Work { layout, head, q_lengths, k_lengths, v_columns, dout: g, dq, dk, dv, p, dp } = work;
    layout.of_window(sizes, window);
    // SAFETY: inputs are only read.
    unsafe {
        head.of_window(sizes, layout, (qkv, q_bias), h, (q_lengths, k_lengths));
        layout.gather(dout, c, h * d, d, g);
    }
    kernels::column_sum(g, d, sums.v_bias);
    kernels::add_bias(head.v, &v_bias[h * d..(h + 1) * d]);
    kernels::transpose(head.v, t, d, d, v_columns);
    for queries in sizes.query_blocks() {
        let (rows, add) = (queries.len(), queries.start > 0);
        let (p, dp) = (&mut p[..rows * t], &mut dp[..rows * t]);
        let wide = queries.start * d..queries.end * d;
        let (q, g, dq) =
            (matrix(&head.q[wide.clone()], d), matrix(&g[wide.clone()], d), matrix(&dq[wide], d));
        let (p_rows, dp_rows) = (matrix(p, t), matrix(dp, t));
        // SAFETY: all of it is this thread's own, and results overlap no operand.
        unsafe {
            matmul((rows, t, d), p_rows, q, matrix(head.k_columns, t), false);
            matmul((rows, t, d), dp_rows, g, matrix(v_columns, t), false);
        }
        if !cx.matmuls_only {
            let square = queries.start * t..queries.end * t;
            let bias = &bias[h * t * t..(h + 1) * t * t][square.clone()];
            // SAFETY: an input, only read.
            let lse = unsafe { lse.part(sizes.stats(window, h, queries.clone())).read() };
            kernels::biased_softmax_from_lse(p, t, factor, layout.with_masks(bias, &queries), lse);
            kernels::softmax_grad_acc(p, dp, t, &mut sums.bias[square]);
        }
        // SAFETY: as above.
        unsafe {
            matmul((t, d, rows), matrix(dv, d), p_rows.transposed(), g, add);
            matmul((rows, d, t), dq, dp_rows, matrix(head.k, d), false);
            matmul((t, d, rows), matrix(dk, d), dp_rows.transposed(), q, add);
        }
    }
    sums.factor += kernels::normalise_grad(head.q, q_lengths, factor, d, dq);
    kernels::normalise_grad(head.k, k_lengths, factor, d, dk);
    kernels::column_sum(dq, d, sums.q_bias);
    for (which, rows) in [&**dq, &**dk, &**dv].into_iter().enumerate() {
        // SAFETY: passed on to the caller.
        unsafe { layout.scatter(0..t, rows, 3 * c, which * c + h * d, dqkv) };
    }
}
