//! What can be run, and its record in `config.json`.

use super::all_reduce::AllReduce;
use super::arithmetic::{LossScale, Residual};
use super::augmentation::Augmentation;
use super::choice::{Device, Precision};
use super::groups::Groups;
use super::pixels::Pixels;
use super::source::{Data, Source};
use super::task::Task;
use crate::FileError;
use crate::schedule::Schedule;
use crate::settings::record::Record;
use crate::settings::{self, Plain};
use crate::shard_group::ShardGroup;
use crate::shares::Shares;
use data::Split;
use data::synthetic::SyntheticSpec;
use graph::{Gathering, Optimizer, ParamGroup, Recompute};
use models::Network;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::PathBuf;

/// Schema version of `config.json`; raised when an older one can no longer be read, or would mean something else.
pub const SCHEMA: u32 = 1;

/// Member of a [`Resolved`] that holds the plain settings.
const PLAIN: &str = "plain";

/// A run that can be started. Written to `config.json`, it holds all that a later command needs of this one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolved {
    pub schema: u32,
    /// The GPU of this machine that plans are for, where a rank has one.
    #[serde(skip)]
    pub gpu: usize,
    pub model: String,
    /// In the order of the labels; filled in when the data is opened.
    pub class_names: Vec<String>,
    #[serde(alias = "vit")]
    pub network: Network,
    pub data: Data,
    pub augmentation: Augmentation,
    /// Settings of images with masks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pixels: Option<Pixels>,
    /// Ranks.
    pub world: usize,
    /// Images of a micro-step of one rank.
    pub batch: usize,
    pub accumulate: usize,
    /// Images of a micro-step over all ranks, where they don't divide equally; `batch` is then the largest share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uneven: Option<usize>,
    pub epochs: u64,
    pub steps: u64,
    pub steps_per_epoch: u64,
    pub optimizer: Optimizer,
    pub schedule: Schedule,
    pub clip: Option<f64>,
    pub label_smoothing: f64,
    pub groups: Groups,
    pub recompute: Recompute,
    pub device: Device,
    pub precision: Precision,
    #[serde(default)]
    pub residual: Residual,
    /// In fp16.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    pub threads: usize,
    pub init: Option<PathBuf>,
    /// Allows weights to start from to have another head.
    pub new_head: bool,
    pub out: Option<PathBuf>,
    /// The folder of the run to continue.
    pub resume: Option<PathBuf>,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Writes checkpoints and weights.
    #[serde(default = "yes")]
    pub checkpoints: bool,
    /// Epochs between evaluations.
    pub eval_every: u64,
    /// Steps between them, if those count instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_steps: Option<u64>,
    /// Steps between lines of the log.
    pub log_every: u64,
    /// Prints a table of time at the end.
    pub breakdown: bool,
    /// Prints a line of it with every line of the log.
    #[serde(default)]
    pub breakdown_lines: bool,
    /// Keeps the account of time.
    #[serde(default = "yes")]
    pub account: bool,
    /// File that the first steps are traced to.
    #[serde(default)]
    pub trace: Option<PathBuf>,
    #[serde(default, alias = "exchange")]
    pub all_reduce: AllReduce,
    /// Ranks that divide states, if not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<ShardGroup>,
    /// Gathering of parameters at stage 3 of ZeRO, as far as a file decides it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gathering: Gathering,
    /// Settings that are what was typed, or a constant. In the record they are members like any other.
    #[serde(default)]
    pub plain: Plain,
    /// Typed settings, for the record of this launch.
    #[serde(skip)]
    pub typed: Option<Record>,
    /// Take over the folder of a run whose lock can't be checked; this time only, so no part of the record.
    #[serde(skip)]
    pub force: bool,
}

fn yes() -> bool {
    true
}

fn is_default(gathering: &Gathering) -> bool {
    *gathering == Gathering::default()
}

/// Members of the record that may change when a run continues and follow from no setting alone. How a batch is divided among ranks and
/// micro-steps is compared as their product.
const FREE: [&str; 5] = ["schema", "data.relative", "all_reduce.predivide", "uneven", GATHERING];

