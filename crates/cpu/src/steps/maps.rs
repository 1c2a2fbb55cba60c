//! Ops on channels-last maps (B,h,w,C) that treat rows of channels alone or move them.

use super::random::{by_sample, path_factor};
use super::{Context, row_piece};
use crate::kernels::{self, Float};
use graph::Shape;
use graph::op::PathDrop;

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn norm_add<T: Float>(cx: &Context<'_, T>, eps: f64, drop: Option<PathDrop>) {
    let shape = &cx.input(0).shape;
    let (rows, cols) = (shape.rows(), shape.last());
    let sample_rows = rows / shape.0[0].max(1);
    // SAFETY: parameters are only read.
    let (gamma, beta) = unsafe { (cx.input(2).data.read(), cx.input(3).data.read()) };
    cx.by_rows(shape, row_piece(cols), |piece, _| {
        for (b, r) in by_sample(piece, sample_rows) {
            let wide = r.start * cols..r.end * cols;
            let factor = path_factor(cx.header, drop, b);
            // SAFETY: pieces don't overlap, and inputs and outputs don't either.
            unsafe {
                let wide_input = |i: usize| cx.input(i).data.part(wide.clone()).read();
                let out = cx.output(0).data.part(wide.clone()).write();
                let [mean, rstd] = [1, 2].map(|i| cx.output(i).data.part(r.clone()).write());
                kernels::norm_add(wide_input(0), wide_input(1), gamma, beta, eps, factor, out, mean, rstd);
                if let Some(again) = cx.step.outputs.get(3) {
                    again.data.part(wide.clone()).write().copy_from_slice(out);
                }
            }
        }
    });
}

/// The four places of a block, in the order in which its channels follow each other.
const BLOCK: [(usize, usize); 4] = [(0, 0), (1, 0), (0, 1), (1, 1)];

pub unsafe fn merge_patches<T: Float>(cx: &Context<'_, T>) {
    let (x, y) = (cx.input(0), cx.output(0));
    each_row_of_blocks(cx, &x.shape, |at, row, block| {
        // SAFETY: each row of blocks is one piece; input and output don't overlap.
        let out = unsafe { y.data.part(block).write() };
        match at {
            // SAFETY: the input is only read.
            Some(at) => out.copy_from_slice(unsafe { x.data.part(at..at + row).read() }),
            None => out.fill(T::ZERO),
        }
    });
}

pub unsafe fn split_patches<T: Float>(cx: &Context<'_, T>) {
    let (dy, dx) = (cx.input(0), cx.output(0));
    each_row_of_blocks(cx, &dx.shape, |at, row, block| {
        let Some(at) = at else { return };
        // SAFETY: each token is in one block; input and output don't overlap.
        let (from, to) = unsafe { (dy.data.part(block).read(), dx.data.part(at..at + row).write()) };
        to.copy_from_slice(from);
    });
}

/// Runs `task(start of a token or none for padding, C, where its channels lie among the blocks)`; one piece for each row of
/// blocks.
fn each_row_of_blocks<T: Float>(
    cx: &Context<'_, T>,
    map: &Shape,
    task: impl Fn(Option<usize>, usize, std::ops::Range<usize>) + Sync,
) {
    let [_, h, w, c] = map.axes();
    let (rows, columns) = (h.div_ceil(2), w.div_ceil(2));
    let row_of_blocks = |piece: usize| {
        let (b, i) = (piece / rows, piece % rows);
        for j in 0..columns {
            for (n, (down, right)) in BLOCK.into_iter().enumerate() {
                let (row, column) = (2 * i + down, 2 * j + right);
                let at = (row < h && column < w).then_some(((b * h + row) * w + column) * c);
                let block = ((piece * columns + j) * 4 + n) * c;
                task(at, c, block..block + c);
            }
        }
    };
    cx.by_sample_pieces(map, rows, |piece, _| row_of_blocks(piece));
}

/// Nothing to do where the output lies over the input.
pub unsafe fn reshape<T: Float>(cx: &Context<'_, T>) {
    if !cx.input(0).data.same_place(&cx.output(0).data) {
        // SAFETY: passed on to the caller.
        unsafe { super::rows::copy(cx) };
    }
}
