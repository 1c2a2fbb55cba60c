//! Convolutions, channels-last: blocks of pixels, whose windows are laid out one row a pixel, times the weight.
//!
//! Legend: P pixels of a block, K window, kh·kw·I elements; I and O input and output channels.

use super::Context;
use super::linear::{by_tiles, gradient_tile};
use crate::kernels::{self, Float, Unfold};
use crate::memory::View;
use crate::product::{Matrix, product};
use graph::op::Window;
use graph::{Shape, Type};

/// Bytes that the windows of a block take: few enough to stay in a core's share of the cache, next to the weight's.
const BLOCK_BYTES: usize = 4 << 20;

/// Pixels of a block whose windows have `len` elements: enough of them that packing the weight anew for each block costs
/// little, and at least four blocks to share out where there is work for four.
fn block_pixels<T>(pixels: usize, len: usize) -> usize {
    let fits = BLOCK_BYTES / (len * size_of::<T>()).max(1);
    let shared = pixels.div_ceil(4).next_multiple_of(8).max(64);
    fits.clamp(128, 512).min(shared)
}

/// The windows that `conv` has over x (B,h,w,I).
fn forward_windows(x: &Shape, y: &Shape, weight: &Shape, window: Window) -> Unfold {
    Unfold {
        height: x.0[1],
        width: x.0[2],
        channels: x.0[3],
        out_height: y.0[1],
        out_width: y.0[2],
        kernel: (weight.0[1], weight.0[2]),
        stride: window.stride,
        pad: (window.pad as isize, window.pad as isize),
        spread: 1,
    }
}

/// The windows that a pixel of x is seen by, over dy (B,h',w',O): those of a convolution with the kernel turned round.
fn backward_windows(dy: &Shape, dx: &Shape, weight: &Shape, window: Window) -> Unfold {
    let pad = |axis: usize| weight.0[axis] as isize - 1 - window.pad as isize;
    Unfold {
        height: dy.0[1],
        width: dy.0[2],
        channels: dy.0[3],
        out_height: dx.0[1],
        out_width: dx.0[2],
        kernel: (weight.0[1], weight.0[2]),
        stride: 1,
        pad: (pad(1), pad(2)),
        spread: window.stride,
    }
}

/// Elements of scratch: windows of a block for each thread.
pub fn forward_scratch(x: &Type, weight: &Type, y: &Type, threads: usize) -> usize {
    let len = weight.shape.count() / weight.shape.0[0];
    block_len(x, y.shape.rows(), len) * threads
}

/// Elements of scratch: as [`forward_scratch`], and the weight turned round.
pub fn grad_x_scratch(dy: &Type, weight: &Type, dx: &Type, threads: usize) -> usize {
    let len = weight.shape.count() / weight.shape.0[3] * dy.shape.last() / weight.shape.0[0];
    weight.shape.count() + block_len(dy, dx.shape.rows(), len) * threads
}

/// Elements of scratch: the windows of a block, which all threads fill and read.
pub fn grad_w_scratch(dy: &Type, weight: &Shape) -> usize {
    let len = weight.count() / weight.0[0];
    match dy.dtype.bytes() {
        8 => gradient_pixels::<f64>(dy.shape.rows(), len) * len,
        _ => gradient_pixels::<f32>(dy.shape.rows(), len) * len,
    }
}

fn block_len(like: &Type, pixels: usize, len: usize) -> usize {
    match like.dtype.bytes() {
        8 => block_pixels::<f64>(pixels, len) * len,
        _ => block_pixels::<f32>(pixels, len) * len,
    }
}

/// y = windows of x · weightᵀ (+ bias).
///
/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, window: Window, bias: bool) {
    let (x, w, y) = (cx.input(0), cx.input(1), cx.output(0));
    let unfold = forward_windows(&x.shape, &y.shape, &w.shape, window);
    let (pixels, o, k) = (y.shape.rows(), y.shape.last(), unfold.window_len());
    // SAFETY: a parameter, only read.
    let bias = if bias { Some(unsafe { cx.input(2).data.read() }) } else { None };
    let scratch: View<T> = cx.scratch();
    // SAFETY: x, the weight and y don't overlap, and the scratch is this step's own.
    unsafe {
        let weight = Matrix::rows(w.data.at(0), k).transposed();
        by_blocks(cx, &unfold, (x.data, pixels), scratch, (weight, o), y.data, |rows| {
            if let (Some(bias), false) = (bias, cx.products_only) {
                kernels::add_bias(rows, bias);
            }
        });
    }
}

