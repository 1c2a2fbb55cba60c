use super::*;

const LIMITS: Limits = Limits { silence: Duration::from_secs(10), stuck: Duration::from_secs(120) };

fn at(sequence: u64, name: &str) -> Option<CallInfo> {
    Some(CallInfo { sequence, collective: "all_reduce", name: Arc::from(name), bytes: 1_800_000 })
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Ranks that wait in call 137, except those that `change` changes; last heartbeat at 100 s.
fn statuses(world: usize, change: impl Fn(&mut RankStatus)) -> Vec<RankStatus> {
    let status = |rank| {
        let mut status = RankStatus::new(rank, &format!("node{}", rank / 2), 70 + rank as u32, seconds(100));
        status.snapshot = Snapshot {
            progress: 1000,
            doing: Arc::from("backward of blocks.7"),
            awaits_device: false,
            current_call: at(137, "blocks.7"),
            last_call: at(137, "blocks.7"),
            entered: 137,
            digest: 5,
            milestone: 6,
        };
        change(&mut status);
        status
    };
    (0..world).map(status).collect()
}

fn outside(status: &mut RankStatus, doing: &str) {
    status.snapshot.current_call = None;
    status.snapshot.last_call = at(136, "blocks.8");
    (status.snapshot.entered, status.snapshot.digest) = (136, 4);
    status.snapshot.doing = Arc::from(doing);
}

fn failed(status: &mut RankStatus, after: u64, cause: Cause, line: &str) {
    status.state =
        RankState::Failed { at: seconds(100) + Duration::from_millis(after), cause, line: line.to_string() };
}

fn diagnosis(statuses: &[RankStatus], at: Duration) -> Diagnosis {
    diagnose(statuses, &LIMITS, at).expect("a fault")
}

#[test]
fn a_lost_device_is_reported_unchanged_and_a_restart_may_succeed() {
    let line = "rank 1 lost GPU 1 (H200) in step 7: CUDA_ERROR_LAUNCH_FAILED";
    let statuses = statuses(3, |status| match status.rank {
        1 => failed(status, 0, Cause::Device, line),
        2 => failed(status, 10, Cause::Aborted, "communication was aborted"),
        _ => {}
    });
    let Diagnosis { rank, line: reported, code } = diagnosis(&statuses, seconds(102));
    assert_eq!((rank, code), (1, 3));
    assert!(reported.starts_with(line) && reported.contains("ranks 0 and 2 wait for it"), "{reported}");
}

#[test]
fn ranks_that_wait_for_each_other_for_a_while_are_well() {
    let statuses = statuses(4, |status| {
        if status.rank == 2 {
            outside(status, "reading images")
        }
    });
    for now in [100, 105, 109] {
        assert_eq!(diagnose(&statuses, &LIMITS, seconds(now)), None);
    }
}

#[test]
fn a_lost_rank_is_named_with_its_activity_and_the_ranks_that_wait() {
    let statuses = statuses(4, |status| {
        if status.rank == 2 {
            outside(status, "backward of blocks.5.mlp.fc1 (linear_grad_w)");
            status.state = RankState::Lost { at: seconds(100) };
        }
    });
    assert_eq!(diagnose(&statuses, &LIMITS, seconds(100)), None, "others may tell more within a moment");
    let line = "rank 2 (host node1, pid 72) was lost in backward of blocks.5.mlp.fc1 (linear_grad_w); \
                ranks 0, 1 and 3 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(diagnosis(&statuses, seconds(101)), Diagnosis { rank: 2, line: line.to_string(), code: 3 });
}

#[test]
fn a_lost_rank_that_was_past_its_last_heartbeat_is_not_reported_there() {
    let statuses = statuses(2, |status| {
        if status.rank == 1 {
            outside(status, "forward");
            status.snapshot.entered = 130;
            status.state = RankState::Lost { at: seconds(100) };
        }
    });
    let line = diagnosis(&statuses, seconds(101)).line;
    assert!(line.contains("was lost, last heartbeat in forward; rank 0 waits"), "{line}");
}

#[test]
fn of_ranks_lost_together_the_first_is_named() {
    let statuses =
        statuses(3, |status| status.state = RankState::Lost { at: seconds(110 - status.rank as u64) });
    assert_eq!(diagnosis(&statuses, seconds(120)).rank, 2);
}

#[test]
fn a_rank_without_a_heartbeat_is_named() {
    let statuses = statuses(4, |status| match status.rank {
        3 => outside(status, "forward of head"),
        _ => status.last_heartbeat = seconds(110),
    });
    assert_eq!(diagnose(&statuses, &LIMITS, seconds(109)), None);
    let line = "rank 3 (host node1, pid 73) sent no heartbeat for 10 s (stopped, or cut off from the network), last in forward of head; \
                ranks 0, 1 and 2 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(diagnosis(&statuses, seconds(111)), Diagnosis { rank: 3, line: line.to_string(), code: 3 });
}

#[test]
fn ranks_of_a_host_fall_silent_together() {
    let statuses = statuses(4, |status| {
        status.last_heartbeat = match status.rank {
            2 => seconds(100),
            3 => seconds(100) + Duration::from_millis(250),
            _ => seconds(111),
        }
    });
    let line = diagnosis(&statuses, seconds(111)).line;
    assert!(line.starts_with("ranks 2 and 3 (host node1) sent no heartbeat for 10 s"), "{line}");
    assert!(line.ends_with("ranks 0 and 1 wait for them in all_reduce #137 of blocks.7 (1.8 MB)"), "{line}");
}

#[test]
fn a_rank_without_progress_is_hung_only_if_it_is_heard_of_idle_and_waited_for() {
    let stuck = |busy: bool, last_heartbeat: u64, others_wait: bool| {
        statuses(3, |status| {
            (status.last_heartbeat, status.last_progress) = (seconds(230), seconds(100));
            if status.rank == 1 {
                outside(status, "reading images");
                (status.busy, status.last_heartbeat) = (busy, seconds(last_heartbeat));
            } else if !others_wait {
                outside(status, "reading images");
            }
        })
    };
    let line = "rank 1 (host node0, pid 71) made no progress for 120 s in reading images; \
                ranks 0 and 2 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    let found = diagnosis(&stuck(false, 230, true), seconds(230));
    assert_eq!(found, Diagnosis { rank: 1, line: line.to_string(), code: 3 });
    assert_eq!(diagnose(&stuck(true, 230, true), &LIMITS, seconds(230)), None, "it is busy");
    assert_eq!(
        diagnose(&stuck(false, 225, true), &LIMITS, seconds(230)),
        None,
        "it is silent, which will show"
    );
    assert_eq!(diagnose(&stuck(false, 230, false), &LIMITS, seconds(230)), None, "nobody waits");
    assert_eq!(diagnose(&stuck(false, 230, true), &LIMITS, seconds(219)), None, "not yet");
}

/// With NCCL's calls in graphs, no host is in a call while a kernel of one of them never ends.
#[test]
fn a_kernel_that_never_ends_ends_the_run() {
    let hang = |computes: usize| {
        statuses(3, |status| {
            outside(status, "an update on the GPU");
            status.snapshot.awaits_device = status.rank != computes;
            (status.last_heartbeat, status.last_progress) = (seconds(230), seconds(100));
        })
    };
    let line = "no rank made progress for 120 s, and all wait for their GPUs in an update on the GPU: a kernel or NCCL hangs";
    let expected = Diagnosis { rank: 0, line: line.to_string(), code: 3 };
    assert_eq!(diagnosis(&hang(3), seconds(230)), expected);
    assert_eq!(diagnose(&hang(3), &LIMITS, seconds(219)), None, "not yet");
    assert_eq!(diagnose(&hang(1), &LIMITS, seconds(230)), None, "one of them computes");
}

#[test]
fn a_collective_in_which_all_wait_hangs() {
    let still = |status: &mut RankStatus| {
        (status.last_heartbeat, status.last_progress) = (seconds(230), seconds(100))
    };
    let line = "all ranks wait in all_reduce #137 of blocks.7 (1.8 MB) for 120 s: communication hangs";
    assert_eq!(diagnosis(&statuses(3, still), seconds(230)).line, line);
    let one_behind = statuses(3, |status| {
        still(status);
        if status.rank == 2 {
            outside(status, "");
            status.snapshot.current_call = at(136, "blocks.8");
        }
    });
    let found = diagnosis(&one_behind, seconds(230));
    assert_eq!(found.rank, 2);
    assert!(found.line.contains("in all_reduce #136 of blocks.8"), "{}", found.line);
}

#[test]
fn other_calls_name_both_and_the_odd_one_out() {
    let odd = |odd: usize| {
        statuses(3, |status| {
            if status.rank == odd {
                status.snapshot.digest = 9;
                status.snapshot.last_call = at(137, "head");
            }
        })
    };
    let found = diagnosis(&odd(2), seconds(100));
    let line = "rank 2 (host node1, pid 72) calls all_reduce #137 of head (1.8 MB) \
                where rank 0 calls all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(found, Diagnosis { rank: 2, line: line.to_string(), code: 1 });
    assert_eq!(diagnosis(&odd(0), seconds(100)).rank, 0);
    let two = statuses(2, |status| status.snapshot.digest = status.rank as u64);
    assert_eq!(diagnosis(&two, seconds(100)).rank, 1);
}

#[test]
fn calls_that_differed_before_show_at_milestones() {
    let statuses = statuses(3, |status| {
        status.snapshot.entered += status.rank as u64;
        status.snapshot.digest += status.rank as u64;
        status.snapshot.milestone = u64::from(status.rank == 1);
    });
    let found = diagnosis(&statuses, seconds(100));
    assert_eq!((found.rank, found.code), (1, 1));
    assert!(
        found.line.contains("called other collectives than rank 0 among the first 137"),
        "{}",
        found.line
    );
}

#[test]
fn ranks_at_different_calls_are_well() {
    let statuses = statuses(3, |status| {
        status.snapshot.entered += 64 * status.rank as u64;
        status.snapshot.digest += status.rank as u64;
        status.snapshot.milestone += status.rank as u64;
    });
    assert_eq!(diagnose(&statuses, &LIMITS, seconds(100)), None);
}

#[test]
fn an_error_is_reported_with_the_ranks_that_have_it() {
    let with = |ranks: &'static [usize]| {
        statuses(3, move |status| {
            if ranks.contains(&status.rank) {
                failed(status, status.rank as u64, Cause::Own, "no such file");
            }
        })
    };
    let line = |ranks| diagnosis(&with(ranks), seconds(101)).line;
    assert_eq!(line(&[2]), "rank 2: no such file");
    assert_eq!(line(&[1, 2]), "ranks 1 and 2: no such file");
    assert_eq!(line(&[0, 1, 2]), "no such file");
    let soon = Duration::from_millis(100_010);
    assert_eq!(diagnose(&with(&[0, 1]), &LIMITS, soon), None, "the third may have it too");
    assert!(diagnose(&with(&[0, 1, 2]), &LIMITS, soon).is_some());
}

