//! Muon: momentum, the matmuls and polynomials that orthogonalise it, the parameters.
//!
//! Legend: B matrices of one shape, M, K and N sides of a matmul.

use super::linear::{by_tiles, share};
use super::update::{start_in_place, write_copy};
use super::{Context, PIECE, row_piece};
use crate::kernels::{self, Float};
use crate::matmul::{self, Matrix};
use graph::Op;
use graph::flat::{Flat, InStack, Stack};
use std::ops::Range;

/// The matrices of a flat buffer.
pub(crate) struct Matrices {
    /// Matrices of this rank in the order of their elements.
    held: Vec<InStack>,
    /// Number of this rank's matrices in each stack.
    counts: Vec<usize>,
}

impl Matrices {
    /// Matrices of stacks, which fit the buffer by the op's description.
    pub fn of(flat: &Flat, stacks: &[Stack]) -> Self {
        let held = flat.matrices(stacks).unwrap_or_default();
        let count = |stack: usize| held.iter().filter(|matrix| matrix.stack == stack).count();
        let counts = (0..stacks.len()).map(count).collect();
        Matrices { held, counts }
    }

    /// Matrices with elements in a range of the buffer: the matrix, the elements of the buffer, the same in its stack.
    fn within(&self, range: Range<usize>) -> impl Iterator<Item = (&InStack, Range<usize>, Range<usize>)> {
        let first = self.held.partition_point(|matrix| matrix.start + matrix.count <= range.start);
        self.held[first..].iter().take_while(move |matrix| matrix.start < range.end).map(move |matrix| {
            let (start, end) = (matrix.start.max(range.start), (matrix.start + matrix.count).min(range.end));
            let in_stack = matrix.number * matrix.count + start - matrix.start;
            (matrix, start..end, in_stack..in_stack + end - start)
        })
    }
}

/// Factor of gradients and whether the step is applied, from control, which is operand `at`.
///
/// # Safety
/// Control is only read.
unsafe fn control<T: Float>(cx: &Context<'_, T>, at: usize) -> (f64, bool) {
    // SAFETY: passed on to the caller.
    let control = unsafe { cx.input(at).data.read() };
    (control[0].to_f64(), control[1].to_f64() != 0.0)
}

/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn momentum<T: Float>(cx: &Context<'_, T>, matrices: &Matrices) {
    let Op::MuonMomentum { momentum, nesterov, .. } = cx.step.op else { return };
    let (g, m) = (cx.input(0).data, cx.output(0).data);
    cx.ranges(m.len(), PIECE, |range, _| {
        // SAFETY: pieces don't overlap, neither in the buffer nor in the stacks; gradients and control are only read.
        unsafe {
            start_in_place(cx, &range);
            let (factor, apply) = control(cx, 2);
            for (matrix, r, in_stack) in matrices.within(range) {
                let direction = cx.output(1 + matrix.stack).data.part(in_stack).write();
                if !apply {
                    direction.fill(T::ZERO);
                    continue;
                }
                let (g, m) = (g.part(r.clone()).read(), m.part(r).write());
                kernels::muon_momentum(g, m, direction, momentum, nesterov, factor);
            }
        }
    });
    // A rank with fewer matrices than another has directions that are of none.
    cx.each(matrices.counts.len(), |stack, _| {
        let direction = cx.output(1 + stack);
        let each: usize = direction.shape.0[1..].iter().product();
        let rest = matrices.counts[stack] * each..direction.shape.count();
        // SAFETY: behind what the pieces above write.
        unsafe { direction.data.part(rest).write().fill(T::ZERO) };
    });
}

pub unsafe fn apply<T: Float>(cx: &Context<'_, T>, matrices: &Matrices) {
    let Op::MuonApply { rms, stacks, flat } = &cx.step.op else { return };
    let w = cx.output(0).data;
    cx.ranges(w.len(), PIECE, |range, _| {
        // SAFETY: pieces don't overlap; directions and control are only read and overlap no output.
        unsafe {
            start_in_place(cx, &range);
            if !control(cx, 1).1 {
                return;
            }
            for (matrix, r, in_stack) in matrices.within(range) {
                let (piece, stack) = (&flat.pieces[matrix.piece], &stacks[matrix.stack]);
                let lr = cx.header.learning_rate * piece.lr_scale;
                let step = lr * rms * (stack.rows.max(stack.columns) as f64).sqrt();
                let direction = cx.input(2 + matrix.stack).data.part(in_stack).read();
                let keep = 1.0 - lr * piece.weight_decay;
                kernels::muon_apply(w.part(r.clone()).write(), direction, keep, step);
                write_copy(cx, 1, r);
            }
        }
    });
}

