//! Settings in two stages: `Raw` is what the user typed, `Resolved` is what can be run. Nothing after `resolve` fails
//! for a bad setting.

use crate::error::TrainError;
use crate::schedule::WarmupCosine;
use data::synthetic::SyntheticSpec;
use data::{Split, Synthetic};
use graph::{Optimizer, Recompute};
use models::vit::{Pool, Vit};
use std::path::PathBuf;

/// What the user typed; `None` where they left the choice to us.
#[derive(Clone, Debug, Default)]
pub struct Raw {
    pub model: Option<String>,
    pub image_size: Option<usize>,
    pub channels: Option<usize>,
    pub classes: Option<usize>,
    pub pool: Option<Pool>,
    pub dropout: Option<f64>,
    pub attention_dropout: Option<f64>,
    pub drop_path: Option<f64>,
    pub data: Option<String>,
    pub train_samples: Option<usize>,
    pub test_samples: Option<usize>,
    pub batch_size: Option<usize>,
    pub accumulate: Option<usize>,
    pub epochs: Option<u64>,
    pub steps: Option<u64>,
    pub optimizer: Option<String>,
    pub lr: Option<f64>,
    pub weight_decay: Option<f64>,
    pub warmup_steps: Option<u64>,
    pub clip: Option<f64>,
    pub label_smoothing: Option<f64>,
    pub recompute: Option<Recompute>,
    pub seed: Option<u64>,
    pub threads: Option<usize>,
    pub init: Option<PathBuf>,
    pub out: Option<PathBuf>,
}

/// The defaults of a first run: a small ViT that learns the synthetic set in about a minute on two cores.
pub const DEFAULT_MODEL: &str = "vit-nano/4";
const DEFAULT_IMAGE: usize = 32;
const DEFAULT_TRAIN_SAMPLES: usize = 20_000;
const DEFAULT_TEST_SAMPLES: usize = 2_000;
const DEFAULT_EPOCHS: u64 = 3;

/// A run that can be started.
#[derive(Clone, Debug)]
pub struct Resolved {
    pub model: String,
    pub vit: Vit,
    pub train_set: SyntheticSpec,
    pub test_set: SyntheticSpec,
    /// Images of a micro-step.
    pub batch: usize,
    pub accumulate: usize,
    pub epochs: u64,
    pub steps: u64,
    pub steps_per_epoch: u64,
    pub optimizer: Optimizer,
    pub schedule: WarmupCosine,
    pub clip: Option<f64>,
    pub label_smoothing: f64,
    pub recompute: Recompute,
    pub seed: u64,
    pub threads: usize,
    pub init: Option<PathBuf>,
    pub out: Option<PathBuf>,
}

impl Resolved {
    /// Images of an optimizer step.
    pub fn global_batch(&self) -> usize {
        self.batch * self.accumulate
    }
}

impl Raw {
    pub fn resolve(self) -> Result<Resolved, TrainError> {
        let run = self.resolve_without_data()?;
        Synthetic::new(run.train_set)?;
        Ok(run)
    }

    /// For commands that plan or time a step and read no data: the set is not asked whether it can be had.
    pub fn resolve_without_data(self) -> Result<Resolved, TrainError> {
        let (model, vit) = self.vit()?;
        let (train_set, test_set) = self.sets(&vit)?;
        let batch = at_least_one("batch-size", self.batch_size.unwrap_or(64))?;
        let accumulate = at_least_one("accumulate", self.accumulate.unwrap_or(1))?;
        let steps_per_epoch = train_set.len.div_ceil(batch * accumulate) as u64;
        let epochs = at_least_one("epochs", self.epochs.unwrap_or(DEFAULT_EPOCHS) as usize)? as u64;
        let steps = at_least_one("steps", self.steps.unwrap_or(epochs * steps_per_epoch) as usize)? as u64;
        let (optimizer, default_lr) = self.optimizer()?;
        let peak = positive("lr", self.lr.unwrap_or(default_lr))?;
        let warmup = self.warmup_steps.unwrap_or(steps / 20).min(steps);
        let clip = match self.clip.unwrap_or(1.0) {
            0.0 => None,
            norm => Some(positive("clip", norm)?),
        };
        let label_smoothing = rate("label-smoothing", self.label_smoothing.unwrap_or(0.0))?;
        Ok(Resolved {
            model,
            vit,
            train_set,
            test_set,
            batch,
            accumulate,
            epochs: steps.div_ceil(steps_per_epoch),
            steps,
            steps_per_epoch,
            optimizer,
            schedule: WarmupCosine { peak, warmup, total: steps },
            clip,
            label_smoothing,
            recompute: self.recompute.unwrap_or_default(),
            seed: self.seed.unwrap_or(0),
            threads: at_least_one("threads", self.threads.unwrap_or_else(available_threads))?,
            init: self.init,
            out: self.out,
        })
    }

