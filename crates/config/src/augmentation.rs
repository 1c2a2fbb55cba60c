//! How an image is changed before a model sees it: presets, single settings over them, and normalisation.

use super::choice::choice;
use super::origin::{Log, Origin};
use super::resolve::smoothing;
use super::settings::Raw;
use super::source::Source;
use crate::ConfigError;
use data::{DataError, limits};
use models::Network;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use text::many;

choice! {
    #[derive(Default)]
    Preset {
        #[default]
        None = "none",
        /// Crops and mirror images.
        Standard = "standard",
        /// Also RandAugment, mixup, cutmix, erasing and label smoothing.
        Strong = "strong",
    }
}

choice! {
    /// Crop of training images.
    Crop {
        None = "none",
        /// Padded on all sides, then cut to size at a random place.
        Pad = "pad",
        /// A random part of random shape, brought to size.
        Resized = "resized",
    }
}

choice! {
    #[derive(Default)]
    Interpolation {
        #[default]
        Bilinear = "bilinear",
        Bicubic = "bicubic",
    }
}

/// Way from an image to the model's size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Geometry {
    /// Both sides, whatever the shape was.
    Resize,
    /// The shorter side to `resize` pixels, then the middle.
    CenterCrop {
        resize: usize,
    },
    PadCrop {
        padding: usize,
    },
    /// `scale` is the part's share of the area, `ratio` its width over its height.
    RandomResizedCrop {
        scale: (f64, f64),
        ratio: (f64, f64),
    },
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Geometry::Resize => f.write_str("resized"),
            Geometry::CenterCrop { resize } => write!(f, "resized to {resize} px, middle cut out"),
            Geometry::PadCrop { padding } => write!(f, "padded by {padding} px, random cut"),
            Geometry::RandomResizedCrop { scale, ratio } => {
                let ((a, b), (c, d)) = (scale, ratio);
                write!(f, "random part of {a} to {b} of the area, sides {c:.2} to {d:.2}, resized")
            }
        }
    }
}

/// The parts of Inception's crop that everyone uses.
const RESIZED: Geometry = Geometry::RandomResizedCrop { scale: (0.08, 1.0), ratio: (3.0 / 4.0, 4.0 / 3.0) };

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Augmentation {
    pub train: Geometry,
    pub eval: Geometry,
    /// Share of images that are mirrored left to right.
    pub flip: f64,
    /// Operations on an image, and their magnitude.
    pub rand_augment: Option<(usize, usize)>,
    /// Share of images of which a part is erased.
    pub erase: f64,
    /// α of the distribution that mixing shares are drawn from; 0 for none.
    pub mixup: f64,
    pub cutmix: f64,
    /// By channel, of values from 0 to 1.
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    pub interpolation: Interpolation,
}

impl Augmentation {
    /// Returns whether training images are only resized and normalised.
    pub fn is_none(&self) -> bool {
        let plain = matches!(self.train, Geometry::Resize | Geometry::CenterCrop { .. });
        plain && self.rand_augment.is_none() && [self.flip, self.erase, self.mixup, self.cutmix] == [0.0; 4]
    }

    /// Returns whether images are mixed in pairs.
    pub fn mixes(&self) -> bool {
        self.mixup > 0.0 || self.cutmix > 0.0
    }

    /// Images that stay on one rank: those that are mixed.
    pub fn group(&self) -> usize {
        if self.mixes() { 2 } else { 1 }
    }
}

/// `--rand-augment N,M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandAugment {
    pub operations: usize,
    pub magnitude: usize,
}

impl FromStr for RandAugment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once(',').and_then(|(n, m)| Some((n.trim().parse().ok()?, m.trim().parse().ok()?)));
        match numbers {
            Some((operations, magnitude)) => Ok(RandAugment { operations, magnitude }),
            None => Err("is not N,M: operations on an image and their magnitude, such as 2,9".to_string()),
        }
    }
}

impl fmt::Display for RandAugment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.operations, self.magnitude)
    }
}

/// Values of a preset; single flags change them.
#[derive(Clone, Copy)]
struct Defaults {
    crop: Crop,
    flip: f64,
    rand_augment: RandAugment,
    erase: f64,
    mixup: f64,
    cutmix: f64,
    label_smoothing: f64,
}

impl Preset {
    fn defaults(self, source: &Source) -> Defaults {
        let rand_augment = RandAugment { operations: 0, magnitude: 0 };
        let none = Defaults {
            crop: Crop::None,
            flip: 0.0,
            rand_augment,
            erase: 0.0,
            mixup: 0.0,
            cutmix: 0.0,
            label_smoothing: 0.0,
        };
        let crop = if source.decodes() { Crop::Resized } else { Crop::Pad };
        let standard = Defaults { crop, flip: 0.5, ..none };
        match self {
            Preset::None => none,
            Preset::Standard => standard,
            Preset::Strong => Defaults {
                rand_augment: RandAugment { operations: 2, magnitude: 9 },
                erase: 0.25,
                mixup: 0.8,
                cutmix: 1.0,
                label_smoothing: 0.1,
                ..standard
            },
        }
    }
}

