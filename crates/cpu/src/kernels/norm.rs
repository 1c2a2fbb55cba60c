//! Layer normalisation. x, y: (R, C); gamma, beta: (C); mean, rstd: (R).

use super::float::Float;
use super::lanes::{sum, sum_pairs};
use super::level::simd;

/// Normalises one row and returns its mean and 1/√(variance + eps). The variance is taken about the mean in a second
/// pass, since E[x²] - E[x]² cancels; the row is in L1 by then.
#[inline(always)]
fn normalise_row<T: Float, const FMA: bool>(x: &[T], gamma: &[T], beta: &[T], eps: T, y: &mut [T]) -> (T, T) {
    let inverse_cols = T::from_f64(1.0 / x.len() as f64);
    let mean = sum(x) * inverse_cols;
    let centred_squares = sum_pairs(x, x, |x, _| (x - mean) * (x - mean));
    let rstd = T::ONE / (centred_squares * inverse_cols + eps).sqrt();
    for (((y, &x), &gamma), &beta) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
        *y = ((x - mean) * rstd).mul_add::<FMA>(gamma, beta);
    }
    (mean, rstd)
}

/// The statistics that the forward pass kept of one row.
struct Row<T> {
    mean: T,
    rstd: T,
    /// Factor of the row's gradients.
    factor: T,
}

impl<T: Float> Row<T> {
    /// Adds, with factor·dy for dy: dgamma_acc += dy·x̂, dbeta_acc += dy, and g = dy·gamma.
    #[inline(always)]
    fn weight_grads<const FMA: bool>(
        &self,
        x: &[T],
        dy: &[T],
        gamma: &[T],
        g: &mut [T],
        dgamma_acc: &mut [T],
        dbeta_acc: &mut [T],
    ) {
        let accs = dgamma_acc.iter_mut().zip(dbeta_acc);
        for ((((g, &x), &dy), &gamma), (dgamma, dbeta)) in g.iter_mut().zip(x).zip(dy).zip(gamma).zip(accs) {
            let dy = dy * self.factor;
            *dgamma = dy.mul_add::<FMA>((x - self.mean) * self.rstd, *dgamma);
            *dbeta += dy;
            *g = dy * gamma;
        }
    }

    /// dx = rstd·(g - mean(g) - x̂·mean(g·x̂)) as a function of one g and x of the row.
    #[inline(always)]
    fn input_grad<const FMA: bool>(&self, x: &[T], g: &[T]) -> impl Fn(T, T) -> T + use<T, FMA> {
        let inverse_cols = T::from_f64(1.0 / x.len() as f64);
        let (mean, rstd) = (self.mean, self.rstd);
        let g_mean = sum(g) * inverse_cols;
        let gx_mean = sum_pairs(g, x, |g, x| g * (x - mean)) * rstd * inverse_cols;
        move |g, x| rstd * ((x - mean) * rstd).mul_add::<FMA>(-gx_mean, g - g_mean)
    }
}

