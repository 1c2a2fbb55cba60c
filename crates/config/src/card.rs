//! What weights say about themselves: enough to evaluate them as their run did.
//!
//! A checkpoint has the configuration of its run, of which a card is made. Plain weights that vitesse writes have the card itself in
//! their header. Of weights that others wrote, the names and shapes of their tensors tell some of it.

use crate::FileError;
use crate::{Device, EvalMode, Geometry, Interpolation, Place, Precision, Raw, Residual, Resolved, Source};
use models::Network;
use models::identify::Identity;
use models::vit::Pool;
use serde::{Deserialize, Serialize};
use std::path::Path;
use text::printable::shortened;

/// Metadata of plain weights.
pub const CARD: &str = "evaluation";

/// Settings of an evaluation, by the names of their flags; nothing where the weights don't say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Card {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_size: Option<usize>,
    /// Image size of training, where it differs: the windows of a Swin V2 are for this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_size: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// Number under the root of layer norms, where that is another than the model's usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f64>,
    /// In the order of the labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub class_names: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mean: Vec<f32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub std: Vec<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interpolation: Option<Interpolation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_resize: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_mode: Option<EvalMode>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_stride: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Place>,
    /// Settings of a synthetic set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_samples: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skip_bad_images: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_in: Option<TrainedIn>,
}

/// Device and precision of the training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainedIn {
    pub device: Device,
    pub precision: Precision,
    pub residual: Residual,
}

impl Card {
    /// Card of weights that a run trained.
    pub fn of(run: &Resolved) -> Self {
        let Resolved { network, augmentation, pixels, data, .. } = run;
        let pixels = pixels.as_ref();
        let slides = |pixels: &&crate::Pixels| pixels.eval_mode == EvalMode::Slide;
        let synthetic = data.source.is_synthetic();
        let usual_eps = Network::of_any_size(&run.model).map(|model| model.norm_eps());
        Card {
            model: Some(run.model.clone()),
            image_size: Some(network.image()),
            trained_size: network.trained().map(|size| size[0]),
            channels: Some(network.channels()),
            classes: Some(network.classes()),
            pool: network.pool(),
            norm_eps: Some(network.norm_eps()).filter(|eps| Some(*eps) != usual_eps),
            class_names: run.class_names.clone(),
            mean: augmentation.mean.clone(),
            std: augmentation.std.clone(),
            interpolation: Some(augmentation.interpolation),
            eval_resize: match augmentation.eval {
                Geometry::CenterCrop { resize } => Some(resize),
                _ => None,
            },
            eval_mode: pixels.map(|pixels| pixels.eval_mode),
            eval_stride: pixels.filter(slides).map(|pixels| pixels.eval_stride),
            data: Some(run.place()),
            test_samples: synthetic.then_some(data.facts.test_images),
            seed: synthetic.then_some(run.seed),
            skip_bad_images: data.skip_bad_images,
            batch_size: Some(run.batch),
            trained_in: Some(TrainedIn {
                device: run.device,
                precision: run.precision,
                residual: run.residual,
            }),
        }
    }

    /// Card of weights of which only tensors are known.
    pub fn of_tensors(identity: Identity) -> Self {
        let Identity { model, image, channels, classes, pool, .. } = identity;
        Card { model, image_size: image, channels, classes, pool, ..Card::default() }
    }

    /// Reads a card; `file` is where it was found.
    pub fn from_json(file: &Path, text: &str) -> Result<Self, FileError> {
        serde_json::from_str(text).map_err(|error| FileError::File {
            file: file.display().to_string(),
            why: format!("what it says of its evaluation can't be read: {}", shortened(&error.to_string())),
        })
    }

    pub fn to_json(&self) -> Result<String, FileError> {
        let error = |e: serde_json::Error| FileError::File { file: CARD.to_string(), why: e.to_string() };
        serde_json::to_string(self).map_err(error)
    }

    /// Side of the windows of the first stage that position biases were learned in, of a Swin V2.
    pub fn learned_window(&self) -> Option<usize> {
        let size = self.trained_size.or(self.image_size)?;
        let network = Network::named(self.model.as_deref()?, size, 1, 1).ok()?;
        Some(network.windows()?.learned)
    }

