//! What the user typed.

use super::arithmetic::Residual;
use super::augmentation::{Crop, Interpolation, Preset, RandAugment};
use super::choice::{Device, Form, Precision};
use super::exchange::Wire;
use super::groups::LrScale;
use super::pixels::EvalMode;
use super::source::Cache;
use super::task::Task;
use crate::deepspeed::{Context, DeepSpeed};
use graph::Recompute;
use models::vit::Pool;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What the user typed; `None`, or nothing in a list, where they left the choice to the file or to us.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Raw {
    pub task: Option<Task>,
    // ---- model
    pub model: Option<String>,
    pub image_size: Option<usize>,
    pub channels: Option<usize>,
    pub classes: Option<usize>,
    pub pool: Option<Pool>,
    pub dropout: Option<f64>,
    pub attention_dropout: Option<f64>,
    pub drop_path: Option<f64>,
    // ---- data
    pub data: Option<String>,
    pub train_samples: Option<usize>,
    pub test_samples: Option<usize>,
    pub data_fraction: Option<f64>,
    pub workers: Option<usize>,
    pub cache: Option<Cache>,
    pub skip_bad_images: bool,
    // ---- augmentation
    pub augment: Option<Preset>,
    pub crop: Option<Crop>,
    pub flip: Option<f64>,
    pub rand_augment: Option<RandAugment>,
    pub erase: Option<f64>,
    pub mixup: Option<f64>,
    pub cutmix: Option<f64>,
    pub label_smoothing: Option<f64>,
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    pub interpolation: Option<Interpolation>,
    pub eval_resize: Option<usize>,
    /// How images with masks are judged.
    pub eval_mode: Option<EvalMode>,
    pub eval_stride: Option<usize>,
    // ---- optimizer
    /// Images of an optimizer step, over all ranks.
    pub global_batch: Option<usize>,
    /// Images of a micro-step of one rank.
    pub batch_size: Option<usize>,
    pub accumulate: Option<usize>,
    pub optimizer: Option<String>,
    pub lr: Option<f64>,
    pub weight_decay: Option<f64>,
    pub clip: Option<f64>,
    pub schedule: Option<Form>,
    pub warmup_steps: Option<u64>,
    pub min_lr: Option<f64>,
    pub step_every: Option<Span>,
    pub milestones: Vec<Span>,
    pub gamma: Option<f64>,
    pub power: Option<f64>,
    pub lr_scale: Vec<LrScale>,
    pub layer_decay: Option<f64>,
    pub no_decay: Vec<String>,
    pub ema: Option<f64>,
    // ---- run
    /// The configuration file, read.
    pub deepspeed: Option<DeepSpeed>,
    pub epochs: Option<u64>,
    pub steps: Option<u64>,
    pub device: Option<Device>,
    pub precision: Option<Precision>,
    /// The numbers of the residual stream.
    pub residual: Option<Residual>,
    pub recompute: Option<Recompute>,
    pub seed: Option<u64>,
    pub threads: Option<usize>,
    pub init: Option<PathBuf>,
    pub new_head: bool,
    /// `--resume`, and the run's folder if it was named there.
    pub resume: Option<Option<PathBuf>>,
    // ---- output
    pub out: Option<PathBuf>,
    pub checkpoint_every: Option<u64>,
    pub keep: Option<usize>,
    /// Keep metrics alone: neither checkpoints nor weights.
    pub no_checkpoints: bool,
    pub eval_every: Option<Every>,
    pub log_every: Option<u64>,
    /// Where to write a trace of the first steps.
    pub trace: Option<PathBuf>,
    pub trace_steps: Option<u64>,
    pub balance: bool,
    /// Elements of gradients that ranks exchange at once.
    pub bucket_size: Option<usize>,
    pub no_overlap: bool,
    pub wire: Option<Wire>,
    /// Leave out the account of time.
    pub no_account: bool,
    /// Leave out where the time went by kind of work, for which a GPU runs some steps otherwise than the rest.
    pub no_breakdown: bool,
    /// Nothing that is measured decides how numbers are computed.
    pub deterministic: bool,
    /// Take over the folder of a run whose lock can't be judged.
    pub force: bool,
}

impl Raw {
    /// These settings, and where they say nothing, those of `earlier`: what a continued run was told, then and now.
    pub fn or(self, mut earlier: Raw) -> Raw {
        // What is told now takes the place of what says the same in other words.
        if self.epochs.or(self.steps).is_some() {
            (earlier.epochs, earlier.steps) = (None, None);
        }
        if self.eval_mode == Some(EvalMode::Whole) {
            earlier.eval_stride = None;
        }
        macro_rules! either {
            (choices: $($choice:ident)*; lists: $($list:ident)*; switches: $($switch:ident)*;) => {
                Raw {
                    $($choice: self.$choice.or(earlier.$choice),)*
                    $($list: if self.$list.is_empty() { earlier.$list } else { self.$list },)*
                    $($switch: self.$switch || earlier.$switch,)*
                    // For this time only.
                    force: self.force,
                }
            };
        }
        either! {
            choices: task model image_size channels classes pool dropout attention_dropout drop_path
                data train_samples test_samples data_fraction workers cache
                augment crop flip rand_augment erase mixup cutmix label_smoothing interpolation eval_resize
                eval_mode eval_stride
                global_batch batch_size accumulate optimizer lr weight_decay clip schedule warmup_steps min_lr
                step_every gamma power layer_decay ema
                deepspeed epochs steps device precision residual recompute seed threads init resume
                out checkpoint_every keep eval_every log_every trace trace_steps bucket_size wire;
            lists: mean std milestones lr_scale no_decay;
            switches: skip_bad_images new_head balance no_account no_overlap deterministic no_checkpoints
                no_breakdown;
        }
    }

