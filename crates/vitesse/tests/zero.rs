//! Stages of ZeRO from the command line: whatever ranks divide, a run is the same; its memory is as planned.

mod common;

use common::{Folder, is_time, largest_difference, scenes, text};
use formats::tensors::Reader;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;

/// Everything that reads or changes states: averages that are evaluated, update ratios, clipping, frozen and slower parameters.
const RUN: &str = "train --model vit-nano/8 --image-size 16 --train-samples 90 --test-samples 25 --dropout 0.1 --drop-path 0.1 \
                   --steps 12 --eval-every 6it --seed 5 --threads 1 --workers 1 --lr 2e-3 --ema 0.9 --update-ratios --log-every 3 \
                   --freeze patch_embed.proj.bias --lr-scale blocks.1.*=0.5 --bucket-size 20000";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// The lines of a run's metrics, without what is measured in time.
fn metrics(folder: &Folder, run: &str) -> Vec<BTreeMap<String, Value>> {
    let text = fs::read_to_string(folder.0.join(run).join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut line: BTreeMap<String, Value> = serde_json::from_str(line).unwrap();
        line.retain(|name, _| !is_time(name));
        line
    };
    text.lines().map(line).collect()
}

/// Trains at each of these stages, each in a folder of its name; returns what each printed.
fn at_stages(folder: &Folder, line: &str, stages: &[u8]) -> Vec<String> {
    let at = |stage: &u8| {
        let line = format!("{line} --zero {stage} --out stage-{stage}");
        text(&folder.run(&words(&line)))
    };
    stages.iter().map(at).collect()
}

/// Asserts that two runs have the same metrics, bit by bit; but for how far weights moved, whose squares are added in another order.
fn assert_alike(folder: &Folder, what: &str, one: &str, other: &str) {
    let (one, other) = (metrics(folder, one), metrics(folder, other));
    assert_eq!(one.len(), other.len(), "{what}");
    assert!(one.iter().any(|line| line.keys().any(|name| name.starts_with("eval_"))), "{what}: evaluated");
    for (one, other) in one.iter().zip(&other) {
        for (name, value) in one {
            let found = &other[name];
            if !name.contains("update_ratio") {
                assert_eq!(value, found, "{what}: {name} of step {}", one["step"]);
                continue;
            }
            let numbers = |value: &Value| -> Vec<f64> {
                let of = |value: &Value| value.as_object().map(|layers| layers.values().cloned().collect());
                let all: Vec<Value> = of(value).unwrap_or(vec![value.clone()]);
                all.iter().filter_map(Value::as_f64).collect()
            };
            let (one, other) = (numbers(value), numbers(found));
            assert!(
                !one.is_empty() && largest_difference(&other, &one) < 1e-5,
                "{what}: {value} and {found}"
            );
        }
    }
}

/// The weights and the last checkpoint of a run, to the byte; but for the settings that they name.
fn tensors(folder: &Folder, run: &str) -> BTreeMap<String, Vec<u32>> {
    let mut tensors = BTreeMap::new();
    for file in ["weights.safetensors", "checkpoints/step-00000012.safetensors"] {
        let reader = Reader::open(&folder.0.join(run).join(file)).unwrap();
        let keep = |name: String, _, values: Vec<f32>| {
            let bits = values.into_iter().map(f32::to_bits).collect();
            tensors.insert(format!("{file} {name}"), bits);
        };
        reader.each(keep).unwrap();
    }
    tensors
}

fn stages_train_alike(name: &str, more: &str) {
    let folder = Folder::new(&format!("zero-{name}"));
    at_stages(&folder, &format!("{RUN} {more}"), &[0, 1, 2, 3]);
    let plain = tensors(&folder, "stage-0");
    for stage in 1..4 {
        let (what, run) = (format!("{name}, stage {stage}"), format!("stage-{stage}"));
        assert_alike(&folder, &what, &run, "stage-0");
        let others = tensors(&folder, &run);
        assert_eq!(plain.len(), others.len(), "{what}");
        for (name, values) in &plain {
            assert!(others.get(name) == Some(values), "{what}: {name} differs");
        }
    }
}

