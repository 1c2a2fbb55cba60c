//! What becomes of a key, given the flags, the device and the number of ranks.

use super::keys::{self, Expected, Rule};
use super::{DeepSpeed, Entry, SCHEDULERS, Setting, Value};
use crate::optimizers::{self, Optimizer};
use crate::{Device, Precision};
use std::collections::BTreeMap;

/// Facts beside the file that a verdict depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context {
    pub world: usize,
    pub device: Device,
    /// Precision of the run, if it is not refused.
    pub precision: Precision,
    /// The flags that were typed, by name, as they were typed: `lr` → `--lr 0.01`.
    pub flags: BTreeMap<&'static str, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It decides something, which this names.
    Honoured(String),
    /// It asks for nothing that is not so anyway, and why.
    Accepted(String),
    /// This flag says otherwise.
    Overridden(String),
    Refused(String),
}

use Verdict::{Accepted, Honoured, Overridden, Refused};

pub(super) fn accepted(why: &str) -> Verdict {
    Accepted(why.to_string())
}

pub(super) fn refused(why: impl Into<String>) -> Verdict {
    Refused(why.into())
}

pub(super) fn judge(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let value = match &entry.value {
        Err(why) => return Refused(why.clone()),
        Ok(Value::Null) => return accepted("null is as if it were not there"),
        Ok(Value::Section { off: true }) => return accepted("switched off"),
        Ok(Value::Section { off: false }) => {
            let instead = keys::absent(&entry.key).unwrap_or("not here");
            return refused(format!("vitesse doesn't have it: {instead}"));
        }
        Ok(value) => value,
    };
    if let Some(flag) = replaced(file, entry, context) {
        return Overridden(flag);
    }
    let Some(key) = keys::all().find(|key| key.path == entry.key) else {
        return refused("unknown key");
    };
    match key.rule {
        Rule::Honoured(flag) => honoured(entry, value, flag, context),
        Rule::Harmless(why) => accepted(why),
        Rule::Must(expected, why) => {
            let good = match (expected, value) {
                (Expected::Is(flag), Value::Bool(found)) => flag == *found,
                (Expected::Equals(x), Value::Number(found)) => x == *found,
                _ => false,
            };
            if good { accepted("so it is here") } else { refused(why) }
        }
        Rule::Judged(judge) => judge(file, entry, context),
    }
}

/// A flag for another optimizer or schedule puts the file's whole section aside.
fn replaced(file: &DeepSpeed, entry: &Entry, context: &Context) -> Option<String> {
    if entry.key.starts_with("scheduler.") {
        return context.flags.get("schedule").cloned();
    }
    let flag = context.flags.get("optimizer")?;
    let of_optimizer = entry.key.starts_with("optimizer.") && !same_optimizer(file, context);
    of_optimizer.then(|| flag.clone())
}

/// Returns whether `--optimizer` is missing or names what the file names, whose parameters then hold.
pub fn same_optimizer(file: &DeepSpeed, context: &Context) -> bool {
    let Some(flag) = context.flags.get("optimizer") else { return true };
    let named = Optimizer::of_deepspeed(file.text("optimizer.type").unwrap_or_default());
    named.is_some_and(|named| flag.strip_prefix("--optimizer ") == Some(named.name))
}

pub(super) fn honoured(
    entry: &Entry,
    value: &Value,
    flag: Option<&'static str>,
    context: &Context,
) -> Verdict {
    let typed = flag.and_then(|flag| context.flags.get(flag));
    match (typed, flag, value) {
        (Some(typed), _, _) => Overridden(typed.clone()),
        (None, Some(flag), Value::Auto) => Honoured(format!("as --{flag}, or its default")),
        (None, None, Value::Auto) => Honoured("the default".to_string()),
        (None, Some(flag), _) => Honoured(format!("--{flag} {}", entry.text)),
        (None, None, _) => Honoured(entry.text.clone()),
    }
}

const MICRO: &str = "train_micro_batch_size_per_gpu";
const STUDY_MICRO: &str = "micro_batch_per_gpu";

/// Checks none of the three alone: whether they multiply is checked apart, with the flags in place of what they override.
pub(super) fn batch(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let flag = match entry.key.as_str() {
        "train_batch_size" => "global-batch",
        "gradient_accumulation_steps" => "accumulate",
        _ => "batch-size",
    };
    if let Some(typed) = context.flags.get(flag) {
        return Overridden(typed.clone());
    }
    if entry.value == Ok(Value::Auto) {
        return Honoured(format!("as --{flag}, or derived from the others"));
    }
    if entry.key != STUDY_MICRO {
        return Honoured(format!("--{flag} {}", entry.text));
    }
    match (file.whole(MICRO), file.whole(STUDY_MICRO)) {
        (Some(Setting::Given(official)), Some(Setting::Given(study))) if official != study => {
            refused(format!("{MICRO} is {official}, and both name the images of a micro-step"))
        }
        _ => {
            Honoured(format!("--{flag} {}; DeepSpeed would ignore this key: its own is {MICRO}", entry.text))
        }
    }
}

/// Measuring costs next to nothing and is always done; printing it is a choice.
pub(super) fn breakdown(_: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    match entry.value {
        Ok(Value::Bool(false)) => Honoured("no account of time at the end of the run".to_string()),
        _ => Honoured("the account of time, with every line of the log and at the end".to_string()),
    }
}

pub(super) fn offload(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let to_memory = match &entry.value {
        Ok(Value::Text(device)) if device == "nvme" => return refused("nothing is offloaded to NVMe here"),
        Ok(Value::Text(device)) => device == "cpu",
        value => *value == Ok(Value::Bool(true)),
    };
    match context.device {
        _ if !to_memory => accepted("nothing is offloaded"),
        Device::Cpu => accepted("the run is on the CPU; all is in its memory"),
        Device::Cuda => refused("nothing is offloaded from a GPU here"),
    }
}

