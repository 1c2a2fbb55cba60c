//! Runs that start again by themselves: killed, stopped by a signal, or left alone.

mod common;

use common::{Folder, text};
use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const RUN: &[&str] = &[
    "train",
    "--model",
    "vit-nano/8",
    "--train-samples",
    "2000",
    "--test-samples",
    "20",
    "--batch-size",
    "8",
    "--checkpoint-every",
    "5",
    "--threads",
    "1",
    "--out",
    "run",
];

fn start(folder: &Folder, more: &[&str]) -> Child {
    folder.start(&[RUN, more].concat())
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The processes that a process started.
fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

fn child_of(supervisor: &Child) -> u32 {
    let mut found = Vec::new();
    eventually("a child", || {
        found = children(supervisor.id());
        !found.is_empty()
    });
    found[0]
}

fn signal(pid: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

fn is_gone(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

#[test]
fn a_killed_run_goes_on_from_its_checkpoint_until_no_restart_is_left() {
    let folder = Folder::new("restarts-killed");
    let supervisor = start(&folder, &["--steps", "100000", "--max-restarts", "1", "--rank-logs", "logs"]);
    folder.wait_for_step(5);
    let first = child_of(&supervisor);
    signal(first, "-KILL");
    eventually("another child", || children(supervisor.id()).iter().any(|pid| *pid != first));
    let second = child_of(&supervisor);
    // Between its making and its beginning a child has the command of its parent.
    eventually("the command that goes on", || {
        let words = fs::read_to_string(format!("/proc/{second}/cmdline")).unwrap_or_default();
        words.ends_with("\0--rank-logs\0logs\0--resume=auto\0")
    });
    eventually("the second launch", || {
        fs::read_to_string(folder.0.join("run/run.json"))
            .is_ok_and(|text| text.matches("\"command\"").count() == 2)
    });
    eventually("both children's lines in the log of the rank", || {
        let log = fs::read_to_string(folder.0.join("logs/rank-0.log")).unwrap_or_default();
        log.matches("vit-nano/8").count() == 2 && log.contains("going on after step ")
    });
    signal(second, "-KILL");
    let output = supervisor.wait_with_output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(137), "{text}");
    assert!(
        text.contains("ended by SIGKILL (killed, or out of memory); restart 1 of 1 from step "),
        "{text}"
    );
    assert!(text.contains("no restart is left after 1"), "{text}");
}

#[test]
fn a_run_that_ends_by_itself_or_would_fail_again_is_not_started_again() {
    let folder = Folder::new("restarts-ends");
    let output = start(&folder, &["--steps", "3", "--max-restarts=2"]).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let output = start(&folder, &["--steps", "3", "--max-restarts", "2"]).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    assert!(text.contains("already holds a run") && !text.contains("restart 1"), "{text}");
}

#[test]
fn a_signal_is_passed_on_and_the_run_saves_and_stops() {
    let folder = Folder::new("restarts-signal");
    let supervisor = start(&folder, &["--steps", "100000", "--max-restarts", "2"]);
    folder.wait_for_step(5);
    signal(supervisor.id(), "-USR1");
    let output = supervisor.wait_with_output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(128 + 10), "{text}");
    assert!(text.contains("stopped by SIGUSR1 after ") && !text.contains("restart 1"), "{text}");
}

#[test]
fn nothing_is_left_when_the_supervisor_is_killed() {
    let folder = Folder::new("restarts-orphan");
    let mut supervisor = start(&folder, &["--steps", "100000", "--max-restarts", "2"]);
    folder.wait_for_step(5);
    let child = child_of(&supervisor);
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    eventually("the child's end", || is_gone(child));
}

#[test]
fn restarts_that_can_t_be_are_refused() {
    let refused = |args: &[&str], variables: &[(&str, &str)], part: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vitesse"));
        let output = command.args(args).envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = text(&output);
        assert!(text.contains(part) && text.lines().count() == 1, "{text}");
    };
    refused(&["train", "--max-restarts", "2"], &[], "--max-restarts needs --out");
    let launched = [("RANK", "0"), ("WORLD_SIZE", "2")];
    refused(&["train", "--max-restarts", "2", "--out", "x"], &launched, "--max-restarts under torchrun");
    let alone = &["train", "--max-restarts", "2", "--min-ranks", "1", "--ranks", "2", "--out", "x"];
    refused(alone, &[], "--min-ranks 1 is for runs that go on without a lost host: it needs");
    let hosts = ["--comm", "mpi", "--hostfile", "hosts"];
    let many = ["train", "--max-restarts", "2", "--min-ranks", "3", "--ranks", "2", "--out", "x"];
    refused(&[&many[..], &hosts].concat(), &[], "--min-ranks 3 is more than --ranks 2");
    refused(&["train", "--min-ranks", "3"], &launched, "--min-ranks 3: torchrun started 2");
}