#[test]
fn adamw_over_threads() {
    stages_train_alike("adamw", "--ranks 2 --batch-size 8 --clip 0.5 --mixup 0.8");
}

#[test]
fn lamb_over_three_ranks() {
    stages_train_alike("lamb", "--ranks 3 --batch-size 4 --optimizer lamb --label-smoothing 0.1");
}

#[test]
fn muon_over_four_ranks() {
    stages_train_alike("muon", "--ranks 4 --batch-size 4 --optimizer muon --recompute full");
}

#[test]
fn sgd_in_double_precision() {
    let folder = Folder::new("zero-sgd");
    let line = format!("{RUN} --ranks 2 --batch-size 8 --optimizer sgd --no-overlap");
    at_stages(&folder, &format!("{line} --precision fp64"), &[0, 1, 2, 3]);
    for stage in 1..4 {
        // Sums of squares may be cut elsewhere: in the last bit of the norm.
        let off = largest_difference(&folder.losses(&format!("stage-{stage}")), &folder.losses("stage-0"));
        assert!(off < 1e-12, "stage {stage}: off by {off:.1e}");
    }
}

/// Processes that talk over sockets; and a run goes on at another stage over another number of ranks.
#[test]
fn processes_over_sockets_and_on_from_there() {
    let folder = Folder::new("zero-sockets");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = format!("{RUN} --batch-size 8 --zero 3 --out run");
    let start = |rank: usize| {
        let mut command = folder.command(common::VITESSE, &words(&line));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.spawn().unwrap()
    };
    let ranks = [0, 1].map(start);
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }
    at_stages(&folder, &format!("{RUN} --ranks 2 --batch-size 8"), &[0]);
    assert_alike(&folder, "over sockets", "run", "stage-0");
    assert_eq!(tensors(&folder, "run"), tensors(&folder, "stage-0"));
}

/// A run that loses a rank at stage 3 goes on at another stage over another number of ranks, and loses one again; in the end it is what it
/// would have been.
#[test]
fn a_run_goes_on_at_another_stage() {
    let folder = Folder::new("zero-goes-on");
    let line = RUN.replace("--steps 12 --eval-every 6it", "--steps 30 --eval-every 30it");
    let line = format!("{line} --batch-size 6 --ranks 4 --checkpoint-every 3");
    at_stages(&folder, &line, &[0]);
    let lost = |line: &str, step: u64| {
        let mut command = folder.command(common::VITESSE, &words(line));
        let output = command.env("VITESSE_FAULT", format!("panic:rank=1:step={step}")).output().unwrap();
        assert!(!output.status.success(), "{}", text(&output));
    };
    lost(&format!("{line} --zero 3 --out run"), 8);
    assert_eq!(folder.last_step(), Some(6));
    lost("train --resume run --ranks 3 --zero 2", 20);
    assert_eq!(folder.last_step(), Some(18));
    folder.run(&words("train --resume run --ranks 1 --zero 0"));
    let off = largest_difference(&folder.losses("run"), &folder.losses("stage-0"));
    assert!(off < 1e-4, "off by {off:.1e}");
}

/// Several micro-steps; and ranks of unequal speeds, of which a faster one gets more images, decide alike on what they divide.
#[test]
fn micro_steps_and_unequal_shares() {
    let line = "--ranks 3 --global-batch 24 --accumulate 2";
    let folder = Folder::new("zero-shares");
    at_stages(&folder, &format!("{RUN} {line}"), &[0, 1, 2, 3]);
    assert_alike(&folder, "stage 1", "stage-1", "stage-0");
    // Later stages add ranks first, then micro-steps; stage 2 may have taken the plans of stage 1.
    for stage in [2, 3] {
        let run = format!("stage-{stage}");
        let off = largest_difference(&folder.losses(&run), &folder.losses("stage-0"));
        assert!(off < 1e-4, "stage {stage}: off by {off:.1e}");
    }
    let longer = RUN.replace("--steps 12 --eval-every 6it", "--steps 30 --eval-every 30it");
    let balanced = format!("{longer} --ranks 2 --batch-size 8 --balance");
    for stage in [2, 3] {
        let line = format!("{balanced} --zero {stage} --out balanced-{stage}");
        let mut command = folder.command(common::VITESSE, &words(&line));
        let output = command.env("VITESSE_FAULT", "slow:rank=1:factor=3").output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(folder.losses(&format!("balanced-{stage}")).len(), 30);
    }
}

