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
    (0..2).flat_map(|host| hosts.pids(host)).filter(|pid| name(pid).trim() == "vitesse").collect()
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
