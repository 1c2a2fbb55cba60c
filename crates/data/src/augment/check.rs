//! Refuses settings that can't be honoured, by name, before anything is read.

use super::ops::{BINS, MAX_OPS};
use super::{Geometry, RandAugment, Transform};
use crate::DataError;
use crate::limits::{ALPHAS, PROBABILITIES, SIDES, normalisation, within};

impl Transform {
    pub fn check(&self) -> Result<(), DataError> {
        within("image-size", self.size, &SIDES, "")?;
        within("channels", self.channels, &SIDES, "")?;
        normalisation(&self.mean, &self.std, self.channels)?;
        self.check_geometry()?;
        within("flip", self.flip, &PROBABILITIES, "")?;
        within("erase", self.erase, &PROBABILITIES, "")?;
        if let Some(rand_augment) = self.rand_augment {
            self.check_rand_augment(rand_augment)?;
        }
        alpha("mixup", self.mixup)?;
        alpha("cutmix", self.cutmix)
    }

    fn check_geometry(&self) -> Result<(), DataError> {
        match self.geometry {
            Geometry::Resize => Ok(()),
            Geometry::CenterCrop { resize } => {
                let why = format!("the model reads {} px of it", self.size);
                within("eval-resize", resize, &(self.size..=*SIDES.end()), &why)
            }
            Geometry::PadCrop { padding } if padding <= self.size => Ok(()),
            Geometry::PadCrop { padding } => {
                let problem = format!("{padding} pixels around an image of {}", self.size);
                Err(DataError::Call { what: "padding", problem })
            }
            Geometry::RandomResizedCrop { scale, ratio } => {
                interval("scale", scale, 1.0)?;
                interval("ratio", ratio, f64::MAX)
            }
        }
    }

    fn check_rand_augment(&self, RandAugment { ops, magnitude }: RandAugment) -> Result<(), DataError> {
        let refuse = |problem| Err(DataError::setting("rand-augment", format!("{ops},{magnitude}"), problem));
        if ops > MAX_OPS {
            return refuse(format!("at most {MAX_OPS} operations are done to an image"));
        }
        if magnitude >= BINS {
            return refuse(format!("magnitudes go up to {}", BINS - 1));
        }
        match self.channels {
            _ if ops == 0 => Ok(()),
            1 | 3 => Ok(()),
            n => refuse(format!("its colour operations need 1 or 3 channels; the images have {n}")),
        }
    }
}

fn alpha(flag: &'static str, found: f64) -> Result<(), DataError> {
    if found == 0.0 {
        return Ok(());
    }
    within(flag, found, &ALPHAS, "or 0, for none")
}

fn interval(what: &'static str, (low, high): (f64, f64), most: f64) -> Result<(), DataError> {
    if 0.0 < low && low <= high && high <= most {
        return Ok(());
    }
    let above = if most < f64::MAX { format!(" and at most {most}") } else { String::new() };
    let problem = format!("must be two rising numbers above 0{above}; ({low}, {high}) was given");
    Err(DataError::Call { what, problem })
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
            Err(DataError::Setting { flag, .. }) => flag,
            Err(DataError::Call { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        assert_eq!(plain(3).check(), Ok(()));
        assert_eq!(refused(|t| t.size = 0), "image-size");
        assert_eq!(refused(|t| t.channels = 1), "mean");
        assert_eq!(refused(|t| t.std[1] = 0.0), "std");
        assert_eq!(refused(|t| t.mean[1] = f32::NAN), "mean");
        assert_eq!(refused(|t| t.flip = 1.5), "flip");
        assert_eq!(refused(|t| t.erase = f64::NAN), "erase");
        assert_eq!(refused(|t| t.mixup = -0.1), "mixup");
        assert_eq!(refused(|t| t.cutmix = f64::INFINITY), "cutmix");
        assert_eq!(refused(|t| t.geometry = Geometry::CenterCrop { resize: 31 }), "eval-resize");
        assert_eq!(refused(|t| t.geometry = Geometry::PadCrop { padding: 33 }), "padding");
        let crop = |scale, ratio| refused(|t| t.geometry = Geometry::RandomResizedCrop { scale, ratio });
        assert_eq!(crop((0.5, 0.4), (1.0, 1.0)), "scale");
        assert_eq!(crop((0.5, 1.1), (1.0, 1.0)), "scale");
        assert_eq!(crop((0.5, 1.0), (0.0, 1.0)), "ratio");
        let rand = |ops, magnitude| refused(|t| t.rand_augment = Some(RandAugment { ops, magnitude }));
        assert_eq!(rand(MAX_OPS + 1, 9), "rand-augment");
        assert_eq!(rand(2, 31), "rand-augment");
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