const GATHERING: &str = "gathering";

/// Members among those that are alike on all ranks.
const AGREED: [&str; 3] = ["all_reduce.predivide", "uneven", GATHERING];

/// Plain settings are read as if they were the run's own.
impl Deref for Resolved {
    type Target = Plain;

    fn deref(&self) -> &Plain {
        &self.plain
    }
}

impl Resolved {
    /// Images of an optimizer step, over all ranks.
    pub fn global_batch(&self) -> usize {
        self.images_of_micro_step() * self.accumulate
    }

    /// Images of a micro-step, over all ranks.
    pub fn images_of_micro_step(&self) -> usize {
        self.uneven.unwrap_or(self.batch * self.world)
    }

    /// Images of each rank in a micro-step, before any rank's speed is known.
    pub fn shares(&self) -> Shares {
        match self.uneven {
            Some(images) => Shares::even(images, self.world, self.augmentation.group()),
            None => Shares::equal(self.batch, self.world),
        }
    }

    pub fn task(&self) -> Task {
        Task::of(&self.network)
    }

    /// Divisor of the loss of a label, on its way to the mean over all; `clip` makes up for the rest. Where pixels have
    /// labels, these are counted.
    pub fn nominal(&self) -> f64 {
        (self.batch * self.accumulate * self.network.labels()) as f64 * self.all_reduce.predivide
    }

    /// Returns whether the model is evaluated after `steps` steps.
    pub fn evaluates_after(&self, steps: u64) -> bool {
        let due = match self.eval_steps {
            Some(every) => steps.is_multiple_of(every),
            None => {
                let epoch_ends = steps.is_multiple_of(self.steps_per_epoch);
                epoch_ends && (steps / self.steps_per_epoch).is_multiple_of(self.eval_every)
            }
        };
        due || steps == self.steps
    }

    /// How often the model is evaluated.
    pub fn evaluations(&self) -> u64 {
        let every = self.eval_steps.unwrap_or(self.eval_every.saturating_mul(self.steps_per_epoch));
        self.steps.div_ceil(every.max(1))
    }

    /// Training images of a step, over all ranks; the last of an epoch may have fewer.
    pub fn images_of_step(&self, step: u64) -> usize {
        let begins = (step % self.steps_per_epoch) as usize * self.global_batch();
        self.data.train_images().saturating_sub(begins).min(self.global_batch())
    }

    /// Communication of gradients between ranks, if there is more than one.
    pub fn communication(&self) -> graph::Communication {
        graph::Communication {
            bucket: self.all_reduce.bucket,
            overlap: self.all_reduce.overlap,
            dtype: self.all_reduce.sent_as(),
            each_micro_step: self.plain.reduce_every_micro_step,
        }
    }

    /// Group of a parameter.
    pub fn group(&self, name: &str) -> ParamGroup {
        self.groups.group(name)
    }

    /// Synthetic set of this run.
    pub fn synthetic(&self, split: Split) -> SyntheticSpec {
        let len = match split {
            Split::Train => self.data.train_images(),
            Split::Test => self.data.facts.test_images,
        };
        let (classes, channels) = (self.data.facts.classes, self.data.facts.channels);
        SyntheticSpec { split, len, image_size: self.network.image(), channels, classes, seed: self.seed }
    }

    /// The record; fails if a path can't be written as text.
    pub fn to_json(&self) -> Result<String, FileError> {
        let error =
            |e: serde_json::Error| FileError::File { file: "config.json".to_string(), why: e.to_string() };
        serde_json::to_string_pretty(&hoisted(serde_json::to_value(self).map_err(error)?)).map_err(error)
    }

    /// Reads a record; `file` is its name in messages.
    pub fn from_json(file: &str, text: &str) -> Result<Self, FileError> {
        let error = |why: String| FileError::File { file: file.to_string(), why };
        let value: Value = serde_json::from_str(text).map_err(|e| error(e.to_string()))?;
        match value.get("schema").and_then(Value::as_u64) {
            Some(schema) if schema == u64::from(SCHEMA) => {}
            Some(schema) => return Err(error(format!("has schema {schema}; this build reads {SCHEMA}"))),
            None => return Err(error("is no record of a run: it has no schema".to_string())),
        }
        serde_json::from_value(lowered(value)).map_err(|e| error(e.to_string()))
    }

