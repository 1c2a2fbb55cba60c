//! Many ranks do what one does: the same samples, the same gradients, the same weights, to rounding.
//!
//! In f64 the norm of every weight after twenty steps is within 1e-9 of one rank's, in f32 every loss within 1e-4. The key
//! bias is left out: it has no gradient but rounding, which Adam turns into real steps.

mod common;

use common::{Folder, largest_difference, text};
use formats::tensors::Reader;
use std::collections::BTreeMap;
use std::path::Path;

/// Dropout, stochastic depth and mixup on; a partial last batch in every epoch.
const RUN: &str = "train --model vit-nano/8 --image-size 16 --train-samples 900 --test-samples 61 --dropout 0.1 --attention-dropout 0.1 \
                   --drop-path 0.1 --mixup 0.8 --cutmix 1.0 --steps 20 --seed 5 --threads 1 --workers 1 --lr 1e-3";

/// A run over `ranks` ranks of `total` images per step.
#[derive(Clone, Copy)]
struct Case<'a> {
    ranks: usize,
    accumulate: usize,
    optimizer: &'a str,
    precision: &'a str,
    comm: &'a str,
}

/// Images of a micro-step, over all ranks.
const TOTAL: usize = 48;

impl Case<'_> {
    fn arguments(&self) -> Vec<String> {
        let Case { ranks, accumulate, optimizer, precision, comm } = self;
        let batch = TOTAL / ranks;
        let more = format!(
            "--batch-size {batch} --accumulate {accumulate} --optimizer {optimizer} --precision {precision} \
             --ranks {ranks} --comm {comm} --out run"
        );
        RUN.split_whitespace().chain(more.split_whitespace()).map(str::to_string).collect()
    }

    /// Tests that run at the same time have folders of their own.
    fn run(&self, test: &str) -> Folder {
        let Case { ranks, accumulate, optimizer, precision, comm } = self;
        let folder = Folder::new(&format!("{test}-{ranks}-{accumulate}-{optimizer}-{precision}-{comm}"));
        let arguments = self.arguments();
        folder.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        folder
    }
}

/// The last checkpoint's tensors, as they are on the disk.
fn states(folder: &Folder) -> BTreeMap<String, Vec<f64>> {
    let path = folder.0.join("run/checkpoints/step-00000020.safetensors");
    let mut states = BTreeMap::new();
    Reader::open(&path).unwrap().each(|name, _, values: Vec<f64>| drop(states.insert(name, values))).unwrap();
    states
}

/// Norms of the weights; of the key's bias, nothing.
fn norms(folder: &Folder) -> Vec<f64> {
    let parameter =
        |name: &str| !name.ends_with(".m") && !name.ends_with(".v") && !name.ends_with(".momentum");
    let weights = states(folder).into_iter().filter(|(name, _)| parameter(name) && name != "applied");
    weights
        .map(|(name, values)| {
            let width = values.len() / 3;
            let is_key = |i: usize| name.ends_with("attn.qkv.bias") && (width..2 * width).contains(&i);
            let squares = values.iter().enumerate().filter(|(i, _)| !is_key(*i)).map(|(_, x)| x * x);
            squares.sum::<f64>().sqrt()
        })
        .collect()
}

fn alike(one: &Folder, many: &Folder, precision: &str, what: &str) {
    let losses = largest_difference(&many.losses("run"), &one.losses("run"));
    if precision == "fp64" {
        let norms = largest_difference(&norms(many), &norms(one));
        println!("{what}: norms differ by {norms:.1e}, losses by {losses:.1e}");
        assert!(norms < 1e-9, "{what}: norms differ by {norms:e}");
    } else {
        println!("{what}: losses differ by {losses:.1e}");
        assert!(losses < 1e-4, "{what}: losses differ by {losses:e}");
    }
}

/// `ranks` against one rank, for each optimizer and number of micro-steps.
fn equivalence(ranks: &[usize], optimizers: &[&str], accumulate: &[usize], precision: &str, comm: &str) {
    for optimizer in optimizers {
        for accumulate in accumulate {
            let one = Case { ranks: 1, accumulate: *accumulate, optimizer, precision, comm: "threads" };
            let alone = one.run(&format!("ranks-{comm}"));
            assert!(alone.losses("run").windows(2).any(|pair| pair[0] != pair[1]), "it learns");
            for ranks in ranks {
                let many = Case { ranks: *ranks, comm, ..one }.run("ranks");
                alike(
                    &alone,
                    &many,
                    precision,
                    &format!("{comm} {ranks} {optimizer} × {accumulate} {precision}"),
                );
            }
        }
    }
}

