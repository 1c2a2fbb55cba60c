//! Optimiser updates, in place. p parameters, g gradients (times `grad_scale`, e.g. a clipping factor), and the
//! optimiser's state, all of one length.

use super::float::Float;
use super::lanes::squares;
use super::level::simd;

/// `torch.optim.AdamW`. `bias1` and `bias2` are 1 - βᵗ of the step being taken (t counts from 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub bias1: f64,
    pub bias2: f64,
}

/// `torch.optim.SGD`. On the `first` step the momentum buffer becomes the gradient, undamped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: bool,
    pub weight_decay: f64,
    pub first: bool,
}

/// DeepSpeed's `FusedLamb` as it is by default: eps outside the square root, and the bias correction in the step
/// size rather than in the moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// Numbers that LAMB shares with Adam.
    pub adam: AdamW,
    /// Limits of the trust ratio.
    pub min_coeff: f64,
    pub max_coeff: f64,
}

impl Lamb {
    /// The factor of one parameter tensor's update: the step size times the trust ratio ‖p‖/‖update‖.
    pub fn step(&self, w_sq: f64, u_sq: f64) -> f64 {
        let trusted = if w_sq == 0.0 || u_sq == 0.0 {
            1.0
        } else {
            (w_sq.sqrt() / u_sq.sqrt()).clamp(self.min_coeff, self.max_coeff)
        };
        self.adam.lr * self.adam.bias2.sqrt() / self.adam.bias1 * trusted
    }
}

/// The moving averages of gradients and of their squares.
#[derive(Clone, Copy)]
struct Averages<T> {
    grad_scale: T,
    /// Shares of the average that stay, and of the gradient that are added.
    keep: [T; 2],
    take: [T; 2],
}

impl<T: Float> Averages<T> {
    fn of(hyper: AdamW, grad_scale: f64) -> Self {
        let betas = [hyper.beta1, hyper.beta2];
        let (keep, take) = (betas.map(T::from_f64), betas.map(|beta| T::from_f64(1.0 - beta)));
        Averages { grad_scale: T::from_f64(grad_scale), keep, take }
    }

    #[inline(always)]
    fn follow<const FMA: bool>(&self, g: T, m: &mut T, v: &mut T) {
        let g = g * self.grad_scale;
        *m = m.mul_add::<FMA>(self.keep[0], g * self.take[0]);
        *v = v.mul_add::<FMA>(self.keep[1], g * g * self.take[1]);
    }
}

/// Number of LAMB's updates that are kept aside until their norm is taken.
const BLOCK: usize = 512;

#[inline(always)]
fn lamb_update<T: Float, const FMA: bool>(p: T, m: T, v: T, eps: T, weight_decay: T) -> T {
    p.mul_add::<FMA>(weight_decay, m / (v.sqrt() + eps))
}

