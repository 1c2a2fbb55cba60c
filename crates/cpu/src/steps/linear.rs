//! Linear layers: matmuls cut into tiles, with the epilogue on each tile while it is still in the cache.
//!
//! Legend: M rows of x, I and O the inner and outer width.

use super::blocks::Blocks;
use super::{Context, PIECE};
use crate::kernels::{self, Float};
use crate::matmul::{Matrix, is_the_same_in_tiles, matmul, matmul_at};
use crate::memory::View;
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
    cx.each(m.div_ceil(rows) * across, |piece, _| {
        let (i, j) = (piece / across, piece % across);
        task(Tile { rows: i * rows..((i + 1) * rows).min(m), cols: j * cols..((j + 1) * cols).min(n) });
    });
}

/// Cuts the result of a matmul with a weight, whose rows are those of a value of `shape`, into tiles: the rows of a part of a block
/// of samples, or where there are no blocks, [`weight_tile`]. Runs `task` on each, with its number from above.
fn by_weight_tiles<T: Float>(
    cx: &Context<'_, T>,
    shape: &Shape,
    n: usize,
    task: impl Fn(Tile, usize) + Sync,
) {
    match Blocks::of(shape) {
        Some(blocks) => cx.by_block(blocks, blocks.parts(), |part, _| {
            task(Tile { rows: blocks.rows(part), cols: 0..n }, part);
        }),
        None => {
            let size = weight_tile(shape.rows(), n);
            by_tiles(cx, (shape.rows(), n), size, |tile| {
                let number = tile.rows.start / size.0;
                task(tile, number);
            });
        }
    }
}

/// Tile of a matmul whose right side (a weight) is packed anew for every tile: tall enough to pay for that, small enough
/// (a megabyte of f32) that the epilogue finds it in the cache, and an even number of tiles to share out.
fn weight_tile(m: usize, n: usize) -> (usize, usize) {
    if m < 2048 {
        return (m, share(n, 4));
    }
    let rows = ((1 << 18) / n).clamp(256, 520);
    (m.div_ceil(m.div_ceil(rows).next_multiple_of(4)).next_multiple_of(4), n)
}

/// Tile of a weight gradient that is the sum of so many parts over `rows` rows each: a share of the longer side, since each tile
/// reads the whole of the other operand. As few as give each thread a piece, if that changes no number.
fn gradient_tile<T: Float>(
    (o, i): (usize, usize),
    (parts, rows): (usize, usize),
    threads: usize,
) -> (usize, usize) {
    let most = (o.max(i) / 192).clamp(2, 4);
    let cut = |tiles: usize| if o >= i { (share(o, tiles), i) } else { (o, share(i, tiles)) };
    let (height, width) = cut(most);
    // The last tile of the smallest ones may have less than others.
    let last = (o - (o - 1) / height * height, i - (i - 1) / width * width);
    let free = is_the_same_in_tiles::<T>((last.0, last.1, rows));
    if free { cut(threads.div_ceil(parts).clamp(1, most)) } else { (height, width) }
}

/// About `parts` equal shares of `n`, each a multiple of 16 (a vector of f32).
pub(super) fn share(n: usize, parts: usize) -> usize {
    n.div_ceil(parts).next_multiple_of(16)
}

