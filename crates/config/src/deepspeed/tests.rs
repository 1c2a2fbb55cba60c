//! What each key says, and that no text can make the reader fail.

use super::*;
use std::time::{Duration, Instant};

fn verdict(json: &str, world: usize) -> String {
    let file = DeepSpeed::parse("ds.json", json).unwrap_or_else(|error| panic!("{json}: {error}"));
    let context = Context { world, ..Context::default() };
    match file.refusal(&file.verdicts(&context)) {
        Some(error) => error.to_string(),
        None => "fine".to_string(),
    }
}

fn unreadable(json: &str) -> String {
    DeepSpeed::parse("ds.json", json).unwrap_err().to_string()
}

#[test]
fn what_asks_for_nothing_is_accepted() {
    for json in [
        "{}",
        r#"{"zero_optimization": {"stage": 0, "offload_param": {"device": "none"}, "allgather_bucket_size": 2e8}}"#,
        r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": true}}}"#,
        r#"{"pin_memory": true, "prescale_gradients": false, "pipeline": {"pipe_partitioned": false}}"#,
        r#"{"prescale_gradients": true, "gradient_predivide_factor": 2.0}"#,
        r#"{"fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"}}"#,
        r#"{"tensorboard": {"enabled": false, "output_path": "logs"}, "flops_profiler": {"enabled": false}}"#,
        r#"{"train_batch_size": null, "steps_per_print": null, "communication_data_type": null}"#,
        r#"{"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false, "torch_adam": true}}}"#,
        r#"{"optimizer": {"type": "adam", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}}"#,
        r#"{"wall_clock_breakdown": true, "gradient_clipping": 0, "zero_allow_untested_optimizer": true}"#,
        r#"{"train_micro_batch_size_per_gpu": 8, "micro_batch_per_gpu": 8}"#,
    ] {
        assert_eq!(verdict(json, 1), "fine", "{json}");
    }
}