    /// The same with relative paths of data, weights and traces taken from `folder`.
    pub fn within(mut self, folder: &Path) -> Raw {
        self.data = self.data.map(|data| match data.split_once(':') {
            Some((kind, path)) => format!("{kind}:{}", folder.join(path).display()),
            None => data,
        });
        self.init = self.init.map(|path| folder.join(path));
        self.trace = self.trace.map(|path| folder.join(path));
        self
    }

    /// The flags that a configuration file has keys for, as they were typed.
    pub(crate) fn context(&self, world: usize) -> Context {
        let typed: [(&'static str, Option<String>); 13] = [
            ("global-batch", text(&self.global_batch)),
            ("batch-size", text(&self.batch_size)),
            ("accumulate", text(&self.accumulate)),
            ("optimizer", text(&self.optimizer)),
            ("lr", text(&self.lr)),
            ("weight-decay", text(&self.weight_decay)),
            ("clip", text(&self.clip)),
            ("schedule", text(&self.schedule)),
            ("warmup-steps", text(&self.warmup_steps)),
            ("precision", text(&self.precision)),
            ("log-every", text(&self.log_every)),
            ("bucket-size", text(&self.bucket_size)),
            ("wire", text(&self.wire)),
        ];
        let spelled = |(flag, value): (&'static str, Option<String>)| {
            value.map(|value| (flag, format!("--{flag} {value}")))
        };
        let switches = self.no_overlap.then(|| ("no-overlap", "--no-overlap".to_string()));
        let (device, precision) = (self.device.unwrap_or_default(), self.chosen_precision().0);
        Context {
            world,
            device,
            precision,
            flags: typed.into_iter().filter_map(spelled).chain(switches).collect(),
        }
    }
}

fn text(value: &Option<impl fmt::Display>) -> Option<String> {
    value.as_ref().map(|value| value.to_string())
}

/// A number of steps, or of epochs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    Steps(u64),
    Epochs(f64),
}

impl Span {
    pub fn steps(self, steps_per_epoch: u64) -> u64 {
        match self {
            Span::Steps(steps) => steps,
            Span::Epochs(epochs) => (epochs * steps_per_epoch as f64).round() as u64,
        }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let epochs = ["epochs", "epoch", "ep"].iter().find_map(|unit| text.strip_suffix(unit));
        let span = match epochs {
            Some(number) => number.trim().parse().ok().filter(|x| *x > 0.0 && *x < 1e9).map(Span::Epochs),
            None => text.parse().ok().filter(|x| *x > 0).map(Span::Steps),
        };
        span.ok_or_else(|| "is neither steps, such as 1000, nor epochs, such as 30ep".to_string())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Span::Steps(steps) => write!(f, "{steps}"),
            Span::Epochs(epochs) => write!(f, "{epochs}ep"),
        }
    }
}

/// How often something is done: every so many epochs, or steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    Epochs(u64),
    Steps(u64),
}

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let steps = ["iterations", "steps", "it"].iter().find_map(|unit| text.strip_suffix(unit));
        let every = match steps {
            Some(number) => number.trim().parse().ok().map(Every::Steps),
            None => text.parse().ok().map(Every::Epochs),
        };
        every.ok_or_else(|| "is neither epochs, such as 2, nor iterations, such as 16000it".to_string())
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Every::Epochs(epochs) => write!(f, "{epochs}"),
            Every::Steps(steps) => write!(f, "{steps}it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_repeated_has_a_unit() {
        assert_eq!("2".parse(), Ok(Every::Epochs(2)));
        for text in ["16000it", "16000 iterations", "16000steps"] {
            assert_eq!(text.parse(), Ok(Every::Steps(16_000)));
        }
        assert_eq!(Every::Steps(5).to_string().parse(), Ok(Every::Steps(5)));
        for bad in ["", "it", "-1it", "1.5", "2ep"] {
            assert!(bad.parse::<Every>().is_err(), "{bad}");
        }
    }

    #[test]
    fn spans_are_steps_or_epochs() {
        assert_eq!("30ep".parse::<Span>().unwrap().steps(313), 9390);
        assert_eq!("0.5 epochs".parse::<Span>().unwrap().steps(10), 5);
        assert_eq!("7".parse::<Span>().unwrap().steps(313), 7);
        for bad in ["", "0", "-1", "ep", "-1ep", "nanep", "infep", "1.5", "x"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }
}
