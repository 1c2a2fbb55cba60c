//! Softmax over rows of attention scores. scores, p, dp: (R, C); lse, delta: (R).
//!
//! C is a number of tokens such as 65 or 197, so the ragged end of a row matters: it is covered by one more whole
//! block that overlaps the block before it, not by up to fifteen scalar exponentials.

use super::float::Float;
use super::lanes::{join_lanes, leftover_weights, sum_lanes, sum_pairs};
use super::level::simd;

/// One 512-bit register of `f32`: the shorter the block, the less of it a ragged end wastes.
const BLOCK: usize = 16;

/// Rows whose logarithms are taken together, since a call amid the vector code would spill its constants.
const ROWS: usize = 32;

/// The last [`BLOCK`] values of a row; a row shorter than a block stands at its right end.
#[inline(always)]
fn last_block<T: Float>(row: &[T]) -> [T; BLOCK] {
    match row.last_chunk::<BLOCK>() {
        Some(block) => *block,
        None => {
            let mut block = [T::NEG_INFINITY; BLOCK];
            block[BLOCK - row.len()..].copy_from_slice(row);
            block
        }
    }
}

#[inline(always)]
fn write_last_block<T: Float>(row: &mut [T], block: &[T; BLOCK]) {
    match row.last_chunk_mut::<BLOCK>() {
        Some(end) => *end = *block,
        None => row.copy_from_slice(&block[BLOCK - row.len()..]),
    }
}

#[inline(always)]
pub(super) fn max_of_row<T: Float>(row: &[T]) -> T {
    let mut lanes = last_block(row);
    for block in row.as_chunks::<BLOCK>().0 {
        for i in 0..BLOCK {
            lanes[i] = lanes[i].max(block[i]);
        }
    }
    join_lanes(lanes, T::max)
}

#[inline(always)]
fn exp_block<T: Float, const FMA: bool>(block: &[T; BLOCK], scale: T, offset: T) -> [T; BLOCK] {
    let mut out = [T::ZERO; BLOCK];
    for i in 0..BLOCK {
        out[i] = block[i].mul_add::<FMA>(scale, -offset).exp::<FMA>();
    }
    out
}

/// row = exp(scale·row - offset); returns its sum.
#[inline(always)]
pub(super) fn exp_row<T: Float, const FMA: bool>(row: &mut [T], scale: T, offset: T) -> T {
    let end = last_block(row);
    let mut sums = [T::ZERO; BLOCK];
    for block in row.as_chunks_mut::<BLOCK>().0 {
        let p = exp_block::<T, FMA>(block, scale, offset);
        for i in 0..BLOCK {
            sums[i] += p[i];
        }
        *block = p;
    }
    if !row.len().is_multiple_of(BLOCK) {
        let p = exp_block::<T, FMA>(&end, scale, offset);
        let weights = leftover_weights::<T, BLOCK>(row.len());
        for i in 0..BLOCK {
            sums[i] += p[i] * weights[i];
        }
        write_last_block(row, &p);
    }
    sum_lanes(sums)
}

/// Σ exp(row - offset)
#[inline(always)]
pub(super) fn sum_exp<T: Float, const FMA: bool>(row: &[T], offset: T) -> T {
    let mut sums = [T::ZERO; BLOCK];
    for block in row.as_chunks::<BLOCK>().0 {
        let p = exp_block::<T, FMA>(block, T::ONE, offset);
        for i in 0..BLOCK {
            sums[i] += p[i];
        }
    }
    if !row.len().is_multiple_of(BLOCK) {
        let p = exp_block::<T, FMA>(&last_block(row), T::ONE, offset);
        let weights = leftover_weights::<T, BLOCK>(row.len());
        for i in 0..BLOCK {
            sums[i] += p[i] * weights[i];
        }
    }
    sum_lanes(sums)
}

/// Bias of every score, and a few masks (·, C), of which row `i` has number `mask_of[i]`.
#[derive(Clone, Copy)]
pub struct BiasAndMasks<'a, T> {
    pub bias: &'a [T],
    pub masks: &'a [T],
    pub mask_of: &'a [u32],
}

