//! Ranks that die, stop, panic, run out of memory or do something else than the others: every rank ends in time, not with
//! success; one line tells which rank and where; no process is left behind, and the last checkpoint is whole.

mod common;

use common::launched::{Ranks, tells};
use common::{Folder, VITESSE};
use std::fs;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Longer than any test lets it run.
const RUN: &str = "train --model vit-nano/4 --train-samples 4000 --test-samples 40 --batch-size 8 --epochs 1000 --threads 1 \
                   --workers 1 --checkpoint-every 3 --seed 2 --timeout 3";
/// All ranks must have ended this long after the timeout.
const GRACE: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(3);

/// Starts `world` ranks; `change` may alter a rank's command.
fn start(name: &str, world: usize, fault: &str, change: impl Fn(usize, &mut Vec<String>)) -> Ranks {
    Ranks::launch(Folder::new(name), world, |rank| {
        let mut words: Vec<String> = RUN.split_whitespace().map(str::to_string).collect();
        words.extend(["--out".to_string(), "run".to_string()]);
        words.insert(0, VITESSE.to_string());
        change(rank, &mut words);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        if !fault.is_empty() {
            command.env("VITESSE_FAULT", fault);
        }
        command
    })
}

const WHERE: &[&str] = &["rank 1"];

#[test]
fn a_killed_rank() {
    let mut ranks = start("fault-killed", 3, "", |_, _| {});
    ranks.folder.wait_for_step(3);
    ranks.signal(1, libc::SIGKILL);
    let text = ranks.end_within(GRACE, &[]);
    tells(&text, WHERE);
    assert!(text.contains("wait") || text.contains("all_reduce") || text.contains(" in "), "{text}");
    ranks.folder.can_go_on();
}

#[test]
fn the_first_rank_killed() {
    let mut ranks = start("fault-first-killed", 3, "", |_, _| {});
    ranks.folder.wait_for_step(3);
    ranks.signal(0, libc::SIGKILL);
    tells(&ranks.end_within(GRACE, &[]), &["rank 0"]);
    ranks.folder.can_go_on();
}

#[test]
fn a_stopped_rank() {
    let mut ranks = start("fault-stopped", 3, "", |_, _| {});
    ranks.folder.wait_for_step(3);
    ranks.signal(1, libc::SIGSTOP);
    let text = ranks.end_within(TIMEOUT + GRACE, &[1]);
    tells(&text, &["rank 1", "all_reduce"]);
    // When it goes on, it finds the others gone, and ends too.
    ranks.signal(1, libc::SIGCONT);
    ranks.end_within(GRACE, &[0, 2]);
    ranks.folder.can_go_on();
}

#[test]
fn a_panicking_rank() {
    let mut ranks = start("fault-panic", 3, "panic:rank=1:step=7", |_, _| {});
    tells(
        &ranks.end_within(Duration::from_secs(60), &[]),
        &["rank 1", "panicked", "VITESSE_FAULT asks for it"],
    );
    ranks.folder.can_go_on();
}

#[test]
fn a_hanging_rank() {
    let mut ranks = start("fault-hang", 3, "hang:rank=1:step=7", |_, _| {});
    ranks.folder.wait_for_step(3);
    tells(&ranks.end_within(TIMEOUT + GRACE + GRACE, &[]), &["rank 1", "all_reduce"]);
    ranks.folder.can_go_on();
}

#[test]
fn a_collective_out_of_order() {
    let mut ranks = start("fault-order", 3, "order:rank=1:step=7", |_, _| {});
    tells(&ranks.end_within(Duration::from_secs(60), &[]), &["rank 1", "barrier", "all_reduce"]);
    ranks.folder.can_go_on();
}

#[test]
fn a_rank_out_of_memory() {
    let limited = |rank: usize, words: &mut Vec<String>| {
        // 700 MB of activations, of which one rank gets 400.
        let position = words.iter().position(|word| word == "--batch-size").unwrap();
        words[position + 1] = "512".to_string();
        if rank == 1 {
            let command = words.join(" ");
            *words = ["sh", "-c", &format!("ulimit -v 400000; exec {command}")].map(str::to_string).to_vec();
        }
    };
    let mut ranks = start("fault-memory", 3, "", limited);
    tells(&ranks.end_within(Duration::from_secs(60), &[]), &["rank 1", "memory"]);
}

#[test]
fn another_configuration() {
    let change = |rank: usize, words: &mut Vec<String>| {
        if rank == 1 {
            words.extend(["--lr", "0.5"].map(str::to_string));
        }
    };
    let mut ranks = start("fault-configuration", 3, "", change);
    tells(&ranks.end_within(Duration::from_secs(60), &[]), &["rank 1", "another configuration", "0.5"]);
}

/// Two sets of as many images with the same labels.
#[test]
fn another_data_set() {
    let sets = Folder::new("fault-sets");
    for (set, factor) in [("set", 37u8), ("other", 38)] {
        let folder = sets.0.join(set).join("cifar-10-batches-bin");
        fs::create_dir_all(&folder).unwrap();
        let records: Vec<u8> =
            (0..40u8).flat_map(|i| [&[i % 10][..], &[i.wrapping_mul(factor); 3072]].concat()).collect();
        for file in
            ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
        {
            fs::write(folder.join(format!("{file}.bin")), &records).unwrap();
        }
    }
    let mut ranks = start("fault-data", 2, "", |rank, words| {
        let set = sets.0.join(if rank == 1 { "other" } else { "set" });
        words.retain(|word| !["--train-samples", "4000", "--test-samples", "40"].contains(&word.as_str()));
        words.extend(["--data".to_string(), format!("cifar10:{}", set.display())]);
    });
    tells(&ranks.end_within(Duration::from_secs(60), &[]), &["rank 1", "other training data"]);
}

