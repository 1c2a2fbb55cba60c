//! Ranks that are threads: one that fails ends all, with one line.

use comm::{Communicator, ExitReport, Member, Options, Reduction, Start, start};
use std::time::{Duration, Instant};

/// What each rank's run gave.
fn run<T: Send>(
    ranks: usize,
    timeout: Option<Duration>,
    work: impl Fn(&Member) -> Result<T, String> + Sync,
) -> Vec<Result<T, ExitReport>> {
    let options = Options { ranks: Some(ranks), timeout, ..Options::default() };
    let Ok(Start::Threads(members)) = start(&options, |_| {}) else { panic!("ranks are threads") };
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            members.into_iter().map(|member| scope.spawn(move || member.run(work))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank's thread ends")).collect()
    })
}

fn sum(world: &Communicator, name: &str) -> Result<f32, String> {
    let mut data = [world.rank() as f32];
    world.all_reduce(world.name(name), Reduction::Sum, &mut data).map_err(|error| error.to_string())?;
    Ok(data[0])
}

/// The line that is printed: by rank 0, and by no other.
fn line<T>(results: &[Result<T, ExitReport>], code: u8) -> String {
    let ended: Vec<&ExitReport> =
        results.iter().map(|result| result.as_ref().err().expect("every rank ends so")).collect();
    assert!(ended.iter().all(|ended| ended.code == code), "{ended:?}");
    assert!(ended[1..].iter().all(|ended| ended.line.is_none()), "{ended:?}");
    ended[0].line.clone().expect("rank 0 tells")
}

#[test]
fn ranks_that_do_their_work_end_well() {
    let results = run(3, None, |member| {
        member.monitor.doing(member.world.name("the work"));
        assert_eq!(member.monitor.prints(), member.place.rank == 0);
        assert_eq!((member.place.local_rank, member.place.local_world), (member.place.rank, 3));
        sum(&member.world, "head")
    });
    assert_eq!(results, vec![Ok(3.0); 3]);
}

#[test]
fn one_rank_needs_no_control_thread() {
    assert_eq!(run(1, None, |member| sum(&member.world, "head")), vec![Ok(0.0)]);
    let results = run(1, None, |_| Err::<(), _>("no such file".to_string()));
    assert_eq!(line(&results, 1), "no such file");
}

#[test]
fn the_error_of_one_rank_ends_all_with_its_line() {
    let since = Instant::now();
    let results = run(4, None, |member| match member.world.rank() {
        2 => Err("the disk is full".to_string()),
        _ => sum(&member.world, "head"),
    });
    assert_eq!(line(&results, 1), "rank 2: the disk is full");
    assert!(since.elapsed() < Duration::from_secs(3));
}

#[test]
fn an_error_of_all_ranks_is_reported_once_without_a_rank() {
    let results = run(4, None, |_| Err::<(), _>("no such file".to_string()));
    assert_eq!(line(&results, 1), "no such file");
}

#[test]
fn a_panic_names_the_rank_the_place_and_who_waits() {
    let results = run(3, None, |member| {
        if member.world.rank() == 1 {
            member.monitor.doing(member.world.name("backward of head"));
            panic!("index out of bounds");
        }
        sum(&member.world, "head")
    });
    let line = line(&results, 3);
    for part in [
        "rank 1 (host ",
        "panicked at ",
        "index out of bounds",
        "(in backward of head)",
        "ranks 0 and 2 wait for it in all_reduce #1 of head",
    ] {
        assert!(line.contains(part), "{part} is not in: {line}");
    }
}

#[test]
fn calls_out_of_order_are_reported() {
    let results = run(3, None, |member| {
        sum(&member.world, "first")?;
        sum(&member.world, if member.world.rank() == 1 { "head" } else { "blocks.0" })
    });
    let line = line(&results, 1);
    assert!(line.contains("rank 1") && line.contains("head") && line.contains("blocks.0"), "{line}");
}

#[test]
fn a_rank_that_ends_early_is_reported() {
    let results = run(3, None, |member| match member.world.rank() {
        1 => Ok(0.0),
        _ => sum(&member.world, "head"),
    });
    let line = results[0].as_ref().err().and_then(|ended| ended.line.clone()).expect("rank 0 tells");
    assert!(line.contains("rank 1") && line.contains("ended its run; ranks 0 and 2 wait for it"), "{line}");
}

#[test]
fn a_rank_without_progress_is_reported_unless_it_is_busy() {
    let timeout = Some(Duration::from_millis(500));
    let long = || std::thread::sleep(Duration::from_millis(1800));
    let busy = run(2, timeout, |member| {
        if member.world.rank() == 1 {
            let _busy = member.monitor.busy("writing a checkpoint");
            long();
        }
        sum(&member.world, "head")
    });
    assert_eq!(busy, vec![Ok(1.0); 2]);
    let stuck = run(2, timeout, |member| {
        if member.world.rank() == 1 {
            member.monitor.doing(member.world.name("reading images"));
            long();
        }
        sum(&member.world, "head")
    });
    let line = line(&stuck, 3);
    assert!(
        line.contains("rank 1")
            && line.contains("in reading images; rank 0 waits for it in all_reduce #1 of head"),
        "{line}"
    );
}
