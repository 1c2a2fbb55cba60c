//! Ops that sum over rows. Rows are cut into parts of blocks of samples, or if there are few into a fixed number of parts; each part sums
//! into a row of the scratch, and the parts are added in order, so that the result depends on the shapes alone.

use super::Context;
use super::blocks::Blocks;
use super::random::{by_sample, path_factor};
use crate::executor::Operand;
use crate::kernels::{self, Float};
use crate::memory::View;
use graph::Shape;
use graph::op::PathDrop;

/// Parts that rows are cut into, where they are not cut into blocks of samples.
const PARTS: usize = 16;

/// Rows in a part; small arrays are one part.
fn part_rows(rows: usize, cols: usize) -> usize {
    rows.div_ceil(PARTS).max(4096 / cols.max(1)).max(1)
}

/// Parts that the rows of a value of `shape` are cut into.
pub fn parts(shape: &Shape) -> usize {
    let (rows, cols) = (shape.rows(), shape.last());
    Blocks::of(shape).map_or_else(|| rows.div_ceil(part_rows(rows, cols)), |blocks| blocks.all_parts())
}

/// Elements of scratch for the partial sums of one column-wise reduction over a value of `shape`.
pub fn partial_elements(shape: &Shape) -> usize {
    parts(shape) * shape.last()
}

/// Runs `task(rows, partial sums)` on every part of the rows of a value of `shape`; the partial sums, a row of `width` for each
/// part, start at zero.
fn by_parts<T: Float>(
    cx: &Context<'_, T>,
    shape: &Shape,
    (partials, width): (View<T>, usize),
    task: impl Fn(std::ops::Range<usize>, &mut [T]) + Sync,
) {
    each_part(cx, shape, |part, rows| {
        // SAFETY: each part has a row of the scratch for itself.
        let partial = unsafe { partials.part(part * width..(part + 1) * width).write() };
        partial.fill(T::ZERO);
        task(rows, partial);
    });
}

/// The rows of a part of a value of `shape`.
pub fn rows_of_part(shape: &Shape, part: usize) -> std::ops::Range<usize> {
    let (rows, size) = (shape.rows(), part_rows(shape.rows(), shape.last()));
    let few = || part * size..((part + 1) * size).min(rows);
    Blocks::of(shape).map_or_else(few, |blocks| blocks.rows(part))
}

/// Runs `task(part, rows)` on every part of the rows of a value of `shape`.
pub fn each_part<T: Float>(
    cx: &Context<'_, T>,
    shape: &Shape,
    task: impl Fn(usize, std::ops::Range<usize>) + Sync,
) {
    let task = |part: usize, _| task(part, rows_of_part(shape, part));
    match Blocks::of(shape) {
        Some(blocks) => cx.by_block(blocks, blocks.parts(), task),
        None => cx.each(parts(shape), task),
    }
}

/// Adds the partial sums of a value of `shape` in order, the columns of each of `outs` lying side by side; on top of `start` if
/// there is one.
fn join<T: Float>(
    cx: &Context<'_, T>,
    shape: &Shape,
    partials: View<T>,
    outs: &[Operand<T>],
    start: Option<View<T>>,
) {
    let (parts, cols) = (parts(shape), shape.last());
    let width = outs.len() * cols;
    cx.shared(outs.len(), |i, _| {
        let out = outs[i].data;
        // SAFETY: the parts are done, and `out` is this step's own.
        let out_slice = unsafe { out.write() };
        match start {
            None => out_slice.fill(T::ZERO),
            Some(start) if start.same_place(&out) => {}
            // SAFETY: an input in another place, only read.
            Some(start) => out_slice.copy_from_slice(unsafe { start.read() }),
        }
        for part in 0..parts {
            let at = part * width + i * cols;
            // SAFETY: the parts are done.
            kernels::add_assign(out_slice, unsafe { partials.part(at..at + cols).read() });
        }
    });
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn column_sum<T: Float>(cx: &Context<'_, T>, accumulate: bool) {
    let start = accumulate.then(|| cx.input(1).data);
    // SAFETY: passed on to the caller.
    unsafe { column_sums(cx, cx.input(0), cx.scratch(), &cx.step.outputs[..1], start) };
}

/// out = start + the sum over the rows of x, which nobody writes meanwhile. Partial sums go to the scratch given.
pub unsafe fn column_sums<T: Float>(
    cx: &Context<'_, T>,
    x: &Operand<T>,
    partials: View<T>,
    out: &[Operand<T>],
    start: Option<View<T>>,
) {
    let cols = x.shape.last();
    by_parts(cx, &x.shape, (partials, cols), |r, partial| {
        // SAFETY: x is only read.
        kernels::column_sum(unsafe { x.data.part(r.start * cols..r.end * cols).read() }, cols, partial);
    });
    join(cx, &x.shape, partials, out, start);
}

pub unsafe fn gelu_grad<T: Float>(cx: &Context<'_, T>, bias: bool) {
    let (pre, dy, dx) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    if !bias {
        return cx.by_rows(shape, super::row_piece(cols), |r, _| {
            let wide = r.start * cols..r.end * cols;
            // SAFETY: pieces don't overlap, and inputs and output don't either.
            let (pre, dy) = unsafe { (pre.part(wide.clone()).read(), dy.part(wide.clone()).read()) };
            // SAFETY: as above.
            kernels::gelu_grad(pre, dy, unsafe { dx.part(wide).write() });
        });
    }
    by_parts(cx, shape, (cx.scratch(), cols), |r, partial| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: parts don't overlap, and inputs and output don't either.
        let (pre, dy) = unsafe { (pre.part(wide.clone()).read(), dy.part(wide.clone()).read()) };
        // SAFETY: as above.
        kernels::gelu_grad_bias(pre, dy, unsafe { dx.part(wide).write() }, cols, partial);
    });
    join(cx, shape, cx.scratch(), &cx.step.outputs[1..2], None);
}

