//! How images with masks are cut and changed for training, and how they are evaluated.

use super::augmentation::{Augmentation, Geometry, Interpolation, Preset, by_channel};
use super::choice::choice;
use super::origin::{Log, Origin};
use super::resolve::smoothing;
use super::resolved::Resolved;
use super::settings::Raw;
use super::source::Source;
use super::task::Task;
use crate::ConfigError;
use data::limits;
use data::segment::MaskTransform;
use models::Network;
use serde::{Deserialize, Serialize};

choice! {
    /// Evaluation of images of any size.
    EvalMode {
        /// Whole images, resized to fit and padded.
        Whole = "whole",
        /// Resized to fit, through windows of the size that the model was trained on; where they overlap, by their mean.
        Slide = "slide",
    }
}

/// Settings that only images with masks have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pixels {
    /// The box that images are resized to fit in: its longer and its shorter side.
    pub fit: (usize, usize),
    /// In training, the box is first made larger or smaller by a factor from this range.
    pub ratio: (f64, f64),
    /// Crops training images at a random place.
    pub random_place: bool,
    /// A cut in which one class has a larger share is drawn again.
    pub max_share: f64,
    /// Distorts colours.
    pub distort: bool,
    pub eval_mode: EvalMode,
    /// From window to window, in pixels.
    pub eval_stride: usize,
}

/// ImageNet's, which backbones were pre-trained with, of values from 0 to 1.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];

impl Pixels {
    /// A cut of training, with the mean, the deviation and the mirroring of `augmentation`.
    fn transform(&self, augmentation: &Augmentation, [height, width]: [usize; 2]) -> MaskTransform {
        let Augmentation { mean, std, flip, .. } = augmentation;
        let &Pixels { fit, ratio, random_place, max_share, distort, .. } = self;
        let plain = MaskTransform::plain(height, width, mean, std);
        MaskTransform { fit, ratio, random_place, max_share, distort, flip: *flip, ..plain }
    }
}

impl Resolved {
    /// Transform of training images with masks.
    pub fn mask_transform(&self) -> Option<MaskTransform> {
        Some(self.pixels.as_ref()?.transform(&self.augmentation, self.network.size()))
    }
}

impl Raw {
    /// Transform of training images of `size` pixels with masks, without a model. `--augment none`: the middle; `standard`: other
    /// sizes, random cuts and mirror images; `strong`: also distorted colours, which is the recipe that UPerNet was published with.
    pub fn mask_transform(&self, size: usize, channels: usize) -> Result<MaskTransform, ConfigError> {
        let (augmentation, transform) = self.mask_augmentation(size, channels, &mut Log::default())?;
        Ok(MaskTransform { flip: augmentation.flip, ..transform })
    }

    /// Augmentation, label smoothing, and what is of masks alone.
    pub(super) fn of_task(
        &self,
        source: &Source,
        network: &Network,
        log: &mut Log,
    ) -> Result<(Augmentation, f64, Option<Pixels>), ConfigError> {
        match Task::of(network) {
            Task::Classify => {
                self.refuse_settings_of_masks()?;
                let (augmentation, label_smoothing) = self.augmentation(source, network, log)?;
                Ok((augmentation, label_smoothing, None))
            }
            Task::Segment => {
                let (augmentation, pixels) = self.pixels(network, log)?;
                let label_smoothing = log.pick("label-smoothing", self.label_smoothing, 0.0);
                Ok((augmentation, smoothing(label_smoothing)?, Some(pixels)))
            }
        }
    }

    /// Augmentation of a run that images with masks share with others, and their own.
    pub(super) fn pixels(
        &self,
        network: &Network,
        log: &mut Log,
    ) -> Result<(Augmentation, Pixels), ConfigError> {
        let size = network.image();
        let (augmentation, transform) = self.mask_augmentation(size, network.channels(), log)?;
        let MaskTransform { fit, ratio, random_place, max_share, distort, .. } = transform;
        let eval_mode = self.mode(network, log)?;
        let eval_stride = self.stride(eval_mode, size, log)?;
        let pixels = Pixels { fit, ratio, random_place, max_share, distort, eval_mode, eval_stride };
        Ok((augmentation, pixels))
    }