#[test]
fn threads_do_what_one_rank_does() {
    equivalence(&[2, 3, 4, 8], &["adamw"], &[1], "fp64", "threads");
    equivalence(&[3], &["sgd", "lamb"], &[4], "fp64", "threads");
    equivalence(&[4], &["adamw", "sgd", "lamb"], &[1], "fp32", "threads");
}

#[test]
#[ignore = "minutes: every optimizer, number of ranks and of micro-steps"]
fn threads_do_what_one_rank_does_in_every_case() {
    for precision in ["fp64", "fp32"] {
        equivalence(&[2, 3, 4, 8], &["adamw", "sgd", "lamb"], &[1, 4], precision, "threads");
    }
}

#[test]
#[cfg(feature = "mpi")]
fn mpi_does_what_one_rank_does() {
    equivalence(&[2, 3], &["adamw"], &[1], "fp64", "mpi");
    equivalence(&[4], &["lamb"], &[4], "fp32", "mpi");
}

#[test]
#[cfg(feature = "mpi")]
#[ignore = "minutes: every optimizer, number of ranks and of micro-steps"]
fn mpi_does_what_one_rank_does_in_every_case() {
    for precision in ["fp64", "fp32"] {
        equivalence(&[2, 3, 4, 8], &["adamw", "sgd", "lamb"], &[1, 4], precision, "mpi");
    }
}

/// The same number of ranks twice, over any engine: bit for bit.
#[test]
fn the_same_ranks_give_the_same_bits() {
    let case = Case { ranks: 3, accumulate: 1, optimizer: "adamw", precision: "fp32", comm: "threads" };
    let first = case.run("bits-first");
    let first = (states(&first), first.losses("run"));
    let engines: &[&str] = if cfg!(feature = "mpi") { &["threads", "mpi"] } else { &["threads"] };
    for comm in engines {
        let again = Case { comm, ..case }.run("bits");
        assert!(states(&again) == first.0 && again.losses("run") == first.1, "{comm}");
    }
}

/// Evaluation is sharded: whatever the number of ranks, every image counts once.
#[test]
fn every_test_image_counts_once() {
    let folder = Folder::new("ranks-evaluation");
    folder.run(&[
        "train",
        "--model",
        "vit-nano/8",
        "--train-samples",
        "96",
        "--steps",
        "1",
        "--threads",
        "1",
        "--out",
        "one",
    ]);
    let score = |out: &str| {
        let text = std::fs::read_to_string(folder.0.join(out).join("metrics.jsonl")).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        (line["eval_top1"].as_f64().unwrap(), line["eval_loss"].as_f64().unwrap())
    };
    let mut scores = vec![];
    for ranks in ["1", "2", "3", "5"] {
        let out = format!("eval-{ranks}");
        // With a learning rate of nothing every run evaluates the same weights, on 61 images: a prime.
        let run = format!(
            "train --model vit-nano/8 --init one --train-samples 60 --test-samples 61 --eval-images all --steps 1 --batch-size 12 --lr 1e-30 \
             --weight-decay 0 --threads 1 --ranks {ranks} --out {out}"
        );
        folder.run(&run.split_whitespace().collect::<Vec<_>>());
        scores.push(score(&out));
    }
    assert!(scores.iter().all(|s| s == &scores[0]), "{scores:?}");
    assert!((scores[0].0 * 61.0).fract().abs() < 1e-9, "61 images: {}", scores[0].0);
}

/// Four ranks, then two, then eight: the losses of a run that never stopped.
#[test]
fn a_run_goes_on_over_another_number_of_ranks() {
    let run = "train --model vit-nano/8 --image-size 16 --train-samples 1920 --test-samples 40 --batch-size 16 --dropout 0.1 \
               --mixup 0.8 --epochs 2 --checkpoint-every 2 --threads 1 --ranks 4 --out";
    let args = |out| run.split_whitespace().chain([out]).collect::<Vec<_>>();
    let folder = Folder::new("ranks-resume");
    folder.run(&args("whole"));
    folder.stopped_after(6, &args("run"));
    let two = folder.stopped_after(20, &["train", "--resume", "run", "--ranks", "2"]);
    assert!(two.contains("batch 16 × 2 × 2 ranks"), "{two}");
    let eight = text(&folder.run(&["train", "--resume", "run", "--ranks", "8"]));
    assert!(eight.contains("batch 8 × 1 × 8 ranks"), "{eight}");
    let difference = largest_difference(&folder.losses("run"), &folder.losses("whole"));
    println!("losses differ by {difference:.1e}");
    assert!(difference < 1e-4, "losses differ by {difference:e}");
}

