//! Refuses settings that can't be honoured, by name, before anything is read.

use super::ops::{BINS, MAX_OPS};
use super::{Geometry, RandAugment, Transform};
use crate::DataError;
use std::ops::RangeInclusive;

/// The affine operations count in 1/65536 pixels within 32 bits.
const MAX_SIZE: usize = 16_384;
/// Far outside of what anyone mixes with; within it the draws neither underflow nor stall.
const ALPHAS: RangeInclusive<f64> = 0.001..=1000.0;

impl Transform {
    pub fn check(&self) -> Result<(), DataError> {
        within("size", self.size, 1..=MAX_SIZE)?;
        within("channels", self.channels, 1..=MAX_SIZE)?;
        normalisation(&self.mean, &self.std, self.channels)?;
        self.check_geometry()?;
        probability("flip", self.flip)?;
        probability("erase", self.erase)?;
        if let Some(rand_augment) = self.rand_augment {
            self.check_rand_augment(rand_augment)?;
        }
        alpha("mixup", self.mixup)?;
        alpha("cutmix", self.cutmix)
    }

    fn check_geometry(&self) -> Result<(), DataError> {
        match self.geometry {
            Geometry::Resize => Ok(()),
            Geometry::CenterCrop { resize } => within("resize", resize, self.size..=MAX_SIZE),
            Geometry::PadCrop { padding } => within("padding", padding, 0..=self.size),
            Geometry::RandomResizedCrop { scale, ratio } => {
                interval("scale", scale, 1.0)?;
                interval("ratio", ratio, f64::MAX)
            }
        }
    }

    fn check_rand_augment(&self, RandAugment { ops, magnitude }: RandAugment) -> Result<(), DataError> {
        within("rand_augment.ops", ops, 0..=MAX_OPS)?;
        within("rand_augment.magnitude", magnitude, 0..=BINS - 1)?;
        match self.channels {
            1 | 3 => Ok(()),
            n => refuse(
                "rand_augment",
                format!("its colour operations need 1 or 3 channels; the images have {n}"),
            ),
        }
    }
}

/// Refuses what no channel can be normalised with.
pub(crate) fn normalisation(mean: &[f32], std: &[f32], channels: usize) -> Result<(), DataError> {
    for (setting, values) in [("mean", mean), ("std", std)] {
        let found = values.len();
        if found != channels {
            return refuse(setting, format!("{found} values for {channels} channels"));
        }
        if let Some(value) = values.iter().find(|x| !x.is_finite()) {
            return refuse(setting, format!("{value} is not a number to normalise with"));
        }
    }
    match std.iter().find(|&&x| x <= 0.0) {
        Some(value) => refuse("std", format!("must be above 0; {value} was given")),
        None => Ok(()),
    }
}

pub(crate) fn refuse(setting: &'static str, problem: String) -> Result<(), DataError> {
    Err(DataError::Setting { setting, problem })
}

fn within(setting: &'static str, found: usize, range: RangeInclusive<usize>) -> Result<(), DataError> {
    if range.contains(&found) {
        return Ok(());
    }
    refuse(setting, format!("must be from {} to {}; {found} was given", range.start(), range.end()))
}

fn probability(setting: &'static str, found: f64) -> Result<(), DataError> {
    if (0.0..=1.0).contains(&found) {
        return Ok(());
    }
    refuse(setting, format!("must be a probability; {found} was given"))
}

fn alpha(setting: &'static str, found: f64) -> Result<(), DataError> {
    if found == 0.0 || ALPHAS.contains(&found) {
        return Ok(());
    }
    refuse(setting, format!("must be 0 or from {} to {}; {found} was given", ALPHAS.start(), ALPHAS.end()))
}

fn interval(setting: &'static str, (low, high): (f64, f64), most: f64) -> Result<(), DataError> {
    if 0.0 < low && low <= high && high <= most {
        return Ok(());
    }
    let above = if most < f64::MAX { format!(" and at most {most}") } else { String::new() };
    refuse(setting, format!("must be two rising numbers above 0{above}; ({low}, {high}) was given"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Interpolation;

    fn plain(channels: usize) -> Transform {
        let (mean, std) = (vec![0.5; channels], vec![0.5; channels]);
        Transform::evaluation(32, None, &mean, &std, Interpolation::Bilinear)
    }

    fn refused(change: impl Fn(&mut Transform)) -> &'static str {
        let mut transform = plain(3);
        change(&mut transform);
        match transform.check() {
            Err(DataError::Setting { setting, .. }) => setting,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        assert_eq!(plain(3).check(), Ok(()));
        assert_eq!(refused(|t| t.size = 0), "size");
        assert_eq!(refused(|t| t.channels = 1), "mean");
        assert_eq!(refused(|t| t.std[1] = 0.0), "std");
        assert_eq!(refused(|t| t.mean[1] = f32::NAN), "mean");
        assert_eq!(refused(|t| t.flip = 1.5), "flip");
        assert_eq!(refused(|t| t.erase = f64::NAN), "erase");
        assert_eq!(refused(|t| t.mixup = -0.1), "mixup");
        assert_eq!(refused(|t| t.cutmix = f64::INFINITY), "cutmix");
        assert_eq!(refused(|t| t.geometry = Geometry::CenterCrop { resize: 31 }), "resize");
        assert_eq!(refused(|t| t.geometry = Geometry::PadCrop { padding: 33 }), "padding");
        let crop = |scale, ratio| refused(|t| t.geometry = Geometry::RandomResizedCrop { scale, ratio });
        assert_eq!(crop((0.5, 0.4), (1.0, 1.0)), "scale");
        assert_eq!(crop((0.5, 1.1), (1.0, 1.0)), "scale");
        assert_eq!(crop((0.5, 1.0), (0.0, 1.0)), "ratio");
        let rand = |ops, magnitude| refused(|t| t.rand_augment = Some(RandAugment { ops, magnitude }));
        assert_eq!(rand(MAX_OPS + 1, 9), "rand_augment.ops");
        assert_eq!(rand(2, 31), "rand_augment.magnitude");
    }

    #[test]
    fn colour_operations_are_refused_for_channels_without_colour() {
        for (channels, accepted) in [(1, true), (2, false), (3, true), (4, false)] {
            let rand_augment = Some(RandAugment { ops: 2, magnitude: 9 });
            let transform = Transform { rand_augment, ..plain(channels) };
            assert_eq!(transform.check().is_ok(), accepted, "{channels} channels");
        }
    }
}
