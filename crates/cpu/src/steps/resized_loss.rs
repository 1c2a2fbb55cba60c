//! The loss of pixels whose logits are resized on the way: a row of logits for each pixel lives in a thread's scratch.
//!
//! Legend: B batch, h and w height and width of the logits, K classes.

use super::Context;
use super::loss::write_loss;
use crate::kernels::{self, Axis, Float};
use crate::memory::View;
use graph::Shape;
use graph::op::Sampling;
use std::ops::Range;

/// Rows of logits whose gradient is one piece. What the rows of pixels between two pieces are made of is computed for both.
const BAND: usize = 8;

/// Bytes of scratch: four sums for each row of pixels, then two rows of logits for each thread.
pub fn scratch(logits: &Shape, labels: &Shape, threads: usize) -> usize {
    let rows = labels.0[0] * labels.0[1];
    rows * size_of::<[f64; 4]>() + threads * 2 * logits.last() * size_of::<f64>()
}

/// Operands of both directions.
struct Pixels<'a, T> {
    logits: &'a [T],
    labels: &'a [i32],
    weights: &'a [T],
    down: Axis,
    across: Axis,
    batch: usize,
    classes: usize,
}

/// The pixels of the logits that one result is made of along an axis, with their weights; the second may have none.
#[derive(Clone, Copy)]
struct Pair {
    first: usize,
    weights: [f64; 2],
}

impl Pair {
    fn of(axis: Axis, o: usize) -> Self {
        let (first, _, weight) = axis.sources(o);
        Pair { first, weights: [weight, 1.0 - weight] }
    }

    fn each(self) -> impl Iterator<Item = (usize, f64)> {
        let Pair { first, weights } = self;
        weights.into_iter().enumerate().filter(|(_, weight)| *weight != 0.0).map(move |(i, w)| (first + i, w))
    }
}

impl<'a, T: Float> Pixels<'a, T> {
    /// # Safety
    /// The inputs are only read while this lives.
    unsafe fn of(cx: &'a Context<'_, T>) -> Self {
        let (logits, labels) = (&cx.input(0).shape, &cx.input(1).shape);
        let axis = |i: usize| Axis { sampling: Sampling::Bilinear, len: logits.0[i], out: labels.0[i] };
        // SAFETY: passed on to the caller.
        let (data, ints, weights) =
            unsafe { (cx.input(0).data.read(), cx.input(1).ints.read(), cx.input(2).data.read()) };
        let (down, across) = (axis(1), axis(2));
        let (batch, classes) = (logits.0[0], logits.last());
        Pixels { logits: data, labels: ints, weights, down, across, batch, classes }
    }

    /// Range of the classes of a pixel of the logits.
    fn at(&self, b: usize, row: usize, pixel: usize) -> Range<usize> {
        let start = ((b * self.down.len + row) * self.across.len + pixel) * self.classes;
        start..start + self.classes
    }

    /// The logits of a result.
    fn resize(&self, b: usize, rows: Pair, pixels: Pair, out: &mut [T]) {
        let mut add = false;
        for (row, of_row) in rows.each() {
            for (pixel, of_pixel) in pixels.each() {
                let weight = T::from_f64(of_row * of_pixel);
                kernels::weigh(&self.logits[self.at(b, row, pixel)], weight, add, out);
                add = true;
            }
        }
    }

    /// The pixels of a row of results that count: (place along the row, label, weight).
    fn weighed(&self, b: usize, o: usize) -> impl Iterator<Item = (usize, usize, f64)> {
        let start = (b * self.down.out + o) * self.across.out;
        (0..self.across.out)
            .map(move |x| (x, self.weights[start + x].to_f64()))
            .filter(|(_, weight)| *weight != 0.0)
            .map(move |(x, weight)| (x, self.labels[start + x] as usize, weight))
    }
}

