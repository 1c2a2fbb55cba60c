//! Batch norm: moments of parts of the rows, joined in order; what is the same for all rows is computed once, in double
//! precision.
//!
//! Legend: C channels.

use super::{Context, reduce, row_piece};
use crate::kernels::{self, Float, Moments};
use crate::memory::View;
use graph::Shape;
use std::ops::Range;

/// Doubles of scratch for sums over the rows of a value, and of what goes before them: see [`coefficients`].
pub fn sums_scratch(shape: &Shape) -> usize {
    (reduce::parts(shape) * 4 + COEFFICIENTS) * shape.last()
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
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    let scratch: View<f64> = cx.scratch();
    let sums = scratch.part(COEFFICIENTS * cols..scratch.len());
    reduce::each_part(cx, shape, |part, range| {
        let own = sums.part(part * 4 * cols..(part + 1) * 4 * cols);
        let block: View<T> = own.part(2 * cols..4 * cols).cast(2 * cols);
        // SAFETY: each part has its own sums and block, and the two don't overlap.
        let (own, block) = unsafe { (own.part(0..2 * cols).write(), block.write()) };
        own.fill(0.0);
        let (first, second) = own.split_at_mut(cols);
        task(range, first, second, block);
    });
    (sums, reduce::parts(shape))
}

/// Channels that a piece of what is computed for each channel has.
const CHANNELS: usize = 64;

/// Runs `task` on every channel, once the parts are done.
fn by_channel<T: Float>(cx: &Context<'_, T>, cols: usize, task: impl Fn(usize) + Sync) {
    cx.shared(cols.div_ceil(CHANNELS), |piece, _| {
        (piece * CHANNELS..((piece + 1) * CHANNELS).min(cols)).for_each(&task);
    });
}

/// (3,C): mean, Σ (x-mean)², count.
///
/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn moments<T: Float>(cx: &Context<'_, T>) {
    let (x, shape, cols) = (cx.input(0).data, &cx.input(0).shape, cx.input(0).shape.last());
    // Each part leaves its own moments where its sums were.
    let (parts, count) = by_parts(cx, |r, sums, squares, block| {
        if r.is_empty() {
            return;
        }
        let count = r.len() as f64;
        // SAFETY: the input is only read.
        let x = unsafe { x.part(r.start * cols..r.end * cols).read() };
        kernels::shifted_sums(x, &x[..cols], sums, squares, block);
        for ((sum, squares), first) in sums.iter_mut().zip(squares).zip(x) {
            *squares -= *sum * *sum / count;
            *sum = first.to_f64() + *sum / count;
        }
    });
    by_channel(cx, cols, |c| {
        let of_part = |part: usize| {
            // SAFETY: the parts are done.
            let value = |row: usize| unsafe { parts.read()[(part * 4 + row) * cols + c] };
            let count = reduce::rows_of_part(shape, part).len() as f64;
            Moments { mean: value(0), squares: value(1), count }
        };
        let joined = (0..count).map(of_part).fold(Moments::default(), Moments::join);
        // SAFETY: each channel has elements of its own.
        unsafe { write_moments(cx.output(0).data, cols, c, joined) };
    });
}

/// # Safety
/// Nobody else touches the elements of this channel.
unsafe fn write_moments<T: Float>(out: View<T>, cols: usize, c: usize, moments: Moments) {
    let Moments { mean, squares, count } = moments;
    // Rounding may leave a little less than nothing of a column that is constant; NaN stays NaN.
    let squares = if squares < 0.0 { 0.0 } else { squares };
    for (row, value) in [mean, squares, count].into_iter().enumerate() {
        // SAFETY: passed on to the caller.
        unsafe { put(out, row * cols + c, value) };
    }
}

/// # Safety
/// Nobody else touches this element.
unsafe fn put<T: Float>(out: View<T>, at: usize, value: f64) {
    // SAFETY: passed on to the caller.
    unsafe { out.part(at..at + 1).write()[0] = T::from_f64(value) };
}

fn read_moments<T: Float>(rows: &[T], cols: usize, c: usize) -> Moments {
    let value = |row: usize| rows[row * cols + c].to_f64();
    Moments { mean: value(0), squares: value(1), count: value(2) }
}

/// Joins the moments of all ranks, in their order.
pub unsafe fn join_moments<T: Float>(cx: &Context<'_, T>) {
    let cols = cx.input(0).shape.last();
    by_channel(cx, cols, |c| {
        // SAFETY: the input is only read.
        let parts = unsafe { cx.input(0).data.read() }.chunks_exact(3 * cols);
        let joined = parts.map(|part| read_moments(part, cols, c)).fold(Moments::default(), Moments::join);
        // SAFETY: each channel has elements of its own.
        unsafe { write_moments(cx.output(0).data, cols, c, joined) };
    });
}

/// Coefficients that are the same for all rows.
#[derive(Clone, Copy)]
struct Coefficients<'a, T> {
    mean: &'a [T],
    /// γ/σ
    scale: &'a [T],
    /// β
    shift: &'a [T],
    /// Coefficients of the gradient: Σ dy / count, and Σ dy·x̂ / count / σ.
    of_sum: &'a [T],
    of_product: &'a [T],
}

