//! The commands as a user meets them: what they print, and what they say to bad input.

use std::path::Path;
use std::process::{Command, Output};
use testing::Folder;

fn vitesse(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vitesse")).args(args).output().expect("vitesse starts")
}

const TINY: [&str; 8] =
    ["--model", "vit-nano/8", "--batch-size", "8", "--train-samples", "32", "--test-samples", "20"];

/// Of the same run, what an evaluation can be told.
const TINY_EVAL: [&str; 6] = ["--model", "vit-nano/8", "--batch-size", "8", "--test-samples", "20"];

fn train(folder: &str, more: &[&str]) -> Output {
    vitesse(&[&["train", "--out", folder, "--json"], &TINY[..], more].concat())
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// One line on standard error that has `culprit` in it, a failure, no panic.
fn refused(args: &[&str], culprit: &str) {
    let output = vitesse(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{args:?} should fail");
    assert!(error.contains(culprit), "{args:?}: '{culprit}' is not in: {error}");
    assert!(!error.contains("panicked"), "{args:?}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{args:?}: {error}");
}

#[test]
fn a_run_leaves_metrics_and_weights() {
    let folder = Folder::new("cli-run");
    let out = folder.path("run");
    let output = train(&out, &["--epochs", "2"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["steps"], 8);
    assert_eq!(summary["images"], 64);

    let metrics = lines(&Path::new(&out).join("metrics.jsonl"));
    assert_eq!(metrics.len(), 10, "eight steps and two evaluations");
    for key in ["step", "epoch", "loss", "lr", "images_per_second"] {
        assert!(metrics[0][key].is_number(), "{key}");
    }
    for key in ["eval_loss", "eval_top1", "eval_top5"] {
        assert!(metrics[4][key].is_number(), "{key}");
    }
    assert_eq!(metrics[9]["eval_top1"], summary["eval_top1"]);

    let weights = folder.path("run/weights.safetensors");
    let eval = [&["eval", "--json", "--weights", &weights], &TINY_EVAL[..]].concat();
    let scored: serde_json::Value = serde_json::from_slice(&vitesse(&eval).stdout).unwrap();
    assert_eq!(scored["eval_top1"], summary["eval_top1"], "the weights are those that were scored");
    refused(&[&["train", "--out", &out], &TINY[..]].concat(), "already holds a run");
}

#[test]
fn the_same_seed_gives_the_same_losses_bit_for_bit() {
    let folder = Folder::new("cli-twice");
    let losses = |name: &str, more: &[&str]| {
        let out = folder.path(name);
        let output = train(&out, &[&["--epochs", "2", "--dropout", "0.1", "--threads", "2"], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let pick = |line: &serde_json::Value| (line["loss"].clone(), line["eval_loss"].clone());
        lines(&Path::new(&out).join("metrics.jsonl")).iter().map(pick).collect::<Vec<_>>()
    };
    let first = losses("a", &[]);
    assert_eq!(first, losses("b", &[]));
    assert_ne!(first, losses("c", &["--seed", "1"]));
}

#[test]
fn weights_convert_both_ways() {
    let folder = Folder::new("cli-convert");
    assert!(train(&folder.path("run"), &["--steps", "2"]).status.success());
    let first = folder.path("run/weights.safetensors");
    let (mut from, mut scores) = (first.clone(), vec![]);
    for to in ["torchvision", "huggingface", "timm"] {
        let next = folder.path(&format!("{to}.safetensors"));
        let output = vitesse(&["export", &from, &next, "--to", to]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let scored: serde_json::Value =
            serde_json::from_slice(&vitesse(&["eval", "--json", "--weights", &next]).stdout).unwrap();
        scores.push((scored["eval_loss"].clone(), scored["eval_top1"].clone()));
        refused(&["export", &from, &next, "--to", to], "exists already");
        from = next;
    }
    assert!(scores.iter().all(|s| *s == scores[0] && s.0.is_number()));
    let bytes = |path: &str| std::fs::read(path).unwrap();
    assert!(bytes(&first) == bytes(&folder.path("timm.safetensors")));
}

#[test]
fn plans_print_as_text_and_json() {
    let text = vitesse(&["plan", "--which", "last"]);
    let text = String::from_utf8(text.stdout).unwrap();
    let plan: graph::Plan = text.parse().unwrap();
    plan.check().unwrap();
    assert_eq!(plan.to_string(), text);

    let json = vitesse(&["plan", "--which", "last", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["steps"].as_array().unwrap().len(), plan.steps.len());
    assert!(String::from_utf8(vitesse(&["plan"]).stdout).unwrap().contains("arena"));
}

/// Two ranks: buckets on the comm lane, as soon as they are complete or all at the end.
#[test]
fn graphs_are_printed_as_a_pass_leaves_them() {
    let after = |pass: &str, more: &[&str]| vitesse(&[&["plan", "--print-after", pass], more].concat());
    let text = |pass, more| String::from_utf8(after(pass, more).stdout).unwrap();
    assert!(text("narrow", &[]).contains(" = gelu(") && !text("fuse", &[]).contains(" = gelu("));
    assert!(
        !text("fuse", &[]).contains("linear_grad_w(") && text("peephole", &[]).contains("linear_grad_w(")
    );
    assert!(text("parallelise", &["--ranks", "3"]).contains("group=\"data:3\""));
    assert!(text("update", &["--which", "update"]).contains(" = adamw("));
    let refused = after("gelu", &["--which", "eval"]);
    assert!(!refused.status.success());
    let says = "vitesse: --print-after gelu: the passes of the plan eval are averages, narrow, fuse, resized_loss, precision, shards\n";
    assert_eq!(String::from_utf8(refused.stderr).unwrap(), says);
}

#[test]
fn plans_of_several_ranks_show_communication() {
    let plan = |more: &[&str]| -> graph::Plan {
        let output = vitesse(&[&["plan", "--which", "last", "--ranks", "2"], more].concat());
        String::from_utf8(output.stdout).unwrap().parse().unwrap()
    };
    let calls = |plan: &graph::Plan| -> Vec<usize> {
        (0..plan.steps.len()).filter(|s| plan.steps[*s].lane == graph::op::Lane::Comm).collect()
    };
    let early = plan(&["--bucket-size", "50000"]);
    let late = plan(&["--bucket-size", "50000", "--no-overlap"]);
    early.check().unwrap();
    let first = calls(&early)[0];
    assert!(calls(&early).len() > 3 && early.steps[first + 1].lane == graph::op::Lane::Compute);
    assert_eq!(calls(&late), (late.steps.len() - calls(&early).len()..late.steps.len()).collect::<Vec<_>>());
    // The earlier name of the flag is still taken.
    for flag in ["--comm-dtype", "--wire"] {
        assert!(plan(&[flag, "bf16"]).to_string().contains("to=\"bf16\""), "{flag}");
    }
    let summary = String::from_utf8(vitesse(&["plan", "--ranks", "2"]).stdout).unwrap();
    assert!(summary.contains("communication: ") && summary.contains(" messages per step"), "{summary}");
    refused(&["plan", "--ranks", "0"], "--ranks 0: must be at least 1");
    refused(&["plan", "--ranks", "2", "--bucket-size", "0"], "--bucket-size 0: must be at least 1");
}

/// The parts of the start sum to the whole.
#[test]
fn a_benchmark_accounts_for_its_start() {
    let args = ["bench", "--model", "vit-nano/8", "--batch-size", "2", "--steps", "1"];
    let output = vitesse(&[&args[..], &["--json"]].concat());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let startup = &report["startup"];
    let phases = startup["phases"].as_object().unwrap();
    assert!(["graph", "device", "first step"].iter().all(|phase| phases.contains_key(*phase)), "{startup}");
    let sum: f64 = phases.values().map(|seconds| seconds.as_f64().unwrap()).sum();
    let whole = report["first_step_seconds"].as_f64().unwrap();
    assert!((sum - whole).abs() < 1e-3 + 0.01 * whole, "{sum} of {whole}");
    let text = String::from_utf8(vitesse(&args).stdout).unwrap();
    assert!(text.contains("s after the start:\n  "), "{text}");
}

/// A step of several micro-steps has the images and operations of all of them.
#[test]
fn a_benchmark_runs_every_micro_step() {
    let of = |accumulate: &str| -> serde_json::Value {
        let args = [
            "bench",
            "--model",
            "vit-nano/8",
            "--batch-size",
            "2",
            "--steps",
            "3",
            "--accumulate",
            accumulate,
            "--json",
        ];
        serde_json::from_slice(&vitesse(&args).stdout).unwrap()
    };
    let (one, four) = (of("1"), of("4"));
    let ratio = four["flops"].as_f64().unwrap() / one["flops"].as_f64().unwrap();
    assert!((4.0..4.1).contains(&ratio), "{ratio} times the operations");
    let mut steps: Vec<f64> =
        four["step_seconds"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    steps.sort_by(f64::total_cmp);
    let images = four["images_per_second"].as_f64().unwrap() * steps[steps.len() / 2];
    assert!((images - 8.0).abs() < 1e-6, "{images} images per step");
    refused(&["bench", "--inference", "--accumulate", "2"], "--accumulate 2");
}

#[test]
fn bad_settings_are_refused_in_one_line() {
    refused(&["train", "--deterministic", "--balance"], "--deterministic");
    refused(&["train", "--model", "resnet50"], "resnet50");
    refused(&["train", "--model", "vit-ti/5"], "patch 5 doesn't divide the 32×32 image");
    refused(&["train", "--batch-size", "0"], "--batch-size 0");
    refused(&["train", "--data", "mnist"], "--data mnist");
    refused(&["train", "--optimizer", "adam"], "--optimizer adam");
    refused(&["train", "--classes", "5000"], "5000");
    refused(&["plan", "--model", "vit-b"], "vit-b");
    refused(&["bench", "--dropout", "1.5"], "1.5");
    refused(&["train", "--out", "/proc/nowhere/run"], "/proc/nowhere/run");
}

const STUDY: &str = r#"{
  "train_batch_size": 32,
  "gradient_accumulation_steps": 1,
  "micro_batch_per_gpu": 16,
  "zero_optimization": { "stage": 0 },
  "optimizer": { "type": "AdamW", "params": { "lr": 1e-4 } },
  "steps_per_print": 1,
  "wall_clock_breakdown": false
}"#;

#[test]
fn a_deepspeed_file_trains_and_explains() {
    let folder = Folder::new("cli-config");
    let config = folder.path("ds.json");
    std::fs::write(&config, STUDY).unwrap();
    let fits = "it fits 2 ranks";
    refused(&["train", "--config", &config], fits);
    refused(&["config", "explain", &config], fits);
    refused(&["train", "--config", &folder.path("missing.json")], "missing.json");

    let small = ["--model", "vit-nano/8", "--train-samples", "32", "--test-samples", "20"];
    let batch = ["--global-batch", "16", "--epochs", "1"];
    let explain = vitesse(&[&["config", "explain", &config, "--ranks", "2"], &small[..]].concat());
    let text = String::from_utf8(explain.stdout).unwrap();
    assert!(explain.status.success(), "{text}");
    assert!(text.contains("--global-batch 32 = 16 × 1 × 2 ranks"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 116), "{text}");
    let json = vitesse(&[&["config", "explain", &config, "--json"], &batch[..]].concat());
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["keys"][0]["verdict"], "overridden");
    assert_eq!(json["refusal"], serde_json::Value::Null);

    let trained = vitesse(&[&["train", "--config", &config], &small[..], &batch[..]].concat());
    let text = String::from_utf8(trained.stdout).unwrap();
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    assert!(text.contains("step 1/2") && text.contains("step 2/2"), "{text}");
    assert!(!text.contains("where the time went"), "the file asks for none: {text}");
}

#[test]
fn a_settings_file_trains_and_explains_and_its_run_continues_without_it() {
    let folder = Folder::new("settings-file");
    let config = folder.path("run.toml");
    let settings =
        "model = \"vit-nano/8\"\ntrain-samples = 16\ntest-samples = 8\nbatch-size = 8\nsteps = 2\nseed = 3\n";
    std::fs::write(&config, settings).unwrap();
    let explained = vitesse(&["config", "explain", &config, "--seed", "4"]);
    let text = String::from_utf8(explained.stdout).unwrap();
    let line =
        |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_string();
    assert!(line("model").ends_with("run.toml:1"), "{text}");
    assert!(line("seed").ends_with("--seed") && line("seed").contains(" 4 "), "{text}");

    let run = folder.path("run");
    assert!(vitesse(&["train", "--config", &config, "--out", &run]).status.success());
    let record = std::fs::read_to_string(folder.path("run/run.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    assert_eq!(record[0]["typed"]["settings"]["model"], "vit-nano/8", "{record}");
    std::fs::write(&config, "modl = 1\n").unwrap();
    refused(
        &["train", "--config", &config],
        "run.toml:1: modl: there is no such setting; did you mean model?",
    );
    // With other settings than the record's it would be refused.
    let continued = vitesse(&["train", "--resume", &run]);
    let text = String::from_utf8(continued.stdout).unwrap();
    assert!(text.contains("the run was finished before"), "{}", String::from_utf8_lossy(&continued.stderr));
}

#[test]
fn every_setting_is_explained_without_a_file() {
    let json = vitesse(&["config", "explain", "--json", "--lr", "0.1"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let settings = json["settings"].as_array().unwrap();
    let help = String::from_utf8(vitesse(&["train", "--help"]).stdout).unwrap();
    let flags = help.lines().filter_map(|line| line.strip_prefix("      --"));
    for flag in flags.map(|line| line.split_whitespace().next().unwrap()) {
        let found = settings.iter().find(|setting| setting["setting"] == flag);
        let found = found.unwrap_or_else(|| panic!("--{flag} is not explained"));
        assert_eq!(found["from"] == "flag", ["lr", "json"].contains(&flag), "{found}");
    }
}

#[test]
fn help_shows_groups_and_examples() {
    let help = String::from_utf8(vitesse(&["train", "--help"]).stdout).unwrap();
    for heading in ["Model:", "Data:", "Augmentation:", "Optimizer:", "Run:", "Output:", "Examples:"] {
        assert!(help.contains(heading), "{heading}");
    }
}

#[test]
fn bad_weights_are_refused_in_one_line() {
    let folder = Folder::new("cli-weights");
    assert!(train(&folder.path("run"), &["--steps", "1"]).status.success());
    let good = std::fs::read(folder.path("run/weights.safetensors")).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let eval = |path: &str, culprit: &str| {
        refused(&[&["eval", "--weights", path], &TINY_EVAL[..]].concat(), culprit);
    };
    eval(&folder.path("missing.safetensors"), "missing.safetensors");
    eval(&write("truncated.safetensors", &good[..good.len() / 2]), "truncated.safetensors");
    eval(&write("empty.safetensors", b""), "empty.safetensors");
    let claim = [&(1u64 << 42).to_le_bytes()[..], b"{}"].concat();
    eval(&write("terabytes.safetensors", &claim), "terabytes.safetensors");
    let tensor =
        br#"{"head.weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}"#;
    let claim = [&(tensor.len() as u64).to_le_bytes()[..], tensor].concat();
    eval(&write("claims.safetensors", &claim), "claims.safetensors");
    let (broken, out) = (folder.path("truncated.safetensors"), folder.path("other"));
    refused(&[&["train", "--init", &broken, "--out", &out], &TINY[..]].concat(), "truncated.safetensors");
    assert!(!Path::new(&out).exists(), "a refused run leaves no folder");
    refused(
        &["eval", "--model", "vit-ti/8", "--weights", &folder.path("run/weights.safetensors")],
        "weights are of another model",
    );
}

/// Every help text, as manual pages.
#[test]
fn help_uses_the_words_of_the_field() {
    let folder = Folder::new("cli-words");
    let output = vitesse(&["man", &folder.path("man")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut wrong = vec![];
    for entry in std::fs::read_dir(folder.join("man")).unwrap() {
        let path = entry.unwrap().path();
        for found in testing::words::strange(&std::fs::read_to_string(&path).unwrap()) {
            wrong.push(format!("{}: {} in: {}", path.display(), found.words, found.line));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn inference_is_timed_by_batch_size() {
    let args = [
        "bench",
        "--inference",
        "--model",
        "vit-nano/8",
        "--batch-size",
        "6",
        "--threads",
        "1",
        "--steps",
        "11",
    ];
    let output = vitesse(&[&args[..], &["--json"]].concat());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["inference"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["batch_size"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4, 6]);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert_eq!(number("runs"), 11.0);
        assert!(number("latency_p95_seconds") >= number("latency_median_seconds"));
        let rate = number("batch_size") / number("latency_median_seconds");
        assert!((number("images_per_second") / rate - 1.0).abs() < 1e-9);
    }
    let text = String::from_utf8(vitesse(&args).stdout).unwrap();
    assert!(
        text.contains("inference on 1 thread") && text.contains("p95") && text.contains("images/s"),
        "{text}"
    );
    refused(&[&args[..], &["--ranks", "2"]].concat(), "--ranks 2");
}