/// y = x·wᵀ + b, and with `gelu` also pre = that, y = GELU(pre).
///
/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn forward<T: Float>(cx: &Context<'_, T>, bias: bool, gelu: bool) {
    let i = cx.input(0).shape.last();
    let o = cx.output(0).shape.last();
    let (x, w) = (cx.input(0).data, cx.input(1).data);
    let (y, target) = (cx.output(0).data, cx.output(usize::from(gelu)).data);
    // SAFETY: a parameter, only read.
    let bias = if bias { Some(unsafe { cx.input(2).data.read() }) } else { None };
    by_weight_tiles(cx, &cx.input(0).shape, o, |tile, _| {
        // SAFETY: tiles don't overlap; x and w are only read and overlap no output.
        unsafe {
            let c = Matrix::rows(target.at(tile.rows.start * o + tile.cols.start), o);
            let a = Matrix::rows(x.at(tile.rows.start * i), i);
            let b = Matrix::rows(w.at(tile.cols.start * i), i).transposed();
            matmul_at((tile.rows.len(), tile.cols.len(), i), c, a, b, false, cx.moment());
        }
        if cx.matmuls_only {
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
pub(super) fn each_run(tile: &Tile, width: usize, mut task: impl FnMut(Range<usize>, Range<usize>)) {
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
    Blocks::of(dx).map_or_else(|| m.div_ceil(weight_tile(m, i).0), |blocks| blocks.all_parts()) * i
}

/// dx = dy·w; with `gelu` then dpre = dx ∘ GELU'(pre) in place, and its column sums.
pub unsafe fn grad_x<T: Float>(cx: &Context<'_, T>, gelu: bool) {
    let o = cx.input(0).shape.last();
    let i = cx.output(0).shape.last();
    let (dy, w, dx) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let sums: View<T> = cx.scratch();
    by_weight_tiles(cx, &cx.output(0).shape, i, |tile, number| {
        // SAFETY: tiles don't overlap; dy and w are only read and don't overlap dx.
        unsafe {
            let c = Matrix::rows(dx.at(tile.rows.start * i + tile.cols.start), i);
            let a = Matrix::rows(dy.at(tile.rows.start * o), o);
            let b = Matrix::rows(w.at(tile.cols.start), i);
            matmul_at((tile.rows.len(), tile.cols.len(), o), c, a, b, false, cx.moment());
        }
        if !gelu || cx.matmuls_only {
            return;
        }
        let sum_row = number * i;
        // SAFETY: each tile has sums of its own.
        let sum = unsafe { sums.part(sum_row + tile.cols.start..sum_row + tile.cols.end).write() };
        sum.fill(T::ZERO);
        // SAFETY: within this tile; `pre` is only read.
        each_run(&tile, i, |run, _| unsafe {
            kernels::gelu_grad_in_place(cx.input(2).data.part(run.clone()).read(), dx.part(run).write(), sum);
        });
    });
    if gelu && !cx.matmuls_only {
        cx.shared(1, |_, _| {
            // SAFETY: every tile is done; the bias gradient is this step's own.
            let (sums, bias) = unsafe { (sums.read(), cx.output(1).data.write()) };
            bias.fill(T::ZERO);
            sums.chunks_exact(i).for_each(|row| kernels::add_assign(bias, row));
        });
    }
}

/// Rows that one part of a weight gradient sums over at least, and parts at most.
const PART_ROWS: usize = 2048;
const PARTS: usize = 16;

/// The ranges of rows that a weight gradient is summed up over, to be added in order.
pub(super) fn gradient_parts(m: usize) -> usize {
    (m / PART_ROWS).clamp(1, PARTS)
}

/// Elements of scratch for the gradient of a weight: one for each part, if there are several.
pub fn gradient_scratch(dy: &Shape, inner: usize) -> usize {
    let parts = gradient_parts(dy.rows());
    if parts > 1 { parts * dy.last() * inner } else { 0 }
}

/// dw = dyᵀ·x, added to the gradient so far where the op accumulates.
pub unsafe fn grad_w<T: Float>(cx: &Context<'_, T>, add: bool) {
    let (m, o) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let i = cx.input(1).shape.last();
    let (dy, x, dw) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let so_far = add.then(|| cx.input(2).data).filter(|v| !v.same_place(&dw));
    let parts = gradient_parts(m);
    let (height, width) = gradient_tile::<T>((o, i), (parts, m / parts), cx.threads());
    let (across, tiles) = (i.div_ceil(width), o.div_ceil(height) * i.div_ceil(width));
    cx.each(parts * tiles, |piece, _| {
        let (part, tile) = (piece / tiles, piece % tiles);
        let rows = m * part / parts..m * (part + 1) / parts;
        let (top, left) = (tile / across * height, tile % across * width);
        let tile = Tile { rows: top..(top + height).min(o), cols: left..(left + width).min(i) };
        let out = if parts > 1 { cx.scratch().part(part * o * i..(part + 1) * o * i) } else { dw };
        if let Some(so_far) = so_far.filter(|_| parts == 1) {
            each_run(&tile, i, |run, _| {
                // SAFETY: tiles don't overlap, and the old sum lies elsewhere.
                let (old, new) = unsafe { (so_far.part(run.clone()).read(), dw.part(run).write()) };
                new.copy_from_slice(old);
            });
        }
        // SAFETY: tiles don't overlap, and each part has its own; dy and x are only read and don't overlap them.
        unsafe {
            let c = Matrix::rows(out.at(tile.rows.start * i + tile.cols.start), i);
            let a = Matrix::rows(dy.at(rows.start * o + tile.rows.start), o).transposed();
            let b = Matrix::rows(x.at(rows.start * i + tile.cols.start), i);
            matmul((tile.rows.len(), tile.cols.len(), rows.len()), c, a, b, add && parts == 1);
        }
    });
    add_parts(cx, parts, dw, (add, so_far));
}

/// Adds up the parts of a weight's gradient, which lie in the scratch one after the other, if there are several: in order, and to the
/// gradient so far if `add`. That is in the result's place, or where `so_far` says.
pub(super) fn add_parts<T: Float>(
    cx: &Context<'_, T>,
    parts: usize,
    dw: View<T>,
    (add, so_far): (bool, Option<View<T>>),
) {
    if parts == 1 || cx.matmuls_only {
        return;
    }
    let (sums, len): (View<T>, usize) = (cx.scratch(), dw.len());
    cx.shared(len.div_ceil(PIECE), |piece, _| {
        let range = piece * PIECE..((piece + 1) * PIECE).min(len);
        let of_part = |part: usize| sums.part(part * len + range.start..part * len + range.end);
        // SAFETY: pieces don't overlap, and every part is done; an old sum in another place is only read.
        unsafe {
            let out = dw.part(range.clone()).write();
            match (add, so_far) {
                (false, _) => out.copy_from_slice(of_part(0).read()),
                (true, Some(so_far)) => out.copy_from_slice(so_far.part(range.clone()).read()),
                (true, None) => {}
            }
            let first = usize::from(!add);
            (first..parts).for_each(|part| kernels::add_assign(out, of_part(part).read()));
        }
    });
}