pub unsafe fn layer_scale_grad<T: Float>(cx: &Context<'_, T>, sum: bool) {
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    // SAFETY: a parameter, only read.
    let gamma = unsafe { cx.input(1).data.read() };
    by_parts(cx, shape, (cx.scratch(), (cx.step.outputs.len() - 1) * cols), |r, partial| {
        let wide = r.start * cols..r.end * cols;
        let (dgamma, dx_sum) = partial.split_at_mut(cols);
        // SAFETY: parts don't overlap, and inputs and output don't either.
        unsafe {
            let of = |i: usize| cx.input(i).data.part(wide.clone()).read();
            let dx = cx.output(0).data.part(wide.clone()).write();
            kernels::layer_scale_grad(of(0), gamma, of(2), dx, dgamma);
            if sum {
                kernels::column_sum(dx, cols, dx_sum);
            }
        }
    });
    join(cx, shape, cx.scratch(), &cx.step.outputs[1..], None);
}

pub unsafe fn swiglu_grad<T: Float>(cx: &Context<'_, T>, sum: bool) {
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    let task = |r: std::ops::Range<usize>| {
        let (wide, half) = (r.start * cols..r.end * cols, r.start * cols / 2..r.end * cols / 2);
        // SAFETY: pieces don't overlap, and inputs and output don't either.
        unsafe {
            let dx = cx.output(0).data.part(wide.clone()).write();
            let (x, dy) = (cx.input(0).data.part(wide).read(), cx.input(1).data.part(half).read());
            kernels::swiglu_grad(x, cols / 2, dy, dx);
            &*dx
        }
    };
    if !sum {
        return cx.by_rows(shape, super::row_piece(cols), |r, _| {
            task(r);
        });
    }
    by_parts(cx, shape, (cx.scratch(), cols), |r, partial| kernels::column_sum(task(r), cols, partial));
    join(cx, shape, cx.scratch(), &cx.step.outputs[1..2], None);
}

pub unsafe fn layer_norm_grad<T: Float>(cx: &Context<'_, T>, add: bool, sum: bool) {
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    // SAFETY: a parameter, only read.
    let gamma = unsafe { cx.input(3).data.read() };
    let sums = 1..3 + usize::from(sum);
    by_parts(cx, shape, (cx.scratch(), sums.len() * cols), |r, partial| {
        let wide = r.start * cols..r.end * cols;
        let (dgamma, rest) = partial.split_at_mut(cols);
        let (dbeta, dx_sum) = rest.split_at_mut(cols);
        // SAFETY: parts don't overlap, and inputs and output don't either.
        unsafe {
            let of_rows = |i: usize| cx.input(i).data.part(r.clone()).read();
            let of_wide = |i: usize| cx.input(i).data.part(wide.clone()).read();
            let extra = add.then(|| of_wide(5));
            let dx = cx.output(0).data.part(wide.clone()).write();
            let (x, mean, rstd, dy) = (of_wide(0), of_rows(1), of_rows(2), of_wide(4));
            kernels::layer_norm_grad(x, mean, rstd, gamma, dy, extra, dx, dgamma, dbeta);
            if sum {
                kernels::column_sum(dx, cols, dx_sum);
            }
            if let Some(again) = cx.step.outputs.get(sums.end) {
                again.data.part(wide.clone()).write().copy_from_slice(dx);
            }
        }
    });
    join(cx, shape, cx.scratch(), &cx.step.outputs[sums], None);
}

pub unsafe fn norm_add_grad<T: Float>(cx: &Context<'_, T>, drop: Option<PathDrop>) {
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    let sample_rows = shape.rows() / shape.0[0].max(1);
    // SAFETY: a parameter, only read.
    let gamma = unsafe { cx.input(3).data.read() };
    by_parts(cx, shape, (cx.scratch(), 2 * cols), |part, partial| {
        let (dgamma, dbeta) = partial.split_at_mut(cols);
        for (b, r) in by_sample(part, sample_rows) {
            let wide = r.start * cols..r.end * cols;
            let factor = path_factor(cx.header, drop, b);
            // SAFETY: parts don't overlap, and inputs and output don't either.
            unsafe {
                let of_rows = |i: usize| cx.input(i).data.part(r.clone()).read();
                let of_wide = |i: usize| cx.input(i).data.part(wide.clone()).read();
                let dy = cx.output(0).data.part(wide.clone()).write();
                let (y, mean, rstd, dout) = (of_wide(0), of_rows(1), of_rows(2), of_wide(4));
                kernels::norm_add_grad(y, mean, rstd, gamma, dout, factor, dy, dgamma, dbeta);
            }
        }
    });
    join(cx, shape, cx.scratch(), &cx.step.outputs[1..], None);
}
