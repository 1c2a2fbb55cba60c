use super::*;

const LIMITS: Limits = Limits { silence: Duration::from_secs(10), stuck: Duration::from_secs(120) };

fn at(sequence: u64, name: &str) -> Option<At> {
    Some(At { sequence, collective: "all_reduce", name: Arc::from(name), bytes: 1_800_000 })
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Ranks that wait in call 137, but for those that `change` changes; heard of at 100 s.
fn seats(world: usize, change: impl Fn(&mut Seat)) -> Vec<Seat> {
    let seat = |rank| {
        let mut seat = Seat::new(rank, &format!("node{}", rank / 2), 70 + rank as u32, seconds(100));
        seat.snapshot = Snapshot {
            progress: 1000,
            doing: Arc::from("backward of blocks.7"),
            at: at(137, "blocks.7"),
            last: at(137, "blocks.7"),
            entered: 137,
            digest: 5,
            milestone: 6,
        };
        change(&mut seat);
        seat
    };
    (0..world).map(seat).collect()
}

fn outside(seat: &mut Seat, doing: &str) {
    seat.snapshot.at = None;
    seat.snapshot.last = at(136, "blocks.8");
    (seat.snapshot.entered, seat.snapshot.digest) = (136, 4);
    seat.snapshot.doing = Arc::from(doing);
}

fn failed(seat: &mut Seat, after: u64, cause: Cause, line: &str) {
    seat.state =
        State::Failed { at: seconds(100) + Duration::from_millis(after), cause, line: line.to_string() };
}

fn verdict(seats: &[Seat], at: Duration) -> Verdict {
    judge(seats, &LIMITS, at).expect("a fault")
}

#[test]
fn a_lost_device_is_told_as_it_is_and_may_go_better_another_time() {
    let line = "rank 1 lost GPU 1 (H200) in step 7: CUDA_ERROR_LAUNCH_FAILED";
    let seats = seats(3, |seat| match seat.rank {
        1 => failed(seat, 0, Cause::Device, line),
        2 => failed(seat, 10, Cause::Aborted, "the exchange was broken off"),
        _ => {}
    });
    let Verdict { rank, line: told, code } = verdict(&seats, seconds(102));
    assert_eq!((rank, code), (1, 3));
    assert!(told.starts_with(line) && told.contains("ranks 0 and 2 wait for it"), "{told}");
}

#[test]
fn ranks_that_wait_for_each_other_for_a_while_are_well() {
    let seats = seats(4, |seat| {
        if seat.rank == 2 {
            outside(seat, "reading images")
        }
    });
    for now in [100, 105, 109] {
        assert_eq!(judge(&seats, &LIMITS, seconds(now)), None);
    }
}

#[test]
fn a_lost_rank_is_named_with_its_work_and_those_who_wait() {
    let seats = seats(4, |seat| {
        if seat.rank == 2 {
            outside(seat, "backward of blocks.5.mlp.fc1 (linear_grad_w)");
            seat.state = State::Gone { at: seconds(100) };
        }
    });
    assert_eq!(judge(&seats, &LIMITS, seconds(100)), None, "others may tell more within a moment");
    let line = "rank 2 (host node1, pid 72) was lost in backward of blocks.5.mlp.fc1 (linear_grad_w); \
                ranks 0, 1 and 3 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(verdict(&seats, seconds(101)), Verdict { rank: 2, line: line.to_string(), code: 3 });
}

#[test]
fn a_lost_rank_that_was_further_than_it_told_is_not_said_to_have_been_there() {
    let seats = seats(2, |seat| {
        if seat.rank == 1 {
            outside(seat, "forward");
            seat.snapshot.entered = 130;
            seat.state = State::Gone { at: seconds(100) };
        }
    });
    let line = verdict(&seats, seconds(101)).line;
    assert!(line.contains("was lost, last heard of in forward; rank 0 waits"), "{line}");
}

#[test]
fn of_ranks_that_go_together_the_first_is_to_blame() {
    let seats = seats(3, |seat| seat.state = State::Gone { at: seconds(110 - seat.rank as u64) });
    assert_eq!(verdict(&seats, seconds(120)).rank, 2);
}

#[test]
fn a_rank_without_a_sign_of_life_is_named() {
    let seats = seats(4, |seat| match seat.rank {
        3 => outside(seat, "forward of head"),
        _ => seat.heard = seconds(110),
    });
    assert_eq!(judge(&seats, &LIMITS, seconds(109)), None);
    let line = "rank 3 (host node1, pid 73) gave no sign of life for 10 s (stopped, or cut off), last in forward of head; \
                ranks 0, 1 and 2 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(verdict(&seats, seconds(111)), Verdict { rank: 3, line: line.to_string(), code: 3 });
}

#[test]
fn ranks_of_a_host_fall_silent_together() {
    let seats = seats(4, |seat| {
        seat.heard = match seat.rank {
            2 => seconds(100),
            3 => seconds(100) + Duration::from_millis(250),
            _ => seconds(111),
        }
    });
    let line = verdict(&seats, seconds(111)).line;
    assert!(line.starts_with("ranks 2 and 3 (host node1) gave no sign of life for 10 s"), "{line}");
    assert!(line.ends_with("ranks 0 and 1 wait for them in all_reduce #137 of blocks.7 (1.8 MB)"), "{line}");
}

#[test]
fn a_rank_without_progress_is_hung_only_if_it_is_heard_of_idle_and_waited_for() {
    let stuck = |busy: bool, heard: u64, others_wait: bool| {
        seats(3, |seat| {
            (seat.heard, seat.moved) = (seconds(230), seconds(100));
            if seat.rank == 1 {
                outside(seat, "reading images");
                (seat.busy, seat.heard) = (busy, seconds(heard));
            } else if !others_wait {
                outside(seat, "reading images");
            }
        })
    };
    let line = "rank 1 (host node0, pid 71) made no progress for 120 s in reading images; \
                ranks 0 and 2 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    let found = verdict(&stuck(false, 230, true), seconds(230));
    assert_eq!(found, Verdict { rank: 1, line: line.to_string(), code: 3 });
    assert_eq!(judge(&stuck(true, 230, true), &LIMITS, seconds(230)), None, "it is busy");
    assert_eq!(judge(&stuck(false, 225, true), &LIMITS, seconds(230)), None, "it is silent, which will show");
    assert_eq!(judge(&stuck(false, 230, false), &LIMITS, seconds(230)), None, "nobody waits");
    assert_eq!(judge(&stuck(false, 230, true), &LIMITS, seconds(219)), None, "not yet");
}

#[test]
fn an_exchange_in_which_all_wait_hangs() {
    let still = |seat: &mut Seat| (seat.heard, seat.moved) = (seconds(230), seconds(100));
    let line = "all ranks wait in all_reduce #137 of blocks.7 (1.8 MB) for 120 s: the exchange hangs";
    assert_eq!(verdict(&seats(3, still), seconds(230)).line, line);
    let one_behind = seats(3, |seat| {
        still(seat);
        if seat.rank == 2 {
            outside(seat, "");
            seat.snapshot.at = at(136, "blocks.8");
        }
    });
    let found = verdict(&one_behind, seconds(230));
    assert_eq!(found.rank, 2);
    assert!(found.line.contains("in all_reduce #136 of blocks.8"), "{}", found.line);
}

#[test]
fn other_calls_name_both_and_the_odd_one_out() {
    let odd = |odd: usize| {
        seats(3, |seat| {
            if seat.rank == odd {
                seat.snapshot.digest = 9;
                seat.snapshot.last = at(137, "head");
            }
        })
    };
    let found = verdict(&odd(2), seconds(100));
    let line = "rank 2 (host node1, pid 72) calls all_reduce #137 of head (1.8 MB) \
                where rank 0 calls all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(found, Verdict { rank: 2, line: line.to_string(), code: 1 });
    assert_eq!(verdict(&odd(0), seconds(100)).rank, 0);
    let two = seats(2, |seat| seat.snapshot.digest = seat.rank as u64);
    assert_eq!(verdict(&two, seconds(100)).rank, 1);
}

#[test]
fn calls_that_differed_before_show_at_milestones() {
    let seats = seats(3, |seat| {
        seat.snapshot.entered += seat.rank as u64;
        seat.snapshot.digest += seat.rank as u64;
        seat.snapshot.milestone = u64::from(seat.rank == 1);
    });
    let found = verdict(&seats, seconds(100));
    assert_eq!((found.rank, found.code), (1, 1));
    assert!(found.line.contains("made other calls than rank 0, among the first 137"), "{}", found.line);
}

#[test]
fn ranks_at_different_calls_are_well() {
    let seats = seats(3, |seat| {
        seat.snapshot.entered += 64 * seat.rank as u64;
        seat.snapshot.digest += seat.rank as u64;
        seat.snapshot.milestone += seat.rank as u64;
    });
    assert_eq!(judge(&seats, &LIMITS, seconds(100)), None);
}

#[test]
fn an_error_is_told_of_the_ranks_that_have_it() {
    let with = |ranks: &'static [usize]| {
        seats(3, move |seat| {
            if ranks.contains(&seat.rank) {
                failed(seat, seat.rank as u64, Cause::Own, "no such file");
            }
        })
    };
    let line = |ranks| verdict(&with(ranks), seconds(101)).line;
    assert_eq!(line(&[2]), "rank 2: no such file");
    assert_eq!(line(&[1, 2]), "ranks 1 and 2: no such file");
    assert_eq!(line(&[0, 1, 2]), "no such file");
    let soon = Duration::from_millis(100_010);
    assert_eq!(judge(&with(&[0, 1]), &LIMITS, soon), None, "the third may have it too");
    assert!(judge(&with(&[0, 1, 2]), &LIMITS, soon).is_some());
}

