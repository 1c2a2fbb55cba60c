//! Ops that treat elements or rows alone.

use super::{Context, PIECE, row_piece};
use crate::kernels::{self, Float};
use crate::memory::View;

/// Runs `task` on pieces of views of equal length.
fn elementwise<T: Float>(cx: &Context<'_, T>, len: usize, task: impl Fn(std::ops::Range<usize>) + Sync) {
    cx.pool.ranges(len, PIECE, |range, _| task(range));
}

/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn copy<T: Float>(cx: &Context<'_, T>) {
    let (from, to) = (cx.input(0).data, cx.output(0).data);
    elementwise(cx, to.len(), |r| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (from, to) = unsafe { (from.part(r.clone()).read(), to.part(r).write()) };
        to.copy_from_slice(from);
    });
}

pub unsafe fn seed<T: Float>(cx: &Context<'_, T>) {
    // SAFETY: the only access to the output.
    unsafe { cx.output(0).data.write() }.fill(T::ONE);
}

pub unsafe fn gelu<T: Float>(cx: &Context<'_, T>) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    elementwise(cx, y.len(), |r| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) = unsafe { (x.part(r.clone()).read(), y.part(r).write()) };
        kernels::gelu(x, y);
    });
}

pub unsafe fn add<T: Float>(cx: &Context<'_, T>) {
    let (a, b, y) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    elementwise(cx, y.len(), |r| {
        // SAFETY: pieces don't overlap, and inputs and output don't either.
        let (a, b, y) = unsafe { (a.part(r.clone()).read(), b.part(r.clone()).read(), y.part(r).write()) };
        kernels::add(a, b, y);
    });
}

pub unsafe fn scale<T: Float>(cx: &Context<'_, T>, factor: f64) {
    let (x, y) = (cx.input(0).data, cx.output(0).data);
    elementwise(cx, y.len(), |r| {
        // SAFETY: pieces don't overlap, and input and output don't either.
        let (x, y) = unsafe { (x.part(r.clone()).read(), y.part(r).write()) };
        kernels::scale(x, T::from_f64(factor), y);
    });
}

/// The first micro-step overwrites, the others add.
pub unsafe fn accumulate<T: Float>(cx: &Context<'_, T>) {
    let (so_far, x, sum) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    elementwise(cx, sum.len(), |r| {
        // SAFETY: pieces don't overlap; `x` and `sum` don't either.
        let (x, sum_part) = unsafe { (x.part(r.clone()).read(), sum.part(r.clone()).write()) };
        if !cx.header.accumulate {
            sum_part.copy_from_slice(x);
            return;
        }
        if !so_far.same_place(&sum) {
            // SAFETY: in another place, so not covered by `sum_part`.
            sum_part.copy_from_slice(unsafe { so_far.part(r).read() });
        }
        kernels::add_assign(sum_part, x);
    });
}

pub unsafe fn layer_norm<T: Float>(cx: &Context<'_, T>, eps: f64, add: bool) {
    let cols = cx.input(0).shape.last();
    let rows = cx.input(0).shape.rows();
    let first = usize::from(add);
    // SAFETY: parameters are only read.
    let (gamma, beta) = unsafe { (cx.input(first + 1).data.read(), cx.input(first + 2).data.read()) };
    let outputs = [0, 1, 2].map(|i| cx.output(first + i).data);
    cx.pool.ranges(rows, row_piece(cols), |r, _| {
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

/// Logits, labels and weights of a batch.
struct Batch<'a, T> {
    logits: &'a [T],
    labels: &'a [i32],
    weights: &'a [T],
    classes: usize,
}

impl<'a, T: Float> Batch<'a, T> {
    /// # Safety
    /// The three are only read while the batch lives.
    unsafe fn of(cx: &'a Context<'_, T>) -> Self {
        let (logits, labels, weights) = (cx.input(0), cx.input(1).ints, cx.input(2).data);
        // SAFETY: passed on to the caller.
        let (labels, weights) = unsafe { (labels.read(), weights.read()) };
        // SAFETY: as above.
        Batch { logits: unsafe { logits.data.read() }, labels, weights, classes: logits.shape.last() }
    }

    /// Samples that count: (index, logits, label, weight).
    fn weighed(&self) -> impl Iterator<Item = (usize, &'a [T], usize, f64)> {
        let rows = self.logits.chunks_exact(self.classes).zip(self.labels).zip(self.weights).enumerate();
        rows.map(|(i, ((row, label), weight))| (i, row, *label as usize, weight.to_f64()))
            .filter(|(_, _, _, weight)| *weight != 0.0)
    }
}

pub unsafe fn cross_entropy<T: Float>(cx: &Context<'_, T>, smoothing: f64) {
    // SAFETY: inputs are only read.
    let batch = unsafe { Batch::of(cx) };
    let mut stats = [0.0; 4];
    for (_, row, label, weight) in batch.weighed() {
        let (loss, rank) = kernels::cross_entropy_row(row, label, smoothing);
        let hit = |best: usize| f64::from(u8::from(rank < best));
        let sample = [loss, 1.0, hit(1), hit(5)];
        stats.iter_mut().zip(sample).for_each(|(sum, x)| *sum += weight * x);
    }
    let write = |out: View<T>, values: &[f64]| {
        // SAFETY: the only access to the outputs.
        let out = unsafe { out.write() };
        out.iter_mut().zip(values).for_each(|(out, value)| *out = T::from_f64(*value));
    };
    write(cx.output(0).data, &[stats[0] / cx.header.nominal]);
    write(cx.output(1).data, &stats);
}

pub unsafe fn cross_entropy_grad<T: Float>(cx: &Context<'_, T>, smoothing: f64) {
    // SAFETY: inputs are only read; the output is written here alone.
    let (batch, dloss, dlogits) =
        unsafe { (Batch::of(cx), cx.input(3).data.read(), cx.output(0).data.write()) };
    dlogits.fill(T::ZERO);
    for (i, row, label, weight) in batch.weighed() {
        let scale = dloss[0].to_f64() * weight / cx.header.nominal;
        let out = &mut dlogits[i * batch.classes..(i + 1) * batch.classes];
        kernels::cross_entropy_grad_row(row, label, smoothing, scale, out);
    }
}