simd! {
    pub fn adamw<T, FMA>(p: &mut [T], g: &[T], m: &mut [T], v: &mut [T], hyper: AdamW, grad_scale: f64) {
        let n = p.len();
        assert!(g.len() == n && m.len() == n && v.len() == n, "adamw: lengths differ");
        let averages = Averages::<T>::of(hyper, grad_scale);
        let decay = T::from_f64(1.0 - hyper.lr * hyper.weight_decay);
        let step = T::from_f64(hyper.lr / hyper.bias1);
        let (unbias, eps) = (T::from_f64(1.0 / hyper.bias2.sqrt()), T::from_f64(hyper.eps));
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            averages.follow::<FMA>(g, m, v);
            let denominator = v.sqrt().mul_add::<FMA>(unbias, eps);
            *p = *p * decay - step * (*m / denominator);
        }
    }

    /// `buffer` is the momentum; without it the momentum must be zero.
    pub fn sgd<T, FMA>(p: &mut [T], g: &[T], buffer: Option<&mut [T]>, hyper: Sgd, grad_scale: f64) {
        assert_eq!(p.len(), g.len(), "sgd: lengths differ");
        let (lr, grad_scale) = (T::from_f64(hyper.lr), T::from_f64(grad_scale));
        let weight_decay = T::from_f64(hyper.weight_decay);
        let Some(buffer) = buffer else {
            assert_eq!(hyper.momentum, 0.0, "sgd: momentum needs a buffer");
            for (p, &g) in p.iter_mut().zip(g) {
                *p -= lr * p.mul_add::<FMA>(weight_decay, g * grad_scale);
            }
            return;
        };
        assert_eq!(p.len(), buffer.len(), "sgd: lengths differ");
        let momentum = T::from_f64(hyper.momentum);
        let keep = if hyper.first { T::ZERO } else { momentum };
        let take = if hyper.first { T::ONE } else { T::from_f64(1.0 - hyper.dampening) };
        // Nesterov's direction is g + momentum·buffer, the plain one 0·g + 1·buffer.
        let (of_g, of_buffer) = if hyper.nesterov { (T::ONE, momentum) } else { (T::ZERO, T::ONE) };
        for ((p, &g), buffer) in p.iter_mut().zip(g).zip(buffer) {
            let g = p.mul_add::<FMA>(weight_decay, g * grad_scale);
            *buffer = buffer.mul_add::<FMA>(keep, take * g);
            *p -= lr * buffer.mul_add::<FMA>(of_buffer, of_g * g);
        }
    }

    /// Updates the moments and returns (‖p‖², ‖update‖²), from which [`Lamb::step`] finds the step of
    /// [`lamb_apply`]. A tensor cut into pieces has the sums of its pieces.
    pub fn lamb_moments_and_norms<T, FMA>(
        p: &[T],
        g: &[T],
        m: &mut [T],
        v: &mut [T],
        hyper: Lamb,
        grad_scale: f64,
    ) -> (f64, f64) {
        let n = p.len();
        assert!(g.len() == n && m.len() == n && v.len() == n, "lamb: lengths differ");
        let averages = Averages::<T>::of(hyper.adam, grad_scale);
        let (eps, weight_decay) = (T::from_f64(hyper.adam.eps), T::from_f64(hyper.adam.weight_decay));
        let (mut w_sq, mut u_sq, mut updates) = (0.0, 0.0, [T::ZERO; BLOCK]);
        let blocks = p.chunks(BLOCK).zip(g.chunks(BLOCK)).zip(m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK)));
        for ((p, g), (m, v)) in blocks {
            let updates = &mut updates[..p.len()];
            for ((((update, &p), &g), m), v) in updates.iter_mut().zip(p).zip(g).zip(m).zip(v) {
                averages.follow::<FMA>(g, m, v);
                *update = lamb_update::<T, FMA>(p, *m, *v, eps, weight_decay);
            }
            w_sq += squares::<T, FMA>(p);
            u_sq += squares::<T, FMA>(updates);
        }
        (w_sq, u_sq)
    }

    /// p -= step · update, where `step` is [`Lamb::step`] of the whole tensor's norms.
    pub fn lamb_apply<T, FMA>(p: &mut [T], m: &[T], v: &[T], hyper: Lamb, step: f64) {
        assert!(m.len() == p.len() && v.len() == p.len(), "lamb_apply: lengths differ");
        let (step, eps) = (T::from_f64(step), T::from_f64(hyper.adam.eps));
        let weight_decay = T::from_f64(hyper.adam.weight_decay);
        for ((p, &m), &v) in p.iter_mut().zip(m).zip(v) {
            *p -= step * lamb_update::<T, FMA>(*p, m, v, eps, weight_decay);
        }
    }

    /// Muon's momentum, a moving average of gradients, and the direction to orthogonalise: that average, or with `nesterov` what
    /// it would be if the same gradient came once more.
    pub fn muon_momentum<T, FMA>(
        g: &[T],
        m: &mut [T],
        direction: &mut [T],
        momentum: f64,
        nesterov: bool,
        grad_scale: f64,
    ) {
        assert!(m.len() == g.len() && direction.len() == g.len(), "muon_momentum: lengths differ");
        let (keep, take) = (T::from_f64(momentum), T::from_f64(1.0 - momentum));
        let (of_m, of_g) = if nesterov { (keep, take) } else { (T::ONE, T::ZERO) };
        let grad_scale = T::from_f64(grad_scale);
        for ((&g, m), direction) in g.iter().zip(m).zip(direction) {
            let g = g * grad_scale;
            *m = m.mul_add::<FMA>(keep, g * take);
            *direction = m.mul_add::<FMA>(of_m, g * of_g);
        }
    }

    /// p = keep·p - step·direction.
    pub fn muon_apply<T, FMA>(p: &mut [T], direction: &[T], keep: f64, step: f64) {
        assert_eq!(p.len(), direction.len(), "muon_apply: lengths differ");
        let (keep, step) = (T::from_f64(keep), T::from_f64(step));
        for (p, &direction) in p.iter_mut().zip(direction) {
            *p = *p * keep - step * direction;
        }
    }

    /// A row of a + b·A + c·A², of that number.
    pub fn newton_schulz<T, FMA>(
        gram: &[T],
        square: &[T],
        out: &mut [T],
        row: usize,
        coefficients: [f64; 3],
    ) {
        assert!(gram.len() == out.len() && square.len() == out.len(), "newton_schulz: lengths differ");
        let [a, b, c] = coefficients.map(T::from_f64);
        for ((out, &gram), &square) in out.iter_mut().zip(gram).zip(square) {
            *out = gram.mul_add::<FMA>(b, square * c);
        }
        out[row] += a;
    }

    /// average = decay·average + (1-decay)·p, written as a step towards p: decay and 1 - decay, each rounded, don't add
    /// up to one, and in single precision an average over ten thousand steps would settle 1e-4 beside p.
    pub fn ema<T, FMA>(average: &mut [T], p: &[T], decay: f64) {
        assert_eq!(average.len(), p.len(), "ema: lengths differ");
        let take = T::from_f64(1.0 - decay);
        for (average, &p) in average.iter_mut().zip(p) {
            *average = (p - *average).mul_add::<FMA>(take, *average);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const STEPS: i32 = 4;

    fn zip3(a: &mut [f64], b: &mut [f64], c: &mut [f64], f: impl Fn(&mut f64, &mut f64, &mut f64, usize)) {
        a.iter_mut().zip(b).zip(c).enumerate().for_each(|(i, ((a, b), c))| f(a, b, c, i));
    }

    #[test]
    fn adamw_steps_as_torch_does() {
        at_every_level(|level| {
            for n in COLS {
                let (mut p, mut m, mut v) = (noise(1, n, 1.0), vec![0.0; n], vec![0.0; n]);
                let (mut p32, mut m32, mut v32) = (narrow(&p), narrow(&m), narrow(&v));
                for t in 1..=STEPS {
                    let g = noise(10 + t as u64, n, 2.0);
                    let (lr, beta1, beta2, eps, weight_decay) = (0.01, 0.9, 0.95, 1e-8, 0.1);
                    let (bias1, bias2) = (1.0 - f64::powi(beta1, t), 1.0 - f64::powi(beta2, t));
                    let hyper = AdamW { lr, beta1, beta2, eps, weight_decay, bias1, bias2 };
                    adamw(&mut p32, &narrow(&g), &mut m32, &mut v32, hyper, 0.5);
                    zip3(&mut p, &mut m, &mut v, |p, m, v, i| {
                        let g = 0.5 * g[i];
                        *p *= 1.0 - lr * weight_decay;
                        *m += (g - *m) * (1.0 - beta1);
                        *v = *v * beta2 + g * g * (1.0 - beta2);
                        *p -= lr / bias1 * *m / (v.sqrt() / bias2.sqrt() + eps);
                    });
                }
                assert_close(&p32, &p, 1e-6, &format!("p {level:?}"));
                assert_close(&m32, &m, 1e-6, &format!("m {level:?}"));
                assert_close(&v32, &v, 1e-6, &format!("v {level:?}"));
            }
        });
    }

    /// Three scalar steps with g = 1, 2, -1 from p = 1, from the formulas of torch.optim.SGD's documentation.
    fn sgd_reference(hyper: Sgd) -> f64 {
        let (mut p, mut buffer): (f64, Option<f64>) = (1.0, None);
        for g in [1.0, 2.0, -1.0] {
            let mut g = g + hyper.weight_decay * p;
            if hyper.momentum != 0.0 {
                let b = buffer.map_or(g, |b| hyper.momentum * b + (1.0 - hyper.dampening) * g);
                g = if hyper.nesterov { g + hyper.momentum * b } else { b };
                buffer = Some(b);
            }
            p -= hyper.lr * g;
        }
        p
    }

    #[test]
    fn sgd_steps_as_torch_does() {
        at_every_level(|level| {
            let cases = [(0.0, 0.0, false), (0.9, 0.0, false), (0.9, 0.0, true), (0.8, 0.3, false)];
            for (momentum, dampening, nesterov) in cases {
                let mut hyper =
                    Sgd { lr: 0.1, momentum, dampening, nesterov, weight_decay: 0.05, first: true };
                let want = sgd_reference(hyper);
                for n in COLS {
                    hyper.first = true;
                    // Whatever the buffer held before the first step must not matter.
                    let (mut p, mut buffer) = (vec![1.0; n], vec![7.0; n]);
                    for g in [1.0, 2.0, -1.0] {
                        let buffer = (momentum != 0.0).then_some(&mut buffer[..]);
                        sgd(&mut p, &vec![g * 4.0; n], buffer, hyper, 0.25);
                        hyper.first = false;
                    }
                    assert_close(&p, &vec![want; n], 1e-14, &format!("{hyper:?} {level:?}"));
                }
            }
        });
    }

    #[test]
    fn lamb_steps_as_deepspeed_does() {
        at_every_level(|level| {
            for n in [1, 5, 65, 768, 1300] {
                let (mut p, mut m, mut v) = (noise(1, n, 1.0), vec![0.0; n], vec![0.0; n]);
                let (mut p32, mut m32, mut v32) = (narrow(&p), narrow(&m), narrow(&v));
                for t in 1..=STEPS {
                    let g = noise(20 + t as u64, n, 2.0);
                    let (lr, beta1, beta2, eps, weight_decay) = (0.01, 0.9, 0.999, 1e-8, 0.1);
                    let (bias1, bias2) = (1.0 - f64::powi(beta1, t), 1.0 - f64::powi(beta2, t));
                    let (min_coeff, max_coeff) = (0.01, 10.0);
                    let adam = AdamW { lr, beta1, beta2, eps, weight_decay, bias1, bias2 };
                    let hyper = Lamb { adam, min_coeff, max_coeff };
                    let (w, u) = lamb_moments_and_norms(&p32, &narrow(&g), &mut m32, &mut v32, hyper, 0.5);
                    lamb_apply(&mut p32, &m32, &v32, hyper, hyper.step(w, u));

                    zip3(&mut p, &mut m, &mut v, |_, m, v, i| {
                        *m = beta1 * *m + (1.0 - beta1) * 0.5 * g[i];
                        *v = beta2 * *v + (1.0 - beta2) * 0.25 * g[i] * g[i];
                    });
                    let update: Vec<f64> =
                        (0..n).map(|i| m[i] / (v[i].sqrt() + eps) + weight_decay * p[i]).collect();
                    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let coeff = (norm(&p) / norm(&update)).clamp(0.01, 10.0);
                    let step = lr * bias2.sqrt() / bias1 * coeff;
                    p.iter_mut().zip(&update).for_each(|(p, u)| *p -= step * u);
                }
                assert_close(&p32, &p, 2e-6, &format!("p of {n}, {level:?}"));
                assert_close(&m32, &m, 1e-6, &format!("m of {n}, {level:?}"));
            }
        });
    }

    #[test]
    fn averages_follow_and_settle_on_what_they_follow() {
        at_every_level(|level| {
            for n in COLS {
                let (start, p) = (noise(1, n, 1.0), noise(2, n, 1.0));
                let (mut average, mut single, mut want) = (start.clone(), narrow(&start), start);
                for _ in 0..STEPS {
                    ema(&mut average, &p, 0.9);
                    ema(&mut single, &narrow(&p), 0.9);
                    want.iter_mut().zip(&p).for_each(|(e, p)| *e = 0.9 * *e + 0.1 * p);
                }
                assert_close(&average, &want, 1e-15, &format!("{level:?}"));
                assert_close(&single, &want, 1e-6, &format!("single, {level:?}"));
                single = narrow(&p);
                (0..20_000).for_each(|_| ema(&mut single, &narrow(&p), 0.9999));
                assert_close(&single, &p, 0.0, &format!("at rest, {level:?}"));
            }
        });
    }

    #[test]
    fn lamb_trusts_a_tensor_without_a_norm_fully() {
        let (beta1, beta2, bias1, bias2) = (0.9, 0.999, 1.0, 1.0);
        let adam = AdamW { lr: 0.1, beta1, beta2, eps: 1e-8, weight_decay: 0.0, bias1, bias2 };
        let hyper = Lamb { adam, min_coeff: 0.01, max_coeff: 10.0 };
        assert_eq!(hyper.step(0.0, 4.0), 0.1);
        assert_eq!(hyper.step(4.0, 0.0), 0.1);
        assert_eq!(hyper.step(1e8, 1.0), 1.0);
        assert_eq!(hyper.step(1.0, 1e8), 0.1 * 0.01);
    }
}