    fn mask_augmentation(
        &self,
        size: usize,
        channels: usize,
        log: &mut Log,
    ) -> Result<(Augmentation, MaskTransform), ConfigError> {
        self.refuse_settings_of_images()?;
        let recipe = self.recipe();
        let (preset, origin) = match self.augment {
            Some(preset) => (preset, Origin::Flag),
            None if self.source()?.is_synthetic() => {
                (Preset::None, Origin::Default("synthetic images vary enough".to_string()))
            }
            None => (recipe.augment, recipe.origin()),
        };
        log.note("augment", preset, origin);
        let usual = |three: [f32; 3]| if channels == 3 { three.to_vec() } else { vec![0.5] };
        let mean = by_channel("mean", &self.mean, &usual(MEAN), channels, log, limits::mean)?;
        let std = by_channel("std", &self.std, &usual(STD), channels, log, limits::std)?;
        let plain = MaskTransform::plain(size, size, &mean, &std);
        let transform = match preset {
            Preset::None => plain,
            Preset::Standard => plain.with_crops(),
            Preset::Strong => plain.with_crops().with_distortion(),
        };
        let flip = self.flip.unwrap_or(transform.flip);
        let origin = match self.flip {
            Some(_) => Origin::Flag,
            None => Origin::Default(format!("--augment {preset}")),
        };
        log.note("flip", flip, origin);
        MaskTransform { flip, ..transform.clone() }.check()?;
        let augmentation = Augmentation {
            train: Geometry::Resize,
            eval: Geometry::Resize,
            flip,
            rand_augment: None,
            erase: 0.0,
            mixup: 0.0,
            cutmix: 0.0,
            mean,
            std,
            interpolation: Interpolation::Bilinear,
        };
        Ok((augmentation, transform))
    }

    fn refuse_settings_of_images(&self) -> Result<(), ConfigError> {
        let why = "is for images with one class each; of images with masks --augment, --flip, --mean and --std can be set";
        let typed = [
            ("crop", self.crop.map(|x| x.to_string())),
            ("rand-augment", self.rand_augment.map(|x| x.to_string())),
            ("erase", self.erase.map(|x| x.to_string())),
            ("mixup", self.mixup.map(|x| x.to_string())),
            ("cutmix", self.cutmix.map(|x| x.to_string())),
            ("eval-resize", self.eval_resize.map(|x| x.to_string())),
        ];
        if let Some((flag, value)) = typed.into_iter().find_map(|(flag, typed)| Some((flag, typed?))) {
            return Err(ConfigError::setting(flag, value, why));
        }
        if self.interpolation == Some(Interpolation::Bicubic) {
            let why = "images with masks are resized bilinearly";
            return Err(ConfigError::setting("interpolation", Interpolation::Bicubic, why));
        }
        Ok(())
    }

    /// Settings of masks where there are none.
    pub(super) fn refuse_settings_of_masks(&self) -> Result<(), ConfigError> {
        let typed = [
            ("eval-mode", self.eval_mode.map(|x| x.to_string())),
            ("eval-stride", self.eval_stride.map(|x| x.to_string())),
        ];
        match typed.into_iter().find_map(|(flag, typed)| Some((flag, typed?))) {
            Some((flag, value)) => Err(ConfigError::setting(flag, value, "is for images with masks")),
            None => Ok(()),
        }
    }

    /// Returns whether this network can read images of any size.
    fn mode(&self, network: &Network, log: &mut Log) -> Result<EvalMode, ConfigError> {
        let any_size = network.sized([network.image(), 2 * network.image()]).is_some();
        let default = if any_size { EvalMode::Whole } else { EvalMode::Slide };
        let mode = log.pick("eval-mode", self.eval_mode, default);
        if mode == EvalMode::Whole && !any_size {
            let why = "a ViT's positions are learned for one size of images: use slide";
            return Err(ConfigError::setting("eval-mode", mode, why));
        }
        Ok(mode)
    }

