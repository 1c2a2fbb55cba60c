//! Verdicts on the keys about communication of gradients. On one rank none of them changes anything.

use super::judge::{Context, Verdict, accepted, honoured, refused};
use super::{DeepSpeed, Entry, Setting, Value};
use Verdict::Honoured;
use text::many;

/// `judged`, if there is more than one rank.
fn among_ranks(context: &Context, judged: impl FnOnce() -> Verdict) -> Verdict {
    if context.world > 1 { judged() } else { accepted("one rank communicates nothing") }
}

fn prescales(file: &DeepSpeed) -> bool {
    file.boolean("prescale_gradients") == Some(Setting::Given(true))
}

pub(super) fn prescale(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let before = matches!(file.number("gradient_predivide_factor"), Some(Setting::Given(x)) if x != 1.0);
    among_ranks(context, || match entry.value {
        Ok(Value::Bool(true)) => Honoured(format!(
            "gradients are divided by the {} before the all-reduce",
            many(context.world, "rank")
        )),
        _ if before => {
            Honoured("what gradient_predivide_factor leaves is divided after the all-reduce".to_string())
        }
        _ => Honoured(format!(
            "gradients are divided by the {} after the all-reduce",
            many(context.world, "rank")
        )),
    })
}

pub(super) fn predivide(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    among_ranks(context, || match &entry.value {
        Ok(_) if prescales(file) => accepted("prescale_gradients divides by all ranks, in DeepSpeed too"),
        Ok(Value::Number(1.0)) => accepted("divides by nothing before the all-reduce"),
        _ => Honoured(format!("gradients are divided by {} before the all-reduce", entry.text)),
    })
}

pub(super) fn reduction(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    match &entry.value {
        Ok(Value::Text(name)) if name == "mean" => Honoured("gradients are averaged over ranks".to_string()),
        _ => among_ranks(context, || refused("gradients are averaged over ranks here, not summed")),
    }
}

pub(super) fn comm_dtype(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    among_ranks(context, || match (&entry.value, context.flags.get("comm-dtype")) {
        (_, Some(typed)) => Verdict::Overridden(typed.clone()),
        (Ok(Value::Text(name)), None) if name == "bfp16" => Honoured("--comm-dtype bf16".to_string()),
        (Ok(Value::Text(name)), None) => Honoured(format!("--comm-dtype {name}")),
        _ => refused("must be a name"),
    })
}

pub(super) fn bucket(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    among_ranks(context, || match &entry.value {
        Ok(value) => honoured(entry, value, Some("bucket-size"), context),
        Err(why) => refused(why.clone()),
    })
}

pub(super) fn overlap(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    among_ranks(context, || match (&entry.value, context.flags.get("no-overlap")) {
        (_, Some(typed)) => Verdict::Overridden(typed.clone()),
        (Ok(Value::Bool(false)), None) => Honoured("--no-overlap".to_string()),
        _ => Honoured("the communication of gradients overlaps with the backward pass".to_string()),
    })
}
