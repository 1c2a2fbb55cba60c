//! Whole runs that need a GPU: `scripts/gpu-test` runs them.

mod common;

use common::{Folder, VITESSE, text};
use std::fs;

const RUN: [&str; 11] = [
    "train",
    "--device",
    "cuda",
    "--model",
    "vit-nano/4",
    "--train-samples",
    "640",
    "--test-samples",
    "64",
    "--checkpoint-every",
    "5",
];

/// The GPU runs into a trap in the middle of a run: one line, code 3, and the run goes on from its checkpoint.
#[test]
#[ignore = "needs a GPU"]
fn a_lost_gpu_is_named_and_the_run_goes_on() {
    for ranks in [1, 2] {
        let folder = Folder::new(&format!("lost-gpu-{ranks}"));
        let lost = ranks - 1;
        let ranks = ranks.to_string();
        let args =
            [&RUN[..], &["--batch-size", "16", "--epochs", "1", "--out", "run", "--ranks", &ranks]].concat();
        let mut command = folder.command(VITESSE, &args);
        let output = command.env("VITESSE_FAULT", format!("gpu:rank={lost}:step=12")).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).trim_end().to_string();
        println!("{error}");
        assert_eq!(output.status.code(), Some(3), "{}", text(&output));
        assert_eq!(error.lines().count(), 1, "{error}");
        // Ranks that share a GPU share its context, and lose it together.
        assert!(error.contains("lost GPU 0 (") && error.contains(" in step 1"), "{error}");
        assert_eq!(folder.last_step(), Some(10));
        let resumed = folder.run(&["train", "--resume", "run"]);
        assert!(text(&resumed).contains("going on after step 10"), "{}", text(&resumed));
    }
}

/// What was chosen for products stays with the run, and a continuation takes it.
#[test]
#[ignore = "needs a GPU"]
fn algorithms_stay_with_a_run() {
    let folder = Folder::new("algorithms");
    let args =
        [&RUN[..], &["--batch-size", "64", "--epochs", "2", "--out", "run", "--eval-every", "1"]].concat();
    let stopped = folder.stopped_after(5, &args);
    println!("{stopped}");
    let kept = || fs::read_to_string(folder.0.join("run/algorithms.json")).unwrap();
    let before = kept();
    // Nothing else is known of products.
    let mut command = folder.command(VITESSE, &["train", "--resume", "run"]);
    let output = command.env("VITESSE_CACHE", folder.0.join("another")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let (before, after): (serde_json::Value, serde_json::Value) =
        (serde_json::from_str(&before).unwrap(), serde_json::from_str(&kept()).unwrap());
    for (product, way) in before["matmuls"].as_object().unwrap() {
        assert_eq!(&after["matmuls"][product], way, "{product}");
    }
}

/// Nothing is measured, and two runs are equal to the bit, whatever was measured before.
#[test]
#[ignore = "needs a GPU"]
fn deterministic_runs_measure_nothing() {
    let folder = Folder::new("deterministic");
    let args =
        ["bench", "--device", "cuda", "--model", "vit-ti/4", "--steps", "3", "--deterministic", "--json"];
    let report: serde_json::Value = serde_json::from_slice(&folder.run(&args).stdout).unwrap();
    println!("{}", report["startup"]);
    assert_eq!(report["startup"]["products"]["measured"], 0);
    let losses = |out: &str, more: &[&str]| {
        let args = [&RUN[..], &["--batch-size", "64", "--epochs", "1", "--out", out], more].concat();
        folder.run(&args);
        folder.losses(out)
    };
    assert_eq!(losses("one", &["--deterministic"]), losses("two", &["--deterministic"]));
    assert!(!folder.0.join("one/algorithms.json").exists());
    losses("measured", &[]);
    assert!(folder.0.join("measured/algorithms.json").exists());
}

/// Kernels are in the trace and in the closing table, and looking at them changes no number.
#[test]
#[ignore = "needs a GPU"]
fn kernels_are_traced_and_told_by_kind() {
    let folder = Folder::new("traced");
    let train = |out: &str, more: &[&str]| {
        let args = ["--batch-size", "64", "--epochs", "2", "--deterministic", "--json", "--out", out];
        let output = folder.run(&[&RUN[..], &args[..], more].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        let summary: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        (summary, folder.losses(out))
    };
    let (summary, losses) = train("traced", &["--trace", "trace.json", "--trace-steps", "3"]);
    let kinds = summary["seconds"].as_object().unwrap();
    println!("{kinds:?} {}", summary["note_on_seconds"]);
    assert!(kinds.len() > 6 && summary["note_on_seconds"].is_string());
    let trace: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(folder.0.join("trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let kernels = events.iter().filter(|event| event["ph"] == "X" && event["tid"] != 0);
    assert!(kernels.clone().count() > 3 * 50, "three steps of many kernels");
    assert!(kernels.clone().all(|event| event["dur"].as_f64().is_some_and(|micros| micros >= 0.0)));
    assert!(events.iter().any(|event| event["name"] == "process_labels"));
    assert_eq!(losses, train("alone", &[]).1);
    let metrics = fs::read_to_string(folder.0.join("alone/metrics.jsonl")).unwrap();
    println!("{}", metrics.lines().last().unwrap());
    println!("{}", fs::read_to_string(folder.0.join("alone/gpus.jsonl")).unwrap_or("no NVML".into()));
}