impl<T: Float> BiasAndMasks<'_, T> {
    #[inline(always)]
    fn check(&self, scores: usize, cols: usize, rows: usize) {
        assert!(scores == rows * cols && scores == self.bias.len(), "biased softmax: shapes differ");
        assert!(self.mask_of.len() == rows, "biased softmax: ragged rows");
    }

    /// Makes row `i` of the scores scale·row + bias + mask.
    #[inline(always)]
    fn add_to<const FMA: bool>(&self, row: &mut [T], i: usize, scale: T) {
        let cols = row.len();
        let bias = &self.bias[i * cols..][..cols];
        let mask = &self.masks[self.mask_of[i] as usize * cols..][..cols];
        for ((s, &bias), &mask) in row.iter_mut().zip(bias).zip(mask) {
            *s = s.mul_add::<FMA>(scale, bias) + mask;
        }
    }
}

#[inline(always)]
fn divide<T: Float>(row: &mut [T], sum: T) {
    let inverse = T::ONE / sum;
    for p in row {
        *p *= inverse;
    }
}

/// Adds the logarithms of the rows' sums to their maxima.
#[inline(always)]
fn add_logs<T: Float>(lse: &mut [T], sums: &[T; ROWS]) {
    // The opaque reference keeps LLVM from taking all the logarithms ahead, used or not.
    for (lse, sum) in lse.iter_mut().zip(std::hint::black_box(sums)) {
        *lse += sum.ln();
    }
}

