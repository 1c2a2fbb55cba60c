//! The loss: a row of logits for each sample or pixel.

use super::{Context, row_piece};
use crate::kernels::{self, Float, Target};
use crate::memory::View;
use graph::Shape;
use std::ops::Range;

/// Logits, labels and weights of a batch.
struct Batch<'a, T> {
    logits: &'a [T],
    labels: &'a [i32],
    weights: &'a [T],
    /// Partners and the label's share, where samples are mixed.
    mixed: Option<(&'a [i32], &'a [T])>,
    classes: usize,
    /// Flag: rows are pixels, with one label each.
    pixels: bool,
}

impl<'a, T: Float> Batch<'a, T> {
    /// # Safety
    /// The inputs are only read while the batch lives.
    unsafe fn of(cx: &'a Context<'_, T>, mixed: bool) -> Self {
        // SAFETY: passed on to the caller.
        let (floats, ints) =
            (|i: usize| unsafe { cx.input(i).data.read() }, |i: usize| unsafe { cx.input(i).ints.read() });
        let mixed = mixed.then(|| (ints(3), floats(4)));
        let shape = &cx.input(0).shape;
        let (classes, pixels) = (shape.last(), shape.rank() > 2 && mixed.is_none());
        Batch { logits: floats(0), labels: ints(1), weights: floats(2), mixed, classes, pixels }
    }

    fn target(&self, i: usize) -> Target {
        let label = self.labels[i] as usize;
        match self.mixed {
            None => Target::plain(label),
            Some((partners, mix)) => Target { label, partner: partners[i] as usize, mix: mix[i].to_f64() },
        }
    }

    /// Rows in `range` that count: (index, logits, target, weight). The others may hold anything.
    fn weighed(&self, range: Range<usize>) -> impl Iterator<Item = (usize, &'a [T], Target, f64)> {
        range
            .map(|i| (i, self.weights[i].to_f64()))
            .filter(|(_, weight)| *weight != 0.0)
            .map(|(i, weight)| (i, &self.logits[i * self.classes..][..self.classes], self.target(i), weight))
    }

    fn rows(&self) -> usize {
        self.weights.len()
    }
}

/// Bytes of scratch: four sums for each piece.
pub fn scratch(logits: &Shape) -> usize {
    let (rows, classes) = (logits.rows(), logits.last());
    rows.div_ceil(row_piece(classes)) * size_of::<[f64; 4]>()
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn cross_entropy<T: Float>(cx: &Context<'_, T>, smoothing: f64, mixed: bool) {
    // SAFETY: inputs are only read.
    let batch = unsafe { Batch::of(cx, mixed) };
    let (sums, piece): (View<[f64; 4]>, usize) = (cx.scratch(), row_piece(batch.classes));
    cx.ranges(batch.rows(), piece, |range, _| {
        let number = range.start / piece;
        let mut stats = [0.0; 4];
        for (_, row, target, weight) in batch.weighed(range) {
            let (loss, rank) = match batch.pixels {
                true => {
                    let (loss, rank, _) = kernels::pixel_loss(row, target.label, smoothing);
                    (loss, rank)
                }
                false => kernels::cross_entropy_row(row, target, smoothing),
            };
            let hit = |best: usize| f64::from(u8::from(rank < best));
            let sample = [loss, 1.0, hit(1), hit(5)];
            stats.iter_mut().zip(sample).for_each(|(sum, x)| *sum += weight * x);
        }
        // SAFETY: each piece has sums of its own.
        unsafe { sums.part(number..number + 1).write()[0] = stats };
    });
    cx.shared(1, |_, _| {
        let mut stats = [0.0; 4];
        // SAFETY: the pieces are done.
        for of_piece in unsafe { sums.part(0..batch.rows().div_ceil(piece)).read() } {
            stats.iter_mut().zip(of_piece).for_each(|(sum, x)| *sum += x);
        }
        // SAFETY: the pieces are done.
        unsafe { write_loss(cx, stats) };
    });
}

/// Loss and statistics, from the sums over all rows.
///
/// # Safety
/// Nobody else touches the outputs.
pub unsafe fn write_loss<T: Float>(cx: &Context<'_, T>, stats: [f64; 4]) {
    let write = |out: View<T>, values: &[f64]| {
        // SAFETY: passed on to the caller.
        let out = unsafe { out.write() };
        out.iter_mut().zip(values).for_each(|(out, value)| *out = T::from_f64(*value));
    };
    write(cx.output(0).data, &[stats[0] / cx.header.nominal]);
    write(cx.output(1).data, &stats);
}

pub unsafe fn cross_entropy_grad<T: Float>(cx: &Context<'_, T>, smoothing: f64, mixed: bool) {
    let last = cx.step.inputs.len() - 1;
    // SAFETY: inputs are only read.
    let (batch, dloss) = unsafe { (Batch::of(cx, mixed), cx.input(last).data.read()) };
    let (dlogits, classes) = (cx.output(0).data, batch.classes);
    cx.ranges(batch.rows(), row_piece(classes), |range, _| {
        // SAFETY: pieces don't overlap.
        let rows = unsafe { dlogits.part(range.start * classes..range.end * classes).write() };
        rows.fill(T::ZERO);
        let start = range.start;
        for (i, row, target, weight) in batch.weighed(range) {
            let scale = dloss[0].to_f64() * weight / cx.header.nominal;
            let out = &mut rows[(i - start) * classes..(i - start + 1) * classes];
            match batch.pixels {
                true => kernels::pixel_grad(row, target.label, smoothing, scale, out),
                false => kernels::cross_entropy_grad_row(row, target, smoothing, scale, out),
            }
        }
    });
}