    /// Two thirds of a window by default, as in mmsegmentation: 341 of 512, 426 of 640.
    fn stride(&self, mode: EvalMode, size: usize, log: &mut Log) -> Result<usize, ConfigError> {
        if let (EvalMode::Whole, Some(stride)) = (mode, self.eval_stride) {
            let why = "is for --eval-mode slide; this run's is whole, which has no windows";
            return Err(ConfigError::setting("eval-stride", stride, why));
        }
        let stride = log.pick("eval-stride", self.eval_stride, (2 * size / 3).max(1));
        if !(1..=size).contains(&stride) {
            let why = format!(
                "windows are {size} px wide: with more than that between them some pixels would be seen by none"
            );
            return Err(ConfigError::setting("eval-stride", stride, why));
        }
        Ok(stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Task;

    fn raw(change: impl FnOnce(&mut Raw)) -> Raw {
        let mut raw = Raw { task: Some(Task::Segment), ..Raw::default() };
        change(&mut raw);
        raw
    }

    #[test]
    fn presets_are_recipes() {
        let transform = |change: fn(&mut Raw)| raw(change).mask_transform(512, 3);
        let plain = transform(|raw| raw.augment = Some(Preset::None)).unwrap();
        assert_eq!((plain.height, plain.width, plain.fit, plain.flip), (512, 512, (2048, 512), 0.0));
        let standard = transform(|raw| raw.augment = Some(Preset::Standard)).unwrap();
        assert_eq!((standard.ratio, standard.max_share, standard.flip), ((0.5, 2.0), 0.75, 0.5));
        assert!(!standard.distort);
        let published = transform(|raw| raw.data = Some("ade20k:d".into())).unwrap();
        assert!(published.distort && published.flip == 0.5 && published.mean == MEAN);
        let strong = transform(|raw| (raw.augment, raw.flip) = (Some(Preset::Strong), Some(0.0))).unwrap();
        assert!(strong.distort && strong.flip == 0.0);
        let drawn = raw(|_| {}).mask_transform(128, 1).unwrap();
        assert_eq!((drawn.mean, drawn.ratio), (vec![0.5], (1.0, 1.0)));
    }

    #[test]
    fn what_does_not_fit_masks_is_refused_by_name() {
        let refused = |change: fn(&mut Raw)| raw(change).mask_transform(64, 3).unwrap_err().to_string();
        assert!(
            refused(|raw| raw.mixup = Some(0.8)).starts_with("--mixup 0.8: is for images with one class")
        );
        assert!(
            refused(|raw| raw.interpolation = Some(Interpolation::Bicubic))
                .starts_with("--interpolation bicubic")
        );
        assert!(refused(|raw| raw.mean = vec![0.1, 0.2]).starts_with("--mean"));
        assert!(refused(|raw| raw.flip = Some(2.0)).contains("flip"));
        let resolved = |change: fn(&mut Raw)| raw(change).resolve_without_data(1).map_err(|e| e.to_string());
        let vit = resolved(|raw| raw.model = Some("vit-nano/4+linear".into())).unwrap().pixels.unwrap();
        assert_eq!((vit.eval_mode, vit.eval_stride), (EvalMode::Slide, 42));
        let whole = resolved(|raw| {
            raw.model = Some("vit-nano/4+linear".into());
            raw.eval_mode = Some(EvalMode::Whole);
        });
        assert_eq!(
            whole.unwrap_err(),
            "--eval-mode whole: a ViT's positions are learned for one size of images: use slide"
        );
        let slide = |raw: &mut Raw| raw.eval_mode = Some(EvalMode::Slide);
        let stride = raw(|raw| (slide(raw), raw.eval_stride = Some(65)).0)
            .resolve_without_data(1)
            .unwrap_err()
            .to_string();
        assert!(stride.starts_with("--eval-stride 65: windows are 64 px wide"), "{stride}");
        let idle = resolved(|raw| raw.eval_stride = Some(32)).unwrap_err();
        assert!(
            idle.starts_with("--eval-stride 32: is for --eval-mode slide; this run's is whole"),
            "{idle}"
        );
        let plain = Raw { eval_stride: Some(3), ..Raw::default() };
        let text = plain.resolve_without_data(1).unwrap_err().to_string();
        assert_eq!(text, "--eval-stride 3: is for images with masks");
    }
}
