//! Convolutions, channels-last: blocks of pixels, whose windows are laid out one row a pixel, times the weight.
//!
//! Legend: P pixels of a block, K window, kh·kw·I elements; I and O input and output channels.

use super::Context;
use super::linear::{Tile, add_parts, each_run, gradient_parts, share};
use crate::kernels::{self, Float, Unfold};
use crate::matmul::{Matrix, matmul};
use crate::memory::View;
use graph::Shape;
use graph::op::Window;
use std::ops::Range;

/// Bytes that the windows of a block take at most, or about that: few enough to stay in a core's share of the cache, next to the
/// weight's.
const BLOCK_BYTES: usize = 4 << 20;

/// Pixels of a block at most: enough of them that packing the weight anew for each block costs little.
const BLOCK_PIXELS: usize = 512;

/// Blocks of pixels whose windows are laid out at once: whole, or if those of a block are too large, one row of the kernel after the
/// other.
#[derive(Clone, Copy)]
struct Cut {
    pixels: usize,
    /// Elements of a window that are laid out at once, and how many times that is done.
    len: usize,
    times: usize,
}

impl Cut {
    /// Cuts so many pixels, with windows of `rows` × `len` elements. There are at least four blocks to share out where
    /// there is work for four.
    fn of<T>(pixels: usize, (rows, len): (usize, usize)) -> Self {
        let shared = pixels.div_ceil(4).next_multiple_of(8).max(64);
        let most = BLOCK_PIXELS.min(shared);
        if most * rows * len * size_of::<T>() <= BLOCK_BYTES {
            return Cut { pixels: most, len: rows * len, times: 1 };
        }
        let fits = BLOCK_BYTES / (len * size_of::<T>()).max(1);
        Cut { pixels: fits.clamp(128, BLOCK_PIXELS).min(shared), len, times: rows }
    }

    /// Elements of the windows of a block.
    fn elements(&self) -> usize {
        self.pixels * self.len
    }
}

/// The windows of a kernel's size over a value (B,h,w,C), for each pixel of `out` one, without padding.
fn windows(value: &Shape, out: &Shape, weight: &Shape) -> Unfold {
    Unfold {
        height: value.0[1],
        width: value.0[2],
        channels: value.0[3],
        out_height: out.0[1],
        out_width: out.0[2],
        kernel: (weight.0[1], weight.0[2]),
        stride: 1,
        pad: (0, 0),
        spread: 1,
    }
}

/// The windows that `conv` has over x (B,h,w,I).
fn forward_windows(x: &Shape, y: &Shape, weight: &Shape, window: Window) -> Unfold {
    let pad = window.pad as isize;
    Unfold { stride: window.stride, pad: (pad, pad), ..windows(x, y, weight) }
}

/// The windows that a pixel of x is seen by, over dy (B,h',w',O): those of a convolution with the kernel turned round.
fn backward_windows(dy: &Shape, dx: &Shape, weight: &Shape, window: Window) -> Unfold {
    let pad = |axis: usize| weight.0[axis] as isize - 1 - window.pad as isize;
    Unfold { pad: (pad(1), pad(2)), spread: window.stride, ..windows(dy, dx, weight) }
}

/// Elements of scratch: windows of a block for each thread.
pub fn forward_scratch<T>(weight: &Shape, y: &Shape, threads: usize) -> usize {
    let [_, kh, kw, i] = weight.axes();
    Cut::of::<T>(y.rows(), (kh, kw * i)).elements() * threads
}

/// Elements of scratch: as [`forward_scratch`], and the weight turned round.
pub fn grad_x_scratch<T>(weight: &Shape, dx: &Shape, threads: usize) -> usize {
    let [o, kh, kw, _] = weight.axes();
    weight.count() + Cut::of::<T>(dx.rows(), (kh, kw * o)).elements() * threads
}

/// Elements of scratch: a gradient for each part, if there are several, and the windows of a block for each thread.
pub fn grad_w_scratch<T>(dy: &Shape, weight: &Shape, threads: usize) -> usize {
    let cut = GradientCut::of(dy.rows(), weight);
    cut.sums(weight) + threads * cut.windows::<T>()
}

/// y = windows of x · weightᵀ (+ bias).
///
/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, window: Window, bias: bool) {
    let (x, w, y) = (cx.input(0), cx.input(1), cx.output(0));
    let unfold = forward_windows(&x.shape, &y.shape, &w.shape, window);
    let (o, k) = (y.shape.last(), unfold.window_len());
    // SAFETY: a parameter, only read.
    let bias = if bias { Some(unsafe { cx.input(2).data.read() }) } else { None };
    let scratch: View<T> = cx.scratch();
    // SAFETY: x, the weight and y don't overlap, and the scratch is this step's own.
    unsafe {
        let weight = Matrix::rows(w.data.at(0), k).transposed();
        by_blocks(cx, &unfold, (x.data, &y.shape), scratch, (weight, o), y.data, |rows| {
            if let (Some(bias), false) = (bias, cx.matmuls_only) {
                kernels::add_bias(rows, bias);
            }
        });
    }
}

