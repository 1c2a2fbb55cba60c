//! Ops that sum over rows. Rows are cut into a fixed number of parts, each part sums into a row of the scratch, and
//! the parts are added in order, so that the result depends on the shapes alone.

use super::Context;
use super::random::{by_sample, path_factor};
use crate::executor::Operand;
use crate::kernels::{self, Float};
use crate::memory::View;
use graph::Shape;
use graph::op::PathDrop;

/// Parts that rows are cut into.
const PARTS: usize = 16;

/// Rows in a part; small arrays are one part.
fn part_rows(rows: usize, cols: usize) -> usize {
    rows.div_ceil(PARTS).max(4096 / cols.max(1)).max(1)
}

/// Elements of scratch for the partial sums of one column-wise reduction over a value of `shape`.
pub fn partial_elements(shape: &Shape) -> usize {
    let (rows, cols) = (shape.rows(), shape.last());
    rows.div_ceil(part_rows(rows, cols)) * cols
}

/// Runs `task(rows, partial sums)` on every part; the partial sums start at zero.
fn by_parts<T: Float>(
    cx: &Context<'_, T>,
    (rows, cols): (usize, usize),
    width: usize,
    task: impl Fn(std::ops::Range<usize>, &mut [T]) + Sync,
) {
    let partials: View<T> = cx.scratch();
    let size = part_rows(rows, cols);
    cx.pool.ranges(rows, size, |range, _| {
        let part = range.start / size;
        // SAFETY: each part has a row of the scratch for itself.
        let partial = unsafe { partials.part(part * width..(part + 1) * width).write() };
        partial.fill(T::ZERO);
        task(range, partial);
    });
}

/// Adds the partial sums in order into `out`, on top of `start` if there is one.
unsafe fn join<T: Float>(
    cx: &Context<'_, T>,
    rows: usize,
    cols: usize,
    width: usize,
    columns: std::ops::Range<usize>,
    out: View<T>,
    start: Option<View<T>>,
) {
    let parts = rows.div_ceil(part_rows(rows, cols));
    let partials: View<T> = cx.scratch();
    // SAFETY: the parts are done, and `out` is this step's own.
    let out_slice = unsafe { out.write() };
    match start {
        None => out_slice.fill(T::ZERO),
        Some(start) if start.same_place(&out) => {}
        // SAFETY: an input in another place, only read.
        Some(start) => out_slice.copy_from_slice(unsafe { start.read() }),
    }
    for part in 0..parts {
        let row = part * width + columns.start..part * width + columns.end;
        // SAFETY: the parts are done.
        kernels::add_assign(out_slice, unsafe { partials.part(row).read() });
    }
}

/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn column_sum<T: Float>(cx: &Context<'_, T>, accumulate: bool) {
    let start = (accumulate && cx.header.accumulate).then(|| cx.input(1).data);
    // SAFETY: passed on to the caller.
    unsafe { column_sums(cx, cx.input(0), cx.output(0).data, start) };
}

/// out = start + the sum over the rows of x, which nobody writes meanwhile. Takes the scratch from its beginning.
pub unsafe fn column_sums<T: Float>(
    cx: &Context<'_, T>,
    x: &Operand<T>,
    out: View<T>,
    start: Option<View<T>>,
) {
    let (rows, cols) = (x.shape.rows(), x.shape.last());
    by_parts(cx, (rows, cols), cols, |r, partial| {
        // SAFETY: x is only read.
        kernels::column_sum(unsafe { x.data.part(r.start * cols..r.end * cols).read() }, cols, partial);
    });
    // SAFETY: passed on to the caller.
    unsafe { join(cx, rows, cols, cols, 0..cols, out, start) };
}

pub unsafe fn gelu_grad<T: Float>(cx: &Context<'_, T>, bias: bool) {
    let (pre, dy, dx) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    if !bias {
        return cx.pool.ranges(dx.len(), super::PIECE, |r, _| {
            // SAFETY: pieces don't overlap, and inputs and output don't either.
            let (pre, dy) = unsafe { (pre.part(r.clone()).read(), dy.part(r.clone()).read()) };
            // SAFETY: as above.
            kernels::gelu_grad(pre, dy, unsafe { dx.part(r).write() });
        });
    }
    by_parts(cx, (rows, cols), cols, |r, partial| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: parts don't overlap, and inputs and output don't either.
        let (pre, dy) = unsafe { (pre.part(wide.clone()).read(), dy.part(wide.clone()).read()) };
        // SAFETY: as above.
        kernels::gelu_grad_bias(pre, dy, unsafe { dx.part(wide).write() }, cols, partial);
    });
    // SAFETY: passed on to the caller.
    unsafe { join(cx, rows, cols, cols, 0..cols, cx.output(1).data, None) };
}

pub unsafe fn layer_norm_grad<T: Float>(cx: &Context<'_, T>, add: bool, sum: bool) {
    let width = cx.input(0).shape.last() * if sum { 3 } else { 2 };
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    // SAFETY: a parameter, only read.
    let gamma = unsafe { cx.input(3).data.read() };
    by_parts(cx, (rows, cols), width, |r, partial| {
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
        }
    });
    // SAFETY: passed on to the caller.
    unsafe {
        for (i, out) in cx.step.outputs[1..].iter().enumerate() {
            join(cx, rows, cols, width, i * cols..(i + 1) * cols, out.data, None);
        }
    }
}

pub unsafe fn norm_add_grad<T: Float>(cx: &Context<'_, T>, drop: Option<PathDrop>) {
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let sample_rows = rows / cx.input(0).shape.0[0].max(1);
    // SAFETY: a parameter, only read.
    let gamma = unsafe { cx.input(3).data.read() };
    by_parts(cx, (rows, cols), 2 * cols, |part, partial| {
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
    // SAFETY: passed on to the caller.
    unsafe {
        join(cx, rows, cols, 2 * cols, 0..cols, cx.output(1).data, None);
        join(cx, rows, cols, 2 * cols, cols..2 * cols, cx.output(2).data, None);
    }
}

pub unsafe fn sum_squares<T: Float>(cx: &Context<'_, T>) {
    let partials: View<f64> = cx.scratch();
    let inputs = &cx.step.inputs;
    cx.pool.each(inputs.len(), |i, _| {
        // SAFETY: inputs are only read; each has its own partial sum.
        unsafe { partials.part(i..i + 1).write()[0] = kernels::sum_squares(inputs[i].data.read()) };
    });
    // SAFETY: the partial sums are done; the output is this step's own.
    let (partials, out) = unsafe { (partials.part(0..inputs.len()).read(), cx.output(0).data.write()) };
    out[0] = T::from_f64(partials.iter().sum());
}
