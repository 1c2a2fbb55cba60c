//! Cross-entropy of one row of logits, with PyTorch's label smoothing: the target is (1-ε)·onehot + ε/K, where a mixed
//! sample has two labels that share the one.
//!
//! In double precision: a row per image is too little work to be worth less. Rows of pixels are many, and in the numbers' own.

use super::float::Float;
use super::lanes::sum;
use super::level::simd;
use super::softmax::{exp_row, max_of_row, sum_exp};

/// Target of a row: `mix` of the label and 1 - `mix` of its partner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    pub label: usize,
    pub partner: usize,
    pub mix: f64,
}

impl Target {
    /// A sample with one label.
    pub fn plain(label: usize) -> Self {
        Target { label, partner: label, mix: 1.0 }
    }

    /// The class with the larger share, which is what a hit is.
    fn main(&self) -> usize {
        if self.mix < 0.5 { self.partner } else { self.label }
    }

    fn share(&self, class: usize) -> f64 {
        let of = |is: bool, share: f64| if is { share } else { 0.0 };
        of(class == self.label, self.mix) + of(class == self.partner, 1.0 - self.mix)
    }

    /// The logits as the labels share them. One without a share must not take part: 0·∞ would make NaN of a masked
    /// class.
    fn shared<T: Float>(&self, logits: &[T]) -> f64 {
        let of = |class: usize, share: f64| if share == 0.0 { 0.0 } else { share * logits[class].to_f64() };
        of(self.label, self.mix) + of(self.partner, 1.0 - self.mix)
    }
}

/// ln Σ exp(logits)
fn log_sum_exp<T: Float>(logits: &[T]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, x| max.max(x.to_f64()));
    max + logits.iter().map(|x| (x.to_f64() - max).exp()).sum::<f64>().ln()
}

/// The loss, and how many classes rank before the label (of two, the one with the larger share): those of a greater
/// logit, or of an equal one and a lower index (the label is in the top k if the rank is below k). NaN among the logits
/// makes the loss NaN and ranks the label last.
pub fn cross_entropy_row<T: Float>(logits: &[T], target: Target, smoothing: f64) -> (f64, usize) {
    let (classes, label) = (logits.len(), target.main());
    let of_labels = target.shared(logits);
    let lse = log_sum_exp(logits);
    let mean = logits.iter().map(|x| x.to_f64()).sum::<f64>() / classes as f64;
    // With ε = 0 the mean must not take part either.
    let expected =
        if smoothing == 0.0 { of_labels } else { (1.0 - smoothing) * of_labels + smoothing * mean };
    let loss = lse - expected;
    if logits.iter().any(|x| x.to_f64().is_nan()) {
        return (f64::NAN, classes - 1);
    }
    let before = |(i, x): (usize, &T)| *x > logits[label] || (*x == logits[label] && i < label);
    (loss, logits.iter().enumerate().filter(|&(i, x)| before((i, x))).count())
}

/// dlogits = scale·(softmax(logits) - target)
pub fn cross_entropy_grad_row<T: Float>(
    logits: &[T],
    target: Target,
    smoothing: f64,
    scale: f64,
    dlogits: &mut [T],
) {
    assert_eq!(logits.len(), dlogits.len(), "cross_entropy_grad_row: lengths differ");
    let lse = log_sum_exp(logits);
    let spread = smoothing / logits.len() as f64;
    for (i, (d, x)) in dlogits.iter_mut().zip(logits).enumerate() {
        let wanted = spread + (1.0 - smoothing) * target.share(i);
        *d = T::from_f64(scale * ((x.to_f64() - lse).exp() - wanted));
    }
}

