//! Batch norm: moments of parts of the rows, joined in order; what is the same for all rows is computed once, in double
//! precision.
//!
//! Legend: C channels.

use super::{Context, row_piece};
use crate::kernels::{self, Float, Moments};
use crate::memory::View;
use graph::Shape;
use std::ops::Range;

/// Parts that rows are cut into, each with sums of its own.
const PARTS: usize = 16;

fn part_rows(rows: usize, cols: usize) -> usize {
    rows.div_ceil(PARTS).max(4096 / cols.max(1)).max(1)
}

/// Doubles of scratch for sums over the rows of a value, and of what goes before them: see [`coefficients`].
pub fn sums_scratch(shape: &Shape) -> usize {
    let (rows, cols) = (shape.rows(), shape.last());
    (rows.div_ceil(part_rows(rows, cols)) * 4 + COEFFICIENTS) * cols
}

/// Doubles of scratch for what is the same for all rows.
pub fn coefficients_scratch(shape: &Shape) -> usize {
    COEFFICIENTS * shape.last()
}

/// Rows that [`coefficients`] makes.
const COEFFICIENTS: usize = 5;

/// Runs `task(rows, sums, more sums, a block of two rows)` on every part; the sums start at zero. Returns where they lie:
/// 4·C doubles for each part, after the coefficients.
fn by_parts<T: Float>(
    cx: &Context<'_, T>,
    task: impl Fn(Range<usize>, &mut [f64], &mut [f64], &mut [T]) + Sync,
) -> (View<f64>, usize) {
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let scratch: View<f64> = cx.scratch();
    let sums = scratch.part(COEFFICIENTS * cols..scratch.len());
    let size = part_rows(rows, cols);
    cx.ranges(rows, size, |range, _| {
        let part = range.start / size;
        let own = sums.part(part * 4 * cols..(part + 1) * 4 * cols);
        let block: View<T> = own.part(2 * cols..4 * cols).cast(2 * cols);
        // SAFETY: each part has its own sums and block, and the two don't overlap.
        let (own, block) = unsafe { (own.part(0..2 * cols).write(), block.write()) };
        own.fill(0.0);
        let (first, second) = own.split_at_mut(cols);
        task(range, first, second, block);
    });
    (sums, rows.div_ceil(size))
}

/// (3,C): mean, Σ (x-mean)², count.
///
/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn moments<T: Float>(cx: &Context<'_, T>) {
    let (x, rows, cols) = (cx.input(0).data, cx.input(0).shape.rows(), cx.input(0).shape.last());
    let (sums, parts) = by_parts(cx, |r, sums, squares, block| {
        // SAFETY: the input is only read.
        let x = unsafe { x.part(r.start * cols..r.end * cols).read() };
        kernels::shifted_sums(x, &x[..cols], sums, squares, block);
    });
    let size = part_rows(rows, cols);
    // SAFETY: the parts are done; the output is this step's own.
    let (sums, x, out) = unsafe { (sums.read(), x.read(), cx.output(0).data.write()) };
    for c in 0..cols {
        let of_part = |part: usize| {
            let (first, count) = (part * size, (size.min(rows - part * size)) as f64);
            let (sum, squares) = (sums[part * 4 * cols + c], sums[part * 4 * cols + cols + c]);
            let mean = x[first * cols + c].to_f64() + sum / count;
            Moments { mean, squares: squares - sum * sum / count, count }
        };
        write_moments(out, c, (0..parts).map(of_part).fold(Moments::default(), Moments::join));
    }
}

fn write_moments<T: Float>(out: &mut [T], c: usize, Moments { mean, squares, count }: Moments) {
    let cols = out.len() / 3;
    // Rounding may leave a little less than nothing of a column that is constant; NaN stays NaN.
    let squares = if squares < 0.0 { 0.0 } else { squares };
    for (row, value) in [mean, squares, count].into_iter().enumerate() {
        out[row * cols + c] = T::from_f64(value);
    }
}

fn read_moments<T: Float>(rows: &[T], cols: usize, c: usize) -> Moments {
    let value = |row: usize| rows[row * cols + c].to_f64();
    Moments { mean: value(0), squares: value(1), count: value(2) }
}

/// Of all ranks, in their order.
pub unsafe fn join_moments<T: Float>(cx: &Context<'_, T>) {
    let cols = cx.input(0).shape.last();
    // SAFETY: the input is only read; the output is this step's own.
    let (parts, out) = unsafe { (cx.input(0).data.read(), cx.output(0).data.write()) };
    for c in 0..cols {
        let parts = parts.chunks_exact(3 * cols).map(|part| read_moments(part, cols, c));
        write_moments(out, c, parts.fold(Moments::default(), Moments::join));
    }
}

/// What is the same for all rows, a row each.
struct Coefficients<'a, T> {
    mean: &'a [T],
    /// γ/σ
    scale: &'a [T],
    /// β
    shift: &'a [T],
    /// Of the gradient: Σ dy / count, and Σ dy·x̂ / count / σ.
    of_sum: &'a [T],
    of_product: &'a [T],
}