/// Value of a preset where nothing was typed, with the preset as its origin.
struct Picker<'a> {
    log: &'a mut Log,
    preset: Preset,
}

impl Picker<'_> {
    fn pick<T: fmt::Display>(&mut self, name: &'static str, typed: Option<T>, default: T) -> T {
        let origin = match (&typed, self.preset) {
            (Some(_), _) => Origin::Flag,
            (None, Preset::None) => Origin::default_value(),
            (None, preset) => Origin::Default(format!("--augment {preset}")),
        };
        let value = typed.unwrap_or(default);
        self.log.note(name, &value, origin);
        value
    }
}

impl Raw {
    /// The augmentation of a network's images, and the label smoothing that comes with it. What it may be is for `data` to
    /// say, which carries it out.
    pub(super) fn augmentation(
        &self,
        source: &Source,
        network: &Network,
        log: &mut Log,
    ) -> Result<(Augmentation, f64), ConfigError> {
        let (size, channels) = (network.image(), network.channels());
        let preset = log.pick("augment", self.augment, Preset::None);
        let defaults = preset.defaults(source);
        let mut picker = Picker { log, preset };
        let crop = picker.pick("crop", self.crop, defaults.crop);
        let flip = picker.pick("flip", self.flip, defaults.flip);
        let rand_augment = picker.pick("rand-augment", self.rand_augment, defaults.rand_augment);
        let erase = picker.pick("erase", self.erase, defaults.erase);
        let mixup = picker.pick("mixup", self.mixup, defaults.mixup);
        let cutmix = picker.pick("cutmix", self.cutmix, defaults.cutmix);
        let label_smoothing = picker.pick("label-smoothing", self.label_smoothing, defaults.label_smoothing);
        let train = match crop {
            Crop::None => Geometry::Resize,
            Crop::Pad => Geometry::PadCrop { padding: size / 8 },
            Crop::Resized => RESIZED,
        };
        let augmentation = Augmentation {
            train,
            eval: self.evaluation(crop, size, log),
            flip,
            rand_augment: (rand_augment.operations > 0)
                .then_some((rand_augment.operations, rand_augment.magnitude)),
            erase,
            mixup,
            cutmix,
            mean: by_channel("mean", &self.mean, &[0.5], channels, log, limits::mean)?,
            std: by_channel("std", &self.std, &[0.5], channels, log, limits::std)?,
            interpolation: log.pick("interpolation", self.interpolation, Interpolation::Bilinear),
        };
        augmentation.evaluation(network).check()?;
        let training = augmentation.training(network);
        // A magnitude is wrong also where no operation uses it.
        let (ops, magnitude) = (rand_augment.operations, rand_augment.magnitude);
        data::Transform { rand_augment: Some(data::RandAugment { ops, magnitude }), ..training }.check()?;
        Ok((augmentation, smoothing(label_smoothing)?))
    }

    /// Models trained on parts of images are evaluated on the middle of slightly larger ones, as is the custom.
    fn evaluation(&self, crop: Crop, size: usize, log: &mut Log) -> Geometry {
        let customary = Geometry::CenterCrop { resize: (size * 8).div_ceil(7) };
        let (geometry, origin) = match (self.eval_resize, crop) {
            (Some(resize), _) => (Geometry::CenterCrop { resize }, Origin::Flag),
            (None, Crop::Resized) => (customary, Origin::Default("with --crop resized".to_string())),
            (None, _) => (Geometry::Resize, Origin::default_value()),
        };
        log.note("eval-resize", geometry, origin);
        geometry
    }
}

/// One number for all channels, or one for each; `usual` if none was typed.
pub(super) fn by_channel(
    flag: &'static str,
    typed: &[f32],
    usual: &[f32],
    channels: usize,
    log: &mut Log,
    check: impl Fn(&[f32]) -> Result<(), DataError>,
) -> Result<Vec<f32>, ConfigError> {
    let origin = if typed.is_empty() { Origin::default_value() } else { Origin::Flag };
    let typed = if typed.is_empty() { usual } else { typed };
    check(typed)?;
    let text = limits::list(typed);
    let values = match *typed {
        [one] => vec![one; channels],
        _ if typed.len() == channels => typed.to_vec(),
        _ => {
            let why = format!(
                "{} for {}: give one, or one for each",
                many(typed.len(), "number"),
                many(channels, "channel")
            );
            return Err(ConfigError::setting(flag, &text, why));
        }
    };
    log.note(flag, text, origin);
    Ok(values)
}
