//! The continuous position bias: a small network from the offset between two tokens of a window to one number a head,
//! spread over all pairs of tokens; and its gradients.
//!
//! Legend: N width of the hidden layer, H heads, T tokens of a window, K offsets between them.

use super::Context;
use crate::kernels::{self, Float};
use crate::matmul::{Matrix, matmul};
use crate::memory::View;
use graph::windows::Offsets;
use graph::{Op, Type};
use std::ops::Range;

/// Offsets in a piece.
const OFFSETS: usize = 32;
/// Hidden channels in a piece.
const CHANNELS: usize = 64;

/// Elements of scratch: numbers of heads for each offset (twice going backward), and for each thread a part of the hidden
/// layer (going backward, with its gradient and weights).
pub fn scratch_elements(op: &Op, w2: &Type, threads: usize) -> usize {
    let [heads, width] = w2.shape.0[..] else { return 0 };
    match op {
        Op::PositionBias { window, .. } => {
            heads * Offsets::new(*window, None).count() + threads * OFFSETS * width
        }
        Op::PositionBiasGrad { window, .. } => {
            let offsets = Offsets::new(*window, None).count();
            2 * heads * offsets + threads * (OFFSETS * width).max(2 * offsets * CHANNELS)
        }
        _ => 0,
    }
}

/// The bias of every offset and head, (H,K): what a bias of two tokens is looked up in.
///
/// # Safety
/// Nobody else uses `table`, nor scratch of `OFFSETS`·N elements for each thread from `own` on.
unsafe fn fill_table<T: Float>(cx: &Context<'_, T>, offsets: Offsets, table: View<T>, own: usize) {
    // SAFETY: parameters are only read.
    let [w1, b1, w2] = [0, 1, 2].map(|i| unsafe { cx.input(i).data.read() });
    let (n, k) = (b1.len(), offsets.count());
    let scratch: View<T> = cx.scratch();
    cx.ranges(k, OFFSETS, |range, thread| {
        let start = own + thread * OFFSETS * n;
        // SAFETY: a thread has its own part of the scratch.
        let hidden = unsafe { scratch.part(start..start + range.len() * n).write() };
        fill_hidden(offsets, range.clone(), w1, b1, hidden);
        for (h, w2) in w2.chunks_exact(n).enumerate() {
            let row = h * k + range.start..h * k + range.end;
            // SAFETY: ranges don't overlap.
            kernels::sixteen_sigmoid(hidden, w2, unsafe { table.part(row).write() });
        }
    });
}

fn fill_hidden<T: Float>(offsets: Offsets, range: Range<usize>, w1: &[T], b1: &[T], hidden: &mut [T]) {
    for (number, row) in range.zip(hidden.chunks_exact_mut(b1.len())) {
        let coordinates = offsets.coordinates(number).map(|x| T::from_f64(f64::from(x)));
        kernels::hidden_rows(w1, b1, &[coordinates], row);
    }
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, window: [usize; 2], pretrained: Option<[usize; 2]>) {
    let offsets = Offsets::new(window, pretrained);
    let (heads, t, k) = (cx.output(0).shape.0[0], window[0] * window[1], offsets.count());
    let table = cx.scratch::<T>().part(0..heads * k);
    // SAFETY: the table is the first of the scratch, what threads own lies behind.
    unsafe { fill_table(cx, offsets, table, heads * k) };
    cx.each(heads, |h, _| {
        // SAFETY: the table is done.
        let table = unsafe { table.part(h * k..(h + 1) * k).read() };
        // SAFETY: each head is one piece.
        let bias = unsafe { cx.output(0).data.part(h * t * t..(h + 1) * t * t).write() };
        for (i, row) in bias.chunks_exact_mut(t).enumerate() {
            for (r, row) in row.chunks_exact_mut(window[1]).enumerate() {
                let biases = table[offsets.run(i, r)].iter().rev();
                row.iter_mut().zip(biases).for_each(|(bias, of_offset)| *bias = *of_offset);
            }
        }
    });
}