simd! {
    /// Softmax in place, p = exp(scale·s - m)/Σ with m the row's maximum, and lse = m + ln Σ: the logarithm of the sum
    /// of the exponentials of the scaled scores. `scale` must be positive.
    pub fn softmax_rows<T, FMA>(scores: &mut [T], cols: usize, scale: T, lse: &mut [T]) {
        assert_eq!(scores.len(), lse.len() * cols, "softmax_rows: ragged rows");
        for (rows, lse) in scores.chunks_mut(ROWS * cols).zip(lse.chunks_mut(ROWS)) {
            let mut sums = [T::ONE; ROWS];
            for ((row, max), sum) in rows.chunks_exact_mut(cols).zip(lse.iter_mut()).zip(&mut sums) {
                *max = scale * max_of_row(row);
                *sum = exp_row::<T, FMA>(row, scale, *max);
                divide(row, *sum);
            }
            add_logs(lse, &sums);
        }
    }

    /// Softmax in place from its log-sum-exp, p = exp(scale·s - lse).
    pub fn softmax_from_lse<T, FMA>(scores: &mut [T], cols: usize, scale: T, lse: &[T]) {
        assert_eq!(scores.len(), lse.len() * cols, "softmax_from_lse: ragged rows");
        for (row, &lse) in scores.chunks_exact_mut(cols).zip(lse) {
            exp_row::<T, FMA>(row, scale, lse);
        }
    }

    /// Softmax like [`softmax_rows`], of scale·scores + bias + the mask of the row.
    pub fn biased_softmax_rows<T, FMA>(
        scores: &mut [T],
        cols: usize,
        scale: T,
        added: BiasAndMasks<'_, T>,
        lse: &mut [T],
    ) {
        added.check(scores.len(), cols, lse.len());
        for (block, scores) in scores.chunks_mut(ROWS * cols).enumerate() {
            let first = block * ROWS;
            let lse = &mut lse[first..first + scores.len() / cols];
            let mut sums = [T::ONE; ROWS];
            for (i, row) in scores.chunks_exact_mut(cols).enumerate() {
                added.add_to::<FMA>(row, first + i, scale);
                lse[i] = max_of_row(row);
                sums[i] = exp_row::<T, FMA>(row, T::ONE, lse[i]);
                divide(row, sums[i]);
            }
            add_logs(lse, &sums);
        }
    }

    /// Softmax in place, p = exp(scale·s + bias + mask - lse)/Σ. In exact arithmetic Σ is 1, but scores may be as large
    /// as 100, and then as many digits of p are lost as their logarithm has.
    pub fn biased_softmax_from_lse<T, FMA>(
        scores: &mut [T],
        cols: usize,
        scale: T,
        added: BiasAndMasks<'_, T>,
        lse: &[T],
    ) {
        added.check(scores.len(), cols, lse.len());
        for (i, row) in scores.chunks_exact_mut(cols).enumerate() {
            added.add_to::<FMA>(row, i, scale);
            let sum = exp_row::<T, FMA>(row, T::ONE, lse[i]);
            divide(row, sum);
        }
    }

    /// Gradient in place, dp = p·(dp - Σ p·dp) over each row; and acc += dp. The sum is taken of these very numbers, so
    /// that a row of the result sums to zero as nearly as it can.
    pub fn softmax_grad_acc<T, FMA>(p: &[T], dp: &mut [T], cols: usize, acc: &mut [T]) {
        assert!(p.len() == dp.len() && p.len() == acc.len(), "softmax_grad_acc: shapes differ");
        let rows = p.chunks_exact(cols).zip(dp.chunks_exact_mut(cols)).zip(acc.chunks_exact_mut(cols));
        for ((p, dp), acc) in rows {
            let delta = sum_pairs(p, dp, |p, dp| p * dp);
            for ((dp, &p), acc) in dp.iter_mut().zip(p).zip(acc) {
                *dp = p * (*dp - delta);
                *acc += *dp;
            }
        }
    }

    /// Gradient in place, dp = p·(dp - delta)·scale, where delta is the row's Σ p·dp.
    pub fn softmax_grad<T, FMA>(p: &[T], dp: &mut [T], cols: usize, delta: &[T], scale: T) {
        assert!(p.len() == dp.len() && p.len() == delta.len() * cols, "softmax_grad: shapes differ");
        for ((p, dp), &delta) in p.chunks_exact(cols).zip(dp.chunks_exact_mut(cols)).zip(delta) {
            for (dp, &p) in dp.iter_mut().zip(p) {
                *dp = p * (*dp - delta) * scale;
            }
        }
    }

    /// out = Σ a·b over each row.
    pub fn row_dot<T, FMA>(a: &[T], b: &[T], cols: usize, out: &mut [T]) {
        assert!(a.len() == b.len() && a.len() == out.len() * cols, "row_dot: shapes differ");
        for ((a, b), out) in a.chunks_exact(cols).zip(b.chunks_exact(cols)).zip(out) {
            *out = sum_pairs(a, b, |a, b| a * b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const SCALE: f64 = 0.125;
    const R: usize = 35;

    fn reference(scores: &[f64], cols: usize) -> (Vec<f64>, Vec<f64>) {
        let mut p = vec![];
        let mut lse = vec![];
        for row in scores.chunks_exact(cols) {
            let max = row.iter().cloned().fold(f64::NEG_INFINITY, f64::max) * SCALE;
            let sum: f64 = row.iter().map(|s| (s * SCALE - max).exp()).sum();
            lse.push(max + sum.ln());
            p.extend(row.iter().map(|s| (s * SCALE - max).exp() / sum));
        }
        (p, lse)
    }

    #[test]
    fn rows_become_probabilities() {
        at_every_level(|level| {
            for cols in COLS {
                let scores = noise(1, R * cols, 60.0);
                let (want, want_lse) = reference(&scores, cols);
                let (mut p, mut lse) = (narrow(&scores), vec![0f32; R]);
                softmax_rows(&mut p, cols, SCALE as f32, &mut lse);
                assert_close(&p, &want, 1e-6, &format!("p of {cols} columns, {level:?}"));
                assert_close(&lse, &want_lse, 1e-6, &format!("lse of {cols} columns, {level:?}"));

                let mut again = narrow(&scores);
                softmax_from_lse(&mut again, cols, SCALE as f32, &lse);
                assert_close(&again, &want, 2e-6, &format!("from lse, {cols} columns, {level:?}"));

                let (mut p, mut lse) = (scores, vec![0.0; R]);
                softmax_rows(&mut p, cols, SCALE, &mut lse);
                assert_close(&p, &want, 1e-14, "p in double precision");
                assert_close(&lse, &want_lse, 1e-14, "lse in double precision");
            }
        });
    }

    #[test]
    fn biased_rows_are_those_of_biased_scores() {
        at_every_level(|level| {
            for cols in [5, 64, 65] {
                let (scores, bias) = (noise(4, R * cols, 90.0), noise(5, R * cols, 16.0));
                let mut masks = vec![0.0; 2 * cols];
                masks[cols..cols + 3].fill(-100.0);
                let mask_of: Vec<u32> = (0..R as u32).map(|row| row % 2).collect();
                let biased = |i: usize| {
                    let (row, column) = (i / cols, i % cols);
                    scores[i] * SCALE + bias[i] + masks[mask_of[row] as usize * cols + column]
                };
                let sums: Vec<f64> = (0..scores.len()).map(|i| biased(i) / SCALE).collect();
                let (want, want_lse) = reference(&sums, cols);
                let (mut p, mut lse) = (scores.clone(), vec![0.0; R]);
                let added = BiasAndMasks { bias: &bias, masks: &masks, mask_of: &mask_of };
                biased_softmax_rows(&mut p, cols, SCALE, added, &mut lse);
                assert_close(&p, &want, 1e-13, &format!("p of {cols} columns, {level:?}"));
                assert_close(&lse, &want_lse, 1e-13, &format!("lse of {cols} columns, {level:?}"));

                // What an inexact logarithm would do to all of a row is undone.
                let (mut again, off): (_, Vec<f64>) =
                    (scores.clone(), lse.iter().map(|l| l + 1e-3).collect());
                biased_softmax_from_lse(&mut again, cols, SCALE, added, &off);
                assert_close(&again, &want, 1e-13, &format!("from lse, {cols} columns, {level:?}"));

                let (mut ds, mut delta, mut acc) =
                    (noise(6, R * cols, 1.0), vec![0.0; R], vec![1.0; R * cols]);
                let mut plain = ds.clone();
                row_dot(&p, &plain, cols, &mut delta);
                softmax_grad(&p, &mut plain, cols, &delta, 1.0);
                softmax_grad_acc(&p, &mut ds, cols, &mut acc);
                assert_close(&ds, &plain, 1e-14, "gradient");
                assert_close(&acc, &plain.iter().map(|d| d + 1.0).collect::<Vec<_>>(), 1e-14, "sum");
            }
        });
    }

    #[test]
    fn masked_scores_get_nothing_and_nan_spoils_only_its_row() {
        at_every_level(|_| {
            for cols in [5, 65, 197] {
                let (mut p, mut lse) = (vec![1f32; 2 * cols], [0f32; 2]);
                p[cols - 1] = f32::NEG_INFINITY;
                p[cols + 3] = f32::NAN;
                softmax_rows(&mut p, cols, 1.0, &mut lse);
                assert_eq!(p[cols - 1], 0.0);
                assert!((p[0] - 1.0 / (cols as f32 - 1.0)).abs() < 1e-6);
                assert!(lse[0].is_finite() && lse[1].is_nan() && p[cols..].iter().all(|p| p.is_nan()));
            }
        });
    }

    #[test]
    fn the_gradient_is_the_slope_of_softmax() {
        at_every_level(|level| {
            for cols in [1, 5, 33, 65] {
                let (scores, dp) = (noise(2, 3 * cols, 10.0), noise(3, 3 * cols, 1.0));
                let (p, _) = reference(&scores, cols);
                let numeric = numeric_grad(&scores, |s| weighted_sum(&dp, &reference(s, cols).0));
                let (mut ds, mut delta) = (dp.clone(), [0.0; 3]);
                row_dot(&p, &dp, cols, &mut delta);
                softmax_grad(&p, &mut ds, cols, &delta, SCALE);
                assert_close(&ds, &numeric, 1e-9, &format!("{level:?}"));

                let (p32, mut ds32, mut delta32) = (narrow(&p), narrow(&dp), [0f32; 3]);
                row_dot(&p32, &ds32, cols, &mut delta32);
                softmax_grad(&p32, &mut ds32, cols, &delta32, SCALE as f32);
                assert_close(&ds32, &ds, 1e-6, &format!("single precision, {level:?}"));
            }
        });
    }
}
