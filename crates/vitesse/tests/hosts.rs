//! Two hosts, made of network namespaces with a slow link between them, under mpirun over TCP.
#![cfg(feature = "mpi")]

mod common;

use common::{Folder, VITESSE, text};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use testing::need;
use testing::tools::Hosts;

/// Processes of vitesse on the hosts.
fn ranks(hosts: &Hosts) -> Vec<String> {
    let name = |pid: &String| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    (0..3).flat_map(|host| hosts.pids(host)).filter(|pid| name(pid).trim() == "vitesse").collect()
}

fn train(hosts: &Hosts, folder: &Folder, args: &[&str]) -> Command {
    let mut command = hosts.command(&[&["mpirun", "-n", "2", VITESSE], args].concat());
    command.current_dir(&folder.0);
    command
}

#[test]
fn two_hosts_train_as_one_process_does() {
    let hosts = need!(Hosts::up("vitesse-train", "10.78.0", "1gbit"));
    let folder = Folder::new("hosts-train");
    let run = "train --model vit-nano/8 --train-samples 400 --test-samples 40 --batch-size 16 --steps 8 --threads 1 --seed 4 \
               --bucket-size 100000 --out";
    let args = |out| run.split_whitespace().chain([out]).collect::<Vec<_>>();
    let apart: Output = train(&hosts, &folder, &args("apart")).output().unwrap();
    assert!(apart.status.success(), "{}", text(&apart));
    let mut together = args("together");
    together.extend(["--ranks", "2"]);
    folder.run(&together);
    assert_eq!(folder.losses("apart"), folder.losses("together"), "the same bits over any engine");
}

/// The link between the hosts is cut: both sides end, and a line names the rank beyond it.
#[test]
fn a_cut_link_ends_the_run() {
    let hosts = need!(Hosts::up("vitesse-cut", "10.79.0", "1gbit"));
    let folder = Folder::new("hosts-cut");
    let run = "train --model vit-nano/8 --train-samples 4000 --test-samples 40 --batch-size 16 --epochs 1000 --threads 1 \
               --checkpoint-every 3 --timeout 3 --out run";
    let mut command = train(&hosts, &folder, &run.split_whitespace().collect::<Vec<_>>());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    folder.wait_for_step(3);
    assert!(hosts.command(&["cut", "1"]).status().unwrap().success());
    let start = Instant::now();
    while !ranks(&hosts).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(3 + 10), "{:?} still run", ranks(&hosts));
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("all ranks ended after {:.1} s", start.elapsed().as_secs_f64());
    // mpirun itself waits for the daemon beyond the cut; that is not ours to end, but the test's.
    std::thread::sleep(Duration::from_secs(1));
    let _ = child.kill();
    let _ = hosts.command(&["down"]).output();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let line =
        errors.lines().find(|line| line.starts_with("vitesse: ")).unwrap_or_else(|| panic!("{errors}"));
    println!("{line}");
    assert!(line.contains("rank 1") && line.contains("all_reduce"), "{line}");
    folder.can_go_on();
}

/// A run over three hosts that vitesse starts by itself, in host 0.
fn supervised(hosts: &Hosts, folder: &Folder, more: &str) -> Command {
    hosts.write_hostfile(&folder.0.join("hosts"), 3, 1);
    let run = "train --model vit-nano/8 --train-samples 2400 --test-samples 40 --batch-size 8 --threads 1 --seed 4 \
               --checkpoint-every 3 --ranks 3 --comm mpi --hostfile hosts --timeout 3 --out run";
    let words: Vec<&str> = run.split_whitespace().chain(more.split_whitespace()).collect();
    let mut command = hosts.command(&[&["on", "0", VITESSE], &words[..]].concat());
    command.current_dir(&folder.0).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command
}

/// One of three hosts is lost: the other two go on from the last checkpoint with the images of before, and learn what three would have.
#[test]
fn a_run_goes_on_without_a_lost_host() {
    let hosts = need!(Hosts::many(3, "vitesse-lost", "10.80.0", "1gbit"));
    let folder = Folder::new("hosts-lost");
    let child = supervised(&hosts, &folder, "--steps 60 --max-restarts 2 --min-ranks 2").spawn().unwrap();
    folder.wait_for_step(6);
    assert!(hosts.command(&["cut", "2"]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let text = text(&output);
    println!("{text}");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("rank 2") && text.contains("restart 1 of 2 from step "), "{text}");
    assert!(text.contains("with 2 of 3 ranks: host 10.80.0.3 does not answer"), "{text}");
    let anew = "a step has the same 24 images, divided as 2 ranks × 6 × 2 micro-steps, before as 3 ranks × 8 × 1 micro-step";
    assert!(text.contains(anew), "{text}");
    assert_eq!(text.matches("restart 1").count() + text.matches("restart 2").count(), 1, "{text}");
    let plain = Folder::new("hosts-lost-plain");
    let undisturbed = "train --model vit-nano/8 --train-samples 2400 --test-samples 40 --batch-size 8 --threads 1 --seed 4 \
                       --steps 60 --ranks 3 --out run";
    plain.run(&undisturbed.split_whitespace().collect::<Vec<_>>());
    let difference = common::largest_difference(&folder.losses("run"), &plain.losses("run"));
    println!("losses within {difference:e}");
    assert!(difference < 2e-4, "{difference:e}");
    assert!(ranks(&hosts).is_empty(), "{:?} still run", ranks(&hosts));
}

/// Without restarts vitesse still ends the mpirun that it started, and nothing stays behind on the hosts that can be reached.
#[test]
fn an_mpirun_that_hangs_is_ended() {
    let hosts = need!(Hosts::many(3, "vitesse-hang", "10.81.0", "1gbit"));
    let folder = Folder::new("hosts-hang");
    let mut child = supervised(&hosts, &folder, "--epochs 1000").spawn().unwrap();
    folder.wait_for_step(6);
    assert!(hosts.command(&["cut", "1"]).status().unwrap().success());
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(3 + 10) {
            let _ = child.kill();
            panic!("vitesse still runs: {}", text(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("ended after {:.1} s", start.elapsed().as_secs_f64());
    let output = child.wait_with_output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("rank 1") && text.contains("all_reduce"), "{text}");
    let left: Vec<String> = [0, 2].iter().flat_map(|host| hosts.pids(*host)).collect();
    assert!(left.is_empty(), "{left:?} still run");
    folder.can_go_on();
}