simd! {
    /// Loss like [`cross_entropy_row`], for one label and in the numbers' own precision; and ln Σ exp(logits).
    pub fn pixel_loss<T, FMA>(logits: &[T], label: usize, smoothing: f64) -> (f64, usize, f64) {
        let (classes, own) = (logits.len(), logits[label]);
        let max = max_of_row(logits);
        let lse = max.to_f64() + sum_exp::<T, FMA>(logits, max).ln().to_f64();
        let mean = if smoothing == 0.0 { 0.0 } else { sum(logits).to_f64() / classes as f64 };
        let loss = lse - ((1.0 - smoothing) * own.to_f64() + smoothing * mean);
        if loss.is_nan() {
            return (loss, classes - 1, lse);
        }
        let (before, after) = logits.split_at(label);
        let greater: u32 = after.iter().map(|&x| u32::from(x > own)).sum();
        let not_less: u32 = before.iter().map(|&x| u32::from(x >= own)).sum();
        (loss, (greater + not_less) as usize, lse)
    }

    /// Gradient like [`cross_entropy_grad_row`], for one label and in the numbers' own precision.
    pub fn pixel_grad<T, FMA>(logits: &[T], label: usize, smoothing: f64, scale: f64, dlogits: &mut [T]) {
        dlogits.copy_from_slice(logits);
        let sum = exp_row::<T, FMA>(dlogits, T::ONE, max_of_row(logits));
        let (factor, spread) = (T::from_f64(scale) / sum, T::from_f64(scale * smoothing / logits.len() as f64));
        for d in dlogits.iter_mut() {
            *d = d.mul_add::<FMA>(factor, -spread);
        }
        dlogits[label] -= T::from_f64(scale * (1.0 - smoothing));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn the_loss_is_pytorchs() {
        // torch.nn.functional.cross_entropy([[1., 2., 3.]], [2], label_smoothing=0.1), worked out by hand.
        let logits = [1f32, 2.0, 3.0];
        let lse = (1f64.exp() + 2f64.exp() + 3f64.exp()).ln();
        let (plain, rank) = cross_entropy_row(&logits, Target::plain(2), 0.0);
        assert!((plain - (lse - 3.0)).abs() < 1e-14 && rank == 0);
        let (smooth, rank) = cross_entropy_row(&logits, Target::plain(0), 0.1);
        assert!((smooth - (0.9 * (lse - 1.0) + 0.1 * (lse - 2.0))).abs() < 1e-14);
        assert_eq!(rank, 2);
    }

    #[test]
    fn pixels_are_rows_of_single_precision() {
        at_every_level(|level| {
            for (classes, smoothing) in COLS.into_iter().flat_map(|classes| [(classes, 0.0), (classes, 0.1)])
            {
                let logits = narrow(&noise(9, classes, 5.0));
                for label in [0, classes / 2, classes - 1] {
                    let target = Target::plain(label);
                    let (want, rank) = cross_entropy_row(&logits, target, smoothing);
                    let (loss, found, lse) = pixel_loss(&logits, label, smoothing);
                    assert!((loss - want).abs() < 2e-6, "{level:?}, {classes} classes: {loss}, not {want}");
                    assert_eq!(found, rank, "{level:?}, {classes} classes");
                    assert!((lse - log_sum_exp(&logits)).abs() < 2e-6, "{level:?}, {classes} classes");
                    let (mut single, mut double) = (vec![0f32; classes], vec![0f32; classes]);
                    pixel_grad(&logits, label, smoothing, 0.25, &mut single);
                    cross_entropy_grad_row(&logits, target, smoothing, 0.25, &mut double);
                    let double: Vec<f64> = double.iter().map(|x| f64::from(*x)).collect();
                    assert_close(&single, &double, 1e-7, "gradient");
                }
            }
            assert_eq!(pixel_loss(&[1f32, 1.0, 1.0, 0.0], 1, 0.0).1, 1, "ties rank by index");
            let (loss, rank, _) = pixel_loss(&[1f32, f32::NAN, 0.0], 0, 0.0);
            assert!(loss.is_nan() && rank == 2);
        });
    }

    #[test]
    fn ties_rank_by_index_and_nan_ranks_last() {
        let rank = |label| cross_entropy_row(&[1f32, 1.0, 1.0, 0.0], Target::plain(label), 0.0).1;
        assert_eq!((rank(1), rank(0)), (1, 0));
        for at in 0..3 {
            let mut logits = [5f32, 1.0, 2.0];
            logits[at] = f32::NAN;
            let (loss, rank) = cross_entropy_row(&logits, Target::plain(0), 0.1);
            assert!(loss.is_nan() && rank == 2);
        }
    }

    #[test]
    fn a_masked_class_costs_nothing_without_smoothing() {
        let target = Target::plain(0);
        let masked = [0f32, f32::NEG_INFINITY];
        assert_eq!(cross_entropy_row(&masked, target, 0.0), (0.0, 0));
        assert_eq!(cross_entropy_row(&masked, Target { partner: 1, ..target }, 0.0), (0.0, 0));
        assert_eq!(cross_entropy_row(&masked, Target { label: 1, partner: 0, mix: 0.0 }, 0.0), (0.0, 0));
    }

    #[test]
    fn mixed_labels_share_the_loss() {
        let logits = noise(3, 10, 4.0);
        let of = |label: usize| cross_entropy_row(&logits, Target::plain(label), 0.1).0;
        for mix in [0.0, 0.3, 0.5, 0.8, 1.0] {
            let (loss, rank) = cross_entropy_row(&logits, Target { label: 2, partner: 7, mix }, 0.1);
            assert!((loss - (mix * of(2) + (1.0 - mix) * of(7))).abs() < 1e-14, "mix {mix}");
            let main = Target::plain(if mix < 0.5 { 7 } else { 2 });
            assert_eq!(rank, cross_entropy_row(&logits, main, 0.1).1, "mix {mix}");
            let (same, _) = cross_entropy_row(&logits, Target { label: 4, partner: 4, mix }, 0.1);
            assert!((same - of(4)).abs() < 1e-14, "mix {mix}");
        }
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        for (classes, smoothing, mix) in
            [(1, 0.0, 1.0), (5, 0.0, 1.0), (5, 0.0, 0.3), (10, 0.1, 1.0), (10, 0.1, 0.0), (65, 0.3, 0.6)]
        {
            let (logits, target) =
                (noise(1, classes, 4.0), Target { label: classes / 2, partner: classes - 1, mix });
            let mut d = vec![0.0; classes];
            cross_entropy_grad_row(&logits, target, smoothing, 0.25, &mut d);
            let numeric = numeric_grad(&logits, |x| 0.25 * cross_entropy_row(x, target, smoothing).0);
            assert_close(&d, &numeric, 1e-9, "dlogits");
            let mut single = vec![0f32; classes];
            cross_entropy_grad_row(&narrow(&logits), target, smoothing, 0.25, &mut single);
            assert_close(&single, &d, 1e-7, "dlogits in single precision");
        }
    }
}
