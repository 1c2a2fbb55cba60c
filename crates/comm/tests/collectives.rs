//! Every engine whose ranks can live in one process, against plain references, and when things go wrong.

mod support;

use comm::{CommError, Communicator, Reduction};
use half::bf16;
use std::time::{Duration, Instant};
use support::{RANKS, WAYS, Way, on_all, plain, suite};

#[test]
fn results_are_those_of_the_plain_text_on_every_rank_and_again() {
    for ranks in RANKS {
        for seed in 0..2 {
            let run = |way| on_all(way, ranks, |comm| suite::everything(&comm, seed));
            let first = run(WAYS[0].1);
            assert!(first.iter().all(|digest| *digest == first[0]), "ranks");
            for (way_name, way) in WAYS {
                assert_eq!(run(way), first, "{way_name}");
            }
        }
    }
}

/// Were the inputs so tame that any order gives the same sum, the test above would not show that ranks keep to one.
#[test]
fn the_order_of_sums_matters_for_the_inputs() {
    let mut all = plain::inputs::<f32>(7, 4, |_| 1000);
    let sums = plain::bits(&plain::reduced(&all, Reduction::Sum));
    all.reverse();
    let reversed = plain::bits(&plain::reduced(&all, Reduction::Sum));
    let different = sums.iter().zip(&reversed).filter(|(a, b)| a != b).count();
    assert!(different > 100, "{different}");
    // And sums of bf16 that are rounded at every step are others than those rounded once.
    let all = plain::inputs::<bf16>(7, 4, |_| 1000);
    let once = plain::bits(&plain::reduced(&all, Reduction::Sum));
    let stepwise = (0..1000).map(|i| all[1..].iter().fold(all[0][i], |sum, input| sum + input[i]).to_bits());
    let different = once.iter().zip(stepwise).filter(|(a, b)| **a != u64::from(*b)).count();
    assert!(different > 100, "{different}");
}

#[test]
fn groups_of_groups() {
    for (_, way) in WAYS {
        for ranks in RANKS {
            on_all(way, ranks, |comm| suite::splits(&comm, ranks as u64));
        }
    }
}

#[test]
fn groups_that_share_a_queue_have_one_order() {
    for (_, way) in WAYS {
        for (rows, columns) in [(1, 2), (2, 2), (2, 3)] {
            on_all(way, rows * columns, |comm| suite::in_order(&comm, rows));
        }
    }
}

#[test]
fn threads_of_a_rank_don_t_disturb_each_other() {
    for (_, way) in WAYS {
        for ranks in [2, 3, 4] {
            on_all(way, ranks, |comm| suite::interleaved(&comm, ranks as u64));
        }
    }
}

#[test]
fn calls_beside_the_caller() {
    for (_, way) in WAYS {
        for ranks in RANKS {
            on_all(way, ranks, |comm| suite::queued(&comm, 5));
        }
    }
}

/// Calls of a thread beside the rank's come in any order among those, and are not part of what ranks are compared by; a failure there is
/// the rank's.
#[test]
fn calls_of_a_thread_beside_the_rank_are_not_part_of_its_digest() {
    for (_, way) in WAYS {
        let digests = on_all(way, 3, |comm| {
            let beside = comm.beside().unwrap();
            let entered = comm.activity().snapshot().entered;
            let thread = std::thread::spawn(move || {
                for value in 0..50 {
                    let mut sum = [f64::from(value)];
                    beside.all_reduce(beside.name("beside"), Reduction::Sum, &mut sum).unwrap();
                    assert_eq!(sum, [f64::from(3 * value)]);
                }
                beside
            });
            for value in 0..20 {
                std::thread::sleep(Duration::from_micros(100 * comm.rank() as u64));
                comm.all_reduce(comm.name("of the rank"), Reduction::Sum, &mut [f64::from(value)]).unwrap();
            }
            let beside = thread.join().unwrap();
            let snapshot = comm.activity().snapshot();
            assert_eq!(snapshot.entered, entered + 20);
            comm.barrier(comm.name("the end")).unwrap();
            beside.engine().abort("the test says so");
            assert!(beside.barrier(beside.name("too late")).is_err() && comm.activity().failure().is_some());
            assert!(snapshot.progress > 70);
            snapshot.digest
        });
        assert!(digests.iter().all(|digest| *digest == digests[0]));
    }
}

#[test]
fn different_calls_are_named_on_all_ranks() {
    for (_, way) in WAYS {
        for (len, other_len) in [(3, 4), (100_000, 100_000), (3, 100_000)] {
            let errors = on_all(way, 3, |comm| {
                // Registered on all: an engine carries only a hash, and each rank spells what it knows.
                let (head, norm) = (comm.name("head.weight"), comm.name("norm.bias"));
                let odd = comm.rank() == 2;
                let mut data = vec![1.0f32; if odd { other_len } else { len }];
                let error = comm
                    .all_reduce(if odd { norm } else { head }, Reduction::Sum, &mut data)
                    .expect_err("ranks called different things");
                assert_eq!(comm.barrier(head).err(), Some(error.clone()), "and all later calls fail");
                error.to_string()
            });
            let expected = format!(
                "rank 2 calls all_reduce (sum) of {other_len} f32 for 'norm.bias' \
                 where rank 0 calls all_reduce (sum) of {len} f32 for 'head.weight'"
            );
            assert_eq!(errors, [expected.clone(), expected.clone(), expected]);
        }
    }
}

