//! Ops that treat elements or rows alone.

use super::blocks::Blocks;
use super::{Context, PIECE, row_piece};
use crate::kernels::{self, Float};

/// Runs `task` on pieces of the elements of the output, which inputs have as many of.
fn elementwise<T: Float>(cx: &Context<'_, T>, task: impl Fn(std::ops::Range<usize>) + Sync) {
    let shape = &cx.output(0).shape;
    let cols = shape.last();
    match Blocks::of(shape) {
        Some(_) => cx.by_rows(shape, 1, |rows, _| task(rows.start * cols..rows.end * cols)),
        None => cx.ranges(shape.count(), PIECE, |range, _| task(range)),
    }
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn copy<T: Float>(cx: &Context<'_, T>) {
    let (from, to) = (cx.input(0).data, cx.output(0).data);
    elementwise(cx, |r| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (from, to) = unsafe { (from.part(r.clone()).read(), to.part(r).write()) };
        to.copy_from_slice(from);
    });
}

pub unsafe fn seed<T: Float>(cx: &Context<'_, T>) {
    cx.each(1, |_, _| {
        // SAFETY: the loss scale, if there is one, is only read.
        let scale = cx.step.inputs.first().map_or(T::ONE, |scale| unsafe { scale.data.read()[0] });
        // SAFETY: the only access to the output.
        unsafe { cx.output(0).data.write() }.fill(scale);
    });
}

pub unsafe fn gelu<T: Float>(cx: &Context<'_, T>) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    elementwise(cx, |r| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) = unsafe { (x.part(r.clone()).read(), y.part(r).write()) };
        kernels::gelu(x, y);
    });
}

pub unsafe fn layer_scale<T: Float>(cx: &Context<'_, T>) {
    let cols = cx.input(0).shape.last();
    // SAFETY: a parameter, only read.
    let gamma = unsafe { cx.input(1).data.read() };
    cx.by_rows(&cx.input(0).shape, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) =
            unsafe { (cx.input(0).data.part(wide.clone()).read(), cx.output(0).data.part(wide).write()) };
        kernels::layer_scale(x, gamma, y);
    });
}

pub unsafe fn swiglu<T: Float>(cx: &Context<'_, T>) {
    let half = cx.output(0).shape.last();
    cx.by_rows(&cx.output(0).shape, row_piece(2 * half), |r, _| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) = unsafe {
            let x = cx.input(0).data.part(2 * r.start * half..2 * r.end * half).read();
            (x, cx.output(0).data.part(r.start * half..r.end * half).write())
        };
        kernels::swiglu(x, half, y);
    });
}

pub unsafe fn add<T: Float>(cx: &Context<'_, T>) {
    let (a, b, y) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    elementwise(cx, |r| {
        // SAFETY: pieces don't overlap, and inputs and output don't either.
        let (a, b, y) = unsafe { (a.part(r.clone()).read(), b.part(r.clone()).read(), y.part(r).write()) };
        kernels::add(a, b, y);
    });
}

pub unsafe fn scale<T: Float>(cx: &Context<'_, T>, factor: f64) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    elementwise(cx, |r| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) = unsafe { (x.part(r.clone()).read(), y.part(r).write()) };
        kernels::scale(x, T::from_f64(factor), y);
    });
}

pub unsafe fn accumulate<T: Float>(cx: &Context<'_, T>) {
    let (so_far, x, sum) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    elementwise(cx, |r| {
        // SAFETY: pieces don't overlap; `x` and `sum` don't either.
        let (x, sum_part) = unsafe { (x.part(r.clone()).read(), sum.part(r.clone()).write()) };
        if !so_far.same_place(&sum) {
            // SAFETY: in another place, so not covered by `sum_part`.
            sum_part.copy_from_slice(unsafe { so_far.part(r).read() });
        }
        kernels::add_assign(sum_part, x);
    });
}

/// Sums that other devices make of parts: here the first part is all.
pub unsafe fn add_up<T: Float>(cx: &Context<'_, T>, starts: &[usize]) {
    let count = cx.step.outputs.len();
    cx.each(count, |index, _| {
        let (whole, out) = (cx.input(index).data, cx.output(index).data);
        let start = starts.iter().position(|of| *of == index).map(|start| cx.input(count + start).data);
        // SAFETY: parts are only read and lie apart from sums; a sum so far lies where the new one does, or apart.
        unsafe {
            let first = start.unwrap_or(whole);
            if !first.same_place(&out) {
                out.write().copy_from_slice(first.read());
            }
            if start.is_some() {
                kernels::add_assign(out.write(), whole.read());
            }
        }
    });
}

pub unsafe fn layer_norm<T: Float>(cx: &Context<'_, T>, eps: f64, add: bool) {
    let cols = cx.input(0).shape.last();
    let first = usize::from(add);
    // SAFETY: parameters are only read.
    let (gamma, beta) = unsafe { (cx.input(first + 1).data.read(), cx.input(first + 2).data.read()) };
    let outputs = [0, 1, 2].map(|i| cx.output(first + i).data);
    cx.by_rows(&cx.input(0).shape, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: pieces don't overlap, and inputs and outputs don't either.
        unsafe {
            let [y, mean, rstd] = outputs;
            let (y, mean, rstd) =
                (y.part(wide.clone()).write(), mean.part(r.clone()).write(), rstd.part(r).write());
            let x = cx.input(0).data.part(wide.clone()).read();
            if add {
                let residual = cx.input(1).data.part(wide.clone()).read();
                let sum = cx.output(0).data.part(wide).write();
                kernels::add_layer_norm(x, residual, gamma, beta, eps, sum, y, mean, rstd);
            } else {
                kernels::layer_norm(x, gamma, beta, eps, y, mean, rstd);
            }
        }
    });
}