/// A rank at half speed gets fewer images; the losses stay those of equal shares.
#[test]
fn a_slow_rank_is_named_and_gets_less() {
    let folder = Folder::new("ranks-balance");
    let run = "train --model vit-nano/8 --train-samples 2000 --test-samples 20 --batch-size 16 --steps 24 --threads 1 --ranks 4";
    let start = |more: &str| {
        let args: Vec<&str> = run.split_whitespace().chain(more.split_whitespace()).collect();
        let mut command = folder.command(common::VITESSE, &args);
        let output = command.env("VITESSE_FAULT", "slow:rank=2:factor=12").output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let plain = start("--out plain");
    assert!(plain.contains("rank 2 is slow"), "{plain}");
    let balanced = start("--out balanced --balance");
    let line = balanced.lines().find(|line| line.contains("divided by speed")).expect("a division");
    let shares: Vec<usize> =
        line.rsplit(": ").next().unwrap().split(" + ").map(|share| share.trim().parse().unwrap()).collect();
    assert!(shares.len() == 4 && shares.iter().sum::<usize>() == 64, "{line}");
    assert!([0, 1, 3].iter().all(|other| shares[2] < shares[*other]), "{line}");
    let difference = largest_difference(&folder.losses("balanced"), &folder.losses("plain"));
    assert!(difference < 1e-4, "losses differ by {difference:e}");
}

/// A trace has every rank and lane, with the exchange on its own row.
#[test]
fn a_trace_shows_every_rank_and_lane() {
    let folder = Folder::new("ranks-trace");
    let run = "train --model vit-nano/8 --train-samples 200 --test-samples 20 --batch-size 16 --steps 6 --threads 1 --ranks 2 \
               --trace trace.json --trace-steps 3 --out run";
    let output = folder.run(&run.split_whitespace().collect::<Vec<_>>());
    assert!(text(&output).contains("trace in trace.json"), "{}", text(&output));
    let trace: serde_json::Value = read(&folder.0.join("trace.json"));
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let of = |lane: u64| {
            let mine = |e: &&serde_json::Value| e["pid"] == rank && e["tid"] == lane && e["ph"] == "X";
            events.iter().filter(mine).collect::<Vec<_>>()
        };
        assert_eq!(of(0).len(), 3, "steps of rank {rank}");
        assert!(of(1).len() > 100, "computing of rank {rank}");
        assert!(of(2).iter().all(|e| e["cat"] == "communication") && of(2).len() >= 3);
    }
    let ranks = std::fs::read_to_string(folder.0.join("run/ranks.jsonl")).unwrap();
    assert_eq!(ranks.lines().count(), 12);
}

fn read(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// How far a step moves each layer's weights doesn't depend on the ranks or, but for rounding, on the precision.
#[test]
fn update_ratios_are_the_same_over_ranks_and_in_fp64() {
    let folder = Folder::new("update-ratios");
    let ratios = |name: &str, more: &[&str]| -> Vec<(String, f64)> {
        let mut args = vec!["train", "--model", "vit-nano/8", "--train-samples", "32", "--test-samples", "8"];
        args.extend([
            "--global-batch",
            "16",
            "--steps",
            "2",
            "--update-ratios",
            "--no-checkpoints",
            "--out",
            name,
        ]);
        args.extend(more);
        folder.run(&args);
        let text = std::fs::read_to_string(folder.0.join(name).join("metrics.jsonl")).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
        let ratios = line["update_ratios"].as_object().unwrap_or_else(|| panic!("{line}"));
        ratios.iter().map(|(layer, ratio)| (layer.clone(), ratio.as_f64().unwrap())).collect()
    };
    let one = ratios("one", &["--ranks", "1"]);
    for (name, more) in [("two", ["--ranks", "2"]), ("fp64", ["--precision", "fp64"])] {
        for ((layer, ratio), (other, there)) in one.iter().zip(ratios(name, &more)) {
            assert!(
                *layer == other && (ratio - there).abs() <= 1e-4 * ratio,
                "{name}: {layer} {ratio} {there}"
            );
        }
    }
}