/// In one process: a rank that panics ends the run with one line, and so do a hang and a collective out of order.
#[test]
fn ranks_of_one_process() {
    for (fault, words) in [
        ("panic:rank=1:step=4", ["rank 1", "panicked"]),
        ("order:rank=2:step=4", ["rank 2", "barrier"]),
        ("hang:rank=1:step=4", ["rank 1", "all_reduce"]),
    ] {
        let folder = Folder::new("fault-threads");
        let args: Vec<&str> = RUN.split_whitespace().chain(["--ranks", "3", "--out", "run"]).collect();
        let start = Instant::now();
        let output: Output = folder.command(VITESSE, &args).env("VITESSE_FAULT", fault).output().unwrap();
        assert!(start.elapsed() < TIMEOUT + GRACE + GRACE, "{fault}: {:?}", start.elapsed());
        assert!(!output.status.success());
        tells(&String::from_utf8_lossy(&output.stderr), &words);
        folder.can_go_on();
    }
}

/// The process that the user started watches over the run, and starts it again; the result is that of a run without a fault.
#[test]
fn a_run_starts_again_by_itself() {
    let run = "train --model vit-nano/8 --train-samples 400 --test-samples 40 --batch-size 8 --epochs 1 --threads 1 --ranks 2 \
               --checkpoint-every 3 --seed 2 --out run";
    let args: Vec<&str> = run.split_whitespace().collect();
    let plain = Folder::new("fault-restart-plain");
    plain.run(&args);
    let folder = Folder::new("fault-restart");
    let watched: Vec<&str> = args.iter().copied().chain(["--max-restarts", "2"]).collect();
    let output =
        folder.command(VITESSE, &watched).env("VITESSE_FAULT", "panic:rank=1:step=10").output().unwrap();
    let text = common::text(&output);
    assert!(output.status.success() && text.contains("rank 1") && text.contains("restart 1 of 2"), "{text}");
    assert_eq!(folder.losses("run"), plain.losses("run"));
}

/// Under mpirun, with which nobody is left behind either.
#[cfg(feature = "mpi")]
mod mpi {
    use super::*;
    use std::process::Child;

    fn mpirun(folder: &Folder, fault: &str) -> Child {
        let mut words = vec!["--allow-run-as-root", "--oversubscribe", "-n", "3", VITESSE];
        words.extend(RUN.split_whitespace().chain(["--out", "run"]));
        let mut command = folder.command("mpirun", &words);
        if !fault.is_empty() {
            command.env("VITESSE_FAULT", fault);
        }
        command.spawn().expect("mpirun: install openmpi-bin")
    }

    /// The ranks that mpirun started, found by their parent.
    fn pids(parent: u32) -> Vec<i32> {
        let children = |pid: i32| -> Vec<i32> {
            let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            text.split_whitespace().map(|word| word.parse().unwrap()).collect()
        };
        children(parent as i32).into_iter().flat_map(|pid| [vec![pid], children(pid)].concat()).collect()
    }

    fn rank_of(pid: i32) -> Option<usize> {
        let text = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        text.split('\0').find_map(|word| word.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok())
    }

    fn suffers(name: &str, fault: &str, signal: Option<i32>, words: &[&str]) {
        let folder = Folder::new(name);
        let mut child = mpirun(&folder, fault);
        folder.wait_for_step(3);
        let found = pids(child.id());
        if let Some(signal) = signal {
            let pid = found.iter().copied().find(|pid| rank_of(*pid) == Some(1)).expect("rank 1");
            // SAFETY: a signal to a process that this test's mpirun started.
            unsafe { libc::kill(pid, signal) };
        }
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > TIMEOUT + GRACE + GRACE {
                let _ = child.kill();
                panic!("mpirun still runs");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        println!("{name}: after {:.1} s", start.elapsed().as_secs_f64());
        let output = child.wait_with_output().unwrap();
        assert!(!output.status.success());
        tells(&String::from_utf8_lossy(&output.stderr), words);
        std::thread::sleep(Duration::from_millis(200));
        let left: Vec<i32> = found.into_iter().filter(|pid| rank_of(*pid).is_some()).collect();
        assert!(left.is_empty(), "{left:?} still run");
        folder.can_go_on();
    }

    #[test]
    fn a_killed_rank() {
        suffers("fault-mpi-killed", "", Some(libc::SIGKILL), &["rank 1"]);
    }

    #[test]
    fn a_stopped_rank() {
        suffers("fault-mpi-stopped", "", Some(libc::SIGSTOP), &["rank 1", "all_reduce"]);
    }

    #[test]
    fn a_panicking_rank() {
        suffers("fault-mpi-panic", "panic:rank=1:step=40", None, &["rank 1", "panicked"]);
    }

    #[test]
    fn a_collective_out_of_order() {
        suffers("fault-mpi-order", "order:rank=1:step=40", None, &["rank 1", "barrier"]);
    }
}