    fn vit(&self) -> Result<(String, Vit), TrainError> {
        let model = self.model.clone().unwrap_or_else(|| DEFAULT_MODEL.to_string());
        let image = self.image_size.unwrap_or(DEFAULT_IMAGE);
        let mut vit = Vit::named(&model, image, self.channels.unwrap_or(3), self.classes.unwrap_or(10))?;
        vit.pool = self.pool.unwrap_or(vit.pool);
        vit.dropout = self.dropout.unwrap_or(0.0);
        vit.attention_dropout = self.attention_dropout.unwrap_or(0.0);
        vit.drop_path = self.drop_path.unwrap_or(0.0);
        vit.check(&model)?;
        Ok((model, vit))
    }

    fn sets(&self, vit: &Vit) -> Result<(SyntheticSpec, SyntheticSpec), TrainError> {
        let name = self.data.as_deref().unwrap_or("synthetic");
        if name != "synthetic" {
            return Err(TrainError::setting("data", name, "only the built-in set 'synthetic' is known yet"));
        }
        let len = at_least_one("train-samples", self.train_samples.unwrap_or(DEFAULT_TRAIN_SAMPLES))?;
        let test_len = at_least_one("test-samples", self.test_samples.unwrap_or(DEFAULT_TEST_SAMPLES))?;
        let train = SyntheticSpec {
            split: Split::Train,
            len,
            image_size: vit.image,
            channels: vit.channels,
            classes: vit.classes,
            seed: self.seed.unwrap_or(0),
        };
        let test = SyntheticSpec { split: Split::Test, len: test_len, ..train };
        Ok((train, test))
    }

    /// The optimizer and its usual learning rate.
    fn optimizer(&self) -> Result<(Optimizer, f64), TrainError> {
        let decay = self.weight_decay;
        if decay.is_some_and(|d| !(0.0..).contains(&d)) {
            return Err(TrainError::setting("weight-decay", decay.unwrap_or(0.0), "must not be negative"));
        }
        let (beta1, beta2) = (0.9, 0.999);
        match self.optimizer.as_deref().unwrap_or("adamw") {
            "adamw" => {
                let weight_decay = decay.unwrap_or(0.05);
                Ok((Optimizer::AdamW { beta1, beta2, eps: 1e-8, weight_decay }, 1e-3))
            }
            "sgd" => {
                let weight_decay = decay.unwrap_or(1e-4);
                Ok((Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay }, 0.03))
            }
            "lamb" => {
                let weight_decay = decay.unwrap_or(0.01);
                let (min_coeff, max_coeff) = (0.01, 10.0);
                let lamb = Optimizer::Lamb { beta1, beta2, eps: 1e-8, weight_decay, min_coeff, max_coeff };
                Ok((lamb, 4e-3))
            }
            other => Err(TrainError::setting("optimizer", other, "is none of adamw, sgd, lamb")),
        }
    }
}

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn at_least_one(flag: &'static str, value: usize) -> Result<usize, TrainError> {
    if value == 0 { Err(TrainError::setting(flag, value, "must be at least 1")) } else { Ok(value) }
}

fn positive(flag: &'static str, value: f64) -> Result<f64, TrainError> {
    let good = value > 0.0 && value.is_finite();
    if good { Ok(value) } else { Err(TrainError::setting(flag, value, "must be positive")) }
}

fn rate(flag: &'static str, value: f64) -> Result<f64, TrainError> {
    let good = (0.0..1.0).contains(&value);
    if good { Ok(value) } else { Err(TrainError::setting(flag, value, "must lie in 0 ≤ rate < 1")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_run_resolves() {
        let run = Raw::default().resolve().unwrap();
        assert_eq!(run.steps, 3 * 313);
        assert_eq!((run.batch, run.accumulate), (64, 1));
    }

    #[test]
    fn steps_override_epochs() {
        let run = Raw { steps: Some(10), epochs: Some(7), ..Raw::default() }.resolve().unwrap();
        assert_eq!((run.steps, run.epochs), (10, 1));
    }

    #[test]
    fn each_bad_setting_names_its_flag() {
        let message = |raw: Raw| raw.resolve().unwrap_err().to_string();
        let cases = [
            (Raw { batch_size: Some(0), ..Raw::default() }, "--batch-size 0: must be at least 1"),
            (Raw { lr: Some(-1.0), ..Raw::default() }, "--lr -1: must be positive"),
            (
                Raw { optimizer: Some("adam".into()), ..Raw::default() },
                "--optimizer adam: is none of adamw, sgd, lamb",
            ),
            (
                Raw { data: Some("mnist".into()), ..Raw::default() },
                "--data mnist: only the built-in set 'synthetic' is known yet",
            ),
            (
                Raw { model: Some("vit-ti/5".into()), ..Raw::default() },
                "vit-ti/5: patch 5 doesn't divide the 32×32 image",
            ),
            (
                Raw { dropout: Some(1.0), ..Raw::default() },
                "vit-nano/4: dropout is 1, but a rate lies in 0 ≤ rate < 1",
            ),
        ];
        for (raw, expected) in cases {
            assert_eq!(message(raw), expected);
        }
    }
}