    /// Typed settings over those of the card; but for the data. Sizes that belong to the size of images
    /// keep their share of it.
    pub fn under(&self, typed: &Raw) -> Raw {
        let scaled = |size: usize| match (typed.image_size, self.image_size) {
            (Some(new), Some(old)) if old > 0 => {
                (size.saturating_mul(new) as f64 / old as f64).round() as usize
            }
            _ => size,
        };
        let typed_source = typed.data.as_ref().and_then(|name| name.parse::<Source>().ok());
        let synthetic = typed.data.is_none() || typed_source.is_some_and(|source| source.is_synthetic());
        let slides = typed.eval_mode.is_none_or(|mode| mode == EvalMode::Slide);
        let on_gpu = |trained: &TrainedIn| [Some(trained.device), typed.device] == [Some(Device::Cuda); 2];
        let numbers = self.trained_in.filter(|trained| on_gpu(trained) && typed.precision.is_none());
        let told = Raw {
            model: self.model.clone(),
            image_size: self.image_size,
            channels: self.channels,
            classes: self.classes,
            pool: self.pool,
            norm_eps: self.norm_eps,
            mean: self.mean.clone(),
            std: self.std.clone(),
            interpolation: self.interpolation,
            eval_resize: self.eval_resize.map(scaled),
            eval_mode: self.eval_mode,
            eval_stride: self.eval_stride.filter(|_| slides).map(|stride| scaled(stride).max(1)),
            test_samples: self.test_samples.filter(|_| synthetic),
            seed: self.seed,
            skip_bad_images: self.skip_bad_images,
            batch_size: self.batch_size,
            precision: numbers.map(|numbers| numbers.precision),
            residual: numbers.filter(|n| n.precision.half().is_some()).map(|n| n.residual),
            ..Raw::default()
        };
        typed.clone().or(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Crop, Preset, Task};

    /// Runs of every kind whose evaluation differs.
    fn runs() -> Vec<Raw> {
        let raw = Raw::default;
        vec![
            raw(),
            Raw { crop: Some(Crop::Resized), mean: vec![0.4, 0.5, 0.6], std: vec![0.2], ..raw() },
            Raw { augment: Some(Preset::Strong), ..raw() },
            Raw { interpolation: Some(Interpolation::Bicubic), eval_resize: Some(48), ..raw() },
            Raw { model: Some("vit-ti/8".into()), image_size: Some(64), pool: Some(Pool::Mean), ..raw() },
            Raw { classes: Some(20), channels: Some(1), seed: Some(7), test_samples: Some(30), ..raw() },
            Raw { eval_resize: Some(40), batch_size: Some(10), skip_bad_images: true, ..raw() },
            Raw { model: Some("swinv2-nano/w8".into()), image_size: Some(64), ..raw() },
            Raw { task: Some(Task::Segment), ..raw() },
            Raw { model: Some("vit-nano/4+linear".into()), eval_stride: Some(20), ..raw() },
            Raw {
                model: Some("swinv2-nano/w8+upernet".into()),
                eval_mode: Some(EvalMode::Slide),
                eval_stride: Some(30),
                ..raw()
            },
        ]
    }

    fn resolved(raw: &Raw) -> Resolved {
        raw.resolve(&crate::Facts::synthetic(raw).unwrap(), 1).unwrap()
    }

    /// Settings that an evaluation depends on.
    fn evaluation(run: &Resolved) -> impl PartialEq + std::fmt::Debug {
        let augmentation = &run.augmentation;
        let pixels = run.pixels.as_ref().map(|pixels| (pixels.fit, pixels.eval_mode, pixels.eval_stride));
        (
            (run.model.clone(), run.network.clone(), run.batch, run.seed),
            (augmentation.eval, augmentation.mean.clone(), augmentation.std.clone()),
            (augmentation.interpolation, pixels, run.data.facts.test_images, run.data.skip_bad_images),
        )
    }

    #[test]
    fn a_card_says_all_that_an_evaluation_depends_on() {
        for raw in runs() {
            let run = resolved(&raw);
            let card = Card::of(&run);
            let read = Card::from_json(Path::new("w"), &card.to_json().unwrap()).unwrap();
            assert_eq!(read, card);
            let again = read.under(&Raw::default());
            let again = again.resolve_for_evaluation(&crate::Facts::synthetic(&again).unwrap()).unwrap();
            assert_eq!(evaluation(&again), evaluation(&run), "{raw:?}");
            assert_eq!(Card { data: card.data.clone(), class_names: vec![], ..Card::of(&again) }, card);
        }
    }

    #[test]
    fn a_flag_overrides_one_thing() {
        let run = resolved(&runs()[1]);
        let card = Card::of(&run);
        let typed = Raw { model: card.model.clone(), ..Raw::default() };
        assert_eq!(
            card.under(&typed),
            card.under(&Raw::default()),
            "naming the run's own model changes nothing"
        );
        let typed = Raw { mean: vec![0.1], ..Raw::default() };
        let expected = Raw { mean: vec![0.1], ..card.under(&Raw::default()) };
        assert_eq!(card.under(&typed), expected);
        let samples = |data: &str| {
            let card = Card { test_samples: Some(30), ..card.clone() };
            card.under(&Raw { data: Some(data.into()), ..Raw::default() }).test_samples
        };
        assert_eq!((samples("synthetic"), samples("folder:photos")), (Some(30), None));
        let larger = card.under(&Raw { image_size: Some(64), ..Raw::default() });
        assert_eq!(
            (card.eval_resize, larger.eval_resize),
            (Some(37), Some(74)),
            "the same share of an image"
        );
        let slides = Card::of(&resolved(&runs()[9]));
        let whole = slides.under(&Raw { eval_mode: Some(EvalMode::Whole), ..Raw::default() });
        assert_eq!((whole.eval_mode, whole.eval_stride), (Some(EvalMode::Whole), None));
    }

    #[test]
    fn on_a_gpu_numbers_are_those_of_the_training_there() {
        let told = |device, typed: Raw| {
            let numbers = TrainedIn { device, precision: Precision::Fp16, residual: Residual::Half };
            Card { trained_in: Some(numbers), ..Card::default() }.under(&typed)
        };
        let gpu = || Raw { device: Some(Device::Cuda), ..Raw::default() };
        let raw = told(Device::Cuda, gpu());
        assert_eq!((raw.precision, raw.residual), (Some(Precision::Fp16), Some(Residual::Half)));
        for raw in [
            told(Device::Cuda, Raw::default()),
            told(Device::Cpu, gpu()),
            told(Device::Cuda, Raw { precision: Some(Precision::Tf32), ..gpu() }),
        ] {
            assert_eq!(raw.residual, None);
            assert_ne!(raw.precision, Some(Precision::Fp16));
        }
    }

    #[test]
    fn what_is_not_a_card_is_named() {
        for text in ["", "3", "{\"model\": 3}", "{\"modle\": \"vit-ti/4\"}"] {
            let error = Card::from_json(Path::new("w.safetensors"), text).unwrap_err().to_string();
            assert!(error.starts_with("w.safetensors: what it says of its evaluation"), "{error}");
        }
    }
}
