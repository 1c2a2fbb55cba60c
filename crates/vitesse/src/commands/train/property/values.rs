//! Values of every flag of `train`: some that a run may have, at their limits too, and some that none may.

use config::settings;
use config::settings::value::Form;

/// A flag, values that some run accepts (none for a switch: it is typed alone), and values that every run refuses.
#[derive(Clone, Copy)]
pub struct Values {
    pub flag: &'static str,
    pub good: &'static [&'static str],
    pub wrong: &'static [&'static str],
}

const fn of(flag: &'static str, good: &'static [&'static str], wrong: &'static [&'static str]) -> Values {
    Values { flag, good, wrong }
}

/// Values of every flag: those of this file, and for a setting that it has none of, what its declaration says.
pub fn of_flags() -> Vec<Values> {
    let known = |name: &str| {
        FLAGS.iter().any(|values| values.flag == name) || ELSEWHERE.iter().any(|(flag, _)| *flag == name)
    };
    let declared = settings::all().iter().filter(|setting| !known(setting.name));
    let declared = declared.map(|setting| Values {
        flag: setting.name,
        good: match (setting.form, setting.words(settings::TRAIN), setting.default()) {
            (Form::Switch, ..) => &[],
            (_, [], default) if default.is_empty() => &["1000000"],
            (_, [], default) => Vec::leak(vec![&*String::leak(default)]),
            (_, words, _) => words,
        },
        wrong: if setting.form == Form::Switch { &[] } else { NO_WORDS },
    });
    FLAGS.iter().copied().chain(declared).collect()
}

/// Flags that are left to other tests, and why.
pub const ELSEWHERE: &[(&str, &str)] = &[
    ("help", "ends before anything is resolved"),
    ("version", "ends before anything is resolved"),
    ("max-restarts", "starts a process: tests/restarts.rs"),
    ("min-ranks", "is for hosts that are lost: tests/hosts.rs"),
    ("resume", "needs an earlier run: tests/resume.rs"),
    ("force", "needs a run that another process trains"),
];

const RATES: &[&str] = &["0", "0.1", "0.99"];
const NO_RATES: &[&str] = &["1", "-0.1", "nan", "inf"];
const SHARES: &[&str] = &["0", "0.5", "1"];
const NO_SHARES: &[&str] = &["-0.01", "1.01", "nan"];
const COUNTS: &[&str] = &["1", "2", "1000000", "18446744073709551615"];
const NO_COUNTS: &[&str] = &["0", "-1", "1.5", "x", "18446744073709551616"];
const NO_NUMBERS: &[&str] = &["-1", "nan", "inf", "1e39", "x"];
const NO_WORDS: &[&str] = &["nonsense", ""];

/// `{IN}` is a folder with files to read, `{OUT}` one to write to.
pub const FLAGS: &[Values] = &[
    // ---- model
    of("task", &["classify", "segment"], NO_WORDS),
    of(
        "model",
        &["vit-nano/4", "vit-nano/8", "vit-nano/8+linear", "swinv2-nano/w2", "swinv2-nano/w4+upernet"],
        &[
            "resnet50",
            "vit-nano/0",
            "vit-nano/5",
            "swinv2-nano/w0",
            "vit-nano/8+upernet",
            "vit-nano/99999999999999999999",
        ],
    ),
    of(
        "image-size",
        &["8", "16", "32", "48", "16384"],
        &["0", "1", "7", "16385", "20000", "4611686018427387904"],
    ),
    of("channels", &["1", "2", "3", "4"], &["0", "257", "-3"]),
    of("classes", &["2", "3", "11", "120"], &["0", "1", "121", "300"]),
    of("pool", &["class-token", "mean"], NO_WORDS),
    of("norm-eps", &["1e-6", "1e-5", "1e-12"], &["0", "1e-50", "-1e-6", "inf"]),
    of("dropout", RATES, NO_RATES),
    of("attention-dropout", RATES, NO_RATES),
    of("drop-path", RATES, NO_RATES),
    // ---- data
    of(
        "data",
        &["synthetic", "synthetic-masks"],
        &["mnist", "cifar10", "folder:{IN}/nowhere", "ade20k:{IN}/nowhere", "synthetic:x"],
    ),
    of("train-samples", &["2", "7", "8", "1000000000000"], &["0", "-1"]),
    of("test-samples", &["1", "3", "5"], &["0", "-1"]),
    of("data-fraction", &["1", "0.5", "1e-9"], &["0", "1.1", "-1", "nan"]),
    of("workers", &["1", "3"], &["0", "4097", "1000000000"]),
    of("cache", &["auto", "off", "2GB", "0"], &["-1", "much"]),
    of("skip-bad-images", &[], &[]),
    of("mean", &["0.5", "0,0,0", "0.1,0.2,0.3", "-1000"], &["nan", "1e30", "0.1,0.2", "x"]),
    of("std", &["0.5", "0.1,0.2,0.3", "1000", "0.0001"], &["0", "-1", "nan", "1e-30", "1e30"]),
    of("interpolation", &["bilinear", "bicubic"], NO_WORDS),
    of("eval-resize", &["8", "16", "33", "40"], &["0", "3", "16385", "20000"]),
    of("eval-mode", &["whole", "slide"], NO_WORDS),
    of("eval-stride", &["1", "8", "16"], &["0", "20000"]),
    // ---- augmentation
    of("augment", &["none", "standard", "strong"], NO_WORDS),
    of("crop", &["none", "pad", "resized"], NO_WORDS),
    of("flip", SHARES, NO_SHARES),
    of("rand-augment", &["0,0", "2,9", "8,30"], &["9,9", "2,31", "0,31", "-1,3", "2"]),
    of("erase", SHARES, NO_SHARES),
    of("mixup", &["0", "0.001", "0.8", "1000"], &["0.0001", "1000.1", "-0.1", "nan"]),
    of("cutmix", &["0", "0.001", "1", "1000"], &["0.0001", "1000.1", "-0.1", "nan"]),
    of(
        "class-weights",
        &["balanced", "1,2,3,4,5", "1,1,1,1,1,1,1,1,1,0.5"],
        &["", "x", "-1", "nan,1", "1,1", "nothing=2"],
    ),
    of("label-smoothing", RATES, NO_RATES),
    // ---- optimizer
    of("global-batch", &["2", "4", "8"], &["0", "-1"]),
    of("batch-size", &["1", "2", "3", "4"], &["0", "-1", "9223372036854775807"]),
    of("accumulate", &["1", "2", "3"], &["0", "-1"]),
    of("optimizer", &["adamw", "sgd", "lamb", "muon"], NO_WORDS),
    of("lr", &["1e-3", "1e-30", "0.1"], &["0", "1e-50", "-1", "nan", "inf", "1e39"]),
    of("weight-decay", &["0", "0.1"], NO_NUMBERS),
    of("clip", &["0", "1e-6", "1", "1e38"], &["1e-50", "-1", "nan", "inf", "1e39", "x"]),
    of("schedule", &["cosine", "linear", "step", "poly", "constant"], NO_WORDS),
    of("betas", &["0.9,0.98", "0,0"], &["0.9", "1,0.9", "0.9,-0.1", "nan,0", "x"]),
    of("momentum", RATES, NO_RATES),
    of("eps", &["1e-30", "1e-6", "1"], &["0", "1e-50", "-1", "nan", "inf", "1e39", "x"]),
    of("freeze", &["head", "blocks.*", "*"], &["nothing"]),
    of("warmup-steps", &["0", "1", "0.5ep", "2ep", "18446744073709551615"], &["-1", "x", "-1ep"]),
    of("min-lr", &["0", "1e-4"], NO_NUMBERS),
    of("step-every", &["1", "30ep", "0.1ep"], &["0", "-1", "x", "0ep"]),
    of("milestones", &["1", "1,30ep", "2ep"], &["0", "x", "-1ep"]),
    of("gamma", &["0.1", "1", "2"], &["0", "-1", "nan", "1e39"]),
    of("power", &["0.9", "1", "3"], &["0", "-1", "nan", "1e39"]),
    of(
        "lr-scale",
        &["head=10", "*=0.1", "*.bias=0", "*=0"],
        &["nothing=1", "head", "head=-1", "head=nan", "head=1e39"],
    ),
    of("layer-decay", &["1", "0.75", "1e-30"], &["0", "1.1", "-1", "nan"]),
    of("no-decay", &["head", "none", "*"], &["nothing"]),
    of("ema", &["0.9", "0.9999"], &["0", "1", "-1", "nan"]),
    // ---- run
    of(
        "config",
        &["{IN}/plain.json", "{IN}/scheduled.json", "{IN}/ranks.json", "{IN}/zero.json"],
        &["{IN}/nowhere.json", "{IN}/unknown.json", "{IN}/stage.json", "{IN}/text.json"],
    ),
    of("epochs", &["1", "2"], &["0", "-1", "18446744073709551615"]),
    of("steps", &["2", "3"], &["0", "-1"]),
    of("device", &["cpu", "cuda"], NO_WORDS),
    of("precision", &["fp32", "fp64", "bf16"], NO_WORDS),
    of("residual", &["fp32", "half"], NO_WORDS),
    of("recompute", &["none", "gelu", "full"], NO_WORDS),
    of("deterministic", &[], &[]),
    of("seed", &["0", "1", "18446744073709551615"], &["-1", "x"]),
    of("threads", &["1", "2", "3"], &["0", "4097", "1000000000"]),
    of("init", &["{IN}/run", "{IN}/run/weights.safetensors"], &["{IN}/nowhere", "{IN}/text.json"]),
    of("new-head", &[], &[]),
    // ---- output
    of("out", &["{OUT}/other", "{OUT}/deep/er"], &["{IN}/text.json", "{IN}/run", "/proc/run"]),
    of("checkpoint-every", COUNTS, NO_COUNTS),
    of("keep", COUNTS, NO_COUNTS),
    of("no-checkpoints", &[], &[]),
    of("eval-every", &["1", "2", "1it", "100it"], &["0", "0it", "-1", "x"]),
    of("eval-images", &["1", "3", "all"], &["0", "-1", "x", "18446744073709551616"]),
    of("log-every", COUNTS, NO_COUNTS),
    of("trace", &["{OUT}/trace.json"], &["{OUT}/no/trace.json", "{IN}", "{IN}/text.json/x", "/proc/x"]),
    of("trace-steps", COUNTS, NO_COUNTS),
    of("no-account", &[], &[]),
    of("no-breakdown", &[], &[]),
    of("serve", &["0", "localhost:0", "127.0.0.1:0"], &["nonsense", "65536", "host:"]),
    of("rank-logs", &["{OUT}/logs"], &["{IN}/text.json"]),
    of("balance", &[], &[]),
    of("json", &[], &[]),
    // ---- ranks
    of("ranks", &["1", "2", "3"], &["0", "-1"]),
    of("comm", &["threads", "tcp", "nccl"], NO_WORDS),
    of("hostfile", &[], &["{IN}/text.json"]),
    of("timeout", &["30", "5m"], &["0", "nan", "x"]),
    of("zero", &["0", "1", "2", "3"], &["4", "-1", "1.5", "x"]),
    of("shard-group", &["node", "2", "3"], &["0", "-1", "1.5", "x"]),
    of("bucket-size", COUNTS, NO_COUNTS),
    of("no-overlap", &[], &[]),
    of("reduce-every-micro-step", &[], &[]),
    of("comm-dtype", &["fp32", "bf16", "fp16"], NO_WORDS),
];

/// Files for `--config`.
pub const CONFIGS: &[(&str, &str)] = &[
    (
        "plain.json",
        r#"{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}"#,
    ),
    (
        "scheduled.json",
        r#"{"optimizer": {"type": "Lamb"}, "gradient_clipping": 0.5, "scheduler": {"type": "WarmupCosineLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}}"#,
    ),
    (
        "ranks.json",
        r#"{"communication_data_type": "bf16", "zero_optimization": {"reduce_bucket_size": 1000}}"#,
    ),
    ("unknown.json", r#"{"optimiser": {}}"#),
    ("zero.json", r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 20000}}"#),
    ("stage.json", r#"{"zero_optimization": {"stage": 4}}"#),
    ("text.json", "no JSON"),
];