#[test]
fn what_can_not_be_honoured_is_refused_with_the_reason() {
    for (json, expected) in [
        (r#"{"zero_optimization": {"stage": 4}}"#, "1:33: zero_optimization.stage 4: is none of 0, 1, 2, 3"),
        (
            r#"{"zero_optimization": {"offload_param": {"device": "nvme"}}}"#,
            "1:52: zero_optimization.offload_param.device \"nvme\": nothing is offloaded to NVMe here",
        ),
        (
            r#"{"bf16": {"enabled": true}}"#,
            "1:22: bf16.enabled true: the CPU computes in fp32; use --precision fp32 to override",
        ),
        (
            r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
            "1:22: fp16.enabled true: bf16.enabled is true as well, and only one of them can be (one more key is \
             refused: `vitesse config explain ds.json` lists all)",
        ),
        (
            r#"{"train_micro_batch_size_per_gpu": 8, "micro_batch_per_gpu": 16}"#,
            "1:62: micro_batch_per_gpu 16: train_micro_batch_size_per_gpu is 8, and both name the images of a micro-step",
        ),
        (
            r#"{"pipeline": {"pipe_partitioned": true}}"#,
            "1:35: pipeline.pipe_partitioned true: there are no pipeline stages here to partition",
        ),
        (r#"{"pipeline": {"stages": 2}}"#, "1:25: pipeline.stages 2: there is no pipeline parallelism here"),
        (
            r#"{"optimizer": {"type": "Lion"}}"#,
            "1:24: optimizer.type \"Lion\": is none of Adam, AdamW, Lamb, SGD",
        ),
        (
            r#"{"optimizer": {"type": "Muon"}}"#,
            "1:24: optimizer.type \"Muon\": DeepSpeed's Muon scales updates by √max(1, rows/columns) and has two learning \
             rates; --optimizer muon scales them by 0.2·√max(rows, columns), which is for AdamW's rate: give that flag to \
             use it",
        ),
        (
            r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}"#,
            "1:58: optimizer.params.adam_w_mode false: decay as a part of the gradient (L2) is not built; AdamW's, which \
             is apart from it, is",
        ),
        (
            r#"{"optimizer": {"type": "SGD", "params": {"dampening": 0.1}}}"#,
            "1:55: optimizer.params.dampening 0.1: momentum is not dampened here",
        ),
        (
            r#"{"scheduler": {"type": "StepLR"}}"#,
            "1:24: scheduler.type \"StepLR\": is none of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
        ),
        (
            r#"{"scheduler": {"type": "WarmupDecayLR"}}"#,
            "1:24: scheduler.type \"WarmupDecayLR\": needs scheduler.params.total_num_steps (or \"auto\")",
        ),
        (
            r#"{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}"#,
            "1:24: scheduler.type \"OneCycle\": it cycles momentum unless scheduler.params.cycle_momentum is false, and \
             momentum is fixed when a run is compiled",
        ),
        (
            r#"{"wandb": {"enabled": true}}"#,
            "1:11: wandb {\"enabled\": true}: vitesse doesn't have it: metrics are written to metrics.jsonl",
        ),
    ] {
        assert_eq!(verdict(json, 1), format!("ds.json:{expected}"), "{json}");
    }
}

/// Key by key, on one rank and on four.
#[test]
fn keys_about_communication_hold_where_there_is_some() {
    let judged = |json: &str, world, flag: &[(&'static str, &str)]| {
        let flags = flag.iter().map(|(name, typed)| (*name, typed.to_string())).collect();
        let file = DeepSpeed::parse("ds.json", json).unwrap();
        file.verdicts(&Context { world, flags, ..Context::default() }).remove(0)
    };
    let honoured = |text: &str| Verdict::Honoured(text.to_string());
    let accepted = |text: &str| Verdict::Accepted(text.to_string());
    for (json, expected) in [
        (
            r#"{"prescale_gradients": true}"#,
            honoured("gradients are divided by the 4 ranks before the all-reduce"),
        ),
        (
            r#"{"prescale_gradients": false}"#,
            honoured("gradients are divided by the 4 ranks after the all-reduce"),
        ),
        (
            r#"{"gradient_predivide_factor": 2.0}"#,
            honoured("gradients are divided by 2.0 before the all-reduce"),
        ),
        (r#"{"gradient_predivide_factor": 1.0}"#, accepted("divides by nothing before the all-reduce")),
        (
            r#"{"prescale_gradients": false, "gradient_predivide_factor": 2.0}"#,
            honoured("what gradient_predivide_factor leaves is divided after the all-reduce"),
        ),
        (
            r#"{"gradient_predivide_factor": 2.0, "prescale_gradients": true}"#,
            accepted("prescale_gradients divides by all ranks, in DeepSpeed too"),
        ),
        (
            r#"{"gradient_allreduce_op": "sum"}"#,
            Verdict::Refused("gradients are averaged over ranks here, not summed".to_string()),
        ),
        (r#"{"communication_data_type": "bfp16"}"#, honoured("--comm-dtype bf16")),
        (r#"{"communication_data_type": "fp16"}"#, honoured("--comm-dtype fp16")),
        (r#"{"zero_optimization": {"reduce_bucket_size": 5e8}}"#, honoured("--bucket-size 5e8")),
        (
            r#"{"zero_optimization": {"reduce_bucket_size": "auto"}}"#,
            honoured("as --bucket-size, or its default"),
        ),
        (r#"{"zero_optimization": {"overlap_comm": false, "stage": 0}}"#, honoured("--no-overlap")),
        (
            r#"{"zero_optimization": {"overlap_comm": true}}"#,
            honoured("the communication of gradients overlaps with the backward pass"),
        ),
    ] {
        assert_eq!(judged(json, 4, &[]), expected, "{json}");
        assert_eq!(judged(json, 1, &[]), accepted("one rank communicates nothing"), "{json}");
    }
    let mean = honoured("gradients are averaged over ranks");
    assert_eq!(judged(r#"{"gradient_allreduce_op": "mean"}"#, 4, &[]), mean);
    for (json, flag, typed) in [
        (r#"{"communication_data_type": "fp16"}"#, "comm-dtype", "--comm-dtype fp32"),
        (r#"{"zero_optimization": {"reduce_bucket_size": 7}}"#, "bucket-size", "--bucket-size 9"),
        (r#"{"zero_optimization": {"overlap_comm": true}}"#, "no-overlap", "--no-overlap"),
    ] {
        assert_eq!(judged(json, 4, &[(flag, typed)]), Verdict::Overridden(typed.to_string()), "{json}");
    }
    let zero = r#"{"gradient_predivide_factor": 0}"#;
    assert_eq!(verdict(zero, 4), "ds.json:1:31: gradient_predivide_factor: must be positive, found 0");
    let zero = r#"{"zero_optimization": {"reduce_bucket_size": 0}}"#;
    assert!(verdict(zero, 4).ends_with("zero_optimization.reduce_bucket_size: must be at least 1, found 0"));
}

/// Key by key, on a GPU.
#[test]
fn the_keys_of_precision_hold_on_a_gpu() {
    use crate::{Device, Raw};
    let judged = |json: &str| {
        let file = DeepSpeed::parse("ds.json", json).unwrap();
        let raw = Raw { device: Some(Device::Cuda), deepspeed: Some(file.clone()), ..Raw::default() };
        let context = raw.context(1);
        (file.verdicts(&context).pop().unwrap(), context.precision.to_string())
    };
    let honoured = |text: &str| Verdict::Honoured(text.to_string());
    let accepted = |text: &str| Verdict::Accepted(text.to_string());
    let refused = |text: &str| Verdict::Refused(text.to_string());
    for (json, expected, precision) in [
        (r#"{"fp16": {"enabled": true}}"#, honoured("--precision fp16"), "fp16"),
        (r#"{"bf16": {"enabled": true}}"#, honoured("--precision bf16"), "bf16"),
        (r#"{"bfloat16": {"enabled": true}}"#, honoured("--precision bf16"), "bf16"),
        (r#"{"fp16": {"enabled": false}}"#, honoured("--precision fp32"), "fp32"),
        (r#"{"fp16": {"enabled": false}, "bf16": {"enabled": true}}"#, honoured("--precision bf16"), "bf16"),
        (r#"{"bf16": {"enabled": true}, "fp16": {"enabled": false}}"#, accepted("computes in bf16"), "bf16"),
        (
            r#"{"fp16": {"enabled": false}, "bf16": {"enabled": "auto"}}"#,
            accepted("as --precision, or its default: bf16"),
            "bf16",
        ),
        (r#"{"pin_memory": true}"#, accepted("copies to a GPU always go through pinned memory"), "bf16"),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}"#,
            refused("nothing is offloaded from a GPU here"),
            "bf16",
        ),
        (
            r#"{"zero_optimization": {"offload_param": {"device": "none"}}}"#,
            accepted("nothing is offloaded"),
            "bf16",
        ),
    ] {
        assert_eq!(judged(json), (expected, precision.to_string()), "{json}");
    }
    let both = judged(r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#).0;
    assert_eq!(both, refused("fp16.enabled is true as well, and only one of them can be"));

    let fp16 = |key: &str| judged(&format!("{{\"fp16\": {{\"enabled\": true, {key}}}}}")).0;
    for (key, expected) in [
        (r#""loss_scale": 0"#, honoured("a dynamic loss scale")),
        (r#""loss_scale": 128"#, honoured("a fixed loss scale of 128; a step that overflows ends the run")),
        (
            r#""loss_scale": -1"#,
            refused("must be 0, for a dynamic scale, or a positive number that fp32 holds"),
        ),
        (r#""loss_scale": 8, "hysteresis": 3"#, accepted("fp16.loss_scale fixes the scale")),
        (r#""initial_scale_power": 10"#, honoured("the loss scale starts at 1024")),
        (r#""initial_scale_power": "auto""#, honoured("the default")),
        (r#""initial_scale_power": 200"#, refused("must be at most 127")),
        (r#""loss_scale_window": 500"#, honoured("the loss scale doubles after 500 good steps")),
        (r#""loss_scale_window": 0"#, refused("must be at least 1")),
        (r#""hysteresis": 1"#, honoured("the loss scale is halved at a skipped step")),
        (r#""hysteresis": 3"#, honoured("the loss scale is halved at skipped step 3")),
        (r#""hysteresis": 0"#, refused("must be at least 1")),
        (r#""min_loss_scale": 2"#, honoured("the loss scale stays at least 2")),
        (r#""min_loss_scale": 0"#, refused("must be positive")),
        (
            r#""initial_scale_power": 1, "min_loss_scale": 4"#,
            refused("the loss scale starts at 2, which is less"),
        ),
        (
            r#""auto_cast": true"#,
            refused("nothing is cast by itself: the plan says what is computed in fp16"),
        ),
        (r#""auto_cast": false"#, accepted("so it is here")),
        (
            r#""consecutive_hysteresis": true"#,
            refused("skipped steps are forgotten when the loss scale changes, not at every good step"),
        ),
        (
            r#""fp16_master_weights_and_grads": true"#,
            refused("parameters and sums of gradients are kept in fp32"),
        ),
    ] {
        assert_eq!(fp16(key), expected, "{key}");
    }
    let bf16 = |key: &str| judged(&format!("{{\"bf16\": {{\"enabled\": true, {key}}}}}")).0;
    assert_eq!(bf16(r#""check_grad_overflow": false"#), accepted("gradients are always checked"));
    assert_eq!(bf16(r#""bf16_optimizer_states": true"#), refused("moments are kept in fp32"));
    let elsewhere = judged(r#"{"fp16": {"hysteresis": 0, "auto_cast": true}}"#).0;
    assert_eq!(elsewhere, accepted("only with fp16, and this run computes in bf16"));
}

#[test]
fn unknown_keys_are_refused_by_their_full_name() {
    for (json, expected) in [
        (r#"{"train_batchsize": 1}"#, "1:21: train_batchsize: unknown key; did you mean train_batch_size?"),
        (
            r#"{"zero_optimization": {"stge": 1}}"#,
            "1:32: zero_optimization.stge: unknown key; did you mean zero_optimization.stage?",
        ),
        (r#"{"stage": 1}"#, "1:11: stage: unknown key; did you mean zero_optimization.stage?"),
        (r#"{"lr": 1}"#, "1:8: lr: unknown key; did you mean optimizer.params.lr?"),
        (
            r#"{"zero_optimisation": {"stage": 1}}"#,
            "1:23: zero_optimisation: unknown key; did you mean zero_optimization?",
        ),
        (r#"{"model": "vit"}"#, "1:11: model: unknown key"),
        (r#"{"fp16.enabled": true}"#, "1:18: fp16.enabled: unknown key; a section is an object of its own"),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"weigth_decay": 1}}}"#,
            "1:60: optimizer.params.weigth_decay: unknown key; did you mean optimizer.params.weight_decay?",
        ),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"momentum": 1}}}"#,
            "1:56: optimizer.params.momentum: AdamW has no parameter momentum",
        ),
        (
            r#"{"optimizer": {"params": {"lr": 1}}}"#,
            "1:33: optimizer.params.lr: there is no optimizer.type that could have it",
        ),
    ] {
        assert_eq!(verdict(json, 1), format!("ds.json:{expected}"), "{json}");
    }
}

#[test]
fn wrong_types_are_named() {
    for (json, expected) in [
        (
            r#"{"train_batch_size": "many"}"#,
            "1:22: train_batch_size: expected a whole number or \"auto\", found \"many\"",
        ),
        (
            r#"{"train_batch_size": 1.5}"#,
            "1:22: train_batch_size: expected a whole number or \"auto\", found 1.5",
        ),
        (r#"{"train_batch_size": 0}"#, "1:22: train_batch_size: must be at least 1, found 0"),
        (
            r#"{"train_batch_size": -2}"#,
            "1:22: train_batch_size: expected a whole number or \"auto\", found -2",
        ),
        (
            r#"{"train_batch_size": {"a": 1}}"#,
            "1:22: train_batch_size: expected a whole number or \"auto\", found {\"a\": 1}",
        ),
        (r#"{"fp16": true}"#, "1:10: fp16: expected an object, found true"),
        (
            r#"{"fp16": {"enabled": "yes"}}"#,
            "1:22: fp16.enabled: expected true or false or \"auto\", found \"yes\"",
        ),
        (r#"{"pin_memory": "auto"}"#, "1:16: pin_memory: expected true or false, found \"auto\""),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"eps": 0}}}"#,
            "1:51: optimizer.params.eps: must be positive, found 0",
        ),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"eps": 1e-50}}}"#,
            "1:51: optimizer.params.eps: is less than fp32 holds, found 1e-50",
        ),
        (r#"{"gradient_clipping": -1}"#, "1:23: gradient_clipping: must be 0 or more, found -1"),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}"#,
            "1:53: optimizer.params.betas: expected two numbers from 0 to below 1 or \"auto\", found [0.9]",
        ),
        (
            r#"{"zero_optimization": {"offload_param": {"device": "gpu"}}}"#,
            "1:52: zero_optimization.offload_param.device: expected one of none, cpu, nvme, found \"gpu\"",
        ),
    ] {
        assert_eq!(verdict(json, 1), format!("ds.json:{expected}"), "{json}");
    }
}

#[test]
fn unreadable_files_are_refused_by_line_and_column() {
    assert_eq!(unreadable("{\n  \"fp16\": {\n}"), "ds.json:3:1: EOF while parsing an object");
    assert_eq!(unreadable("{\"a\": 1,\n \"a\": 2}"), "ds.json:2:7: \"a\" occurs twice");
    assert_eq!(unreadable("[1]"), "ds.json:1:1: expected an object, found [1]");
    let missing = DeepSpeed::read(Path::new("/nowhere/ds.json")).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere/ds.json: "), "{missing}");
    let folder = testing::Folder::new("ds");
    let path = folder.join("ds.json");
    for (bytes, why) in [(vec![b' '; 70_000], "more than 64 KiB"), (vec![b'{', 0xff], "byte 2 is not UTF-8")]
    {
        std::fs::write(&path, bytes).unwrap();
        let error = DeepSpeed::read(&path).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

const FILES: [&str; 3] = [
    include_str!("../../tests/fixtures/deepspeed/study-a-intra.json"),
    include_str!("../../tests/fixtures/deepspeed/study-a-vector.json"),
    include_str!("../../tests/fixtures/deepspeed/zero2-offload.json"),
];

/// What a mutation puts in.
const SCRAPS: [&str; 24] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\ud800",
    "null",
    "true",
    "-",
    "1e999",
    "1e308",
    "9007199254740993",
    "0",
    "\"auto\"",
    "é",
    "\u{0}",
    "\n",
    "\"type\": \"OneCycle\",",
    "\"stage\": 3,",
    "\"params\": {}",
    "\"lr\": -0.0,",
];

/// Mutations of good files: every one is read or refused, judged, and resolved or refused, but nothing panics.
/// Deterministic; a second by default, longer with VITESSE_FUZZ_SECONDS.
#[test]
fn no_text_makes_the_reader_panic() {
    let seconds = std::env::var("VITESSE_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    let (limit, rounds) = seconds.map_or((Duration::MAX, 20_000), |s| (Duration::from_secs(s), u64::MAX));
    let (start, mut random) = (Instant::now(), Random(1));
    for _ in (0..rounds).take_while(|_| start.elapsed() < limit) {
        let mut text = FILES[random.below(FILES.len())].to_string();
        for _ in 0..1 + random.below(4) {
            mutate(&mut text, &mut random);
        }
        check(&text, &mut random);
    }
}

fn check(text: &str, random: &mut Random) {
    use crate::{Device, Facts, Precision, Raw};
    let Ok(file) = DeepSpeed::parse("ds.json", text) else { return };
    let flag = |on: usize| (on == 0).then_some(Precision::Fp32);
    let device = (random.below(2) == 0).then_some(Device::Cuda);
    let raw = Raw { deepspeed: Some(file), precision: flag(random.below(2)), device, ..Raw::default() };
    let facts = Facts { train_images: 100, test_images: 10, classes: 10, channels: 3 };
    let world = 1 + random.below(3);
    let explained = raw.explain(&facts, world);
    match raw.resolve(&facts, world) {
        Ok(run) => {
            assert_eq!(explained.refusal, None, "{text}");
            (0..5).for_each(|step| assert!(run.schedule.at(step).is_finite(), "{text}"));
        }
        Err(error) => assert_eq!(explained.refusal, Some(error.to_string()), "{text}"),
    }
}

/// Cuts, doubles, swaps or replaces a part of the text, always between characters.
fn mutate(text: &mut String, random: &mut Random) {
    let (a, b) = (random.border(text), random.border(text));
    let (from, to) = (a.min(b), a.max(b).min(random.border_near(text, a.min(b))));
    let (from, to) = (from.min(to), from.max(to));
    match random.below(4) {
        0 => text.replace_range(from..to, ""),
        1 => text.insert_str(from, SCRAPS[random.below(SCRAPS.len())]),
        2 => text.replace_range(from..to, SCRAPS[random.below(SCRAPS.len())]),
        _ => {
            let part = text[from..to].to_string();
            let at = random.border(text);
            text.insert_str(at, &part);
        }
    }
}

/// A small generator: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n.max(1)
    }

    /// A place between two characters.
    fn border(&mut self, text: &str) -> usize {
        let at = self.below(text.len() + 1);
        (0..=at).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0)
    }

    /// One not far after `from`.
    fn border_near(&mut self, text: &str, from: usize) -> usize {
        let at = (from + self.below(30)).min(text.len());
        (0..=at).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0)
    }
}
