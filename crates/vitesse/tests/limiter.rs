//! The limiter names what was made to limit a real run: a slow loader, a slow link, a slow rank, a tiny batch, too little work, too
//! few cores. All but the last depend on times: they run with the slow tests, on a machine that nobody else uses.

mod common;

use common::{Folder, VITESSE, text};
use serde_json::Value;
use std::fs;
use std::process::Command;
use testing::need;
use testing::tools::Hosts;

/// An error where this machine is too busy for times to mean anything; the limiter would name that, and rightly.
fn quiet() -> Result<(), String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load: f64 = load.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0);
    if load > 1.5 * cores { Err(format!("{load} processes want {cores} cores")) } else { Ok(()) }
}

/// A study of one point; returns the cause and the sentence.
fn limiter(name: &str, fault: &str, args: &str) -> (String, String) {
    let folder = Folder::new(name);
    let args: Vec<&str> = args.split_whitespace().collect();
    let mut command = folder.command(VITESSE, &args);
    if !fault.is_empty() {
        command.env("VITESSE_FAULT", fault);
    }
    named(&folder, &mut command)
}

fn named(folder: &Folder, command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let results = fs::read_to_string(folder.0.join("s/results.json")).unwrap();
    let results: Value = serde_json::from_str(&results).unwrap();
    let point = &results["points"][0];
    let said = |key: &str| point["limiter"][key].as_str().unwrap_or_else(|| panic!("{point}")).to_string();
    println!("{}: {}", said("cause"), said("sentence"));
    (said("cause"), said("sentence"))
}

const TWO: &str = "study fixed-per-rank --ranks 2 --threads 1 --batch-sizes 16 --steps 24 --repeats 1 --oversubscribe --out s \
                   -- --train-samples 256 --test-samples 16";

/// Four ranks of two threads for each core.
#[test]
fn too_few_cores() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let args = format!(
        "study fixed-per-rank --ranks 2 --threads {} --batch-sizes 4 --steps 6 --warmup 1 --repeats 1 --oversubscribe --out s \
         --model vit-nano/8 -- --train-samples 64 --test-samples 8 --image-size 16",
        2 * cores
    );
    let (cause, sentence) = limiter("limiter-cores", "", &args);
    assert_eq!(cause, "oversubscribed");
    assert!(sentence.contains(&format!("2 ranks × {} threads on {cores} cores", 2 * cores)), "{sentence}");
}

/// 4 images per rank and step compute in some 10 ms; reading them takes a loader thread 400.
#[test]
#[ignore = "depends on times"]
fn a_slow_loader() {
    need!(quiet());
    let few = TWO.replace("--batch-sizes 16 --steps 24", "--batch-sizes 4 --steps 20");
    let (cause, sentence) = limiter("limiter-data", "data:rank=all:ms=100", &few);
    assert_eq!(cause, "data");
    assert!(sentence.contains("loader threads would feed 2 ranks (now 2)"), "{sentence}");
}

#[test]
#[ignore = "depends on times"]
fn a_straggler() {
    need!(quiet());
    let (cause, sentence) = limiter("limiter-straggler", "slow:rank=1:factor=3", TWO);
    assert_eq!(cause, "straggler");
    assert!(sentence.starts_with("rank 1 is "), "{sentence}");
}

/// An image of five tokens: the optimizer and the like take a third of its step.
#[test]
#[ignore = "depends on times"]
fn a_tiny_batch() {
    need!(quiet());
    let args = "study batch --ranks 1 --threads 1 --batch-sizes 1 --steps 200 --repeats 1 --out s --model vit-nano/8 \
                -- --train-samples 256 --test-samples 16 --image-size 16";
    let (cause, sentence) = limiter("limiter-tiny", "", args);
    assert_eq!(cause, "tiny-batch");
    assert!(sentence.contains("with 1 image per rank"), "{sentence}");
}

/// 40 images in batches of 32: every other batch is three quarters empty.
#[test]
#[ignore = "depends on times"]
fn too_little_work() {
    need!(quiet());
    let args = "study batch --ranks 1 --threads 1 --batch-sizes 32 --steps 24 --warmup 4 --repeats 1 --out s \
                -- --train-samples 40 --test-samples 16";
    let (cause, sentence) = limiter("limiter-little", "", args);
    assert_eq!(cause, "too-little-work");
    assert!(
        sentence.contains("40 images per epoch fill 2 batches of 32") && sentence.contains("38%"),
        "{sentence}"
    );
}

const NET: &str = "10.81.0";

/// Two hosts of network namespaces, joined by 50 Mbit/s; ranks are started as torchrun would.
#[test]
#[ignore = "depends on times"]
fn a_slow_link() {
    need!(quiet());
    let hosts = need!(Hosts::up("vitesse-limiter", NET, "50mbit"));
    let folder = Folder::new("limiter-link");
    let start = folder.0.join("start");
    let lines = format!(
        "#!/bin/sh\nexport WORLD_SIZE=2 MASTER_ADDR={NET}.1 MASTER_PORT=29471 LOCAL_RANK=0\n\
         RANK=1 {0} on 1 \"$@\" & RANK=0 {0} on 0 \"$@\" || exit 1\nwait\n",
        hosts.script.display()
    );
    fs::write(&start, lines).unwrap();
    let args = "study fixed-per-rank --ranks 2 --threads 1 --batch-sizes 16 --steps 12 --repeats 1 --out s --launcher";
    let launcher = format!("sh {}", start.display());
    let mut args: Vec<&str> = args.split_whitespace().chain([launcher.as_str()]).collect();
    args.extend("-- --train-samples 256 --test-samples 16".split_whitespace());
    let mut command = folder.command(VITESSE, &args);
    hosts.set(&mut command);
    let (cause, sentence) = named(&folder, &mut command);
    assert_eq!(cause, "exchange");
    assert!(sentence.contains("exposed communication") && sentence.contains("accumulation"), "{sentence}");
}
