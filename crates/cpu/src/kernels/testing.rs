//! Inputs and comparisons for the tests of the kernels.

pub use super::level::forced::at_every_level;

/// Column counts worth testing: below, at and beside the lane counts, and those of real models.
pub const COLS: [usize; 9] = [1, 5, 16, 31, 33, 65, 192, 197, 768];

/// `len` values in [-spread, spread), the same for the same seed (splitmix64).
pub fn noise(seed: u64, len: usize, spread: f64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    // Rounded to f32, so that both precisions see the same numbers.
    (0..len).map(|_| (((next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0) * spread) as f32 as f64).collect()
}

pub fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// Asserts |got - want| ≤ tolerance · max(1, largest |want|) everywhere.
#[track_caller]
pub fn assert_close<T: super::Float>(got: &[T], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths differ");
    let scale = want.iter().fold(1.0f64, |scale, x| scale.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs();
        assert!(error <= tolerance * scale, "{what}[{i}]: {got} should be {want} (error {error:e})");
    }
}

/// The gradient of `f` at `x` by central differences.
pub fn numeric_grad(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let centre = x[i];
            let mut at = |value| {
                x[i] = value;
                f(&x)
            };
            let slope = (at(centre + STEP) - at(centre - STEP)) / (2.0 * STEP);
            x[i] = centre;
            slope
        })
        .collect()
}

pub fn weighted_sum(weights: &[f64], values: &[f64]) -> f64 {
    weights.iter().zip(values).map(|(w, v)| w * v).sum()
}
