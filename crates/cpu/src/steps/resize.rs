//! Resizing, and going back through it: columns of a row's neighbours first, then along the row.
//!
//! Legend: h and w height and width, C channels.

use super::Context;
use crate::kernels::{self, Axis, Float, Taps};
use crate::memory::View;
use graph::Shape;
use graph::op::Sampling;

/// The two axes between an image and its resized form.
fn axes(image: &Shape, resized: &Shape, sampling: Sampling) -> [Axis; 2] {
    [1, 2].map(|axis| Axis { sampling, len: image.0[axis], out: resized.0[axis] })
}

/// Bytes of the tables of an axis: entries, then weights.
fn table_bytes(axis: Axis, width: usize) -> (usize, usize) {
    let entries = (axis.len.max(axis.out) + 1) * size_of::<[u32; 2]>();
    (entries.next_multiple_of(64), (axis.most_weights() * width).next_multiple_of(64))
}

/// Bytes of scratch: the tables of both axes, and a row as wide as the input for each thread.
pub fn scratch<T: Float>(x: &Shape, y: &Shape, sampling: Sampling, backward: bool, threads: usize) -> usize {
    let (image, resized) = if backward { (y, x) } else { (x, y) };
    let tables = axes(image, resized, sampling).map(|axis| table_bytes(axis, size_of::<T>()));
    let row = x.0[2] * x.0[3] * size_of::<T>();
    tables.into_iter().map(|(entries, weights)| entries + weights).sum::<usize>()
        + row.next_multiple_of(64) * threads
}

/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn resize<T: Float>(cx: &Context<'_, T>, sampling: Sampling, backward: bool) {
    let (x, y) = (cx.input(0), cx.output(0));
    let (image, resized) = if backward { (&y.shape, &x.shape) } else { (&x.shape, &y.shape) };
    let scratch: View<u8> = cx.scratch();
    let mut at = 0;
    let [down, across] = axes(image, resized, sampling).map(|axis| {
        let (entries, weights) = table_bytes(axis, size_of::<T>());
        let views = (scratch.part(at..at + entries), scratch.part(at + entries..at + entries + weights));
        at += entries + weights;
        Table { axis, backward, views }
    });
    // SAFETY: each table has bytes of its own.
    cx.shared(2, |which, _| unsafe { if which == 0 { &down } else { &across }.fill::<T>() });
    let rows = scratch.part(at..scratch.len());
    let ([_, h, w, c], [_, oh, ow, _]) = (of(&x.shape), of(&y.shape));
    let row_bytes = (w * c * size_of::<T>()).next_multiple_of(64);
    let larger = if h * w > oh * ow { &x.shape } else { &y.shape };
    cx.by_sample_pieces(larger, oh, |piece, thread| {
        let (image, oy) = (piece / oh, piece % oh);
        // SAFETY: the tables are done.
        let (down, across): (Taps<'_, T>, Taps<'_, T>) = unsafe { (down.read(), across.read()) };
        let mixed: View<T> = rows.part(thread * row_bytes..(thread + 1) * row_bytes).cast(w * c);
        // SAFETY: each thread has a row of its own, pieces don't overlap, and x is only read.
        let (mixed, out) =
            unsafe { (mixed.write(), y.data.part(piece * ow * c..(piece + 1) * ow * c).write()) };
        let (first, weights) = down.of(oy);
        if weights.is_empty() {
            return out.fill(T::ZERO);
        }
        for (i, weight) in weights.iter().enumerate() {
            let row = (image * h + first + i) * w * c;
            // SAFETY: x is only read.
            kernels::weigh(unsafe { x.data.part(row..row + w * c).read() }, *weight, i > 0, mixed);
        }
        across.along(mixed, c, out);
    });
}

fn of(shape: &Shape) -> [usize; 4] {
    shape.axes()
}

/// The taps of an axis, in the scratch.
struct Table {
    axis: Axis,
    backward: bool,
    /// Entries and weights.
    views: (View<u8>, View<u8>),
}

impl Table {
    fn views<T>(&self) -> (View<[u32; 2]>, View<T>) {
        (self.views.0.cast(self.axis.len.max(self.axis.out) + 1), self.views.1.cast(self.axis.most_weights()))
    }

    /// # Safety
    /// Nobody else touches the table meanwhile.
    unsafe fn fill<T: Float>(&self) {
        let (entries, weights) = self.views::<T>();
        // SAFETY: passed on to the caller.
        let (entries, weights) = unsafe { (entries.write(), weights.write()) };
        if self.backward {
            Taps::backward(self.axis, entries, weights);
        } else {
            Taps::forward(self.axis, entries, weights);
        }
    }

    /// # Safety
    /// The table was filled, and nobody writes it while the result lives.
    unsafe fn read<'a, T: Float>(&self) -> Taps<'a, T> {
        let (entries, weights) = self.views::<T>();
        let results = if self.backward { self.axis.len } else { self.axis.out };
        // SAFETY: passed on to the caller.
        unsafe { Taps::of_tables(results, entries.read(), weights.read()) }
    }
}