/// dx = windows of dy · the weight turned round.
pub unsafe fn grad_x<T: Float>(cx: &Context<'_, T>, window: Window) {
    let (dy, w, dx) = (cx.input(0), cx.input(1), cx.output(0));
    let unfold = backward_windows(&dy.shape, &dx.shape, &w.shape, window);
    let [o, kh, kw, i] = w.shape.axes();
    let scratch: View<T> = cx.scratch();
    let (turned, windows) = (scratch.part(0..o * kh * kw * i), scratch.part(o * kh * kw * i..scratch.len()));
    // (O,kh,kw,I) → (kh,kw,O,I), both axes of the kernel from the end.
    cx.shared(kh * kw, |tap, _| {
        // SAFETY: each tap has a part of the scratch for itself; the weight is only read.
        unsafe {
            let rows = turned.part(tap * o * i..(tap + 1) * o * i).write();
            for (channel, row) in rows.chunks_exact_mut(i).enumerate() {
                let from = (channel * kh * kw + kh * kw - 1 - tap) * i;
                row.copy_from_slice(w.data.part(from..from + i).read());
            }
        }
    });
    // SAFETY: dy and dx don't overlap; the two parts of the scratch don't either.
    unsafe {
        let weight = Matrix::rows(turned.at(0), i);
        by_blocks(cx, &unfold, (dy.data, &dx.shape), windows, (weight, i), dx.data, |_| {});
    }
}

/// out (pixels, n) = windows (pixels, K) · right (K, n) for the pixels of a value of a shape, block by block, each with its windows in
/// the scratch of the thread that has it; `finish` gets the rows of a block.
///
/// # Safety
/// Nobody writes the images and the right side meanwhile; `out` and the scratch are this step's own.
unsafe fn by_blocks<T: Float>(
    cx: &Context<'_, T>,
    unfold: &Unfold,
    (images, pixels): (View<T>, &Shape),
    scratch: View<T>,
    (right, n): (Matrix<T>, usize),
    out: View<T>,
    finish: impl Fn(&mut [T]) + Sync,
) {
    let (kh, kw) = unfold.kernel;
    let cut = Cut::of::<T>(pixels.rows(), (kh, kw * unfold.channels));
    let (k, right) = (cut.len, Shared(right));
    cx.by_rows(pixels, cut.pixels, |range, thread| {
        let own = scratch.part(thread * cut.elements()..(thread + 1) * cut.elements());
        for range in even(range, cut.pixels) {
            // SAFETY: each thread has scratch of its own, and blocks don't overlap; the rest is only read.
            unsafe {
                let c = Matrix::rows(out.at(range.start * n), n);
                for row in 0..cut.times {
                    let left = if unfold.is_identity() {
                        images.at(range.start * k)
                    } else {
                        let taps = if cut.times == 1 { *unfold } else { unfold.taps((row, 0), kw) };
                        taps.rows(images.read(), range.clone(), own.part(0..range.len() * k).write());
                        own.at(0)
                    };
                    let right = right.from(row * k);
                    matmul((range.len(), n, k), c, Matrix::rows(left, k), right, row > 0);
                }
                finish(out.part(range.start * n..range.end * n).write());
            }
        }
    });
}

/// A range as ranges of at most `most`, as long as each other or almost.
fn even(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = range.len().div_ceil(most.max(1));
    let at = move |i: usize| range.start + range.len() * i / count;
    (0..count).map(move |i| at(i)..at(i + 1))
}

/// A matrix that threads only read.
struct Shared<T>(Matrix<T>);

// SAFETY: an address; whoever reads there says why it may.
unsafe impl<T: Sync> Sync for Shared<T> {}

impl<T: Float> Shared<T> {
    /// Matrix from a row on.
    fn from(&self, row: usize) -> Matrix<T> {
        Matrix { ptr: self.0.ptr.wrapping_add(row * self.0.row_stride), ..self.0 }
    }
}

/// Elements that the sums of all parts of a weight's gradient have at most, unless one has more.
const SUMS: usize = 8 << 20;

/// Channels of a tile of the gradient at most, where tiles are parts of taps.
const TILE_CHANNELS: usize = 512;

/// Cut of the gradient of a weight: parts of the pixels, added in order, and of each part tiles of the result, whose
/// pixels are met a block at a time. A tile is a row of the kernel, or if that makes few, some channels of a tap. The
/// windows of all tiles are laid out once, but for those of several tiles of output channels.
struct GradientCut {
    parts: usize,
    /// Pixels of a part.
    pixels: usize,
    /// Output channels of a tile.
    out: usize,
    /// Taps of a tile, side by side.
    taps: usize,
    /// Channels of each of its taps: all, or some of one.
    channels: usize,
}

