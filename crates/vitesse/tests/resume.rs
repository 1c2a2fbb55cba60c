//! A run that is stopped, killed or runs out of disk, and goes on, leaves what an uninterrupted one leaves.

mod common;

use common::{Folder, VITESSE, is_time, text};
use formats::tensors::Reader;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// Dropout, averages, mixing and accumulation on: all that a checkpoint has to carry.
const RUN: &[&str] = &[
    "train",
    "--model",
    "vit-nano/8",
    "--train-samples",
    "200",
    "--test-samples",
    "40",
    "--batch-size",
    "8",
    "--accumulate",
    "2",
    "--epochs",
    "6",
    "--checkpoint-every",
    "4",
    "--dropout",
    "0.1",
    "--ema",
    "0.9",
    "--augment",
    "strong",
    "--threads",
    "2",
    "--seed",
    "3",
    "--out",
    "run",
];

/// A run in a folder of its own.
trait Resumed {
    fn resume_to_end(&self);
    fn checkpoints_are_whole(&self) -> usize;
}

impl Resumed for Folder {
    fn resume_to_end(&self) {
        let output = self.start(&["train", "--resume", "run"]).wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }

    /// Every checkpoint there can be opened.
    fn checkpoints_are_whole(&self) -> usize {
        let Ok(entries) = fs::read_dir(self.0.join("run/checkpoints")) else { return 0 };
        let whole = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if !name.ends_with(".tmp") {
                assert!(Reader::open(path).unwrap().verify().is_ok(), "{name} can't be read");
            }
            !name.ends_with(".tmp")
        };
        entries.map(|entry| entry.unwrap().path()).filter(whole).count()
    }
}

/// Metrics without times, and the values of the final weights.
fn results(folder: &Path) -> (Vec<String>, Vec<String>, Vec<u8>) {
    let run = folder.join("run");
    let without_rate = |line: &str| match serde_json::from_str::<serde_json::Value>(line).unwrap() {
        serde_json::Value::Object(mut line) => {
            line.retain(|key, _| !is_time(key));
            serde_json::Value::Object(line).to_string()
        }
        other => panic!("{other}"),
    };
    let jsonl = fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().map(without_rate).collect();
    let csv = fs::read_to_string(run.join("metrics.csv")).unwrap();
    let columns: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    let without_column = |line: &str| {
        let cells = line.split(',').zip(&columns).filter(|(_, column)| !is_time(column));
        cells.map(|(cell, _)| cell).collect::<Vec<_>>().join(",")
    };
    let weights = fs::read(run.join("weights.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
    (jsonl, csv.lines().map(without_column).collect(), weights[header..].to_vec())
}

fn uninterrupted(folder: &Folder) -> (Vec<String>, Vec<String>, Vec<u8>) {
    let output = folder.start(RUN).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    results(&folder.0)
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: a signal to a process this test started.
    unsafe { libc::kill(child.id() as i32, signal) };
}

#[test]
fn killed_at_twenty_moments_a_run_loses_nothing() {
    let expected = uninterrupted(&Folder::new("resume-whole"));
    let folder = Folder::new("resume-killed");
    let mut state = 12345u64;
    let mut kills = 0;
    // One command for the first start and for all others.
    let args = [RUN, &["--resume", "auto"]].concat();
    while kills < 20 {
        let mut child = folder.start(&args);
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_millis(60 + (state >> 33) % 400));
        signal(&child, libc::SIGKILL);
        let ended = child.wait().unwrap();
        kills += 1;
        if ended.success() {
            break;
        }
        folder.checkpoints_are_whole();
    }
    println!("{kills} kills");
    let output = folder.start(&args).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(results(&folder.0), expected);
}

#[test]
fn a_run_that_is_asked_to_stop_says_how_to_go_on() {
    let expected = uninterrupted(&Folder::new("resume-whole-signals"));
    let folder = Folder::new("resume-stopped");
    let mut args = RUN.to_vec();
    let signals = [
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGINT, "Ctrl-C"),
        (libc::SIGTERM, "SIGTERM"),
        (libc::SIGUSR1, "SIGUSR1"),
    ];
    for (number, name) in signals {
        let child = folder.start(&args);
        let metrics = folder.0.join("run/run.json");
        while !metrics.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(150));
        signal(&child, number);
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            break;
        }
        assert_eq!(output.status.code(), Some(128 + number), "{}", text(&output));
        assert!(text(&output).contains(&format!("stopped by {name} after")), "{}", text(&output));
        assert!(text(&output).contains("to go on: vitesse train --resume run"), "{}", text(&output));
        assert!(folder.checkpoints_are_whole() > 0);
        // Another number of threads gives the same bits.
        args = vec!["train", "--resume", "run", "--threads", "1"];
    }
    folder.resume_to_end();
    assert_eq!(results(&folder.0), expected);
    // A finished run has nothing left to do, and stays as it is.
    folder.resume_to_end();
    assert_eq!(results(&folder.0), expected);
}

/// In a mount namespace of its own, on a disk of a few megabytes.
#[test]
fn a_full_disk_ends_a_run_that_goes_on_when_there_is_room() {
    let expected = uninterrupted(&Folder::new("resume-whole-disk"));
    let folder = Folder::new("resume-disk");
    let checkpoint = {
        let probe = Folder::new("resume-disk-probe");
        let mut args = RUN.to_vec();
        args.extend(["--steps", "4"]);
        args.retain(|arg| !["--epochs", "6"].contains(arg));
        assert!(probe.start(&args).wait_with_output().unwrap().status.success());
        fs::metadata(probe.0.join("run/checkpoints/step-00000004.safetensors")).unwrap().len()
    };
    // Room for one checkpoint and a half.
    let room = checkpoint * 3 / 2;
    let script = format!(
        "set -e; mkdir disk; mount -t tmpfs -o size=64m tmpfs disk; cd disk
         head -c $((64 * 1024 * 1024 - {room} - 262144)) /dev/zero > filler
         if {VITESSE} {} > ../first.txt 2>&1; then echo 'the disk was large enough' >&2; exit 3; fi
         ls run/checkpoints > ../left.txt
         rm filler
         {VITESSE} train --resume run > ../second.txt 2>&1
         cp -r run ..",
        RUN.join(" ")
    );
    let output =
        Command::new("unshare").args(["-m", "-r", "sh", "-c", &script]).current_dir(&folder.0).output();
    let output = output.unwrap();
    let said = |name: &str| fs::read_to_string(folder.0.join(name)).unwrap_or_default();
    assert!(output.status.success(), "{}{}{}", text(&output), said("first.txt"), said("second.txt"));
    let complaint = said("first.txt");
    let last = complaint.lines().last().unwrap_or_default();
    assert!(last.starts_with("vitesse: ") && last.contains("No space left"), "{complaint}");
    assert!(!said("left.txt").contains("tmp") && said("left.txt").contains("step-"), "{}", said("left.txt"));
    assert_eq!(results(&folder.0), expected);
}