#[test]
fn what_follows_from_a_fault_does_not_hide_it() {
    let consequences = |root: bool| {
        seats(4, move |seat| match seat.rank {
            0 => failed(seat, 0, Cause::Lost(1), "rank 1 is gone (closed)"),
            1 => failed(seat, 1, Cause::Lost(2), "rank 2 is gone (closed)"),
            2 if root => seat.state = State::Gone { at: seconds(101) },
            3 => failed(seat, 3, Cause::Aborted, "broken off"),
            _ => {}
        })
    };
    assert_eq!(verdict(&consequences(true), seconds(102)).rank, 2);
    assert_eq!(judge(&consequences(false), &LIMITS, seconds(101)), None, "rank 2 may yet be missed");
    let found = verdict(&consequences(false), seconds(102));
    let line = "rank 1, in all_reduce #137 of blocks.7 (1.8 MB): rank 2 is gone (closed)";
    assert_eq!(found, Verdict { rank: 2, line: line.to_string(), code: 3 });
}

#[test]
fn a_rank_that_left_is_to_blame_only_for_calls_it_never_made() {
    let left = |entered: u64| {
        seats(3, move |seat| {
            if seat.rank == 1 {
                (seat.snapshot.at, seat.snapshot.entered) = (None, entered);
                seat.snapshot.digest = if entered == 137 { 5 } else { 4 };
                seat.state = State::Left;
            }
        })
    };
    assert_eq!(judge(&left(137), &LIMITS, seconds(101)), None);
    assert_eq!(judge(&left(136), &LIMITS, seconds(100)), None, "others may come to the call");
    let found = verdict(&left(136), seconds(101));
    let line = "rank 1 (host node0, pid 71) ended its run; ranks 0 and 2 wait for it in all_reduce #137 of blocks.7 (1.8 MB)";
    assert_eq!(found, Verdict { rank: 1, line: line.to_string(), code: 1 });
}

#[test]
fn a_rank_by_itself_tells_only_whether_another_is_there() {
    let mut two = seats(2, |_| {});
    two[1].snapshot.digest = 9;
    assert_eq!(judge_presence(&two, &LIMITS, seconds(101)), None);
    two[0].state = State::Gone { at: seconds(101) };
    assert_eq!(judge_presence(&two, &LIMITS, seconds(102)).map(|verdict| verdict.rank), Some(0));
}
