//! Kernels of window attention beside its softmax: unit queries and keys, and the layers of the position bias.

use super::float::Float;
use super::lanes::{sum_lanes, sum_pairs};
use super::level::simd;

/// The least length a row is divided by, as in torch's `normalize`.
const LEAST: f64 = 1e-12;

/// One 512-bit register of `f32`; heads are 32 wide.
const BLOCK: usize = 16;

/// Σ a·b of a short row.
#[inline(always)]
fn dot<T: Float, const FMA: bool>(a: &[T], b: &[T]) -> T {
    let (mut sums, (blocks, rest)) = ([T::ZERO; BLOCK], a.as_chunks::<BLOCK>());
    for (a, b) in blocks.iter().zip(b.as_chunks::<BLOCK>().0) {
        for i in 0..BLOCK {
            sums[i] = a[i].mul_add::<FMA>(b[i], sums[i]);
        }
    }
    let done = blocks.len() * BLOCK;
    for (i, (&a, &b)) in rest.iter().zip(&b[done..]).enumerate() {
        sums[i] += a * b;
    }
    sum_lanes(sums)
}

simd! {
    /// Rows of length 1, and the lengths they had.
    pub fn normalise_rows<T, FMA>(x: &mut [T], cols: usize, lengths: &mut [T]) {
        assert_eq!(x.len(), lengths.len() * cols, "normalise_rows: ragged rows");
        for (row, length) in x.chunks_exact_mut(cols).zip(lengths) {
            *length = dot::<T, FMA>(row, row).sqrt().max(T::from_f64(LEAST));
            let inverse = T::ONE / *length;
            for x in row {
                *x *= inverse;
            }
        }
    }

    /// Gradient in place, dx = factor·(dx - x̂·(x̂·dx))/length, the gradient through [`normalise_rows`] where dx came
    /// in as that of factor·x̂; returns Σ x̂·dx of what came in.
    pub fn normalise_grad<T, FMA>(unit: &[T], lengths: &[T], factor: T, cols: usize, dx: &mut [T]) -> f64 {
        assert!(unit.len() == dx.len() && dx.len() == lengths.len() * cols, "normalise_grad: shapes differ");
        let mut total = 0.0;
        let rows = unit.chunks_exact(cols).zip(dx.chunks_exact_mut(cols)).zip(lengths);
        for ((unit, dx), &length) in rows {
            let along = dot::<T, FMA>(unit, dx);
            total += along.to_f64();
            let share = factor / length;
            for (dx, &unit) in dx.iter_mut().zip(unit) {
                *dx = unit.mul_add::<FMA>(-along, *dx) * share;
            }
        }
        total
    }

    /// hidden (rows, N) = relu(w·coordinates + b), with w (N,2); one pair of coordinates a row.
    pub fn hidden_rows<T, FMA>(w: &[T], b: &[T], coordinates: &[[T; 2]], hidden: &mut [T]) {
        assert!(w.len() == 2 * b.len() && hidden.len() == coordinates.len() * b.len(), "hidden_rows: shapes");
        for (row, &[x, y]) in hidden.chunks_exact_mut(b.len()).zip(coordinates) {
            for ((hidden, w), &b) in row.iter_mut().zip(w.as_chunks::<2>().0).zip(b) {
                *hidden = w[0].mul_add::<FMA>(x, w[1].mul_add::<FMA>(y, b)).max(T::ZERO);
            }
        }
    }

    /// out = 16·sigmoid(Σ over a row of hidden·w), for each row.
    pub fn sixteen_sigmoid<T, FMA>(hidden: &[T], w: &[T], out: &mut [T]) {
        assert_eq!(hidden.len(), out.len() * w.len(), "sixteen_sigmoid: ragged rows");
        for (row, out) in hidden.chunks_exact(w.len()).zip(out) {
            let z = sum_pairs(row, w, |hidden, w| hidden * w);
            *out = T::from_f64(16.0) / (T::ONE + (-z).exp::<FMA>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    fn unit_rows(x: &[f64], cols: usize) -> Vec<f64> {
        let length = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt().max(LEAST);
        x.chunks_exact(cols).flat_map(|row| row.iter().map(move |x| x / length(row))).collect()
    }

    #[test]
    fn rows_get_length_one_and_zero_stays_zero() {
        at_every_level(|level| {
            for cols in [1, 5, 16, 32, 48] {
                let mut x = noise(1, 3 * cols, 2.0);
                x[cols..2 * cols].fill(0.0);
                let (want, mut unit, mut lengths) = (unit_rows(&x, cols), narrow(&x), [0f32; 3]);
                normalise_rows(&mut unit, cols, &mut lengths);
                assert_close(&unit, &want, 1e-6, &format!("{cols} columns, {level:?}"));
                assert_eq!(lengths[1], 1e-12);
            }
        });
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_normed_row() {
        at_every_level(|level| {
            for cols in [2, 5, 32] {
                let (x, dy) = (noise(2, 3 * cols, 2.0), noise(3, 3 * cols, 1.0));
                let factor = 7.5;
                let numeric = numeric_grad(&x, |x| factor * weighted_sum(&dy, &unit_rows(x, cols)));
                let (mut unit, mut lengths, mut dx) = (x.clone(), [0.0; 3], dy.clone());
                normalise_rows(&mut unit, cols, &mut lengths);
                let total = normalise_grad(&unit, &lengths, factor, cols, &mut dx);
                assert_close(&dx, &numeric, 1e-8, &format!("{level:?}"));
                assert_close(&[total], &[weighted_sum(&dy, &unit)], 1e-12, "Σ x̂·dx");
            }
        });
    }
}
