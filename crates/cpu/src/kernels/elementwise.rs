//! Additions, scalings and plain reductions.

use super::lanes::squares;
use super::level::simd;

simd! {
    pub fn add<T, FMA>(a: &[T], b: &[T], out: &mut [T]) {
        assert!(a.len() == out.len() && b.len() == out.len(), "add: lengths differ");
        for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
            *out = a + b;
        }
    }

    pub fn add_assign<T, FMA>(acc: &mut [T], x: &[T]) {
        assert_eq!(acc.len(), x.len(), "add_assign: lengths differ");
        for (acc, &x) in acc.iter_mut().zip(x) {
            *acc += x;
        }
    }

    pub fn scale<T, FMA>(x: &[T], factor: T, out: &mut [T]) {
        assert_eq!(x.len(), out.len(), "scale: lengths differ");
        for (out, &x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }

    /// Adds `bias` to every row of `y`.
    pub fn add_bias<T, FMA>(y: &mut [T], bias: &[T]) {
        assert!(y.len().is_multiple_of(bias.len()), "add_bias: ragged rows");
        for row in y.chunks_exact_mut(bias.len()) {
            for (y, &bias) in row.iter_mut().zip(bias) {
                *y += bias;
            }
        }
    }

    /// acc += the sum of the rows of `x`; rows are summed four by four, in order.
    pub fn column_sum<T, FMA>(x: &[T], cols: usize, acc: &mut [T]) {
        assert!(acc.len() == cols && x.len().is_multiple_of(cols), "column_sum: ragged rows");
        let mut groups = x.chunks_exact(4 * cols);
        for rows in &mut groups {
            let (ab, cd) = rows.split_at(2 * cols);
            let ((a, b), (c, d)) = (ab.split_at(cols), cd.split_at(cols));
            for ((((acc, &a), &b), &c), &d) in acc.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *acc += (a + b) + (c + d);
            }
        }
        for row in groups.remainder().chunks_exact(cols) {
            for (acc, &x) in acc.iter_mut().zip(row) {
                *acc += x;
            }
        }
    }

    /// Σ x², accumulated in double precision.
    pub fn sum_squares<T, FMA>(x: &[T]) -> f64 {
        squares::<T, FMA>(x)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn sums_and_scalings_match_plain_loops() {
        at_every_level(|level| {
            for len in COLS {
                let (a, b) = (noise(1, len, 3.0), noise(2, len, 3.0));
                let (a32, b32, mut out) = (narrow(&a), narrow(&b), vec![0f32; len]);
                add(&a32, &b32, &mut out);
                let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
                assert_close(&out, &sum, 1e-7, &format!("add {level:?}"));
                out.copy_from_slice(&a32);
                add_assign(&mut out, &b32);
                assert_close(&out, &sum, 3e-7, &format!("add_assign {level:?}"));
                scale(&a32, 0.25, &mut out);
                assert_close(&out, &a.iter().map(|a| a * 0.25).collect::<Vec<_>>(), 0.0, "scale");
            }
        });
    }

    #[test]
    fn rows_share_a_bias_and_sum_to_its_gradient() {
        at_every_level(|level| {
            for (cols, rows) in COLS.into_iter().zip([1, 2, 3, 4, 5, 7, 8, 9, 11]) {
                let (y, bias) = (noise(3, rows * cols, 1.0), noise(4, cols, 1.0));
                let mut y32 = narrow(&y);
                add_bias(&mut y32, &narrow(&bias));
                let biased: Vec<f64> = y.iter().enumerate().map(|(i, y)| y + bias[i % cols]).collect();
                assert_close(&y32, &biased, 1e-7, &format!("add_bias {level:?}"));

                let mut acc = narrow(&bias);
                column_sum(&y32, cols, &mut acc);
                let mut sums = bias.clone();
                biased.iter().enumerate().for_each(|(i, y)| sums[i % cols] += y);
                assert_close(&acc, &sums, 1e-6, &format!("column_sum {level:?}"));
            }
        });
    }

    #[test]
    fn squares_sum_in_double_precision() {
        at_every_level(|level| {
            for len in COLS {
                let x = noise(5, len, 2.0);
                let want: f64 = x.iter().map(|x| x * x).sum();
                assert_close(
                    &[sum_squares(&narrow(&x)), sum_squares(&x)],
                    &[want; 2],
                    1e-14,
                    &format!("{level:?}"),
                );
            }
        });
    }
}
