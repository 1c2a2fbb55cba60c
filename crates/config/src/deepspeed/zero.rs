//! Verdicts on the block `zero_optimization`, and what of it reaches the plans.

use super::judge::{Context, Verdict, accepted, refused};
use super::{DeepSpeed, Entry, Setting, Value};
use Verdict::{Honoured, Overridden};
use graph::{Gathering, Zero};
use text::many;

const STAGE: &str = "zero_optimization.stage";

pub(super) fn stage(_: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    match (&entry.value, context.flags.get("zero")) {
        (Ok(Value::Number(stage)), _) if *stage > 3.0 => refused("is none of 0, 1, 2, 3"),
        (_, Some(typed)) => Overridden(typed.clone()),
        (Ok(Value::Number(0.0)), None) => accepted("nothing is sharded"),
        _ if context.world == 1 => accepted("one rank shares with nobody and holds all"),
        _ => Honoured(format!("--zero {}", entry.text)),
    }
}

/// The stage of the run: that of `--zero`, or else of the file. One rank divides nothing.
fn stage_of(file: &DeepSpeed, context: &Context) -> u64 {
    let typed = context.flags.get("zero").and_then(|flag| flag.strip_prefix("--zero ")?.parse().ok());
    let of_file = match file.whole(STAGE) {
        Some(Setting::Given(stage)) => stage,
        _ => 0,
    };
    if context.world > 1 { typed.unwrap_or(of_file) } else { 0 }
}

