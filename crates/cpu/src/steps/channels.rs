//! Ops that only move channels or tokens.

use super::{Context, row_piece};
use crate::kernels::Float;

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn concat<T: Float>(cx: &Context<'_, T>) {
    let (y, shape, cols) = (cx.output(0).data, &cx.output(0).shape, cx.output(0).shape.last());
    cx.by_rows(shape, row_piece(cols), |r, _| {
        // SAFETY: pieces don't overlap, and inputs and output don't either.
        let out = unsafe { y.part(r.start * cols..r.end * cols).write() };
        let mut start = 0;
        for part in &cx.step.inputs {
            let c = part.shape.last();
            // SAFETY: inputs are only read.
            let x = unsafe { part.data.part(r.start * c..r.end * c).read() };
            for (x, row) in x.chunks_exact(c).zip(out.chunks_exact_mut(cols)) {
                row[start..start + c].copy_from_slice(x);
            }
            start += c;
        }
    });
}

pub unsafe fn slice<T: Float>(cx: &Context<'_, T>, start: usize) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    let (shape, cols, c) = (&cx.output(0).shape, cx.input(0).shape.last(), cx.output(0).shape.last());
    cx.by_rows(shape, row_piece(c), |r, _| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) =
            unsafe { (x.part(r.start * cols..r.end * cols).read(), y.part(r.start * c..r.end * c).write()) };
        for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(c)) {
            y.copy_from_slice(&x[start..start + c]);
        }
    });
}

/// The last tokens of each sample, as they lie.
pub unsafe fn grid<T: Float>(cx: &Context<'_, T>) {
    let (x, y) = (cx.input(0), cx.output(0));
    let batch = x.shape.0[0];
    let (from, to) = (x.data.len() / batch, y.data.len() / batch);
    cx.by_sample(&x.shape, |b, _| {
        // SAFETY: each sample is one piece; input and output don't overlap.
        let (x, y) = unsafe {
            let x = x.data.part((b + 1) * from - to..(b + 1) * from).read();
            (x, y.data.part(b * to..(b + 1) * to).write())
        };
        y.copy_from_slice(x);
    });
}

pub unsafe fn ungrid<T: Float>(cx: &Context<'_, T>) {
    let (dy, dx) = (cx.input(0), cx.output(0));
    let batch = dx.shape.0[0];
    let (from, to) = (dy.data.len() / batch, dx.data.len() / batch);
    cx.by_sample(&dx.shape, |b, _| {
        // SAFETY: each sample is one piece; input and output don't overlap.
        let (dy, dx) = unsafe {
            let dy = dy.data.part(b * from..(b + 1) * from).read();
            (dy, dx.data.part(b * to..(b + 1) * to).write())
        };
        dx[..to - from].fill(T::ZERO);
        dx[to - from..].copy_from_slice(dy);
    });
}
