//! Linear layers: products cut into tiles, with the epilogue on each tile while it is still in the cache.
//!
//! Legend: M rows of x, I and O the inner and outer width.

use super::Context;
use crate::kernels::{self, Float};
use crate::memory::View;
use crate::product::{Matrix, product};
use graph::Shape;
use std::ops::Range;

/// A (rows, columns) tile of the result.
pub(super) struct Tile {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// Cuts a result of m × n into tiles of at most `rows` × `cols` and runs `task` on each.
pub(super) fn by_tiles<T: Float>(
    cx: &Context<'_, T>,
    (m, n): (usize, usize),
    (rows, cols): (usize, usize),
    task: impl Fn(Tile) + Sync,
) {
    let across = n.div_ceil(cols);
    cx.pool.each(m.div_ceil(rows) * across, |piece, _| {
        let (i, j) = (piece / across, piece % across);
        task(Tile { rows: i * rows..((i + 1) * rows).min(m), cols: j * cols..((j + 1) * cols).min(n) });
    });
}

/// Tile of a product whose right side (a weight) is packed anew for every tile: tall enough to pay for that, small enough
/// (a megabyte of f32) that the epilogue finds it in the cache, and an even number of tiles to share out.
fn weight_tile(m: usize, n: usize) -> (usize, usize) {
    if m < 2048 {
        return (m, share(n, 4));
    }
    let rows = ((1 << 18) / n).clamp(256, 520);
    (m.div_ceil(m.div_ceil(rows).next_multiple_of(4)).next_multiple_of(4), n)
}

/// Tile of a weight gradient: a share of the longer side, since each tile reads the whole of the other operand.
pub(super) fn gradient_tile(o: usize, i: usize) -> (usize, usize) {
    let parts = (o.max(i) / 192).clamp(2, 4);
    if o >= i { (share(o, parts), i) } else { (o, share(i, parts)) }
}

/// About `parts` equal shares of `n`, each a multiple of 16 (a vector of f32).
fn share(n: usize, parts: usize) -> usize {
    n.div_ceil(parts).next_multiple_of(16)
}

/// y = x·wᵀ + b, and with `gelu` also pre = that, y = GELU(pre).
///
/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, bias: bool, gelu: bool) {
    let (m, i) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let o = cx.output(0).shape.last();
    let (x, w) = (cx.input(0).data, cx.input(1).data);
    let (y, target) = (cx.output(0).data, cx.output(usize::from(gelu)).data);
    // SAFETY: a parameter, only read.
    let bias = if bias { Some(unsafe { cx.input(2).data.read() }) } else { None };
    by_tiles(cx, (m, o), weight_tile(m, o), |tile| {
        // SAFETY: tiles don't overlap; x and w are only read and overlap no output.
        unsafe {
            let c = Matrix::rows(target.at(tile.rows.start * o + tile.cols.start), o);
            let a = Matrix::rows(x.at(tile.rows.start * i), i);
            let b = Matrix::rows(w.at(tile.cols.start * i), i).transposed();
            product((tile.rows.len(), tile.cols.len(), i), c, a, b, false);
        }
        if cx.products_only {
            return;
        }
        each_run(&tile, o, |range, cols| {
            let bias = bias.map(|b| &b[cols.clone()]);
            // SAFETY: within this tile.
            let pre = unsafe { target.part(range.clone()).write() };
            match (gelu, bias) {
                // SAFETY: within this tile, in another value than `pre`.
                (true, Some(bias)) => kernels::bias_gelu(pre, bias, unsafe { y.part(range).write() }),
                // SAFETY: as above.
                (true, None) => kernels::gelu(pre, unsafe { y.part(range).write() }),
                (false, Some(bias)) => kernels::add_bias(pre, bias),
                (false, None) => {}
            }
        });
    });
}

/// The runs of consecutive elements a tile covers: all of it if it is full width, else one run a row.
fn each_run(tile: &Tile, width: usize, mut task: impl FnMut(Range<usize>, Range<usize>)) {
    if tile.cols.len() == width {
        return task(tile.rows.start * width..tile.rows.end * width, 0..width);
    }
    for row in tile.rows.clone() {
        task(row * width + tile.cols.start..row * width + tile.cols.end, tile.cols.clone());
    }
}

/// Elements of scratch for the bias gradient of [`grad_x`] with a GELU: a row for each tile above another.
pub fn bias_scratch(dx: &Shape) -> usize {
    let (m, i) = (dx.rows(), dx.last());
    m.div_ceil(weight_tile(m, i).0) * i
}

/// dx = dy·w; with `gelu` then dpre = dx ∘ GELU'(pre) in place, and its column sums.
pub unsafe fn grad_x<T: Float>(cx: &Context<'_, T>, gelu: bool) {
    let (m, o) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let i = cx.output(0).shape.last();
    let (dy, w, dx) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let tile_size = weight_tile(m, i);
    let sums: View<T> = cx.scratch();
    by_tiles(cx, (m, i), tile_size, |tile| {
        // SAFETY: tiles don't overlap; dy and w are only read and don't overlap dx.
        unsafe {
            let c = Matrix::rows(dx.at(tile.rows.start * i + tile.cols.start), i);
            let a = Matrix::rows(dy.at(tile.rows.start * o), o);
            let b = Matrix::rows(w.at(tile.cols.start), i);
            product((tile.rows.len(), tile.cols.len(), o), c, a, b, false);
        }
        if !gelu || cx.products_only {
            return;
        }
        let sum_row = tile.rows.start / tile_size.0 * i;
        // SAFETY: each tile has sums of its own.
        let sum = unsafe { sums.part(sum_row + tile.cols.start..sum_row + tile.cols.end).write() };
        sum.fill(T::ZERO);
        // SAFETY: within this tile; `pre` is only read.
        each_run(&tile, i, |run, _| unsafe {
            kernels::gelu_grad_in_place(cx.input(2).data.part(run.clone()).read(), dx.part(run).write(), sum);
        });
    });
    if gelu && !cx.products_only {
        // SAFETY: every tile is done; the bias gradient is this step's own.
        let (sums, bias) = unsafe { (sums.read(), cx.output(1).data.write()) };
        bias.fill(T::ZERO);
        sums.chunks_exact(i).for_each(|row| kernels::add_assign(bias, row));
    }
}

/// dw = dyᵀ·x, added to the gradient so far where the op accumulates and this is not the first micro-step.
pub unsafe fn grad_w<T: Float>(cx: &Context<'_, T>, accumulate: bool) {
    let (m, o) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let i = cx.input(1).shape.last();
    let (dy, x, dw) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let add = accumulate && cx.header.accumulate;
    let so_far = add.then(|| cx.input(2).data).filter(|v| !v.same_place(&dw));
    by_tiles(cx, (o, i), gradient_tile(o, i), |tile| {
        if let Some(so_far) = so_far {
            each_run(&tile, i, |run, _| {
                // SAFETY: tiles don't overlap, and the old sum lies elsewhere.
                let (old, new) = unsafe { (so_far.part(run.clone()).read(), dw.part(run).write()) };
                new.copy_from_slice(old);
            });
        }
        // SAFETY: tiles don't overlap; dy and x are only read and don't overlap dw.
        unsafe {
            let c = Matrix::rows(dw.at(tile.rows.start * i + tile.cols.start), i);
            let a = Matrix::rows(dy.at(tile.rows.start), o).transposed();
            let b = Matrix::rows(x.at(tile.cols.start), i);
            product((tile.rows.len(), tile.cols.len(), m), c, a, b, add);
        }
    });
}
