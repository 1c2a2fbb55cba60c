//! Device groups, over a stand-in for NCCL whose devices are plain memory. What only a GPU can show is tested elsewhere.

mod fake_nccl;
mod support;

use comm::nccl::Library;
use comm::{Call, Collective, CommError, Communicator, Counts, ElementType, Engine, Reduction, Span};
use comm::{ExitReport, Member, Options, Start};
use fake_nccl::{Fake, join_with, on_devices, on_worlds};
use half::bf16;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::suite;

fn aborted(why: &str) -> CommError {
    CommError::Aborted(why.into())
}

#[test]
fn results_are_those_of_the_plain_text() {
    let fake = Fake::build("suite", &[]);
    for ranks in 1..=4 {
        on_devices(&fake, ranks, |device, _| {
            suite::everything(&device, ranks as u64);
            suite::splits(&device, ranks as u64);
            suite::interleaved(&device, ranks as u64);
            suite::queued(&device, 5);
        });
    }
    assert_eq!((fake.misuses(), fake.aborted()), (0, 0));
    // Each rank was in the group; in four parts and as many parts of those; and in three for its threads.
    assert_eq!(fake.destroyed(), (1 + 2 + 3 + 4) * (1 + 8 + 3), "and all ended in good order");
}

#[test]
fn rank_0_makes_the_id_and_all_join_with_it() {
    let fake = Fake::build("id", &[]);
    let places = on_devices(&fake, 4, |device, nccl| {
        assert_eq!((nccl.name(), nccl.enqueues()), ("nccl", true));
        (device.rank(), device.size())
    });
    assert_eq!(places, [(0, 4), (1, 4), (2, 4), (3, 4)]);
    assert_eq!(fake.ids(), 1);
    assert!((0..4).all(|rank| fake.id(rank) == "id 1"));
    // Another group has another one.
    on_devices(&fake, 2, |_, _| ());
    assert_eq!((fake.ids(), fake.id(1).as_str()), (2, "id 2"));
}

#[test]
fn calls_are_made_as_asked_in_order_and_on_the_rank_s_stream() {
    let fake = Fake::build("order", &[]);
    on_devices(&fake, 2, |device, _| {
        let name = device.name("x");
        device.all_reduce(name, Reduction::Mean, &mut [1.0f32; 5]).unwrap();
        device.all_reduce(name, Reduction::Max, &mut [bf16::ONE; 3]).unwrap();
        device.all_reduce::<f32>(name, Reduction::Sum, &mut []).unwrap();
        device.reduce_scatter(name, Reduction::Sum, &[1.0f64; 4], &mut [0.0; 2]).unwrap();
        device.all_gather(name, &[1i32; 3], &mut [0; 6]).unwrap();
        device.broadcast(name, 1, &mut [7u64; 9]).unwrap();
        device.barrier(name).unwrap();
        device.all_to_all(name, &[1u8; 8], &mut [0; 8]).unwrap();
        device.split(0, 1 - device.rank()).unwrap();
    });
    for rank in 0..2 {
        let stream = ["0x100", "0x200"][rank];
        let lines = [
            "all_reduce 5 f32 avg",
            "all_reduce 3 bf16 max",
            "reduce_scatter 2 f64 sum",
            "all_gather 3 i32",
            "broadcast 9 u64 from 1",
            "all_reduce 1 u8 max",
            "send 4 u8 to 0",
            "recv 4 u8 from 0",
            "send 4 u8 to 1",
            "recv 4 u8 from 1",
        ];
        let mut expected: Vec<String> = lines.iter().map(|line| format!("{line} on {stream}")).collect();
        expected.push(format!("split 0 {}", 1 - rank));
        assert_eq!(fake.log(rank), expected);
    }
}

