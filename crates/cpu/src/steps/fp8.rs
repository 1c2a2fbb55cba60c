//! Matmuls in fp8: operands that were multiplied by a scale and rounded to 8 bits. Here they are seen widened, as every
//! operand that is stored in another type.

use super::linear::by_tiles;
use super::{Context, row_piece};
use crate::kernels::Float;
use crate::matmul::{Matrix, matmul};
use crate::memory::View;

/// Rows of a tile of a matmul.
const ROWS: usize = 256;

/// q = x·scale, once more transposed if that is asked for, and the largest |x|; `round` does the rest. A number that is not finite
/// makes the largest infinite.
///
/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn quantize<T: Float>(cx: &Context<'_, T>, transposed: bool, accumulate: bool) {
    let (rows, cols) = (cx.input(0).shape.rows(), cx.input(0).shape.last());
    let (x, q) = (cx.input(0).data, cx.output(0).data);
    let columns = transposed.then(|| cx.output(1).data);
    // SAFETY: the scale is only read.
    let scale = unsafe { cx.input(1).data.read()[0] };
    cx.ranges(rows, row_piece(cols), |r, _| {
        let wide = r.start * cols..r.end * cols;
        // SAFETY: pieces don't overlap, and inputs and outputs don't either.
        let (x, q) = unsafe { (x.part(wide.clone()).read(), q.part(wide).write()) };
        q.iter_mut().zip(x).for_each(|(q, x)| *q = *x * scale);
        let Some(columns) = columns else { return };
        for (row, values) in r.zip(q.chunks_exact(cols)) {
            for (column, value) in values.iter().enumerate() {
                let at = column * rows + row;
                // SAFETY: each row has elements of its own.
                unsafe { columns.part(at..at + 1).write()[0] = *value };
            }
        }
    });
    cx.each(1, |_, _| {
        let largest = cx.output(1 + usize::from(transposed)).data;
        // SAFETY: what was there is read before it is written over; x is only read.
        unsafe {
            let so_far = if accumulate { cx.input(2).data.read()[0] } else { T::ZERO };
            let sizes = x.read().iter().map(|x| x.to_f64().abs());
            let size =
                sizes.fold(
                    so_far.to_f64(),
                    |most, size| if size.is_finite() { most.max(size) } else { f64::INFINITY },
                );
            largest.write()[0] = T::from_f64(size);
        }
    });
}

/// scale = (scale, largest values of the last steps): the newest comes first, the oldest goes, and the scale brings the largest of
/// all to the end of the range of `largest`, or `margin` powers of two below. One that is not finite changes nothing.
pub unsafe fn rescale<T: Float>(cx: &Context<'_, T>, largest: f64, margin: u32) {
    cx.each(1, |_, _| {
        // SAFETY: an input, read before the output is written.
        let newest = unsafe { cx.input(1).data.read()[0] };
        let (before, after) = (cx.input(0).data, cx.output(0).data);
        // SAFETY: the output is this step's own; in another place than the input, it starts as that.
        let state = unsafe {
            if !before.same_place(&after) {
                after.write().copy_from_slice(before.read());
            }
            after.write()
        };
        if !newest.to_f64().is_finite() {
            return;
        }
        let Some((scale, history)) = state.split_first_mut().filter(|(_, history)| !history.is_empty())
        else {
            return;
        };
        history.rotate_right(1);
        history[0] = newest;
        let most = history.iter().fold(0.0, |most: f64, x| most.max(x.to_f64()));
        if most > 0.0 {
            *scale = T::from_f64(largest / most / 2f64.powi(margin as i32));
        }
    });
}

/// y = a·bᵀ / (scale of a · scale of b) + bias, added to the sum so far where the op accumulates. The matmul goes to the scratch then.
pub unsafe fn scaled_matmul<T: Float>(cx: &Context<'_, T>, bias: bool, accumulate: bool) {
    let (a, b, y) = (cx.input(0), cx.input(1), cx.output(0));
    let (m, n, k) = (a.shape.rows(), y.shape.last(), a.shape.last());
    // SAFETY: only read.
    let scales = unsafe { [2, 3].map(|i| cx.input(i).data.read()[0].to_f64()) };
    let factor = T::from_f64(1.0 / (scales[0] * scales[1]));
    // SAFETY: only read.
    let bias = bias.then(|| unsafe { cx.input(4).data.read() });
    let so_far = cx.step.inputs.last().filter(|_| accumulate).map(|sum| sum.data);
    let made: View<T> = if so_far.is_some() { cx.scratch() } else { y.data };
    by_tiles(cx, (m, n), (ROWS, n), |tile| {
        let range = tile.rows.start * n..tile.rows.end * n;
        // SAFETY: tiles don't overlap; a and b are only read and overlap neither y nor the scratch. A sum in another place than
        // y is only read, and one in the same place is read before it is written.
        unsafe {
            let c = Matrix::rows(made.at(range.start), n);
            let rows = Matrix::rows(a.data.at(tile.rows.start * k), k);
            matmul((tile.rows.len(), n, k), c, rows, Matrix::rows(b.data.at(0), k).transposed(), false);
            if cx.matmuls_only {
                return;
            }
            for at in range {
                let mut value = made.part(at..at + 1).read()[0] * factor;
                if let Some(bias) = bias {
                    value += bias[at % n];
                }
                if let Some(so_far) = so_far {
                    value += so_far.part(at..at + 1).read()[0];
                }
                y.data.part(at..at + 1).write()[0] = value;
            }
        }
    });
}
