//! The number type of a kernel: `f32` to train with, `f64` to check gradients with.
//!
//! The `f32` transcendentals are branch-free polynomials so that loops over them vectorise; the `f64` ones are
//! exact to a few units in the last place and scalar. `const FMA` says whether fused multiply-add is an instruction
//! at the level being compiled (see `level.rs`).

use super::erf::{erf_f64, normal_cdf_f64};
use std::fmt::{Debug, Display};
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

pub trait Float:
    Copy
    + Send
    + Sync
    + 'static
    + Default
    + Debug
    + Display
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn sqrt(self) -> Self;
    fn ln(self) -> Self;
    /// `self * factor + addend`, rounded once where `FMA`.
    fn mul_add<const FMA: bool>(self, factor: Self, addend: Self) -> Self;
    /// Zero for very negative arguments and -∞; NaN stays NaN.
    fn exp<const FMA: bool>(self) -> Self;
    fn erf<const FMA: bool>(self) -> Self;
    /// Φ(x) and φ(x) of the standard normal distribution.
    fn normal_cdf_and_density<const FMA: bool>(self) -> (Self, Self);

    /// The larger of the two; `self` where `other` is NaN. (A compare and select: one instruction on x86.)
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

impl Float for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self as f64
    }

    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }

    #[inline(always)]
    fn mul_add<const FMA: bool>(self, factor: f32, addend: f32) -> f32 {
        if FMA { f32::mul_add(self, factor, addend) } else { self * factor + addend }
    }

    #[inline(always)]
    fn exp<const FMA: bool>(self) -> f32 {
        exp_f32::<FMA>(self)
    }

    #[inline(always)]
    fn erf<const FMA: bool>(self) -> f32 {
        let gauss = exp_up_to_89::<FMA>(-(self * self));
        let size = 1.0 - 2.0 * gauss * mills_half::<FMA>(self.abs() * std::f32::consts::SQRT_2);
        size.copysign(self)
    }

    #[inline(always)]
    fn normal_cdf_and_density<const FMA: bool>(self) -> (f32, f32) {
        const INV_SQRT_2PI: f32 = 0.3989423;
        let gauss = exp_up_to_89::<FMA>(-0.5 * (self * self));
        let upper_tail = gauss * mills_half::<FMA>(self.abs());
        let cdf = if self > 0.0 { 1.0 - upper_tail } else { upper_tail };
        (cdf, gauss * INV_SQRT_2PI)
    }
}

/// Σ coefficients[k]·x^k by Horner's rule.
#[inline(always)]
fn polynomial<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut value = coefficients[N - 1];
    for k in (0..N - 1).rev() {
        value = Float::mul_add::<FMA>(value, x, coefficients[k]);
    }
    value
}

/// e^x to about one unit in the last place; 0 below -87, +∞ above 88.7, NaN for NaN (which fails a comparison, and so
/// passes the clamps).
#[inline(always)]
fn exp_f32<const FMA: bool>(x: f32) -> f32 {
    exp_up_to_89::<FMA>(if x > 89.0 { 89.0 } else { x })
}

/// e^x = 2^n · e^r with |r| ≤ ln(2)/2, for x ≤ 89: the product has overflowed to +∞ there.
#[inline(always)]
fn exp_up_to_89<const FMA: bool>(x: f32) -> f32 {
    // The top bits of ln 2, few enough that n·LN2_HI is exact without FMA, and the rest of it.
    const LN2_HI: f32 = 0.69140625;
    const LN2_LO: f32 = 1.7409306e-3;
    // Adding 1.5·2^23 rounds to an integer, which then stands in the low bits; 126 biases it to the exponent of
    // 2^(n-1). (2^n itself would overflow while e^x does not; the polynomial makes up for the factor 2.)
    const ROUND_AND_BIAS: f32 = 12_582_912.0 + 126.0;
    const TWICE_EXP: [f32; 7] = [2.0, 2.0, 0.9999998, 0.33332837, 0.08333648, 0.016749961, 0.0027673151];

    // At this clamp the exponent field is 0, so the result is exactly 0.
    let x = if x < -87.5 { -87.5 } else { x };
    let rounded = Float::mul_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND_AND_BIAS);
    let half_scale = f32::from_bits(rounded.to_bits() << 23);
    let n = rounded - ROUND_AND_BIAS;
    let r = Float::mul_add::<FMA>(n, -LN2_HI, x);
    let r = Float::mul_add::<FMA>(n, -LN2_LO, r);
    polynomial::<FMA, 7>(r, TWICE_EXP) * half_scale
}