impl GradientCut {
    fn of(pixels: usize, weight: &Shape) -> Self {
        let [o, kh, kw, i] = weight.axes();
        let parts = gradient_parts(pixels).min((SUMS / weight.count().max(1)).max(1));
        let rows = parts * kh >= 16;
        let channels = if rows { i } else { share(i, i.div_ceil(TILE_CHANNELS)).min(i) };
        let taps = if rows { kw } else { 1 };
        let pieces = parts * kh * (kw / taps) * i.div_ceil(channels);
        let out = if pieces >= 8 { o } else { share(o, (o / 128).clamp(1, 4)) };
        GradientCut { parts, pixels: pixels.div_ceil(parts), out, taps, channels }
    }

    /// Elements of all parts' sums.
    fn sums(&self, weight: &Shape) -> usize {
        if self.parts > 1 { self.parts * weight.count() } else { 0 }
    }

    /// Pixels whose windows are laid out at once.
    fn block<T>(&self) -> usize {
        let fits = BLOCK_BYTES / (self.taps * self.channels * size_of::<T>()).max(1);
        fits.clamp(256, 2048).min(self.pixels)
    }

    /// Elements of those windows.
    fn windows<T>(&self) -> usize {
        self.block::<T>() * self.taps * self.channels
    }
}

/// dweight (O,K) = Σ over blocks of dyᵀ (O,P) · windows (P,K), added to the gradient so far where the op accumulates.
pub unsafe fn grad_w<T: Float>(cx: &Context<'_, T>, window: Window, add: bool) {
    let (dy, x, dw) = (cx.input(0), cx.input(1), cx.output(0));
    let unfold = forward_windows(&x.shape, &dy.shape, &dw.shape, window);
    let (pixels, o, k) = (dy.shape.rows(), dy.shape.last(), unfold.window_len());
    let cut = GradientCut::of(pixels, &dw.shape);
    let (parts, (kh, kw), i) = (cut.parts, unfold.kernel, unfold.channels);
    let so_far = add.then(|| cx.input(2).data).filter(|v| !v.same_place(&dw.data));
    let (own, windows_at) = (cut.windows::<T>(), cut.sums(&dw.shape));
    let (in_tap, across) = (i.div_ceil(cut.channels), kh * (kw / cut.taps) * i.div_ceil(cut.channels));
    let tiles = across * o.div_ceil(cut.out);
    cx.each(parts * tiles, |piece, thread| {
        let (part, tile) = (piece / tiles, piece % tiles);
        let (top, across) = (tile / across * cut.out, tile % across);
        let (tap, first) = (across / in_tap * cut.taps, across % in_tap * cut.channels);
        let channels = first..(first + cut.channels).min(i);
        let width = cut.taps * channels.len();
        let cols = tap * i + first..tap * i + first + width;
        let tile = Tile { rows: top..(top + cut.out).min(o), cols };
        let out = if parts > 1 { cx.scratch().part(part * o * k..(part + 1) * o * k) } else { dw.data };
        if let Some(so_far) = so_far.filter(|_| parts == 1) {
            each_run(&tile, k, |run, _| {
                // SAFETY: tiles don't overlap, and the old sum lies elsewhere.
                unsafe { dw.data.part(run.clone()).write().copy_from_slice(so_far.part(run).read()) };
            });
        }
        let taps = unfold.taps((tap / kw, tap % kw), cut.taps);
        let windows: View<T> = cx.scratch().part(windows_at + thread * own..windows_at + (thread + 1) * own);
        let mut goes_on = add && parts == 1;
        for range in even(pixels * part / parts..pixels * (part + 1) / parts, cut.block::<T>()) {
            // SAFETY: tiles don't overlap, and each part has its own; a thread has windows of its own; dy and x are only read
            // and overlap none of it.
            unsafe {
                let b = if unfold.is_identity() {
                    Matrix::rows(x.data.at(range.start * i + first), i)
                } else {
                    let windows = windows.part(0..range.len() * width).write();
                    if channels.len() == i {
                        taps.rows(x.data.read(), range.clone(), windows);
                    } else {
                        taps.tap_rows(x.data.read(), range.clone(), channels.clone(), windows);
                    }
                    Matrix::rows(windows.as_mut_ptr(), width)
                };
                let c = Matrix::rows(out.at(tile.rows.start * k + tile.cols.start), k);
                let a = Matrix::rows(dy.data.at(range.start * o + tile.rows.start), o).transposed();
                matmul((tile.rows.len(), width, range.len()), c, a, b, goes_on);
            }
            goes_on = true;
        }
    });
    add_parts(cx, parts, dw.data, (add, so_far));
}