pub(super) fn pinned(_: &DeepSpeed, _: &Entry, context: &Context) -> Verdict {
    accepted(match context.device {
        Device::Cpu => "pins memory for copies to a GPU; on the CPU there are none",
        Device::Cuda => "copies to a GPU always go through pinned memory",
    })
}

pub(super) fn pipeline_stages(_: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    match &entry.value {
        Ok(Value::Text(stages)) if stages == "auto" => accepted("there is one stage"),
        Ok(Value::Number(stages)) if *stages == 0.0 || *stages == 1.0 => accepted("there is one stage"),
        _ => refused("there is no pipeline parallelism here"),
    }
}

fn listed(name: &str, names: &[&str]) -> bool {
    names.iter().any(|known| known.eq_ignore_ascii_case(name))
}

pub(super) fn optimizer_type(_: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    match &entry.value {
        Ok(Value::Text(name)) if name.eq_ignore_ascii_case("adam") => {
            Honoured("--optimizer adamw, as in DeepSpeed unless adam_w_mode is false".to_string())
        }
        Ok(Value::Text(name)) => match (Optimizer::of_deepspeed(name), optimizers::refused(name)) {
            (Some(one), _) => Honoured(format!("--optimizer {}", one.name)),
            (None, Some(why)) => refused(why),
            (None, None) => refused(format!("is none of {}", optimizers::deepspeed_types().join(", "))),
        },
        _ => refused(format!("is none of {}", optimizers::deepspeed_types().join(", "))),
    }
}

pub(crate) fn adam_w_mode(file: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    let adamw = file.text("optimizer.type").is_some_and(|name| name.eq_ignore_ascii_case("adamw"));
    match entry.value {
        Ok(Value::Bool(false)) if adamw => accepted("type AdamW decides, in DeepSpeed too"),
        Ok(Value::Bool(false)) => {
            refused("decay as a part of the gradient (L2) is not built; AdamW's, which is apart from it, is")
        }
        _ => accepted("so it is here"),
    }
}

/// Returns whether the scheduler has rates of its own, which in DeepSpeed replace the optimizer's.
pub fn scheduler_sets_rate(file: &DeepSpeed) -> bool {
    let name = file.text("scheduler.type").unwrap_or_default().to_ascii_lowercase();
    let given = file.number("scheduler.params.warmup_max_lr");
    match name.as_str() {
        "warmuplr" => matches!(given, Some(Setting::Given(_))),
        "warmupdecaylr" => given != Some(Setting::Auto),
        "onecycle" | "lrrangetest" => true,
        _ => false,
    }
}

pub(super) fn learning_rate(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let scheduled = scheduler_sets_rate(file) && !context.flags.contains_key("schedule");
    match entry.value.as_ref() {
        Ok(_) if scheduled => accepted("the scheduler sets the rate, in DeepSpeed too"),
        Ok(value) => honoured(entry, value, Some("lr"), context),
        Err(why) => Refused(why.clone()),
    }
}

/// DeepSpeed pulls every parameter it is given; vitesse leaves vectors alone, as is usual for transformers.
pub(super) fn weight_decay(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let verdict = match &entry.value {
        Ok(value) => honoured(entry, value, Some("weight-decay"), context),
        Err(why) => Refused(why.clone()),
    };
    match (verdict, &entry.value) {
        (Honoured(text), Ok(Value::Number(decay))) if *decay > 0.0 => Honoured(format!(
            "{text}, of matrices; DeepSpeed decays biases and norms too, as --no-decay none would"
        )),
        (verdict, _) => verdict,
    }
}

/// DeepSpeed ignored them before 0.19.4.
pub(super) fn stairs(_: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    match entry.value {
        Ok(Value::Number(0.0)) => accepted("the rate moves at every step"),
        _ => Honoured(format!("{} stairs; DeepSpeed before 0.19.4 ignores them", entry.text)),
    }
}

pub(super) fn total_steps(file: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    let cosine = file.text("scheduler.type").is_some_and(|name| name.eq_ignore_ascii_case("warmupcosinelr"));
    match entry.value {
        Ok(Value::Auto) => Honoured("the steps of the run".to_string()),
        _ if cosine => Honoured(format!(
            "step {}; a longer run sees the rate rise again, as in DeepSpeed up to 0.19.2",
            entry.text
        )),
        _ => Honoured(format!("step {}, however long the run is", entry.text)),
    }
}

pub(super) fn scheduler_type(file: &DeepSpeed, entry: &Entry, _: &Context) -> Verdict {
    let Ok(Value::Text(name)) = &entry.value else { return refused("must be a name") };
    let has = |param: &str| file.number(&format!("scheduler.params.{param}")).is_some();
    let lower = name.to_ascii_lowercase();
    let missing = match lower.as_str() {
        "warmupdecaylr" | "warmupcosinelr" if !has("total_num_steps") => {
            Some("total_num_steps (or \"auto\")")
        }
        "onecycle" if !has("cycle_min_lr") => Some("cycle_min_lr"),
        "onecycle" if !has("cycle_max_lr") => Some("cycle_max_lr"),
        _ => None,
    };
    let cycles = lower == "onecycle" && file.boolean("scheduler.params.cycle_momentum").is_none();
    match missing {
        _ if !listed(name, SCHEDULERS) => refused(format!("is none of {}", SCHEDULERS.join(", "))),
        Some(param) => refused(format!("needs scheduler.params.{param}")),
        None if cycles => refused(
            "it cycles momentum unless scheduler.params.cycle_momentum is false, and momentum is fixed when a run is compiled",
        ),
        None => Honoured(format!("--schedule is {name}")),
    }
}