pub unsafe fn backward<T: Float>(cx: &Context<'_, T>, window: [usize; 2], pretrained: Option<[usize; 2]>) {
    let offsets = Offsets::new(window, pretrained);
    let [heads, n] = cx.input(2).shape.axes();
    let (t, k) = (window[0] * window[1], offsets.count());
    let scratch = cx.scratch::<T>();
    let (table, dtable, own) =
        (scratch.part(0..heads * k), scratch.part(heads * k..2 * heads * k), 2 * heads * k);
    // SAFETY: the tables are the first of the scratch, what threads own lies behind.
    unsafe { fill_table(cx, offsets, table, own) };
    cx.each(heads, |h, _| {
        // SAFETY: each head is one piece; the table is done; the gradient is only read.
        let (table, dtable, dbias) = unsafe {
            let dbias = cx.input(3).data.part(h * t * t..(h + 1) * t * t).read();
            let rows = h * k..(h + 1) * k;
            (table.part(rows.clone()).read(), dtable.part(rows).write(), dbias)
        };
        dtable.fill(T::ZERO);
        for (i, row) in dbias.chunks_exact(t).enumerate() {
            for (r, row) in row.chunks_exact(window[1]).enumerate() {
                let sums = dtable[offsets.run(i, r)].iter_mut().rev();
                sums.zip(row).for_each(|(sum, dbias)| *sum += *dbias);
            }
        }
        // Through 16·σ: 16·σ·(1 - σ), of which the table has 16·σ.
        for (dtable, &table) in dtable.iter_mut().zip(table) {
            *dtable *= table * (T::ONE - table * T::from_f64(1.0 / 16.0));
        }
    });
    cx.ranges(n, CHANNELS, |channels, thread| {
        let start = own + thread * 2 * k * CHANNELS;
        let mine = scratch.part(start..start + 2 * k * CHANNELS);
        // SAFETY: each range of channels writes gradients of its own; a thread has its own part of the scratch.
        unsafe { weight_grads(cx, offsets, channels, dtable, mine) };
    });
}

/// The gradients of some channels of the hidden layer.
unsafe fn weight_grads<T: Float>(
    cx: &Context<'_, T>,
    offsets: Offsets,
    channels: Range<usize>,
    dtable: View<T>,
    mine: View<T>,
) {
    let [heads, n] = cx.input(2).shape.axes();
    let (k, width, at) = (offsets.count(), channels.len(), channels.start);
    let (hidden, dhidden) = (mine.part(0..k * width), mine.part(k * width..2 * k * width));
    let pairs = 2 * channels.start..2 * channels.end;
    // SAFETY: parameters are only read; outputs and scratch are the caller's own.
    unsafe {
        let (w1, b1) =
            (cx.input(0).data.part(pairs.clone()).read(), cx.input(1).data.part(channels.clone()).read());
        fill_hidden(offsets, 0..k, w1, b1, hidden.write());
        let dtable = Matrix::rows(dtable.at(0), k);
        let dw2 = Matrix::rows(cx.output(2).data.at(at), n);
        matmul((heads, width, k), dw2, dtable, Matrix::rows(hidden.at(0), width), false);
        let w2 = Matrix::rows(cx.input(2).data.at(at), n);
        matmul((k, width, heads), Matrix::rows(dhidden.at(0), width), dtable.transposed(), w2, false);

        let (dw1, db1) = (cx.output(0).data.part(pairs).write(), cx.output(1).data.part(channels).write());
        dw1.fill(T::ZERO);
        db1.fill(T::ZERO);
        let rows = hidden.read().chunks_exact(width).zip(dhidden.read().chunks_exact(width));
        for (number, (hidden, dhidden)) in rows.enumerate() {
            let [x, y] = offsets.coordinates(number).map(|x| T::from_f64(f64::from(x)));
            for (c, (&hidden, &dhidden)) in hidden.iter().zip(dhidden).enumerate() {
                let d = if hidden > T::ZERO { dhidden } else { T::ZERO };
                dw1[2 * c] += d * x;
                dw1[2 * c + 1] += d * y;
                db1[c] += d;
            }
        }
    }
}