simd! {
    pub fn layer_norm<T, FMA>(
        x: &[T],
        gamma: &[T],
        beta: &[T],
        eps: f64,
        y: &mut [T],
        mean: &mut [T],
        rstd: &mut [T],
    ) {
        let cols = gamma.len();
        assert!(beta.len() == cols && x.len() == y.len(), "layer_norm: shapes differ");
        assert!(x.len() == mean.len() * cols && x.len() == rstd.len() * cols, "layer_norm: ragged rows");
        let statistics = mean.iter_mut().zip(rstd);
        for ((x, y), (mean, rstd)) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)).zip(statistics) {
            (*mean, *rstd) = normalise_row::<T, FMA>(x, gamma, beta, T::from_f64(eps), y);
        }
    }

    /// sum = a + b, y = layer_norm(sum).
    pub fn add_layer_norm<T, FMA>(
        a: &[T],
        b: &[T],
        gamma: &[T],
        beta: &[T],
        eps: f64,
        sum: &mut [T],
        y: &mut [T],
        mean: &mut [T],
        rstd: &mut [T],
    ) {
        let cols = gamma.len();
        assert!(beta.len() == cols && sum.len() == y.len(), "add_layer_norm: shapes differ");
        assert!(a.len() == y.len() && b.len() == y.len(), "add_layer_norm: shapes differ");
        assert!(y.len() == mean.len() * cols && y.len() == rstd.len() * cols, "add_layer_norm: ragged rows");
        let inputs = a.chunks_exact(cols).zip(b.chunks_exact(cols));
        let outputs = sum.chunks_exact_mut(cols).zip(y.chunks_exact_mut(cols));
        let statistics = mean.iter_mut().zip(rstd);
        for (((a, b), (sum, y)), (mean, rstd)) in inputs.zip(outputs).zip(statistics) {
            for ((sum, &a), &b) in sum.iter_mut().zip(a).zip(b) {
                *sum = a + b;
            }
            (*mean, *rstd) = normalise_row::<T, FMA>(sum, gamma, beta, T::from_f64(eps), y);
        }
    }

    /// out = shortcut + factor·layer_norm(y).
    pub fn norm_add<T, FMA>(
        y: &[T],
        shortcut: &[T],
        gamma: &[T],
        beta: &[T],
        eps: f64,
        factor: T,
        out: &mut [T],
        mean: &mut [T],
        rstd: &mut [T],
    ) {
        let cols = gamma.len();
        assert!(beta.len() == cols && shortcut.len() == y.len(), "norm_add: shapes differ");
        assert!(y.len() == out.len(), "norm_add: shapes differ");
        assert!(y.len() == mean.len() * cols && y.len() == rstd.len() * cols, "norm_add: ragged rows");
        let inputs = y.chunks_exact(cols).zip(shortcut.chunks_exact(cols));
        let statistics = mean.iter_mut().zip(rstd);
        for (((y, shortcut), out), (mean, rstd)) in inputs.zip(out.chunks_exact_mut(cols)).zip(statistics) {
            (*mean, *rstd) = normalise_row::<T, FMA>(y, gamma, beta, T::from_f64(eps), out);
            for (out, &shortcut) in out.iter_mut().zip(shortcut) {
                *out = out.mul_add::<FMA>(factor, shortcut);
            }
        }
    }

    /// The gradient through [`norm_add`]: dy, and dgamma_acc += Σ factor·dout·x̂, dbeta_acc += Σ factor·dout.
    pub fn norm_add_grad<T, FMA>(
        y: &[T],
        mean: &[T],
        rstd: &[T],
        gamma: &[T],
        dout: &[T],
        factor: T,
        dy: &mut [T],
        dgamma_acc: &mut [T],
        dbeta_acc: &mut [T],
    ) {
        let cols = gamma.len();
        assert!(y.len() == dy.len() && dout.len() == dy.len(), "norm_add_grad: shapes differ");
        assert!(dgamma_acc.len() == cols && dbeta_acc.len() == cols, "norm_add_grad: shapes differ");
        assert!(y.len() == mean.len() * cols && y.len() == rstd.len() * cols, "norm_add_grad: ragged rows");
        for (r, dy) in dy.chunks_exact_mut(cols).enumerate() {
            let span = r * cols..(r + 1) * cols;
            let (y, row) = (&y[span.clone()], Row { mean: mean[r], rstd: rstd[r], factor });
            row.weight_grads::<FMA>(y, &dout[span], gamma, dy, dgamma_acc, dbeta_acc);
            let through = row.input_grad::<FMA>(y, dy);
            for (dy, &y) in dy.iter_mut().zip(y) {
                *dy = through(*dy, y);
            }
        }
    }

    /// dx = the gradient through [`layer_norm`] (plus `add`, where a residual branch joins), and
    /// dgamma_acc += Σ dy·x̂, dbeta_acc += Σ dy over the rows.
    pub fn layer_norm_grad<T, FMA>(
        x: &[T],
        mean: &[T],
        rstd: &[T],
        gamma: &[T],
        dy: &[T],
        add: Option<&[T]>,
        dx: &mut [T],
        dgamma_acc: &mut [T],
        dbeta_acc: &mut [T],
    ) {
        let cols = gamma.len();
        assert!(x.len() == dx.len() && dy.len() == dx.len(), "layer_norm_grad: shapes differ");
        assert!(dgamma_acc.len() == cols && dbeta_acc.len() == cols, "layer_norm_grad: shapes differ");
        assert!(x.len() == mean.len() * cols && x.len() == rstd.len() * cols, "layer_norm_grad: ragged rows");
        assert!(add.is_none_or(|add| add.len() == dx.len()), "layer_norm_grad: shapes differ");
        for (r, dx) in dx.chunks_exact_mut(cols).enumerate() {
            let span = r * cols..(r + 1) * cols;
            let (x, row) = (&x[span.clone()], Row { mean: mean[r], rstd: rstd[r], factor: T::ONE });
            row.weight_grads::<FMA>(x, &dy[span.clone()], gamma, dx, dgamma_acc, dbeta_acc);
            let through = row.input_grad::<FMA>(x, dx);
            match add {
                Some(add) => {
                    for ((dx, &x), &add) in dx.iter_mut().zip(x).zip(&add[span]) {
                        *dx = through(*dx, x) + add;
                    }
                }
                None => {
                    for (dx, &x) in dx.iter_mut().zip(x) {
                        *dx = through(*dx, x);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const EPS: f64 = 1e-6;

    fn reference(x: &[f64], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
        let cols = gamma.len();
        x.chunks_exact(cols)
            .flat_map(|row| {
                let mean = row.iter().sum::<f64>() / cols as f64;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
                let rstd = 1.0 / (variance + EPS).sqrt();
                (0..cols).map(move |i| (row[i] - mean) * rstd * gamma[i] + beta[i])
            })
            .collect()
    }

    #[test]
    fn rows_are_normalised_even_far_from_zero() {
        at_every_level(|level| {
            // One column has no variance: there 1/√eps magnifies the rounding of the mean without bound.
            for cols in COLS.into_iter().filter(|&cols| cols > 1) {
                let (a, b) = (noise(1, 3 * cols, 1.0), noise(2, 3 * cols, 1.0));
                let (gamma, beta) = (noise(3, cols, 2.0), noise(4, cols, 1.0));
                let (mut sum, mut y) = (vec![0f32; a.len()], vec![0f32; a.len()]);
                let (mut mean, mut rstd) = ([0f32; 3], [0f32; 3]);
                let (gamma32, beta32) = (narrow(&gamma), narrow(&beta));
                let (a32, b32) = (narrow(&a), narrow(&b));
                add_layer_norm(&a32, &b32, &gamma32, &beta32, EPS, &mut sum, &mut y, &mut mean, &mut rstd);
                let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
                assert_close(&sum, &want, 1e-7, &format!("sum {level:?}"));
                assert_close(&y, &reference(&want, &gamma, &beta), 2e-6, &format!("y {level:?}"));

                let far: Vec<f32> = a32.iter().map(|a| a + 1000.0).collect();
                let far64: Vec<f64> = far.iter().map(|&x| x as f64).collect();
                layer_norm(&far, &gamma32, &beta32, EPS, &mut y, &mut mean, &mut rstd);
                // A mean near 1000 is known to two units in its last place at best; gamma is below 2.
                let tolerance = 2.0 * 2.0 * 6.1e-5 * rstd.iter().fold(0.0, |a: f64, &b| a.max(b as f64));
                assert_close(&y, &reference(&far64, &gamma, &beta), tolerance, &format!("far y {level:?}"));
            }
        });
    }

    /// A layer norm of doubles with everything its backward pass needs.
    struct Case {
        x: Vec<f64>,
        dy: Vec<f64>,
        gamma: Vec<f64>,
        beta: Vec<f64>,
        mean: Vec<f64>,
        rstd: Vec<f64>,
    }

    impl Case {
        fn new(rows: usize, cols: usize) -> Case {
            let (x, dy) = (noise(5, rows * cols, 2.0), noise(6, rows * cols, 1.0));
            let (gamma, beta) = (noise(7, cols, 2.0), noise(8, cols, 1.0));
            let (mut y, mut mean, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows], vec![0.0; rows]);
            layer_norm(&x, &gamma, &beta, EPS, &mut y, &mut mean, &mut rstd);
            assert_close(&y, &reference(&x, &gamma, &beta), 1e-12, "y");
            Case { x, dy, gamma, beta, mean, rstd }
        }

        fn grads(&self, add: Option<&[f64]>) -> [Vec<f64>; 3] {
            let cols = self.gamma.len();
            let (mut dx, mut dgamma, mut dbeta) = (vec![0.0; self.x.len()], vec![0.0; cols], vec![0.0; cols]);
            let Case { x, dy, gamma, mean, rstd, .. } = self;
            layer_norm_grad(x, mean, rstd, gamma, dy, add, &mut dx, &mut dgamma, &mut dbeta);
            [dx, dgamma, dbeta]
        }
    }

    #[test]
    fn gradients_are_the_slopes() {
        at_every_level(|_| {
            for cols in [2, 5, 33, 65] {
                let case = Case::new(3, cols);
                let Case { x, dy, gamma, beta, .. } = &case;
                let [dx, dgamma, dbeta] = case.grads(None);
                let loss =
                    |x: &[f64], gamma: &[f64], beta: &[f64]| weighted_sum(dy, &reference(x, gamma, beta));
                assert_close(&dx, &numeric_grad(x, |x| loss(x, gamma, beta)), 1e-7, "dx");
                assert_close(&dgamma, &numeric_grad(gamma, |gamma| loss(x, gamma, beta)), 1e-8, "dgamma");
                assert_close(&dbeta, &numeric_grad(beta, |beta| loss(x, gamma, beta)), 1e-8, "dbeta");
                let with_add: Vec<f64> = dx.iter().zip(x).map(|(dx, x)| dx + x).collect();
                assert_close(&case.grads(Some(x))[0], &with_add, 1e-12, "dx + add");
            }
        });
    }

    #[test]
    fn single_precision_gradients_match_double() {
        at_every_level(|level| {
            for cols in COLS.into_iter().filter(|&cols| cols > 1) {
                let case = Case::new(3, cols);
                let want = case.grads(Some(&case.dy));
                let [x, dy, gamma, mean, rstd] =
                    [&case.x, &case.dy, &case.gamma, &case.mean, &case.rstd].map(|v| narrow(v));
                let (mut dx, mut dgamma, mut dbeta) =
                    (vec![0f32; x.len()], vec![0f32; cols], vec![0f32; cols]);
                layer_norm_grad(&x, &mean, &rstd, &gamma, &dy, Some(&dy), &mut dx, &mut dgamma, &mut dbeta);
                for (got, want) in [&dx, &dgamma, &dbeta].into_iter().zip(&want) {
                    assert_close(got, want, 2e-6, &format!("{cols} columns, {level:?}"));
                }
            }
        });
    }
}
