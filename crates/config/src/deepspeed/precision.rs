//! What becomes of the keys about precision: it depends on the device, and on what the run computes in.

use super::judge::{Context, Verdict, accepted, refused};
use super::{DeepSpeed, Entry, Setting, Value};
use crate::{Device, Precision};
use Verdict::{Honoured, Overridden};

/// `fp16.enabled`, `bf16.enabled`, and its older name.
pub(super) fn enabled(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let on = |key: &str| file.boolean(key) == Some(Setting::Given(true));
    let bf16 = ["bf16.enabled", "bfloat16.enabled"].into_iter().find(|key| on(key));
    let other = if entry.key == "fp16.enabled" { bf16 } else { Some("fp16.enabled").filter(|key| on(key)) };
    let is_on = entry.value == Ok(Value::Bool(true));
    match (other, context.flags.get("precision")) {
        (Some(other), _) if is_on => refused(format!("{other} is true as well, and only one of them can be")),
        (_, Some(typed)) => Overridden(typed.clone()),
        _ if is_on && context.device == Device::Cpu => {
            refused("the CPU computes in fp32; use --precision fp32 to override")
        }
        _ if is_on => Honoured(format!("--precision {}", context.precision)),
        _ if entry.value == Ok(Value::Auto) => {
            accepted(&format!("as --precision, or its default: {}", context.precision))
        }
        _ if context.device == Device::Cuda && context.precision == Precision::Fp32 => {
            Honoured("--precision fp32".to_string())
        }
        _ => accepted(&format!("computes in {}", context.precision)),
    }
}

/// `judged`, if the run computes in `precision`.
fn only_in(precision: Precision, context: &Context, judged: impl FnOnce() -> Verdict) -> Verdict {
    if context.precision == precision {
        return judged();
    }
    accepted(&format!("only with {precision}, and this run computes in {}", context.precision))
}

/// The numbers of the loss scale.
pub(super) fn loss_scale(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    only_in(Precision::Fp16, context, || match entry.value {
        Ok(Value::Number(number)) => scale(file, entry, number),
        _ => Honoured("the default".to_string()),
    })
}

fn scale(file: &DeepSpeed, entry: &Entry, number: f64) -> Verdict {
    let key = entry.key.strip_prefix("fp16.").unwrap_or(&entry.key);
    let fixed = matches!(file.number("fp16.loss_scale"), Some(Setting::Given(scale)) if scale != 0.0);
    let power = file.number("fp16.initial_scale_power");
    let initial = if let Some(Setting::Given(power)) = power { power.exp2() } else { DEFAULT_SCALE };
    match key {
        "loss_scale" if number == 0.0 => Honoured("a dynamic loss scale".to_string()),
        "loss_scale" if !(0.0..=f64::from(f32::MAX)).contains(&number) => {
            refused("must be 0, for a dynamic scale, or a positive number that fp32 holds")
        }
        "loss_scale" => {
            Honoured(format!("a fixed loss scale of {}; a step that overflows ends the run", entry.text))
        }
        _ if fixed => accepted("fp16.loss_scale fixes the scale"),
        "initial_scale_power" if number > LARGEST_POWER => {
            refused(format!("must be at most {LARGEST_POWER}"))
        }
        "initial_scale_power" => Honoured(format!("the loss scale starts at {initial}")),
        "loss_scale_window" | "hysteresis" if number < 1.0 => refused("must be at least 1"),
        "loss_scale_window" => Honoured(format!("the loss scale doubles after {} good steps", entry.text)),
        "hysteresis" if number == 1.0 => Honoured("the loss scale is halved at a skipped step".to_string()),
        "hysteresis" => Honoured(format!("the loss scale is halved at skipped step {}", entry.text)),
        _ if number <= 0.0 => refused("must be positive"),
        _ if number > initial => refused(format!("the loss scale starts at {initial}, which is less")),
        _ => Honoured(format!("the loss scale stays at least {}", entry.text)),
    }
}

/// The scale of a step's losses must fit fp32.
const LARGEST_POWER: f64 = 127.0;
/// 2 to the power of DeepSpeed's default, 16.
const DEFAULT_SCALE: f64 = 65_536.0;

fn is_true(entry: &Entry) -> bool {
    entry.value == Ok(Value::Bool(true))
}

/// A switch of fp16 that can only be off.
pub(super) fn off_in_fp16(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    only_in(Precision::Fp16, context, || match entry.key.as_str() {
        _ if !is_true(entry) => accepted("so it is here"),
        "fp16.auto_cast" => refused("nothing is cast by itself: the plan says what is computed in fp16"),
        "fp16.consecutive_hysteresis" => {
            refused("skipped steps are forgotten when the loss scale changes, not at every good step")
        }
        _ => refused("parameters and sums of gradients are kept in fp32"),
    })
}

/// A switch of bf16.
pub(super) fn in_bf16(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    only_in(Precision::Bf16, context, || match entry.key.as_str() {
        "bf16.immediate_grad_update" => accepted("gradients are summed as soon as they are ready"),
        "bf16.check_grad_overflow" => accepted("gradients are always checked"),
        _ if !is_true(entry) => accepted("so it is here"),
        "bf16.bf16_optimizer_states" => refused("moments are kept in fp32"),
        _ => refused("parameters and sums of gradients are kept in fp32"),
    })
}
