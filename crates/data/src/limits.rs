//! What settings may be, said once: whatever reads images refuses settings by these limits, and so does `train` before a run
//! begins, through the same checks.

use crate::DataError;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// Sides of images, in pixels: the affine operations count in 1/65536 pixels within 32 bits.
pub const SIDES: RangeInclusive<usize> = 1..=16_384;
/// Sides of synthetic images. Pixel coordinates up to here are exact in `f32` with enough bits left for smooth edges.
pub const SYNTHETIC_SIDES: RangeInclusive<usize> = 8..=16_384;
pub const SYNTHETIC_CHANNELS: RangeInclusive<usize> = 1..=256;
/// α of the distribution that images are mixed by: far outside of what anyone mixes with; within it the draws neither underflow nor
/// stall.
pub const ALPHAS: RangeInclusive<f64> = 0.001..=1000.0;
/// Means of pixel values from 0 to 1. What a model sees then stays where squares of sums are numbers in `f32`.
pub const MEANS: RangeInclusive<f32> = -1000.0..=1000.0;
pub const DEVIATIONS: RangeInclusive<f32> = 0.0001..=1000.0;
pub const PROBABILITIES: RangeInclusive<f64> = 0.0..=1.0;

/// Refuses a value that does not lie in `range`, with `why` it must, if that is not plain.
pub(crate) fn within<T: PartialOrd + Display>(
    flag: &'static str,
    found: T,
    range: &RangeInclusive<T>,
    why: &str,
) -> Result<(), DataError> {
    if range.contains(&found) {
        return Ok(());
    }
    let why = if why.is_empty() { String::new() } else { format!(": {why}") };
    let problem = format!("must be from {} to {}{why}", range.start(), range.end());
    Err(DataError::setting(flag, found, problem))
}

/// Refuses means that no channel can be normalised with.
pub fn mean(values: &[f32]) -> Result<(), DataError> {
    all_within("mean", values, &MEANS)
}

/// Refuses standard deviations that no channel can be normalised with.
pub fn std(values: &[f32]) -> Result<(), DataError> {
    all_within("std", values, &DEVIATIONS)
}

fn all_within(flag: &'static str, values: &[f32], range: &RangeInclusive<f32>) -> Result<(), DataError> {
    if values.iter().all(|value| range.contains(value)) {
        return Ok(());
    }
    let problem = format!("must be from {} to {}, of values from 0 to 1", range.start(), range.end());
    Err(DataError::setting(flag, list(values), problem))
}

/// Refuses means and deviations that are not a number for each channel.
pub(crate) fn normalisation(means: &[f32], stds: &[f32], channels: usize) -> Result<(), DataError> {
    for (flag, values) in [("mean", means), ("std", stds)] {
        if values.len() != channels {
            let problem = format!("{} numbers for {channels} channels", values.len());
            return Err(DataError::setting(flag, list(values), problem));
        }
    }
    mean(means)?;
    std(stds)
}

/// Numbers as they are typed.
pub fn list(values: &[f32]) -> String {
    values.iter().map(f32::to_string).collect::<Vec<_>>().join(",")
}