/// `(1 - Φ(a)) / e^(-a²/2)` for a ≥ 0 (half the scaled complementary error function, at a/√2).
///
/// A minimax fit on [0, 6] of the error weighted by `max(a, 1)·e^(-a²/2)`, i.e. of GELU itself (below 1e-8 there),
/// so one exponential serves Φ, φ and GELU's tail. Past 6 the factor e^(-a²/2) < 2e-8 lets any bounded value do.
#[inline(always)]
fn mills_half<const FMA: bool>(a: f32) -> f32 {
    const FIT: [f32; 13] = [
        0.5,
        -0.3989414,
        0.2499852,
        -0.13288233,
        0.0621599,
        -0.025893752,
        0.009473432,
        -0.002927625,
        0.0007224012,
        -0.00013314128,
        1.687809e-5,
        -1.2954381e-6,
        4.4977227e-8,
    ];
    polynomial::<FMA, 13>(if a > 6.0 { 6.0 } else { a }, FIT)
}

impl Float for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }

    #[inline(always)]
    fn mul_add<const FMA: bool>(self, factor: f64, addend: f64) -> f64 {
        if FMA { f64::mul_add(self, factor, addend) } else { self * factor + addend }
    }

    #[inline(always)]
    fn exp<const FMA: bool>(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn erf<const FMA: bool>(self) -> f64 {
        erf_f64(self)
    }

    #[inline(always)]
    fn normal_cdf_and_density<const FMA: bool>(self) -> (f64, f64) {
        const INV_SQRT_2PI: f64 = 0.3989422804014327;
        (normal_cdf_f64(self), INV_SQRT_2PI * f64::exp(-0.5 * self * self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(from: f64, to: f64, count: usize) -> impl Iterator<Item = f32> {
        (0..=count).map(move |i| (from + (to - from) * i as f64 / count as f64) as f32)
    }

    fn exp_error_in_ulps<const FMA: bool>() -> f64 {
        grid(-86.9, 88.7, 200_000)
            .map(|x| {
                let exact = (x as f64).exp();
                let ulp = 2f64.powi(exact.log2().floor() as i32 - 23);
                (exp_f32::<FMA>(x) as f64 - exact).abs() / ulp
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_good_to_about_an_ulp() {
        let (fused, plain) = (exp_error_in_ulps::<true>(), exp_error_in_ulps::<false>());
        assert!(fused < 1.2 && plain < 1.6, "errors in ulp: {fused} fused, {plain} plain");
    }

    #[test]
    fn exp_ends_in_zero_infinity_and_nan() {
        assert_eq!(exp_f32::<true>(0.0), 1.0);
        assert_eq!(exp_f32::<true>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32::<true>(-1e30), 0.0);
        assert_eq!(exp_f32::<false>(-88.0), 0.0);
        assert_eq!(exp_f32::<true>(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32::<true>(89.5), f32::INFINITY);
        assert!(exp_f32::<true>(f32::NAN).is_nan());
        assert!(exp_f32::<false>(f32::from_bits(0x7f80_0101)).is_nan());
    }

    #[test]
    fn erf_and_normal_of_f32_match_f64() {
        for x in grid(-9.0, 9.0, 100_000) {
            let erf_error = (Float::erf::<true>(x) as f64 - erf_f64(x as f64)).abs();
            assert!(erf_error < 1.5e-7, "erf({x}) is off by {erf_error}");
            let (cdf, density) = Float::normal_cdf_and_density::<true>(x);
            let (exact_cdf, exact_density) = Float::normal_cdf_and_density::<true>(x as f64);
            assert!((cdf as f64 - exact_cdf).abs() < 1e-7, "cdf({x}) = {cdf}, exactly {exact_cdf}");
            assert!((density as f64 - exact_density).abs() < 1e-7, "density({x})");
        }
    }
}