/// A thread's two rows of logits.
fn rows_of<T: Float>(cx: &Context<'_, T>, labels: &Shape, classes: usize, thread: usize) -> [View<T>; 2] {
    let bytes: View<u8> = cx.scratch();
    let start = labels.0[0] * labels.0[1] * size_of::<[f64; 4]>() + thread * 2 * classes * 8;
    let rows: View<T> = bytes.part(start..start + 2 * classes * size_of::<T>()).cast(2 * classes);
    [rows.part(0..classes), rows.part(classes..2 * classes)]
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, smoothing: f64) {
    // SAFETY: inputs are only read.
    let pixels = unsafe { Pixels::of(cx) };
    let (rows, lse) = (pixels.batch * pixels.down.out, cx.output(2).data);
    let sums: View<[f64; 4]> = cx.scratch::<u8>().part(0..rows * size_of::<[f64; 4]>()).cast(rows);
    cx.each(rows, |piece, thread| {
        let (b, o, width) = (piece / pixels.down.out, piece % pixels.down.out, pixels.across.out);
        let [row, _] = rows_of(cx, &cx.input(1).shape, pixels.classes, thread);
        // SAFETY: each thread has a row of its own, and pieces don't overlap.
        let (row, lse) = unsafe { (row.write(), lse.part(piece * width..(piece + 1) * width).write()) };
        lse.fill(T::ZERO);
        let mut stats = [0.0; 4];
        for (x, label, weight) in pixels.weighed(b, o) {
            pixels.resize(b, Pair::of(pixels.down, o), Pair::of(pixels.across, x), row);
            let (loss, rank, log_sum) = kernels::pixel_loss(row, label, smoothing);
            lse[x] = T::from_f64(log_sum);
            let hit = |best: usize| f64::from(u8::from(rank < best));
            let sample = [loss, 1.0, hit(1), hit(5)];
            stats.iter_mut().zip(sample).for_each(|(sum, x)| *sum += weight * x);
        }
        // SAFETY: each piece has sums of its own.
        unsafe { sums.part(piece..piece + 1).write()[0] = stats };
    });
    cx.shared(1, |_, _| {
        let mut stats = [0.0; 4];
        // SAFETY: the pieces are done.
        for of_row in unsafe { sums.read() } {
            stats.iter_mut().zip(of_row).for_each(|(sum, x)| *sum += x);
        }
        // SAFETY: as above.
        unsafe { write_loss(cx, stats) };
    });
}

pub unsafe fn backward<T: Float>(cx: &Context<'_, T>, smoothing: f64) {
    // SAFETY: inputs are only read.
    let (pixels, dloss) = unsafe { (Pixels::of(cx), cx.input(4).data.read()) };
    let (height, row_len) = (pixels.down.len, pixels.across.len * pixels.classes);
    let (bands, dlogits) = (height.div_ceil(BAND), cx.output(0).data);
    cx.each(pixels.batch * bands, |piece, thread| {
        let (b, band) = (piece / bands, piece % bands);
        let own = band * BAND..((band + 1) * BAND).min(height);
        let start = (b * height + own.start) * row_len;
        let [row, grad] = rows_of(cx, &cx.input(1).shape, pixels.classes, thread);
        // SAFETY: each thread has rows of its own, and pieces don't overlap.
        let (row, grad, out) =
            unsafe { (row.write(), grad.write(), dlogits.part(start..start + own.len() * row_len).write()) };
        out.fill(T::ZERO);
        for o in 0..pixels.down.out {
            let rows = Pair::of(pixels.down, o);
            if !rows.each().any(|(row, _)| own.contains(&row)) {
                continue;
            }
            for (x, label, weight) in pixels.weighed(b, o) {
                let columns = Pair::of(pixels.across, x);
                pixels.resize(b, rows, columns, row);
                let scale = dloss[0].to_f64() * weight / cx.header.nominal;
                kernels::pixel_grad(row, label, smoothing, scale, grad);
                for (r, of_row) in rows.each().filter(|(row, _)| own.contains(row)) {
                    for (pixel, of_pixel) in columns.each() {
                        let at = (r - own.start) * row_len + pixel * pixels.classes;
                        let weight = T::from_f64(of_row * of_pixel);
                        kernels::weigh(grad, weight, true, &mut out[at..at + pixels.classes]);
                    }
                }
            }
        }
    });
}
