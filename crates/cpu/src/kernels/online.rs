//! Softmax of rows that come a range of columns at a time. scores, dp: (R, stride), of which `cols` columns are there; max, sum,
//! lse, delta: (R); acc: (R, width).

use super::float::Float;
use super::level::simd;
use super::softmax::{exp_row, max_of_row};

simd! {
    /// Softmax in place, p = exp(scale·s - m), with m the maximum of the row so far, to which what was summed up before
    /// is scaled: `max`, `sum` = Σ p, and `acc`. Before the first range of columns, `max` is the least finite number
    /// and `sum` 0.
    pub fn softmax_range<T, FMA>(
        scores: &mut [T],
        stride: usize,
        cols: usize,
        scale: T,
        max: &mut [T],
        sum: &mut [T],
        acc: &mut [T],
    ) {
        let rows = max.len();
        assert!(scores.len() >= rows * stride && cols <= stride, "softmax_range: too few scores");
        assert!(sum.len() == rows && rows > 0 && acc.len().is_multiple_of(rows), "softmax_range: ragged rows");
        let width = acc.len() / rows;
        let rows = scores.chunks_mut(stride).zip(max).zip(sum).zip(acc.chunks_exact_mut(width));
        for (((row, max), sum), acc) in rows {
            let row = &mut row[..cols];
            let (before, now) = (*max, Float::max(*max, scale * max_of_row(row)));
            let range = exp_row::<T, FMA>(row, scale, now);
            if now > before {
                let factor = (before - now).exp::<FMA>();
                *max = now;
                *sum *= factor;
                acc.iter_mut().for_each(|acc| *acc *= factor);
            }
            *sum += range;
        }
    }

    /// Softmax and its gradient in place, p = exp(scale·s - lse) and dp = scale·p·(dp - delta).
    pub fn softmax_and_grad<T, FMA>(
        scores: &mut [T],
        dp: &mut [T],
        stride: usize,
        cols: usize,
        scale: T,
        lse: &[T],
        delta: &[T],
    ) {
        assert!(scores.len() >= lse.len() * stride && cols <= stride, "softmax_and_grad: too few scores");
        assert!(scores.len() == dp.len() && lse.len() == delta.len(), "softmax_and_grad: shapes differ");
        let rows = scores.chunks_mut(stride).zip(dp.chunks_mut(stride)).zip(lse).zip(delta);
        for (((scores, dp), &lse), &delta) in rows {
            for (s, dp) in scores[..cols].iter_mut().zip(&mut dp[..cols]) {
                let p = s.mul_add::<FMA>(scale, -lse).exp::<FMA>();
                *s = p;
                *dp = p * (*dp - delta) * scale;
            }
        }
    }
}
