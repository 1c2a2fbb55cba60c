//! The same faults under mpirun. It ends all processes when one dies; the line must come before that.

use super::ranks::{AS_RANK, Outcome, Ranks, assert_has, one_line};
use super::{PATIENT, SOON};
use std::time::Duration;

/// How mpirun ended.
fn mpirun(scenario: &str, ranks: usize, timeout_ms: u64) -> Outcome {
    let mut children = Ranks::new(&format!("mpi-{scenario}"));
    let ranks = ranks.to_string();
    let by = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks];
    let mut command = children.command(&by, scenario, timeout_ms);
    command.args(AS_RANK);
    children.add(0, command);
    let outcomes = children.end_within(Duration::from_millis(timeout_ms.min(2000)) + SOON);
    outcomes.into_iter().next().expect("mpirun was started")
}

#[test]
fn ranks_of_mpirun_end_well() {
    let outcome = mpirun("fine", 4, PATIENT);
    assert!(outcome.status.success(), "{}", outcome.said);
    assert!(!outcome.said.contains("vitesse: "), "{}", outcome.said);
}

#[test]
fn every_fault_is_reported_in_one_line_under_mpirun() {
    let cases: [(&str, u64, &[&str]); 6] = [
        ("killed", PATIENT, &["rank 2 (host ", "was lost", "all_reduce #"]),
        (
            "stopped",
            2000,
            &["rank 2 (host ", "sent no heartbeat for 2 s", "ranks 0, 1 and 3 wait for it in all_reduce #11"],
        ),
        ("error", PATIENT, &["rank 2: no image 7"]),
        ("same error", PATIENT, &["vitesse: no image 7"]),
        (
            "panic",
            PATIENT,
            &["rank 1 (host ", "index out of bounds", "ranks 0, 2 and 3 wait for it in all_reduce #11"],
        ),
        ("order", PATIENT, &["rank 1", "all_gather", "head", "all_reduce", "blocks.7"]),
    ];
    for (scenario, timeout_ms, parts) in cases {
        let outcome = mpirun(scenario, 4, timeout_ms);
        assert!(!outcome.status.success(), "{scenario}");
        let (line, codes) = one_line(&[outcome]);
        assert_has(&line, parts);
        println!("{scenario}: {codes:?} {line}");
    }
}