/// From moments and parameters, and for the gradient from its sums too.
///
/// # Safety
/// Inputs are only read and the scratch's first doubles are touched by nobody else while the result lives.
unsafe fn coefficients<'a, T: Float>(
    cx: &Context<'_, T>,
    (eps, running): (f64, bool),
    sums: Option<View<T>>,
) -> Coefficients<'a, T> {
    let cols = cx.input(0).shape.last();
    let scratch: View<f64> = cx.scratch();
    let rows: View<T> = scratch.part(0..COEFFICIENTS * cols).cast(COEFFICIENTS * cols);
    // SAFETY: passed on to the caller.
    let (rows, moments, gamma, beta, sums) = unsafe {
        let input = |i: usize| cx.input(i).data.read();
        (rows.write(), input(1), input(2), input(3), sums.map(|view| view.read()))
    };
    for c in 0..cols {
        let Moments { mean, squares, count } = read_moments(moments, cols, c);
        let variance = if running { squares } else { squares / count };
        let rstd = 1.0 / (variance + eps).sqrt();
        let (of_sum, of_product) = match sums {
            Some(sums) => (sums[c].to_f64() / count, sums[cols + c].to_f64() / count * rstd),
            None => (0.0, 0.0),
        };
        let values = [mean, gamma[c].to_f64() * rstd, beta[c].to_f64(), of_sum, of_product];
        for (row, value) in values.into_iter().enumerate() {
            rows[row * cols + c] = T::from_f64(value);
        }
    }
    let row = |i: usize| &rows[i * cols..(i + 1) * cols];
    Coefficients { mean: row(0), scale: row(1), shift: row(2), of_sum: row(3), of_product: row(4) }
}

pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, eps: f64, relu: bool, running: bool) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    // SAFETY: inputs are only read, and the scratch is this step's own.
    let Coefficients { mean, scale, shift, .. } = unsafe { coefficients(cx, (eps, running), None) };
    cx.ranges(rows, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) = unsafe { (x.part(wide.clone()).read(), y.part(wide).write()) };
        kernels::batch_norm(x, mean, scale, shift, relu, y);
    });
}

/// (2,C): Σ dy, Σ dy·x̂.
pub unsafe fn sums<T: Float>(cx: &Context<'_, T>, eps: f64, relu: bool) {
    let cols = cx.input(0).shape.last();
    let (x, dy) = (cx.input(0).data, cx.input(4).data);
    // SAFETY: inputs are only read; these doubles of the scratch are for this alone.
    let Coefficients { mean, scale, shift, .. } = unsafe { coefficients(cx, (eps, false), None) };
    let (sums, parts) = by_parts(cx, |r, sums, products, block| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: inputs are only read.
        let (x, dy) = unsafe { (x.part(wide.clone()).read(), dy.part(wide).read()) };
        kernels::batch_norm_sums(x, dy, mean, scale, shift, relu, sums, products, block);
    });
    // SAFETY: the parts are done; the output is this step's own.
    let (sums, moments, out) = unsafe { (sums.read(), cx.input(1).data.read(), cx.output(0).data.write()) };
    for c in 0..cols {
        let total = |row: usize| (0..parts).map(|part| sums[(part * 4 + row) * cols + c]).sum::<f64>();
        let Moments { squares, count, .. } = read_moments(moments, cols, c);
        out[c] = T::from_f64(total(0));
        out[cols + c] = T::from_f64(total(1) / (squares / count + eps).sqrt());
    }
}

pub unsafe fn grad<T: Float>(cx: &Context<'_, T>, eps: f64, relu: bool) {
    let (x, dy, dx) = (cx.input(0).data, cx.input(4).data, cx.output(0).data);
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    // SAFETY: inputs are only read, and the scratch is this step's own.
    let Coefficients { mean, scale, shift, of_sum, of_product } =
        unsafe { coefficients(cx, (eps, false), Some(cx.input(5).data)) };
    cx.ranges(rows, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: pieces don't overlap, and inputs and output don't either.
        unsafe {
            let (x, dy) = (x.part(wide.clone()).read(), dy.part(wide.clone()).read());
            let dx = dx.part(wide).write();
            kernels::batch_norm_grad(x, dy, mean, scale, shift, relu, of_sum, of_product, dx);
        }
    });
}

/// torch's: the variance that the running one follows is the unbiased one.
pub unsafe fn running_moments<T: Float>(cx: &Context<'_, T>, momentum: f64) {
    let cols = cx.output(0).shape.last();
    let (start, out) = (cx.input(0).data, cx.output(0).data);
    if !start.same_place(&out) {
        // SAFETY: in different places, so apart.
        unsafe { out.write().copy_from_slice(start.read()) };
    }
    // SAFETY: moments are only read; the output is this step's own.
    let (moments, running) = unsafe { (cx.input(1).data.read(), out.write()) };
    for c in 0..cols {
        let Moments { mean, squares, count } = read_moments(moments, cols, c);
        let now = [mean, squares / (count - 1.0)];
        for (row, now) in now.into_iter().enumerate() {
            let value = &mut running[row * cols + c];
            *value = T::from_f64((1.0 - momentum) * value.to_f64() + momentum * now);
        }
        running[2 * cols + c] += T::ONE;
    }
}

/// Each value as it is to be, or as it was if the step is skipped.
pub unsafe fn commit<T: Float>(cx: &Context<'_, T>) {
    let count = cx.step.outputs.len();
    // SAFETY: control is only read.
    let apply = unsafe { cx.input(0).data.read()[1].to_f64() != 0.0 };
    for i in 0..count {
        let from = cx.input(if apply { 1 + count + i } else { 1 + i }).data;
        let out = cx.output(i).data;
        if !from.same_place(&out) {
            // SAFETY: in different places, so apart.
            unsafe { out.write().copy_from_slice(from.read()) };
        }
    }
}