    /// Settings that differ from those of `before` and would change what is computed.
    pub fn differences(&self, before: &Resolved) -> Vec<String> {
        let text = |name: &str, new: &str, old: &str| format!("{name} is {new}, was {old}");
        different(&self.settings(), &before.settings(), text)
    }

    /// Settings in which a rank differs from the first.
    pub fn differences_among_ranks(&self, first: &Resolved) -> Vec<String> {
        let text = |name: &str, here: &str, first: &str| format!("{name} is {here}, not {first}");
        let all = |run: &Resolved| {
            let (mut settings, mut free) = (run.settings(), BTreeMap::new());
            flatten("", &run.without_paths(), &[], &mut free);
            let agreed = settings::agreed_members();
            let is_agreed = |name: &str| {
                let member = name.split_once('.').map_or(name, |(member, _)| member);
                AGREED.contains(&name) || AGREED.contains(&member) || agreed.iter().any(|known| known == name)
            };
            settings.extend(free.into_iter().filter(|(name, _)| is_agreed(name)));
            settings.insert("resume".to_string(), run.resume.is_some().to_string());
            settings
        };
        different(&all(self), &all(first), text)
    }

    /// The record without its paths, which don't matter and are all that could fail to become JSON.
    fn without_paths(&self) -> Value {
        let mut plain = Resolved { init: None, out: None, resume: None, trace: None, ..self.clone() };
        (plain.data.source, plain.data.relative) = (Source::synthetic(data::Task::Classify), None);
        hoisted(serde_json::to_value(plain).unwrap_or_default())
    }

    /// Every setting that matters to the arithmetic, by its name in the record.
    fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = BTreeMap::new();
        let free: Vec<String> =
            settings::free_members().into_iter().chain(FREE.map(str::to_string)).collect();
        flatten("", &self.without_paths(), &free, &mut settings);
        settings.insert("global batch".to_string(), self.global_batch().to_string());
        if self.network.normalises_batches() {
            settings.insert("images of a micro-step".to_string(), self.images_of_micro_step().to_string());
        }
        settings.insert("data".to_string(), self.data.source.set().to_string());
        settings
    }
}

/// The record with plain settings among its members.
fn hoisted(mut record: Value) -> Value {
    if let Some(members) = record.as_object_mut()
        && let Some(Value::Object(plain)) = members.shift_remove(PLAIN)
    {
        members.extend(plain);
    }
    record
}

/// The record with plain settings by themselves.
fn lowered(mut record: Value) -> Value {
    if let Some(members) = record.as_object_mut() {
        let plain = settings::all().iter().filter(|setting| setting.is_plain());
        let plain = plain
            .filter_map(|setting| Some((setting.field.to_string(), members.shift_remove(setting.field)?)));
        let plain = Value::Object(plain.collect());
        members.insert(PLAIN.to_string(), plain);
    }
    record
}

/// Differences between two sets of settings, worded by `text`.
fn different(
    new: &BTreeMap<String, String>,
    old: &BTreeMap<String, String>,
    text: impl Fn(&str, &str, &str) -> String,
) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let value =
        |of: &'_ BTreeMap<String, String>, name| of.get(name).cloned().unwrap_or("nothing".to_string());
    let differ = names.into_iter().filter(|name| old.get(*name) != new.get(*name));
    differ.map(|name| text(name, &value(new, name), &value(old, name))).collect()
}

/// All members of an object and of those in it, but for the ones named in `without`.
fn flatten(path: &str, value: &Value, without: &[String], settings: &mut BTreeMap<String, String>) {
    if without.iter().any(|name| name == path) {
        return;
    }
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, without, settings);
            }
        }
        Value::Null => {}
        Value::String(text) => {
            settings.insert(path.to_string(), text.clone());
        }
        other => {
            settings.insert(path.to_string(), other.to_string());
        }
    }
}
