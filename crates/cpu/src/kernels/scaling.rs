//! LayerScale and SwiGLU: what multiplies a branch, by a parameter for each column or by a gate.

use super::float::Float;
use super::level::simd;

#[inline(always)]
fn sigmoid<T: Float, const FMA: bool>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp::<FMA>())
}

simd! {
    /// out = gamma·x in every row.
    pub fn layer_scale<T, FMA>(x: &[T], gamma: &[T], out: &mut [T]) {
        let cols = gamma.len();
        assert!(x.len() == out.len() && x.len().is_multiple_of(cols), "layer_scale: shapes differ");
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            for ((out, &x), &gamma) in out.iter_mut().zip(x).zip(gamma) {
                *out = x * gamma;
            }
        }
    }

    /// dx = gamma·dy, and dgamma_acc += the column sums of x·dy.
    pub fn layer_scale_grad<T, FMA>(x: &[T], gamma: &[T], dy: &[T], dx: &mut [T], dgamma_acc: &mut [T]) {
        let cols = gamma.len();
        assert!(x.len() == dx.len() && dy.len() == dx.len(), "layer_scale_grad: lengths differ");
        assert!(dgamma_acc.len() == cols && dx.len().is_multiple_of(cols), "layer_scale_grad: ragged rows");
        let rows = x.chunks_exact(cols).zip(dy.chunks_exact(cols));
        for (dx, (x, dy)) in dx.chunks_exact_mut(cols).zip(rows) {
            let sums = dgamma_acc.iter_mut().zip(gamma);
            for (((dx, &x), &dy), (dgamma, &gamma)) in dx.iter_mut().zip(x).zip(dy).zip(sums) {
                *dgamma = x.mul_add::<FMA>(dy, *dgamma);
                *dx = dy * gamma;
            }
        }
    }

    /// out = silu(a)·b for the halves a and b of every row of x.
    pub fn swiglu<T, FMA>(x: &[T], half: usize, out: &mut [T]) {
        assert!(x.len() == 2 * out.len() && out.len().is_multiple_of(half), "swiglu: shapes differ");
        for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(half)) {
            let (gate, value) = x.split_at(half);
            for ((out, &gate), &value) in out.iter_mut().zip(gate).zip(value) {
                *out = gate * sigmoid::<T, FMA>(gate) * value;
            }
        }
    }

    /// The gradient through [`swiglu`]; d/dx silu(x) = σ(x)·(1 + x·(1-σ(x))).
    pub fn swiglu_grad<T, FMA>(x: &[T], half: usize, dy: &[T], dx: &mut [T]) {
        assert!(x.len() == 2 * dy.len() && x.len() == dx.len(), "swiglu_grad: lengths differ");
        assert!(dy.len().is_multiple_of(half), "swiglu_grad: ragged rows");
        let rows = x.chunks_exact(2 * half).zip(dy.chunks_exact(half));
        for (dx, (x, dy)) in dx.chunks_exact_mut(2 * half).zip(rows) {
            let ((gate, value), (dgate, dvalue)) = (x.split_at(half), dx.split_at_mut(half));
            let inputs = gate.iter().zip(value).zip(dy);
            for ((dgate, dvalue), ((&gate, &value), &dy)) in dgate.iter_mut().zip(dvalue).zip(inputs) {
                let open = sigmoid::<T, FMA>(gate);
                let slope = open * (gate * (T::ONE - open) + T::ONE);
                *dgate = dy * value * slope;
                *dvalue = dy * gate * open;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn columns_are_scaled_and_their_gradients_are_the_slopes() {
        at_every_level(|level| {
            for cols in COLS {
                let (x, gamma, dy) = (noise(1, 3 * cols, 2.0), noise(2, cols, 1.0), noise(3, 3 * cols, 1.0));
                let of = |x: &[f64], gamma: &[f64]| -> Vec<f64> {
                    x.iter().enumerate().map(|(i, x)| x * gamma[i % cols]).collect()
                };
                let mut out = vec![0f32; x.len()];
                layer_scale(&narrow(&x), &narrow(&gamma), &mut out);
                assert_close(&out, &of(&x, &gamma), 1e-6, &format!("layer_scale {level:?}"));
                let (mut dx, mut dgamma) = (vec![0.0; x.len()], vec![0.0; cols]);
                layer_scale_grad(&x, &gamma, &dy, &mut dx, &mut dgamma);
                let loss = |x: &[f64], gamma: &[f64]| weighted_sum(&dy, &of(x, gamma));
                assert_close(&dx, &numeric_grad(&x, |x| loss(x, &gamma)), 1e-8, "dx");
                assert_close(&dgamma, &numeric_grad(&gamma, |gamma| loss(&x, gamma)), 1e-8, "dgamma");
            }
        });
    }

    #[test]
    fn gates_open_and_their_gradients_are_the_slopes() {
        at_every_level(|level| {
            for half in [1, 5, 33] {
                let (x, dy) = (noise(4, 6 * half, 4.0), noise(5, 3 * half, 1.0));
                let of = |x: &[f64]| -> Vec<f64> {
                    let row = |x: &[f64]| -> Vec<f64> {
                        let silu = |x: f64| x / (1.0 + (-x).exp());
                        (0..half).map(|i| silu(x[i]) * x[half + i]).collect()
                    };
                    x.chunks_exact(2 * half).flat_map(row).collect()
                };
                let mut out = vec![0f32; dy.len()];
                swiglu(&narrow(&x), half, &mut out);
                assert_close(&out, &of(&x), 2e-6, &format!("swiglu {level:?}"));
                let mut dx = vec![0.0; x.len()];
                swiglu_grad(&x, half, &dy, &mut dx);
                assert_close(&dx, &numeric_grad(&x, |x| weighted_sum(&dy, &of(x))), 1e-7, "dx");
            }
            // Closed and open as far as it goes.
            let mut out = [0f32; 2];
            swiglu(&[-200.0, 200.0, 1.0, 1.0], 2, &mut out);
            assert_eq!(out, [0.0, 200.0]);
        });
    }
}
