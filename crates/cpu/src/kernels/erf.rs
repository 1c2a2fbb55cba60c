//! The error function in double precision, for the finite-difference checks of gradients.
//!
//! No table of coefficients: a series without cancellation near zero and the continued fraction of the tail.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Argument from which the continued fraction takes over from the series; both converge quickly around here.
const TAIL_START: f64 = 2.5;

pub fn erf_f64(x: f64) -> f64 {
    if x.abs() < TAIL_START { erf_series(x) } else { (1.0 - erfc_tail(x.abs())).copysign(x) }
}

/// Φ(x) = erfc(-x/√2)/2, which keeps the relative accuracy of the lower tail.
pub fn normal_cdf_f64(x: f64) -> f64 {
    let z = -x * FRAC_1_SQRT_2;
    if z.abs() < TAIL_START {
        0.5 - 0.5 * erf_series(z)
    } else if z > 0.0 {
        0.5 * erfc_tail(z)
    } else {
        1.0 - 0.5 * erfc_tail(-z)
    }
}

/// erf(x) = 2/√π · e^(-x²) · Σ 2ⁿ x^(2n+1) / (1·3·…·(2n+1)): the terms share one sign.
fn erf_series(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    let mut odd = 1.0;
    while term.abs() > sum.abs() * 1e-17 {
        odd += 2.0;
        term *= 2.0 * x * x / odd;
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

/// erfc(x) = e^(-x²)/√π · 1/(x + (1/2)/(x + (2/2)/(x + (3/2)/(x + …)))) for x ≥ [`TAIL_START`]; NaN stays NaN.
fn erfc_tail(x: f64) -> f64 {
    const TERMS: usize = 80;
    let fraction = (1..=TERMS).rev().fold(x, |below, k| x + 0.5 * k as f64 / below);
    (-x * x).exp() / (PI.sqrt() * fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_matches_tabulated_values() {
        // From mpmath at 50 digits.
        let table = [
            (1e-8, 1.1283791670955125e-8),
            (0.1, 0.1124629160182849),
            (0.5, 0.5204998778130465),
            (1.0, 0.8427007929497149),
            (1.7, 0.9837904585907745),
            (2.25, 0.9985372834133188),
            (2.4999, 0.9995928300996666),
            (2.5, 0.999593047982555),
            (3.0, 0.9999779095030014),
            (4.0, 0.9999999845827421),
            (6.0, 1.0),
        ];
        for (x, exact) in table {
            assert!((erf_f64(x) - exact).abs() <= 4e-16 * exact, "erf({x}) = {:e}", erf_f64(x));
            assert_eq!(erf_f64(-x), -erf_f64(x));
        }
        assert!(erf_f64(f64::NAN).is_nan());
        assert_eq!(erf_f64(f64::INFINITY), 1.0);
    }

    #[test]
    fn the_lower_tail_of_the_normal_distribution_keeps_its_digits() {
        for (x, exact) in [
            (-0.5, 0.3085375387259869),
            (-2.0, 0.02275013194817921),
            (-3.5, 0.00023262907903552504),
            (-3.6, 0.00015910859015753388),
            (-5.0, 2.866515718791939e-07),
            (-8.0, 6.220960574271784e-16),
            (-20.0, 2.7536241186062337e-89),
            (1.5, 0.9331927987311419),
            (4.0, 0.9999683287581669),
        ] {
            let error = (normal_cdf_f64(x) - exact).abs() / exact;
            assert!(error < 1e-11, "cdf({x}) = {:e}, off by {error:e}", normal_cdf_f64(x));
        }
        assert_eq!(normal_cdf_f64(0.0), 0.5);
        assert_eq!(normal_cdf_f64(40.0), 1.0);
    }
}