#[test]
fn parts_of_any_length_and_of_none() {
    let fake = Fake::build("parts", &[]);
    let got = on_devices(&fake, 3, |device, _| {
        let (me, name) = (device.rank(), device.name("parts"));
        // Rank 2 has nothing to do with anybody; rank 0 sends two to itself and three to rank 1, which sends it one.
        let (send, receive) =
            [(vec![2, 3, 0], vec![2, 1, 0]), (vec![1, 0, 0], vec![3, 0, 0]), (vec![0, 0, 0], vec![0, 0, 0])]
                [me]
                .clone();
        let from: Vec<i64> = (0..send.iter().sum::<usize>()).map(|i| (10 * me + i) as i64).collect();
        let mut into = vec![-1; receive.iter().sum()];
        device.all_to_all_parts(name, Counts { send, receive }, &from, &mut into).unwrap();
        into
    });
    assert_eq!(got, [vec![0, 1, 10], vec![2, 3, 4], vec![]]);
    assert_eq!(fake.log(1), ["send 1 i64 to 0 on 0x200", "recv 3 i64 from 0 on 0x200"]);
    assert!(fake.log(2).is_empty());
}

#[test]
fn what_nccl_can_t_do_is_refused_and_does_no_harm() {
    let fake = Fake::build("refused", &[]);
    on_devices(&fake, 2, |device, nccl| {
        let mut data = [4i32, 6];
        let (span, name) = (Span::of_mut(&mut data), device.name("x"));
        let refused = |collective| {
            let call = Call { collective, kind: ElementType::I32, send: span, receive: span, name };
            // SAFETY: the data is here until the end.
            unsafe { nccl.run(&call) }.unwrap_err().to_string()
        };
        let mean = refused(Collective::AllReduce(Reduction::Mean));
        assert_eq!(mean, "NCCL has no mean of integers (i32)");
        let in_place = refused(Collective::AllToAll(None));
        assert_eq!(in_place, "NCCL has no all_to_all in place: it needs a separate receive buffer");
        device.all_reduce(name, Reduction::Sum, &mut data).unwrap();
        assert_eq!(data, [8, 12]);
        let far = nccl.split(usize::MAX, 0).err().unwrap();
        assert_eq!(far, CommError::Misuse(format!("colour {} is too large for NCCL", usize::MAX)));
    });
    assert_eq!((fake.destroyed(), fake.aborted()), (2, 0));
}

#[test]
fn an_abort_frees_a_rank_that_is_stuck_and_ends_all_that_follows() {
    let fake = Fake::build("abort", &[]);
    on_devices(&fake, 2, |device, nccl| {
        let part = device.split(0, 0).unwrap();
        let start = Instant::now();
        if device.rank() == 0 {
            // Rank 1 doesn't come.
            let aborts = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                nccl.abort("a fault");
                nccl.abort("another");
            });
            let stuck = device.all_reduce(device.name("x"), Reduction::Sum, &mut [1.0f32; 10]);
            assert_eq!(stuck.unwrap_err(), aborted("a fault"));
            aborts.join().unwrap();
        } else {
            nccl.abort("a fault");
            assert_eq!(nccl.check(), Err(aborted("a fault")));
        }
        assert_eq!(device.barrier(device.name("y")).unwrap_err(), aborted("a fault"));
        assert_eq!(part.barrier(part.name("z")).unwrap_err(), aborted("a fault"), "the part ends too");
        assert_eq!(device.split(0, 0).err(), Some(aborted("a fault")));
        assert!(start.elapsed() < Duration::from_secs(5));
    });
    // Each group of each rank once.
    assert_eq!((fake.aborted(), fake.destroyed(), fake.misuses()), (4, 0, 0));
}

#[test]
fn a_call_that_hangs_can_be_called_off() {
    let fake = Fake::build("hang", &[]);
    on_devices(&fake, 3, |device, nccl| {
        fake.hang();
        let aborts = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            nccl.abort("enough");
        });
        assert_eq!(device.barrier(device.name("x")).unwrap_err(), aborted("enough"));
        aborts.join().unwrap();
    });
    assert_eq!((fake.aborted(), fake.misuses()), (3, 0));
}

/// The one line that all ranks have.
fn one_line(ranks: usize, library: impl Fn(usize) -> Result<Arc<Library>, CommError> + Sync) -> String {
    let ends = on_worlds(ranks, |world| join_with(library(world.rank()), world).err().unwrap().to_string());
    assert!(ends.iter().all(|line| *line == ends[0] && !line.contains('\n')), "{ends:?}");
    ends[0].clone()
}