#[test]
fn other_collectives_kinds_and_roots_are_found_too() {
    type Step = fn(&Communicator) -> Result<comm::Timing, CommError>;
    let steps: [Step; 7] = [
        |comm| comm.all_reduce(comm.name("x"), Reduction::Sum, &mut [1.0f32; 4]),
        |comm| comm.all_reduce(comm.name("x"), Reduction::Max, &mut [1.0f32; 4]),
        |comm| comm.all_reduce(comm.name("x"), Reduction::Sum, &mut [1i32; 4]),
        |comm| comm.broadcast(comm.name("x"), 0, &mut [1.0f32; 4]),
        |comm| comm.broadcast(comm.name("x"), 1, &mut [1.0f32; 4]),
        |comm| comm.barrier(comm.name("x")),
        |comm| comm.split(0, 0).and_then(|comm| comm.barrier(comm.name("x"))),
    ];
    for (way_name, way) in WAYS {
        for (a, first) in steps.iter().enumerate() {
            for (b, second) in steps.iter().enumerate().filter(|&(b, _)| b != a) {
                let ends = on_all(way, 2, |comm| if comm.rank() == 0 { first(&comm) } else { second(&comm) });
                for end in ends {
                    let found = matches!(end, Err(CommError::Mismatch { rank: 1, other: 0, .. }));
                    assert!(found, "{way_name}: {a} and {b}: {end:?}");
                }
            }
        }
    }
}

#[test]
fn parts_that_don_t_fit_are_found() {
    for (_, way) in WAYS {
        let errors = on_all(way, 3, |comm| {
            // Rank 2 awaits one element too many from rank 1.
            let receive = if comm.rank() == 2 { vec![5, 6, 5] } else { vec![5; 3] };
            let mut into = vec![0u8; receive.iter().sum()];
            let counts = comm::Counts { send: vec![5; 3], receive };
            comm.all_to_all_parts(comm.name("parts"), counts, &[1; 15], &mut into).unwrap_err()
        });
        assert!(
            errors.iter().all(|e| matches!(e, CommError::Mismatch { rank: 1, other: 2, .. })),
            "{errors:?}"
        );
    }
}

fn aborted(why: &str) -> CommError {
    CommError::Aborted(why.into())
}

/// One rank of three stays away; the others wait, in the group or in a part of it, until somebody calls it off.
fn calls_off(way: Way, delay: Duration) {
    let ends = on_all(way, 3, |comm| {
        let part = comm.split(comm.rank() / 2, 0).unwrap();
        let start = Instant::now();
        match comm.rank() {
            // Waits for rank 1 in the part.
            0 => (part.all_reduce(part.name("x"), Reduction::Sum, &mut [1.0f32; 50_000]).unwrap_err(), start),
            // Waits for all, and is aborted by another thread of its own.
            1 => {
                let engine = comm.engine().clone();
                let monitor = std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    engine.abort("a fault");
                });
                let error = comm.barrier(comm.name("y")).unwrap_err();
                monitor.join().unwrap();
                // The sub-group is aborted with the group.
                assert_eq!(part.barrier(part.name("z")).unwrap_err(), aborted("a fault"));
                (error, start)
            }
            _ => {
                std::thread::sleep(delay * 2);
                (comm.barrier(comm.name("y")).unwrap_err(), start)
            }
        }
    });
    assert_eq!(ends[1].0, aborted("a fault"));
    for (error, start) in ends {
        // Over a network the others learn that the rank has gone, not why.
        assert!(matches!(error, CommError::Aborted(_) | CommError::Lost { rank: 1 | 0, .. }), "{error:?}");
        assert!(start.elapsed() < delay * 2 + Duration::from_secs(2));
    }
}

#[test]
fn an_abort_ends_the_calls_of_all() {
    for (_, way) in WAYS {
        calls_off(way, Duration::ZERO);
        calls_off(way, Duration::from_millis(50));
    }
}

/// Aborts at any moment of calls that use each other's buffers, which are gone right after: nothing may be touched then.
#[test]
fn an_abort_in_the_middle_leaves_no_buffer_in_use() {
    for (_, way) in WAYS {
        for round in 0..30u64 {
            on_all(way, 3, |comm| {
                let name = comm.name("x");
                std::thread::scope(|scope| {
                    if comm.rank() == 0 {
                        let engine = comm.engine().clone();
                        scope.spawn(move || {
                            std::thread::sleep(Duration::from_micros(200 + 37 * round));
                            engine.abort("now");
                        });
                    }
                    loop {
                        let mut data = vec![1.0f32; 30_000];
                        if comm.all_reduce(name, Reduction::Sum, &mut data).is_err() {
                            data.fill(5.0);
                            std::thread::yield_now();
                            assert!(data.iter().all(|x| *x == 5.0), "written after the call had ended");
                            return;
                        }
                        assert!(data.iter().all(|x| *x == 3.0));
                    }
                });
            });
        }
    }
}

#[test]
fn a_rank_that_ends_is_lost_to_those_that_need_it() {
    for (of, way) in WAYS {
        for delay in [0, 50] {
            let ends = on_all(way, 3, |comm| {
                let name = comm.name("x");
                comm.barrier(name).unwrap();
                if comm.rank() == 1 {
                    std::thread::sleep(Duration::from_millis(delay));
                    return None;
                }
                Some(comm.all_reduce(name, Reduction::Sum, &mut [1.0f32; 10]).unwrap_err())
            });
            // Over sockets, a rank that fails closes its own too, and a slower one may see that first.
            let seen = |rank: usize| rank == 1 || of == "tcp";
            let lost =
                |end: &Option<CommError>| matches!(end, Some(CommError::Lost { rank, .. }) if seen(*rank));
            assert!(lost(&ends[0]) && ends[1].is_none() && lost(&ends[2]), "{of}: {ends:?}");
            let named = |end: &Option<CommError>| matches!(end, Some(CommError::Lost { rank: 1, .. }));
            assert!(ends.iter().any(named), "{of}: somebody saw rank 1 go: {ends:?}");
        }
    }
}
