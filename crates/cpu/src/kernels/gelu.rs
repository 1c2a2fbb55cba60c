//! Exact GELU, x·Φ(x), with the bias of the linear layer before it.

use super::float::Float;
use super::level::simd;

#[inline(always)]
fn gelu_of<T: Float, const FMA: bool>(x: T) -> T {
    x * x.normal_cdf_and_density::<FMA>().0
}

/// d/dx x·Φ(x) = Φ(x) + x·φ(x)
#[inline(always)]
fn slope_of<T: Float, const FMA: bool>(x: T) -> T {
    let (cdf, density) = x.normal_cdf_and_density::<FMA>();
    x.mul_add::<FMA>(density, cdf)
}

simd! {
    pub fn gelu<T, FMA>(x: &[T], out: &mut [T]) {
        assert_eq!(x.len(), out.len(), "gelu: lengths differ");
        for (out, &x) in out.iter_mut().zip(x) {
            *out = gelu_of::<T, FMA>(x);
        }
    }

    /// pre += bias in every row, out = gelu(pre).
    pub fn bias_gelu<T, FMA>(pre: &mut [T], bias: &[T], out: &mut [T]) {
        let cols = bias.len();
        assert!(pre.len() == out.len() && pre.len().is_multiple_of(cols), "bias_gelu: shapes differ");
        for (pre, out) in pre.chunks_exact_mut(cols).zip(out.chunks_exact_mut(cols)) {
            for ((out, pre), &bias) in out.iter_mut().zip(pre).zip(bias) {
                *pre += bias;
                *out = gelu_of::<T, FMA>(*pre);
            }
        }
    }

    pub fn gelu_grad<T, FMA>(pre: &[T], dy: &[T], dx: &mut [T]) {
        assert!(pre.len() == dx.len() && dy.len() == dx.len(), "gelu_grad: lengths differ");
        for ((dx, &pre), &dy) in dx.iter_mut().zip(pre).zip(dy) {
            *dx = dy * slope_of::<T, FMA>(pre);
        }
    }

    /// dx ∘= the slope at pre, and dbias_acc += the column sums of `dx`.
    pub fn gelu_grad_in_place<T, FMA>(pre: &[T], dx: &mut [T], dbias_acc: &mut [T]) {
        let cols = dbias_acc.len();
        assert!(pre.len() == dx.len() && dx.len().is_multiple_of(cols), "gelu_grad_in_place: shapes differ");
        for (dx, pre) in dx.chunks_exact_mut(cols).zip(pre.chunks_exact(cols)) {
            for ((dx, &pre), dbias) in dx.iter_mut().zip(pre).zip(dbias_acc.iter_mut()) {
                *dx *= slope_of::<T, FMA>(pre);
                *dbias += *dx;
            }
        }
    }

    /// [`gelu_grad`], and dbias_acc += the column sums of `dx`.
    pub fn gelu_grad_bias<T, FMA>(pre: &[T], dy: &[T], dx: &mut [T], cols: usize, dbias_acc: &mut [T]) {
        assert!(pre.len() == dx.len() && dy.len() == dx.len(), "gelu_grad_bias: lengths differ");
        assert!(dbias_acc.len() == cols && dx.len().is_multiple_of(cols), "gelu_grad_bias: ragged rows");
        let rows = pre.chunks_exact(cols).zip(dy.chunks_exact(cols));
        for (dx, (pre, dy)) in dx.chunks_exact_mut(cols).zip(rows) {
            for (((dx, &pre), &dy), dbias) in dx.iter_mut().zip(pre).zip(dy).zip(dbias_acc.iter_mut()) {
                *dx = dy * slope_of::<T, FMA>(pre);
                *dbias += *dx;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    fn reference(x: &[f64]) -> Vec<f64> {
        x.iter().map(|&x| 0.5 * x * (1.0 + Float::erf::<false>(x / 2f64.sqrt()))).collect()
    }

    fn reference_slope(x: f64) -> f64 {
        Float::normal_cdf_and_density::<false>(x).0
            + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    #[test]
    fn gelu_is_exact_to_single_precision_everywhere() {
        at_every_level(|level| {
            let x: Vec<f64> = (-120_000..=120_000).map(|i| (i as f64 * 1e-4) as f32 as f64).collect();
            let mut out = vec![0f32; x.len()];
            gelu(&narrow(&x), &mut out);
            for ((&got, want), x) in out.iter().zip(reference(&x)).zip(&x) {
                let error = (got as f64 - want).abs();
                assert!(
                    error < 1.5e-7 * want.abs().max(0.5),
                    "gelu({x}) = {got}, exactly {want} at {level:?}"
                );
            }
            let ones = vec![1f32; x.len()];
            gelu_grad(&narrow(&x), &ones, &mut out);
            for (&got, &x) in out.iter().zip(&x) {
                let error = (got as f64 - reference_slope(x)).abs();
                assert!(error < 4e-7, "slope({x}) = {got}, off by {error:e} at {level:?}");
            }
        });
    }

    #[test]
    fn the_fused_forms_match_the_plain_ones() {
        at_every_level(|level| {
            for cols in COLS {
                let n = 3 * cols;
                let (x, bias, dy) = (noise(1, n, 4.0), noise(2, cols, 1.0), noise(3, n, 1.0));
                let pre: Vec<f64> = x.iter().enumerate().map(|(i, x)| x + bias[i % cols]).collect();
                let (mut pre32, mut out) = (narrow(&x), vec![0f32; n]);
                bias_gelu(&mut pre32, &narrow(&bias), &mut out);
                assert_close(&pre32, &pre, 1e-7, &format!("pre {level:?}"));
                assert_close(&out, &reference(&pre), 3e-7, &format!("bias_gelu {level:?}"));

                let (mut dx, mut dbias) = (vec![0f32; n], narrow(&bias));
                gelu_grad_bias(&pre32, &narrow(&dy), &mut dx, cols, &mut dbias);
                let want: Vec<f64> = pre.iter().zip(&dy).map(|(&x, dy)| dy * reference_slope(x)).collect();
                let mut sums = bias.clone();
                want.iter().enumerate().for_each(|(i, dx)| sums[i % cols] += dx);
                assert_close(&dx, &want, 1e-6, &format!("dx {level:?}"));
                assert_close(&dbias, &sums, 1e-6, &format!("dbias {level:?}"));

                let (mut in_place, mut dbias) = (narrow(&dy), narrow(&bias));
                gelu_grad_in_place(&pre32, &mut in_place, &mut dbias);
                assert_close(&in_place, &want, 1e-6, &format!("dx in place {level:?}"));
                assert_close(&dbias, &sums, 1e-6, &format!("dbias in place {level:?}"));
            }
        });
    }

    #[test]
    fn the_gradient_is_the_slope_of_gelu() {
        at_every_level(|_| {
            let (x, dy) = (noise(4, 65, 5.0), noise(5, 65, 1.0));
            let mut dx = vec![0.0; x.len()];
            gelu_grad(&x, &dy, &mut dx);
            let numeric = numeric_grad(&x, |x| {
                let mut y = vec![0.0; x.len()];
                gelu(x, &mut y);
                weighted_sum(&dy, &y)
            });
            assert_close(&dx, &numeric, 1e-9, "dx");
        });
    }

    #[test]
    fn nan_stays_nan() {
        at_every_level(|_| {
            let mut out = [0f32; 2];
            gelu(&[f32::NAN, 1.0], &mut out);
            assert!(out[0].is_nan() && !out[1].is_nan());
            gelu_grad(&[f32::NAN, 1.0], &[1.0; 2], &mut out);
            assert!(out[0].is_nan() && !out[1].is_nan());
        });
    }
}
