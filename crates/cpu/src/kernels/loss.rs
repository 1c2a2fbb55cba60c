//! Cross-entropy of one row of logits, with PyTorch's label smoothing: the target is (1-ε)·onehot + ε/K.
//!
//! In double precision: a row per image is too little work to be worth less.

use super::float::Float;

/// ln Σ exp(logits)
fn log_sum_exp<T: Float>(logits: &[T]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, x| max.max(x.to_f64()));
    max + logits.iter().map(|x| (x.to_f64() - max).exp()).sum::<f64>().ln()
}

/// The loss, and how many classes rank before `label`: those of a greater logit, or of an equal one and a lower
/// index (the label is in the top k if the rank is below k). NaN among the logits makes the loss NaN and ranks the
/// label last.
pub fn cross_entropy_row<T: Float>(logits: &[T], label: usize, smoothing: f64) -> (f64, usize) {
    let classes = logits.len();
    let of_label = logits[label].to_f64();
    let lse = log_sum_exp(logits);
    let mean = logits.iter().map(|x| x.to_f64()).sum::<f64>() / classes as f64;
    // With ε = 0 the mean must not take part: 0·∞ would turn a masked class into NaN.
    let expected = if smoothing == 0.0 { of_label } else { (1.0 - smoothing) * of_label + smoothing * mean };
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
    label: usize,
    smoothing: f64,
    scale: f64,
    dlogits: &mut [T],
) {
    assert_eq!(logits.len(), dlogits.len(), "cross_entropy_grad_row: lengths differ");
    let lse = log_sum_exp(logits);
    let spread = smoothing / logits.len() as f64;
    for (i, (d, x)) in dlogits.iter_mut().zip(logits).enumerate() {
        let target = spread + if i == label { 1.0 - smoothing } else { 0.0 };
        *d = T::from_f64(scale * ((x.to_f64() - lse).exp() - target));
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
        let (plain, rank) = cross_entropy_row(&logits, 2, 0.0);
        assert!((plain - (lse - 3.0)).abs() < 1e-14 && rank == 0);
        let (smooth, rank) = cross_entropy_row(&logits, 0, 0.1);
        assert!((smooth - (0.9 * (lse - 1.0) + 0.1 * (lse - 2.0))).abs() < 1e-14);
        assert_eq!(rank, 2);
    }

    #[test]
    fn ties_rank_by_index_and_nan_ranks_last() {
        assert_eq!(cross_entropy_row(&[1f32, 1.0, 1.0, 0.0], 1, 0.0).1, 1);
        assert_eq!(cross_entropy_row(&[1f32, 1.0, 1.0, 0.0], 0, 0.0).1, 0);
        for at in 0..3 {
            let mut logits = [5f32, 1.0, 2.0];
            logits[at] = f32::NAN;
            let (loss, rank) = cross_entropy_row(&logits, 0, 0.1);
            assert!(loss.is_nan() && rank == 2);
        }
    }

    #[test]
    fn a_masked_class_costs_nothing_without_smoothing() {
        let (loss, rank) = cross_entropy_row(&[0f32, f32::NEG_INFINITY], 0, 0.0);
        assert_eq!((loss, rank), (0.0, 0));
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        for (classes, smoothing) in [(1, 0.0), (5, 0.0), (10, 0.1), (65, 0.3)] {
            let (logits, label) = (noise(1, classes, 4.0), classes / 2);
            let mut d = vec![0.0; classes];
            cross_entropy_grad_row(&logits, label, smoothing, 0.25, &mut d);
            let numeric = numeric_grad(&logits, |x| 0.25 * cross_entropy_row(x, label, smoothing).0);
            assert_close(&d, &numeric, 1e-9, "dlogits");
            let mut single = vec![0f32; classes];
            cross_entropy_grad_row(&narrow(&logits), label, smoothing, 0.25, &mut single);
            assert_close(&single, &d, 1e-7, "dlogits in single precision");
        }
    }
}