#[test]
fn ranks_without_nccl_end_all_ranks_with_one_line() {
    let fake = Fake::build("missing", &[]);
    let nowhere = || Library::open("/nowhere/libnccl.so.2");
    let line = one_line(3, |rank| if rank == 1 { nowhere() } else { fake.library() });
    assert_eq!(line, "NCCL: rank 1: there is no /nowhere/libnccl.so.2");
    let line = one_line(3, |rank| if rank > 0 { nowhere() } else { fake.library() });
    assert_eq!(line, "NCCL: ranks 1 and 2: there is no /nowhere/libnccl.so.2");
    assert_eq!(one_line(3, |_| nowhere()), "NCCL: there is no /nowhere/libnccl.so.2");
    assert_eq!(fake.ids(), 0);
    // Nor does one that is too old help.
    let old = Fake::build("old", &["-DFAKE_VERSION=2804"]);
    let line = one_line(2, |_| old.library());
    assert_eq!(line, format!("NCCL: {} is NCCL 2.8.4; 2.10.0 or newer is needed", old.path));
}

#[test]
fn ranks_with_another_version_are_named() {
    let (fake, other) = (Fake::build("new", &[]), Fake::build("newer", &["-DFAKE_VERSION=22105"]));
    let line = one_line(3, |rank| if rank == 2 { other.library() } else { fake.library() });
    assert_eq!(line, "NCCL: rank 2 has version 2.21.5, but rank 0 has 2.30.7: all ranks need the same");
    let line = one_line(3, |rank| if rank > 0 { other.library() } else { fake.library() });
    assert_eq!(
        line,
        "NCCL: ranks 1 and 2 have version 2.21.5, but rank 0 has 2.30.7: all ranks need the same"
    );
}

#[test]
fn failures_at_the_start_are_reported() {
    let fake = Fake::build("start", &[]);
    fake.fail(c"ncclGetUniqueId", 2);
    let line = one_line(2, |_| fake.library());
    let why = "unhandled system error (the fake was told to fail ncclGetUniqueId)";
    assert_eq!(line, format!("NCCL: rank 0: ncclGetUniqueId: {why}"));
    fake.fail(c"ncclCommInitRank", 5);
    let line = one_line(2, |_| fake.library());
    assert_eq!(line, "NCCL: ncclCommInitRank: invalid usage (the fake was told to fail ncclCommInitRank)");
}

#[test]
fn a_failed_call_tells_why_and_the_group_is_of_no_more_use() {
    let fake = Fake::build("fail", &[]);
    on_devices(&fake, 2, |device, nccl| {
        device.barrier(device.name("x")).unwrap();
        // Rank 1 brings less.
        let mut data = vec![0.0f32; 10 - device.rank()];
        let error = device.all_reduce(device.name("y"), Reduction::Sum, &mut data).unwrap_err();
        assert_eq!(error.to_string(), "NCCL: ncclAllReduce: invalid usage (rank 1 calls something else)");
        assert_eq!(device.activity().failure(), Some(&error), "the control knows");
        assert_eq!(nccl.check().unwrap_err(), error);
        assert_eq!(nccl.split(0, 0).err(), Some(error));
    });
    assert_eq!((fake.aborted(), fake.destroyed(), fake.misuses()), (2, 0, 0));
}

#[test]
fn parts_that_don_t_fit_fail() {
    let fake = Fake::build("unfit", &[]);
    let ends = on_devices(&fake, 2, |device, _| {
        // Rank 1 awaits one element too many from rank 0.
        let receive = if device.rank() == 1 { vec![6, 5] } else { vec![5, 5] };
        let mut into = vec![0u8; receive.iter().sum()];
        let counts = Counts { send: vec![5; 2], receive };
        device.all_to_all_parts(device.name("parts"), counts, &[1; 10], &mut into).unwrap_err().to_string()
    });
    let why = "NCCL: ncclSend and ncclRecv: invalid usage (what is sent and what is awaited differ)";
    assert_eq!(ends, [why, why]);
}