#[test]
fn what_follows_from_a_fault_does_not_hide_it() {
    let consequences = |root: bool| {
        statuses(4, move |status| match status.rank {
            0 => failed(status, 0, Cause::Lost(1), "lost rank 1 (closed)"),
            1 => failed(status, 1, Cause::Lost(2), "lost rank 2 (closed)"),
            2 if root => status.state = RankState::Lost { at: seconds(101) },
            3 => failed(status, 3, Cause::Aborted, "aborted"),
            _ => {}
        })
    };
    assert_eq!(diagnosis(&consequences(true), seconds(102)).rank, 2);
    assert_eq!(diagnose(&consequences(false), &LIMITS, seconds(101)), None, "rank 2 may yet time out");
    let found = diagnosis(&consequences(false), seconds(102));
    let line = "rank 1, in all_reduce #137 of blocks.7 (1.8 MB): lost rank 2 (closed)";
    assert_eq!(found, Diagnosis { rank: 2, line: line.to_string(), code: 3 });
}

#[test]
fn a_finished_rank_is_at_fault_only_for_calls_it_never_made() {
    let left = |entered: u64| {
        statuses(3, move |status| {
            if status.rank == 1 {
                (status.snapshot.current_call, status.snapshot.entered) = (None, entered);
                status.snapshot.digest = if entered == 137 { 5 } else { 4 };
                status.state = RankState::Finished;
            }
        })
    };
    assert_eq!(diagnose(&left(137), &LIMITS, seconds(101)), None);
    assert_eq!(diagnose(&left(136), &LIMITS, seconds(100)), None, "others may join to the call");
    let found = diagnosis(&left(136), seconds(101));
    let line = "rank 1 (host node0, pid 71) ended its run; ranks 0 and 2 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(found, Diagnosis { rank: 1, line: line.to_string(), code: 1 });
}

#[test]
fn a_rank_by_itself_diagnoses_only_the_loss_of_another() {
    let mut two = statuses(2, |_| {});
    two[1].snapshot.digest = 9;
    assert_eq!(diagnose_presence(&two, &LIMITS, seconds(101)), None);
    two[0].state = RankState::Lost { at: seconds(101) };
    assert_eq!(diagnose_presence(&two, &LIMITS, seconds(102)).map(|diagnosis| diagnosis.rank), Some(0));
}