/// dx = windows of dy · the weight turned round.
pub unsafe fn grad_x<T: Float>(cx: &Context<'_, T>, window: Window) {
    let (dy, w, dx) = (cx.input(0), cx.input(1), cx.output(0));
    let unfold = backward_windows(&dy.shape, &dx.shape, &w.shape, window);
    let [o, kh, kw, i] = w.shape.0[..] else { unreachable!("shape rule") };
    let scratch: View<T> = cx.scratch();
    let (turned, windows) = (scratch.part(0..o * kh * kw * i), scratch.part(o * kh * kw * i..scratch.len()));
    // (O,kh,kw,I) → (kh,kw,O,I), both axes of the kernel from the end.
    cx.each(kh * kw, |tap, _| {
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
        by_blocks(cx, &unfold, (dy.data, dx.shape.rows()), windows, (weight, i), dx.data, |_| {});
    }
}

/// out (pixels, n) = windows (pixels, K) · right (K, n), block by block, each with its windows in the scratch of the thread
/// that has it; `finish` gets the rows of a block.
///
/// # Safety
/// Nobody writes the images and the right side meanwhile; `out` and the scratch are this step's own.
unsafe fn by_blocks<T: Float>(
    cx: &Context<'_, T>,
    unfold: &Unfold,
    (images, pixels): (View<T>, usize),
    scratch: View<T>,
    (right, n): (Matrix<T>, usize),
    out: View<T>,
    finish: impl Fn(&mut [T]) + Sync,
) {
    let k = unfold.window_len();
    let block = block_pixels::<T>(pixels, k);
    let right = Shared(right);
    cx.ranges(pixels, block, |range, thread| {
        let windows = scratch.part(thread * block * k..thread * block * k + range.len() * k);
        // SAFETY: each thread has scratch of its own, and blocks don't overlap; the rest is only read.
        unsafe {
            unfold.rows(images.read(), range.clone(), windows.write());
            let c = Matrix::rows(out.at(range.start * n), n);
            product((range.len(), n, k), c, Matrix::rows(windows.at(0), k), right.get(), false);
            finish(out.part(range.start * n..range.end * n).write());
        }
    });
}

/// A matrix that threads only read.
struct Shared<T>(Matrix<T>);

// SAFETY: an address; whoever reads there says why it may.
unsafe impl<T: Sync> Sync for Shared<T> {}

impl<T: Float> Shared<T> {
    fn get(&self) -> Matrix<T> {
        self.0
    }
}

/// Pixels whose windows are laid out at once for the gradient of the weight.
fn gradient_pixels<T>(pixels: usize, len: usize) -> usize {
    let fits = 2 * BLOCK_BYTES / (len * size_of::<T>()).max(1);
    fits.clamp(256, 4096).min(pixels)
}

/// dweight (O,K) = Σ over blocks of dyᵀ (O,P) · windows (P,K), added to the gradient so far where the op accumulates.
pub unsafe fn grad_w<T: Float>(cx: &Context<'_, T>, window: Window, add: bool) {
    let (dy, x, dw) = (cx.input(0), cx.input(1), cx.output(0));
    let unfold = forward_windows(&x.shape, &dy.shape, &dw.shape, window);
    let (pixels, o, k) = (dy.shape.rows(), dy.shape.last(), unfold.window_len());
    if add && !cx.input(2).data.same_place(&dw.data) {
        // SAFETY: in different places, so apart.
        unsafe { dw.data.write().copy_from_slice(cx.input(2).data.read()) };
    }
    let windows: View<T> = cx.scratch();
    let block = gradient_pixels::<T>(pixels, k);
    for start in (0..pixels).step_by(block) {
        let count = block.min(pixels - start);
        cx.ranges(count, count.div_ceil(8).max(1), |r, _| {
            // SAFETY: pieces don't overlap, and x is only read.
            let (x, rows) = unsafe { (x.data.read(), windows.part(r.start * k..r.end * k).write()) };
            unfold.rows(x, start + r.start..start + r.end, rows);
        });
        by_tiles(cx, (o, k), gradient_tile(o, k), |tile| {
            // SAFETY: tiles don't overlap; dy and the windows are only read and don't overlap dw.
            unsafe {
                let c = Matrix::rows(dw.data.at(tile.rows.start * k + tile.cols.start), k);
                let a = Matrix::rows(dy.data.at(start * o + tile.rows.start), o).transposed();
                let b = Matrix::rows(windows.at(tile.cols.start), k);
                product((tile.rows.len(), tile.cols.len(), count), c, a, b, add || start > 0);
            }
        });
    }
}