/// Batch norm, masks, and images of other sizes, whose evaluation gathers parameters as often on one rank as on another.
#[test]
fn pixels_train_alike() {
    let folder = Folder::new("zero-pixels");
    scenes(&folder, (40, 24), [12, 5]);
    let line = "train --data masks:set --model swinv2-nano/w8+upernet --image-size 32 --threads 1 --workers 1 --seed 3 --ranks 2 \
                --batch-size 2 --steps 3 --lr 1e-3 --ema 0.9";
    at_stages(&folder, line, &[0, 1, 3]);
    for stage in [1, 3] {
        assert_alike(&folder, &format!("stage {stage}"), &format!("stage-{stage}"), "stage-0");
    }
}

/// The memory of a plan, by what it is for.
fn plan(folder: &Folder, line: &str) -> Value {
    let output = folder.run(&words(&format!("plan --json {line}")));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Each stage divides what it is to divide, as `vitesse plan` shows it, for ranks that no machine has to have; a run has the memory that
/// was planned.
#[test]
fn memory_is_as_planned() {
    let folder = Folder::new("zero-plan");
    let model = "--model vit-ti/8 --image-size 32 --batch-size 4 --accumulate 2";
    for ranks in [2, 4, 8, 64] {
        let of = |stage: u8| plan(&folder, &format!("{model} --ranks {ranks} --zero {stage}"));
        let plans = [0, 1, 2, 3].map(of);
        let bytes = |stage: usize, kind: &str| plans[stage]["memory"][kind].as_u64().unwrap() as f64;
        for (stage, plan) in plans.iter().enumerate() {
            let all: u64 = plan["memory"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
            let planned = plan["arena"].as_u64().unwrap() + plan["state_bytes"].as_u64().unwrap();
            assert_eq!(all, planned, "{ranks} ranks, stage {stage}");
            assert_eq!(plan["zero"], stage, "{ranks} ranks");
        }
        // Padding and what stays whole.
        let divided = |stage: usize, kind: &str| bytes(stage, kind) * ranks as f64 / bytes(0, kind);
        for (kind, from) in [("moments", 1), ("gradients", 2), ("parameters", 3)] {
            for stage in 1..4 {
                let times = divided(stage, kind);
                let good =
                    if stage >= from { (0.99..1.6).contains(&times) } else { times > 0.99 * ranks as f64 };
                let whole = kind == "parameters" && stage == 3;
                assert!(
                    good || whole && times < 0.1 * ranks as f64,
                    "{ranks} ranks, stage {stage}: {kind} {times:.2}"
                );
            }
        }
        assert!(bytes(3, "gathered_parameters") > 0.0 || ranks > 8, "{ranks} ranks");
    }
    for (ranks, stage) in [2, 4].into_iter().flat_map(|ranks| (0..4).map(move |stage| (ranks, stage))) {
        let run = format!("--model vit-nano/8 --image-size 16 --batch-size 4 --ranks {ranks} --zero {stage}");
        let planned = plan(&folder, &format!("{run} --classes 10 --threads 1"));
        let planned = planned["arena"].as_u64().unwrap() + planned["state_bytes"].as_u64().unwrap();
        let line = format!("train {run} --steps 2 --train-samples 32 --test-samples 8 --threads 1 --json");
        let done: Value = serde_json::from_slice(&folder.run(&words(&line)).stdout).unwrap();
        assert_eq!(done["memory_bytes"].as_u64(), Some(planned), "stage {stage}, {ranks} ranks");
    }
}

/// What flags change about a plan is told in bytes and in steps.
#[test]
fn plans_are_compared() {
    let folder = Folder::new("zero-diff");
    let model = "plan --model vit-nano/8 --image-size 16 --batch-size 4 --ranks 2 --accumulate 2";
    let with = |more: &[&str]| {
        let mut line = words(model);
        line.extend(more);
        folder.start(&line).wait_with_output().unwrap()
    };
    let summary = text(&with(&["--diff", "--zero 1"]));
    let moments = summary.lines().find(|line| line.starts_with("moments")).unwrap();
    assert!(moments.contains(" -") && summary.contains("--zero 1"), "{summary}");
    // They stay whole; a bucket's end is padded.
    let parameters = summary.lines().find(|line| line.starts_with("parameters")).unwrap();
    let numbers = parameters.split_whitespace().skip(1).map(|number| number.replace([',', '+'], ""));
    let [before, with_zero, change] = numbers.map(|n| n.parse::<f64>().unwrap()).collect::<Vec<_>>()[..]
    else {
        panic!("{parameters}")
    };
    assert!(with_zero - before == change && (0.0..0.05 * before).contains(&change), "{parameters}");
    let steps = text(&with(&["--diff", "--zero 1", "--which", "last"]));
    assert!(steps.lines().any(|line| line.starts_with("- comm all_reduce")), "{steps}");
    assert!(steps.lines().any(|line| line.starts_with("+ comm reduce_scatter")), "{steps}");
    let update = text(&with(&["--diff=--zero 3", "--which", "update"]));
    assert!(update.contains("+ comm all_reduce"), "{update}");
    let same = text(&with(&["--diff", "--seed 1"]));
    assert!(!same.contains(" +") && same.contains("--seed 1"), "{same}");
    for (flags, why) in [
        ("--zero 4", "--diff --zero 4: --zero 4: is none of 0, 1, 2, 3"),
        ("--json", "--diff --json: takes flags that shape the plans"),
        ("", "takes flags that shape the plans"),
    ] {
        let output = with(&["--diff", flags]);
        let line = text(&output);
        assert!(
            !output.status.success() && line.contains(why) && line.trim_end().lines().count() == 1,
            "{line}"
        );
    }
}

/// Where stage 1 takes less memory, stage 2 takes its plans, and says so.
#[test]
fn stage_2_that_takes_more_is_stage_1() {
    let folder = Folder::new("zero-instead");
    let line = "--model vit-nano/8 --image-size 16 --batch-size 64 --ranks 2";
    assert_eq!(plan(&folder, &format!("{line} --zero 2"))["zero"], 1);
    let says = "--zero 2 takes the plans of stage 1, which need less memory here";
    let planned = text(&folder.run(&words(&format!("plan {line} --zero 2"))));
    assert!(planned.contains(says), "{planned}");
    let more = "--zero 2 --steps 2 --train-samples 128 --test-samples 8 --threads 1";
    let trained = text(&folder.run(&words(&format!("train {line} {more}"))));
    assert!(trained.contains(says), "{trained}");
}

/// A value that is no number is named where it was, whoever holds it.
#[test]
fn a_bad_value_is_named() {
    let folder = Folder::new("zero-bad");
    let run = "train --model vit-nano/8 --image-size 16 --batch-size 4 --ranks 2 --lr 1e38 --clip 0 --optimizer sgd --weight-decay 0 \
               --warmup-steps 0 --steps 20 --train-samples 160 --test-samples 8 --threads 1 --no-checkpoints";
    let of = |stage: u8| {
        let output = folder.start(&words(&format!("{run} --zero {stage}"))).wait_with_output().unwrap();
        assert!(!output.status.success(), "stage {stage}");
        let text = text(&output);
        text.lines().find(|line| line.starts_with("vitesse: ")).map(str::to_string).unwrap_or(text)
    };
    for stage in 0..4 {
        let line = of(stage);
        assert!(line.contains("on rank") && !line.contains("bucket."), "stage {stage}: {line}");
    }
}