/// What a key of the block asks for.
enum Asks {
    /// Another way to the same numbers.
    Nothing(&'static str),
    /// Something that is not here, unless it is switched off: false, or this number.
    Absent(f64, &'static str),
    /// A number of elements that gathers keep to.
    Elements(&'static str),
    /// The number of ranks that divide parameters; -1 for all.
    Group,
}

use Asks::{Absent, Elements, Group, Nothing};

/// The keys that tune a stage: their names in the block, the first stage that they are for, and what they ask for.
const DETAILS: &[(&str, u64, Asks)] = &[
    (
        "allgather_partitions",
        1,
        Nothing("parameters are gathered by an all-gather of each bucket; broadcasts would give the same"),
    ),
    (
        "allgather_bucket_size",
        1,
        Nothing("parameters are gathered in the buckets of the gradients: --bucket-size"),
    ),
    ("reduce_scatter", 1, Nothing("gradients are reduce-scattered; an all-reduce would give the same sums")),
    ("contiguous_gradients", 1, Nothing("gradients are made where they are sent from, without a copy")),
    ("use_multi_rank_bucket_allreduce", 1, Nothing("one reduce-scatter serves all ranks")),
    ("round_robin_gradients", 1, Nothing("is for offloading, which is not needed here")),
    ("ignore_unused_parameters", 1, Nothing("every parameter of a model here is used")),
    ("load_from_fp32_weights", 1, Nothing("parameters are kept, saved and loaded in fp32")),
    ("elastic_checkpoint", 1, Nothing("a checkpoint is for any stage and any number of ranks")),
    ("legacy_stage1", 1, Nothing("there is one stage 1 here")),
    ("sub_group_size", 1, Nothing("optimizers work in place, bucket by bucket")),
    ("compute_grad_norm", 1, Nothing("the norm is computed in any case: it says whether a step is applied")),
    ("parameter_alignment", 1, Nothing("buffers are aligned for every device")),
    ("zero_quantized_gradients", 1, Absent(0.0, QUANTISED)),
    ("zero_quantized_weights", 3, Absent(0.0, QUANTISED)),
    ("zero_quantized_nontrainable_weights", 3, Absent(0.0, QUANTISED)),
    ("zero_hpz_partition_size", 3, Absent(1.0, "there is no second division within a host here")),
    ("mics_shard_size", 3, Group),
    ("mics_hierarchical_params_gather", 3, Nothing("parameters are gathered within a group of ranks alone")),
    ("memory_efficient_linear", 3, Nothing("no gathered weight is kept for the backward pass")),
    (
        "pipeline_loading_checkpoint",
        3,
        Nothing("rank 0 reads weights, tensor by tensor, and sends each rank its part"),
    ),
    ("override_module_apply", 3, Nothing("there are no modules here to patch: plans are rewritten")),
    ("log_trace_cache_warnings", 3, Nothing("gathers follow the plan: there is no trace to go stale")),
    ("enable_sanity_checks", 3, Nothing("every plan is checked before it runs")),
    ("module_granularity_threshold", 3, Nothing("parameters are gathered by bucket, not by module")),
    (
        "use_all_reduce_for_fetch_params",
        3,
        Nothing("a gather lands where layers read: nothing is concatenated or sliced"),
    ),
    ("allgather_sequential", 3, Nothing("one all-gather serves a bucket")),
    ("gather_16bit_weights_on_model_save", 3, Nothing("saved weights are whole, in fp32")),
    ("gather_fp16_weights_on_model_save", 3, Nothing("saved weights are whole, in fp32")),
    ("prefetch_bucket_size", 3, Elements("elements are gathered ahead of their use at most")),
    ("max_live_parameters", 3, Elements("elements are gathered at a time at most")),
    (
        "max_reuse_distance",
        3,
        Elements("elements of others at most come between two uses of what stays gathered"),
    ),
    ("param_persistence_threshold", 3, Elements("elements, or fewer, make a parameter that stays whole")),
    ("model_persistence_threshold", 3, Elements("elements stay whole at most")),
];

const QUANTISED: &str = "nothing is quantised for its way here; --comm-dtype bf16 halves what gradients take";

/// The name of a key within the block; those of stage 3 have the same meaning with and without `stage3_`.
fn name(key: &str) -> &str {
    let name = key.strip_prefix("zero_optimization.").unwrap_or(key);
    name.strip_prefix("stage3_").unwrap_or(name)
}

/// Keys that tune ZeRO change nothing without it.
pub(super) fn detail(file: &DeepSpeed, entry: &Entry, context: &Context) -> Verdict {
    let stage = stage_of(file, context);
    let Some((_, least, asks)) = DETAILS.iter().find(|(known, ..)| *known == name(&entry.key)) else {
        return refused("unknown key");
    };
    let off = match (asks, &entry.value) {
        (Absent(off, _), Ok(Value::Number(number))) => number == off,
        (Absent(..), Ok(Value::Bool(on))) => !on,
        (Group, Ok(Value::Number(number))) => *number == -1.0,
        (_, Ok(Value::Auto)) => true,
        _ => false,
    };
    match asks {
        _ if context.world == 1 => accepted("tunes ZeRO, and one rank shares with nobody"),
        _ if stage == 0 => accepted("tunes ZeRO, which is off"),
        _ if stage < *least => accepted("is for stage 3"),
        Nothing(why) => accepted(why),
        Absent(..) | Group if off => accepted("switched off"),
        Absent(_, why) => refused(*why),
        Group => match (&entry.value, context.flags.get("shard-group")) {
            (Ok(Value::Number(ranks)), _) if *ranks < 1.0 || ranks.fract() != 0.0 => {
                refused("is no number of ranks")
            }
            (_, Some(typed)) => Overridden(typed.clone()),
            (Ok(Value::Number(ranks)), _) if *ranks < 2.0 => {
                refused("a group that divides states has at least 2 ranks")
            }
            (Ok(Value::Number(ranks)), _) if context.world as f64 % ranks != 0.0 => {
                let all = many(context.world, "rank");
                refused(format!("{all} can't be divided into groups of {}", entry.text))
            }
            _ => Honoured(format!("--shard-group {}", entry.text)),
        },
        Elements(_) if off => Honoured("the default".to_string()),
        Elements(what) => Honoured(format!("{} {what}", entry.text)),
    }
}

/// How a file wants parameters to be gathered.
pub(crate) fn gathering(file: Option<&DeepSpeed>, stage: Zero, world: usize) -> Gathering {
    let Some(file) = file.filter(|_| stage == Zero::Stage3 && world > 1) else {
        return Gathering::default();
    };
    let elements = |name: &str| {
        let found =
            ["stage3_", ""].iter().find_map(|of| file.whole(&format!("zero_optimization.{of}{name}")));
        match found? {
            Setting::Given(elements) => usize::try_from(elements).ok(),
            Setting::Auto => None,
        }
    };
    Gathering {
        whole: elements("param_persistence_threshold"),
        whole_in_all: elements("model_persistence_threshold"),
        ahead: elements("prefetch_bucket_size"),
        live: elements("max_live_parameters"),
        reuse: elements("max_reuse_distance"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::{self, Kind};
    use super::*;
    use crate::Raw;

    /// The block of ZeRO, key by key, by the stage of the run.
    #[test]
    fn keys_about_zero_hold_for_their_stages() {
        let judged = |keys: &str, stage: u64, world: usize, flag: Option<&str>| {
            let text = format!("{{\"zero_optimization\": {{{keys}, \"stage\": {stage}}}}}");
            let file = DeepSpeed::parse("ds.json", &text).unwrap();
            let flags = flag.into_iter().map(|typed| ("zero", typed.to_string())).collect();
            file.verdicts(&Context { world, flags, ..Context::default() })
        };
        let first = |keys: &str, stage, world, flag| judged(keys, stage, world, flag).remove(0);
        let stage = |stage, world, flag| judged("\"reduce_scatter\": true", stage, world, flag).remove(1);
        let honoured = |text: &str| Verdict::Honoured(text.to_string());
        let accepted = |text: &str| Verdict::Accepted(text.to_string());
        let refused = |text: &str| Verdict::Refused(text.to_string());
        assert_eq!(stage(0, 4, None), accepted("nothing is sharded"));
        assert_eq!(stage(3, 4, None), honoured("--zero 3"));
        assert_eq!(stage(3, 1, None), accepted("one rank shares with nobody and holds all"));
        assert_eq!(stage(4, 4, None), refused("is none of 0, 1, 2, 3"));
        assert_eq!(stage(3, 4, Some("--zero 1")), Verdict::Overridden("--zero 1".to_string()));

        let prefetch = "\"stage3_prefetch_bucket_size\": 5e7";
        assert_eq!(
            first(prefetch, 3, 4, None),
            honoured("5e7 elements are gathered ahead of their use at most")
        );
        assert_eq!(first(prefetch, 2, 4, None), accepted("is for stage 3"));
        assert_eq!(first(prefetch, 2, 4, Some("--zero 3")), first(prefetch, 3, 4, None));
        assert_eq!(first(prefetch, 3, 4, Some("--zero 0")), accepted("tunes ZeRO, which is off"));
        assert_eq!(first(prefetch, 3, 1, None), accepted("tunes ZeRO, and one rank shares with nobody"));
        assert_eq!(first("\"stage3_max_live_parameters\": \"auto\"", 3, 4, None), honoured("the default"));
        for (name, off, on) in [
            ("zero_quantized_gradients", "false", "true"),
            ("zero_quantized_weights", "false", "true"),
            ("zero_hpz_partition_size", "1", "8"),
        ] {
            let with = |value: &str| first(&format!("\"{name}\": {value}"), 3, 16, None);
            assert_eq!(with(off), accepted("switched off"), "{name}");
            assert!(matches!(with(on), Verdict::Refused(_)), "{name}: {:?}", with(on));
        }
        let mics = |value: &str, stage| first(&format!("\"mics_shard_size\": {value}"), stage, 16, None);
        assert_eq!(mics("8", 3), honoured("--shard-group 8"));
        assert_eq!(mics("-1", 3), accepted("switched off"));
        assert_eq!(mics("2.5", 3), refused("is no number of ranks"));
        assert_eq!(mics("8", 2), accepted("is for stage 3"));
        // Each key of the block is known to the table of what keys ask for.
        for key in keys::KEYS.iter().filter(|key| key.path.starts_with("zero_optimization.")) {
            let name = key.path.strip_prefix("zero_optimization.").unwrap();
            if matches!(name, "stage" | "overlap_comm" | "reduce_bucket_size") || name.contains("offload") {
                continue;
            }
            let value = if key.kind == Kind::Bool { "true" } else { "1" };
            let verdict = first(&format!("\"{name}\": {value}"), 3, 4, None);
            assert_ne!(verdict, refused("unknown key"), "{name}");
        }
    }

    /// What gathers keep to reaches the run, at stage 3 alone.
    #[test]
    fn numbers_about_gathers_reach_the_run() {
        let text = r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9,
            "max_reuse_distance": 1000, "stage3_param_persistence_threshold": "auto", "model_persistence_threshold": 77}}"#;
        let raw = Raw { deepspeed: Some(DeepSpeed::parse("ds.json", text).unwrap()), ..Raw::default() };
        let of = |raw: &Raw, world| raw.resolve_without_data(world).unwrap().gathering;
        let expected = Gathering {
            whole: None,
            whole_in_all: Some(77),
            ahead: Some(50_000_000),
            live: Some(1_000_000_000),
            reuse: Some(1000),
        };
        assert_eq!(of(&raw, 2), expected);
        assert_eq!(of(&raw, 1), Gathering::default());
        assert_eq!(of(&Raw { zero: Some(Zero::Stage2), ..raw.clone() }, 2), Gathering::default());
        let (run, plain) =
            (raw.resolve_without_data(2).unwrap(), Raw { zero: Some(Zero::Stage3), ..Raw::default() });
        let other = plain.resolve_without_data(2).unwrap();
        let among = run.differences_among_ranks(&other);
        assert!(among.contains(&"gathering.ahead is 50000000, not nothing".to_string()), "{among:?}");
        assert!(run.differences(&other).iter().all(|line| !line.contains("gathering")), "it may change");
    }
}