#[test]
fn what_goes_wrong_on_the_device_shows_later() {
    let fake = Fake::build("later", &[]);
    on_devices(&fake, 2, |device, nccl| {
        device.barrier(device.name("x")).unwrap();
        assert_eq!(nccl.check(), Ok(()));
        // Still at it is no failure.
        fake.break_device(device.rank(), 7);
        assert_eq!(nccl.check(), Ok(()));
        fake.break_device(device.rank(), 2);
        let error = nccl.check().unwrap_err();
        assert_eq!(
            error,
            CommError::Engine { engine: "NCCL", why: "an earlier call: unhandled system error".into() }
        );
        assert_eq!(device.barrier(device.name("y")).unwrap_err(), error);
    });
    assert_eq!((fake.aborted(), fake.destroyed()), (2, 0));
}

#[test]
fn a_library_that_can_t_split_says_so() {
    let fake = Fake::build("unsplit", &["-DFAKE_WITHOUT_SPLIT", "-DFAKE_VERSION=21602"]);
    on_devices(&fake, 2, |device, _| {
        let error = device.split(0, 0).err().unwrap().to_string();
        assert_eq!(error, "NCCL: version 2.16.2 can't split a group: 2.18 or newer is needed");
        device.barrier(device.name("x")).unwrap();
    });
}

/// A monitored run of ranks that are threads.
fn watched(ranks: usize, work: impl Fn(&Member) -> Result<(), String> + Sync) -> Vec<Result<(), ExitReport>> {
    let options =
        Options { ranks: Some(ranks), timeout: Some(Duration::from_secs(20)), ..Options::default() };
    let Ok(Start::Threads(members)) = comm::start(&options, |_| {}) else { panic!("no launcher here") };
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            members.into_iter().map(|member| scope.spawn(move || member.run(work))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn device(fake: &Fake, member: &Member) -> Result<Communicator, String> {
    let nccl: Arc<dyn Engine> =
        join_with(fake.library(), &member.world).map_err(|error| error.to_string())?;
    member.monitor.abort_with_run(&nccl);
    Ok(member.world.with_engine(nccl))
}

#[test]
fn a_diagnosis_ends_the_device_group_too() {
    let fake = Fake::build("diagnosis", &[]);
    let ends = watched(3, |member| {
        let device = device(&fake, member)?;
        if member.place.rank == 1 {
            device.engine().abort("I can't go on");
            return Err("no image 7".to_string());
        }
        device.barrier(device.name("for rank 1")).map(|_| ()).map_err(|error| error.to_string())
    });
    let lines: Vec<&str> =
        ends.iter().filter_map(|end| end.as_ref().err().and_then(|ended| ended.line.as_deref())).collect();
    assert_eq!(lines, ["rank 1: no image 7"]);
    assert!(ends.iter().all(|end| end.as_ref().is_err_and(|ended| ended.code == 1)), "{ends:?}");
    assert_eq!((fake.aborted(), fake.misuses()), (3, 0));
}

/// A rank that captures a plan anew queues calls of the device that the others don't.
#[test]
fn calls_of_the_device_are_no_calls_out_of_order() {
    let fake = Fake::build("digest", &[]);
    let ends = watched(2, |member| {
        let (world, rank) = (&member.world, member.place.rank);
        let told = |error: CommError| error.to_string();
        let alone = device(&fake, member)?.split(rank, 0).map_err(told)?;
        for step in 0..300 {
            for _ in 0..step % (2 + rank) {
                let mut data = vec![0.0f32; 10 + rank];
                alone.all_reduce(alone.name("captured"), Reduction::Sum, &mut data).map_err(told)?;
            }
            world.barrier(world.name("step")).map_err(told)?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    });
    assert_eq!(ends, [Ok(()), Ok(())]);
    assert_ne!(fake.log(0).len(), fake.log(1).len());
}

/// `VITESSE_NCCL=…/libnccl.so.2 cargo test -p comm --test nccl -- --ignored`; needs no GPU.
#[test]
#[ignore = "needs NCCL"]
fn the_real_library_has_all_that_is_needed() {
    let library = Library::find().unwrap();
    println!("{} is NCCL {}", library.path(), library.version());
    assert!(library.version() >= 21_000);
    assert!(Arc::ptr_eq(&library, &Library::find().unwrap()), "loaded once");
}
