//! Draws from Beta(α, α), the same on every platform.
//!
//! `exp` and `ln` of the standard library differ in their last bits from one platform to the next; these are made of
//! additions, multiplications and divisions alone, as all else that decides what a sample looks like.

use crate::random::Stream;
use std::f64::consts::{LN_2, SQRT_2};

/// A draw from Beta(α, α); α within what [`super::Transform::check`] lets pass.
pub(super) fn beta(alpha: f64, stream: &mut Stream) -> f64 {
    if alpha < 1.0 {
        johnk(alpha, stream)
    } else if alpha > 1.0 {
        cheng(alpha, stream)
    } else {
        stream.unit()
    }
}

/// Jöhnk, 1964: x/(x + y) of x = u^(1/α) and y = v^(1/α), if x + y is at most 1. For small α both powers may
/// underflow while their quotient does not, hence the logarithms.
fn johnk(alpha: f64, stream: &mut Stream) -> f64 {
    loop {
        let x = ln(inside(stream)) / alpha;
        let y = ln(inside(stream)) / alpha;
        if exp(x) + exp(y) <= 1.0 {
            return 1.0 / (1.0 + exp(y - x));
        }
    }
}

/// Cheng, 1978, algorithm BB, for two equal parameters above 1. Takes less than 1.5 rounds on average.
fn cheng(alpha: f64, stream: &mut Stream) -> f64 {
    let slope = (1.0 / alpha).sqrt();
    let gamma = alpha + 1.0 / slope;
    let ln4 = 2.0 * LN_2;
    loop {
        let (u, v) = (inside(stream), inside(stream));
        let logit = slope * ln(u / (1.0 - u));
        let w = alpha * exp(logit);
        let z = u * u * v;
        let r = gamma * logit - ln4;
        let bound = r + 2.0 * alpha * ln(2.0 * alpha / (alpha + w));
        if bound >= ln(z) {
            return w / (alpha + w);
        }
    }
}

/// Uniform within 0..1, both ends left out.
fn inside(stream: &mut Stream) -> f64 {
    ((stream.bits() >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
}

/// eˣ. 0 below the smallest number with full precision.
pub(super) fn exp(x: f64) -> f64 {
    /// The upper 33 bits of ln 2, so that multiples of it are exact, and what is left.
    const UPPER: f64 = 6.931_471_803_691_238e-1;
    const LOWER: f64 = 1.908_214_929_270_587_7e-10;
    if x < -708.0 {
        return 0.0;
    }
    if x > 709.0 {
        return f64::INFINITY;
    }
    let twos = (x / LN_2).round_ties_even();
    let rest = (x - twos * UPPER) - twos * LOWER;
    // |rest| is at most ln 2 / 2; the next term of the series would be below 10⁻¹⁸.
    let series = (1..=15).rev().fold(1.0, |sum, n| 1.0 + sum * rest / f64::from(n));
    series * f64::from_bits(((twos as i64 + 1023) as u64) << 52)
}

/// The natural logarithm of a number that is positive, finite and not subnormal.
pub(super) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut twos = (bits >> 52) as i64 - 1023;
    let mut part = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if part > SQRT_2 {
        part /= 2.0;
        twos += 1;
    }
    // ln(part) = 2 artanh(s); |s| is below 0.172, and the next term of the series would be below 10⁻¹⁸.
    let s = (part - 1.0) / (part + 1.0);
    let square = s * s;
    let series = (0..=11).rev().fold(0.0, |sum, n| sum * square + 1.0 / f64::from(2 * n + 1));
    twos as f64 * LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_exponential_are_those_of_the_standard_library() {
        for i in -70_000..70_000 {
            let x = f64::from(i) * 0.01;
            let (ours, std) = (exp(x), x.exp());
            assert!((ours - std).abs() <= 1e-15 * std, "exp {x}: {ours} {std}");
            let (back, root) = (ln(std), std.ln());
            assert!((back - root).abs() <= 4e-16 * root.abs().max(1.0), "ln {std}: {back} {root}");
        }
        assert_eq!((exp(0.0), exp(-1e9), exp(1e9), ln(1.0)), (1.0, 0.0, f64::INFINITY, 0.0));
    }

    /// Beta(α, α) has mean 1/2 and variance 1/(4(2α + 1)). The mean of n draws is off by more than 4.5 of its
    /// standard errors once in 150,000 sets of draws; the fourth moment gives that of the variance.
    #[test]
    fn moments_are_those_of_the_distribution() {
        let n = 100_000;
        for alpha in [0.001, 0.05, 0.2, 0.4, 0.8, 1.0, 1.5, 4.0, 100.0, 1000.0] {
            let mut stream = Stream::new(11);
            let draws: Vec<f64> = (0..n).map(|_| beta(alpha, &mut stream)).collect();
            assert!(draws.iter().all(|x| (0.0..=1.0).contains(x)));
            let moment = |power| draws.iter().map(|x| (x - 0.5).powi(power)).sum::<f64>() / f64::from(n);
            let variance = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            let fourth = 3.0 / (16.0 * (2.0 * alpha + 1.0) * (2.0 * alpha + 3.0));
            let error = |variance: f64| 4.5 * (variance / f64::from(n)).sqrt() + 1e-12;
            assert!(moment(1).abs() < error(variance), "α = {alpha}: mean off by {}", moment(1));
            let spread = moment(2) - variance;
            assert!(
                spread.abs() < error(fourth - variance * variance),
                "α = {alpha}: variance off by {spread}"
            );
        }
    }
}