impl<'a, T: Float> Coefficients<'a, T> {
    /// Coefficients that [`coefficients`] left in the scratch.
    ///
    /// # Safety
    /// They are done, and nobody writes them while the result lives.
    unsafe fn read(cx: &Context<'_, T>) -> Self {
        let cols = cx.input(0).shape.last();
        // SAFETY: passed on to the caller.
        let row = |i: usize| unsafe { coefficient_rows(cx).part(i * cols..(i + 1) * cols).read() };
        Coefficients { mean: row(0), scale: row(1), shift: row(2), of_sum: row(3), of_product: row(4) }
    }
}

fn coefficient_rows<T: Float>(cx: &Context<'_, T>) -> View<T> {
    let len = COEFFICIENTS * cx.input(0).shape.last();
    cx.scratch::<f64>().part(0..len).cast(len)
}

/// Makes them, from moments and parameters, and for the gradient from its sums too.
fn coefficients<T: Float>(cx: &Context<'_, T>, (eps, running): (f64, bool), sums: Option<View<T>>) {
    let (cols, rows) = (cx.input(0).shape.last(), coefficient_rows(cx));
    by_channel(cx, cols, |c| {
        // SAFETY: inputs are only read.
        let [moments, gamma, beta] = [1, 2, 3].map(|i| unsafe { cx.input(i).data.read() });
        let Moments { mean, squares, count } = read_moments(moments, cols, c);
        let variance = if running { squares } else { squares / count };
        let rstd = 1.0 / (variance + eps).sqrt();
        let (of_sum, of_product) = match sums {
            Some(sums) => {
                // SAFETY: an input, only read.
                let sums = unsafe { sums.read() };
                (sums[c].to_f64() / count, sums[cols + c].to_f64() / count * rstd)
            }
            None => (0.0, 0.0),
        };
        let values = [mean, gamma[c].to_f64() * rstd, beta[c].to_f64(), of_sum, of_product];
        for (row, value) in values.into_iter().enumerate() {
            // SAFETY: each channel has elements of its own.
            unsafe { put(rows, row * cols + c, value) };
        }
    });
}

pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, eps: f64, relu: bool, running: bool) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    coefficients(cx, (eps, running), None);
    cx.by_rows(shape, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: the coefficients are done; pieces don't overlap, and input and output don't either.
        let (Coefficients { mean, scale, shift, .. }, x, y) =
            unsafe { (Coefficients::read(cx), x.part(wide.clone()).read(), y.part(wide).write()) };
        kernels::batch_norm(x, mean, scale, shift, relu, y);
    });
}

/// (2,C): Σ dy, Σ dy·x̂.
pub unsafe fn sums<T: Float>(cx: &Context<'_, T>, eps: f64, relu: bool) {
    let cols = cx.input(0).shape.last();
    let (x, dy) = (cx.input(0).data, cx.input(4).data);
    coefficients(cx, (eps, false), None);
    let (sums, parts) = by_parts(cx, |r, sums, products, block| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: the coefficients are done; inputs are only read.
        let (Coefficients { mean, scale, shift, .. }, x, dy) =
            unsafe { (Coefficients::read(cx), x.part(wide.clone()).read(), dy.part(wide).read()) };
        kernels::batch_norm_sums(x, dy, mean, scale, shift, relu, sums, products, block);
    });
    by_channel(cx, cols, |c| {
        // SAFETY: the parts are done; moments are only read.
        let (sums, moments) = unsafe { (sums.read(), cx.input(1).data.read()) };
        let total = |row: usize| (0..parts).map(|part| sums[(part * 4 + row) * cols + c]).sum::<f64>();
        let Moments { squares, count, .. } = read_moments(moments, cols, c);
        // SAFETY: each channel has elements of its own.
        unsafe {
            put(cx.output(0).data, c, total(0));
            put(cx.output(0).data, cols + c, total(1) / (squares / count + eps).sqrt());
        }
    });
}

pub unsafe fn grad<T: Float>(cx: &Context<'_, T>, eps: f64, relu: bool) {
    let (x, dy, dx) = (cx.input(0).data, cx.input(4).data, cx.output(0).data);
    let (shape, cols) = (&cx.input(0).shape, cx.input(0).shape.last());
    coefficients(cx, (eps, false), Some(cx.input(5).data));
    cx.by_rows(shape, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: the coefficients are done; pieces don't overlap, and inputs and output don't either.
        unsafe {
            let Coefficients { mean, scale, shift, of_sum, of_product } = Coefficients::read(cx);
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
    cx.each(1, |_, _| {
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
    });
}

/// Each value as it is to be, or as it was if the step is skipped.
pub unsafe fn commit<T: Float>(cx: &Context<'_, T>) {
    let count = cx.step.outputs.len();
    cx.each(count, |i, _| {
        // SAFETY: control is only read.
        let apply = unsafe { cx.input(0).data.read()[1].to_f64() != 0.0 };
        let from = cx.input(if apply { 1 + count + i } else { 1 + i }).data;
        let out = cx.output(i).data;
        if !from.same_place(&out) {
            // SAFETY: in different places, so apart.
            unsafe { out.write().copy_from_slice(from.read()) };
        }
    });
}
