//! What is done to an image and its mask on the way to a model: settings, and their check.

use crate::DataError;
use crate::limits::{PROBABILITIES, SIDES, normalisation, within};

/// Transform of an image and its mask, as in the training recipes of mmsegmentation: resize, cut, mirror, distort colours, normalise, pad. Nothing checks it
/// until [`MaskTransform::check`] does.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskTransform {
    /// Size that a model reads; the same for every sample.
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// For each channel, in units of 0..=1: (x/255 − mean) / std.
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    /// The box that images are resized to fit in, keeping their shape: its longer and its shorter side.
    pub fit: (usize, usize),
    /// The box is first made larger or smaller by a factor from this range.
    pub ratio: (f64, f64),
    /// Cut at a random place, or in the middle.
    pub random_place: bool,
    /// A cut in which one class has a larger share of the labelled pixels is drawn again, up to ten times; 1 allows all.
    pub max_share: f64,
    /// Probability of mirroring left to right.
    pub flip: f64,
    /// Change brightness, contrast, saturation and hue, each at even odds.
    pub distort: bool,
    /// Weight of each class's pixels; 1 for classes that it doesn't reach.
    pub class_weights: Vec<f32>,
}

/// The longer side of the box is so many times the shorter one: 2048 and 512.
const LONGER: usize = 4;
const RATIO: (f64, f64) = (0.5, 2.0);
const MAX_SHARE: f64 = 0.75;

impl MaskTransform {
    /// Nothing random: images fitted into a box as high as the output, and the middle of that.
    pub fn plain(height: usize, width: usize, mean: &[f32], std: &[f32]) -> Self {
        let short = height.min(width);
        Self {
            height,
            width,
            channels: mean.len(),
            mean: mean.to_vec(),
            std: std.to_vec(),
            fit: (LONGER * short, short),
            ratio: (1.0, 1.0),
            random_place: false,
            max_share: 1.0,
            flip: 0.0,
            distort: false,
            class_weights: vec![],
        }
    }

    /// Half to twice the size, cut where no class has more than three quarters, mirrored at even odds.
    pub fn with_crops(self) -> Self {
        Self { ratio: RATIO, random_place: true, max_share: MAX_SHARE, flip: 0.5, ..self }
    }

    /// Also distorted colours.
    pub fn with_distortion(self) -> Self {
        Self { distort: true, ..self }
    }

    /// Pixels of a sample.
    pub fn area(&self) -> usize {
        self.height * self.width
    }

    pub fn check(&self) -> Result<(), DataError> {
        for side in [self.height, self.width, self.fit.0.min(self.fit.1)] {
            within("image-size", side, &SIDES, "")?;
        }
        let longest = self.fit.0.max(self.fit.1);
        if !SIDES.contains(&longest) {
            let problem = format!(
                "images would be fitted into a box with sides up to {longest} px, and {} is the most",
                SIDES.end()
            );
            return Err(DataError::setting("image-size", self.height.min(self.width), problem));
        }
        within("channels", self.channels, &SIDES, "")?;
        let (low, high) = self.ratio;
        if !(low > 0.0 && low <= high && high <= 100.0) {
            let problem = format!("{low} to {high} is no range of factors up to 100");
            return Err(DataError::Call { what: "ratio", problem });
        }
        if !PROBABILITIES.contains(&self.max_share) {
            let problem = format!("{} is no share", self.max_share);
            return Err(DataError::Call { what: "max_share", problem });
        }
        within("flip", self.flip, &PROBABILITIES, "")?;
        normalisation(&self.mean, &self.std, self.channels)
    }
}

/// Width and height of an image once it fits into a box of a longer and a shorter side, as mmcv counts: whole pixels,
/// rounded, at least one.
pub(super) fn fitted((width, height): (usize, usize), (longer, shorter): (usize, usize)) -> (usize, usize) {
    let (long, short) = (width.max(height).max(1) as f64, width.min(height).max(1) as f64);
    let (longer, shorter) = (longer.max(shorter) as f64, longer.min(shorter) as f64);
    let factor = (longer / long).min(shorter / short);
    let scaled = |side: usize| ((side as f64 * factor + 0.5) as usize).max(1);
    (scaled(width), scaled(height))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> MaskTransform {
        MaskTransform::plain(512, 512, &[0.5; 3], &[0.5; 3])
    }

    #[test]
    fn images_keep_their_shape() {
        assert_eq!(fitted((683, 512), (2048, 512)), (683, 512));
        assert_eq!(fitted((256, 341), (2048, 512)), (512, 682));
        // The longer side is the limit.
        assert_eq!(fitted((3000, 300), (2048, 512)), (2048, 205));
        assert_eq!(fitted((300, 3000), (512, 2048)), (205, 2048));
        assert_eq!(fitted((10_000, 1), (2048, 512)), (2048, 1));
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        assert_eq!(plain().with_crops().with_distortion().check(), Ok(()));
        let refused = |transform: MaskTransform, name: &str| {
            let message = transform.check().unwrap_err().to_string();
            assert!(message.starts_with(name), "{message}");
        };
        refused(MaskTransform { height: 0, ..plain() }, "--image-size 0");
        refused(MaskTransform { fit: (0, 512), ..plain() }, "--image-size 0");
        refused(MaskTransform { fit: (16_385, 512), ..plain() }, "--image-size 512: images would be fitted");
        refused(MaskTransform { ratio: (2.0, 0.5), ..plain() }, "ratio");
        refused(MaskTransform { ratio: (f64::NAN, 1.0), ..plain() }, "ratio");
        refused(MaskTransform { max_share: 1.5, ..plain() }, "max_share");
        refused(MaskTransform { flip: -0.1, ..plain() }, "--flip -0.1");
        refused(MaskTransform { mean: vec![0.0; 2], ..plain() }, "--mean 0,0: 2 numbers");
        refused(
            MaskTransform { std: vec![1.0, 0.0, 1.0], ..plain() },
            "--std 1,0,1: must be from 0.0001 to 1000",
        );
    }
}