/// Rows and columns of a tile, by the shape alone.
fn tile(m: usize, n: usize) -> (usize, usize) {
    if m >= n { (share(m, 4), n) } else { (m, share(n, 4)) }
}

/// Every result (M,N) of B matmuls, in tiles.
pub unsafe fn matmul<T: Float>(cx: &Context<'_, T>, left_transposed: bool, right_transposed: bool) {
    let [b, m, n] = cx.output(0).shape.0[..] else { return };
    let [_, rows, columns] = cx.input(0).shape.0[..] else { return };
    let k = if left_transposed { rows } else { columns };
    let (left, right, out) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    let (height, width) = tile(m, n);
    // The matrices lie one below the other: a tile of all of them has rows of one.
    let across = m.div_ceil(height);
    by_tiles(cx, (b * across, n), (1, width), |tile| {
        let (matrix, top) = (tile.rows.start / across, tile.rows.start % across * height);
        let rows = height.min(m - top);
        // SAFETY: tiles don't overlap; both sides are only read and overlap no output.
        unsafe {
            let c = Matrix::rows(out.at(matrix * m * n + top * n + tile.cols.start), n);
            let of_left = matrix * m * k;
            let a = match left_transposed {
                true => Matrix::rows(left.at(of_left + top), m).transposed(),
                false => Matrix::rows(left.at(of_left + top * k), k),
            };
            let of_right = matrix * k * n;
            let b = match right_transposed {
                true => Matrix::rows(right.at(of_right + tile.cols.start * k), k).transposed(),
                false => Matrix::rows(right.at(of_right + tile.cols.start), n),
            };
            matmul::matmul((rows, tile.cols.len(), k), c, a, b, false);
        }
    });
}

/// Runs `task(matrix, rows)` on pieces of B matrices of N rows.
fn by_rows<T: Float>(cx: &Context<'_, T>, (b, n): (usize, usize), task: impl Fn(usize, Range<usize>) + Sync) {
    let size = row_piece(n);
    let each = n.div_ceil(size);
    cx.each(b * each, |piece, _| {
        let top = piece % each * size;
        task(piece / each, top..(top + size).min(n));
    });
}

/// Gram matrices over their traces, and the roots of these. Each piece sums up the trace for itself, in order.
pub unsafe fn unit_trace<T: Float>(cx: &Context<'_, T>, eps: f64) {
    let [b, n, _] = cx.output(0).shape.0[..] else { return };
    let (gram, out, norms) = (cx.input(0).data, cx.output(0).data, cx.output(1).data);
    by_rows(cx, (b, n), |matrix, rows| {
        let of = |row: usize| (matrix * n + row) * n;
        // SAFETY: pieces don't overlap; gram matrices are only read and overlap no output.
        unsafe {
            let all = gram.part(of(0)..of(n)).read();
            let trace: f64 = (0..n).map(|i| all[i * n + i].to_f64()).sum();
            let norm = trace.sqrt().max(eps);
            if rows.start == 0 {
                norms.part(matrix..matrix + 1).write()[0] = T::from_f64(norm);
            }
            let (from, to) = (rows.start * n..rows.end * n, of(rows.start)..of(rows.end));
            kernels::scale(&all[from], T::from_f64(1.0 / (norm * norm)), out.part(to).write());
        }
    });
}

/// a + b·A + c·A², over the norm where there is one.
pub unsafe fn newton_schulz<T: Float>(cx: &Context<'_, T>, coefficients: [f64; 3]) {
    let [b, n, _] = cx.output(0).shape.0[..] else { return };
    let (gram, square, out) = (cx.input(0).data, cx.input(1).data, cx.output(0).data);
    by_rows(cx, (b, n), |matrix, rows| {
        // SAFETY: norms are only read.
        let norm = cx.step.inputs.get(2).map_or(1.0, |norms| unsafe { norms.data.read()[matrix].to_f64() });
        let coefficients = coefficients.map(|x| x / norm);
        for row in rows {
            let start = (matrix * n + row) * n;
            let range = start..start + n;
            // SAFETY: rows don't overlap; the operands are only read and overlap no output.
            unsafe {
                let (gram, square) = (gram.part(range.clone()).read(), square.part(range.clone()).read());
                kernels::newton_schulz(gram, square, out.part(range).write(), row, coefficients);
            }
        }
    });
}
