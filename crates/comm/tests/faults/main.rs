//! Ranks that are processes, joined by sockets: how their run ends when one is killed, stopped, fails or does something else.
//!
//! The tests start this executable again as the ranks.

#[cfg(feature = "mpi")]
mod mpi;
mod network;
mod ranks;

use comm::{Communicator, Member, Options, Reduction, Start, start};
use ranks::{FOLDER, Ranks, SCENARIO, TIMEOUT, assert_has, one_line};
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What a rank does; not a test by itself.
#[test]
#[ignore = "the ranks of the other tests"]
fn rank() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    // As a run does, which ends in its own time. mpirun sends it to all ranks when one dies.
    // SAFETY: sets a signal's disposition; no handler runs.
    unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
    let timeout = std::env::var(TIMEOUT).ok().and_then(|ms| ms.parse().ok()).map(Duration::from_millis);
    let ended = match start(&Options { timeout, ..Options::default() }, print) {
        Ok(Start::Process(member)) => {
            let first = member.place.rank == 0;
            let ended = member.run(|member| work(member, &scenario));
            let early = scenario == "saves" && !first && !saved_file().is_ok_and(|file| file.is_file());
            let ended = ended.err().map(|ended| (ended.code, ended.line));
            ended.or(early.then(|| (8, Some("rank 0 has not saved yet".to_string()))))
        }
        Ok(Start::Threads(_)) => Some((9, Some("not a process".to_string()))),
        Err(refused) => Some((refused.code, refused.prints.then_some(refused.line))),
    };
    let (code, line) = ended.unwrap_or((0, None));
    if let Some(line) = line {
        print(&line);
    }
    std::process::exit(i32::from(code));
}

fn print(line: &str) {
    eprintln!("vitesse: {line}");
}

fn work(member: &Member, scenario: &str) -> Result<(), String> {
    let (world, rank) = (&member.world, member.place.rank);
    let steps = if ["fine", "locals", "saves"].contains(&scenario) { 20 } else { usize::MAX };
    let name = world.name("blocks.7");
    let backward = world.name("backward of blocks.5");
    if scenario == "locals" && (member.place.local_rank, member.place.local_world) != (rank, world.size()) {
        return Err("the place on the machine is wrong".to_string());
    }
    for step in 0..steps {
        member.monitor.doing(backward);
        if step == 10 {
            let folder = std::env::var(FOLDER).map_err(|error| error.to_string())?;
            std::fs::write(Path::new(&folder).join(rank.to_string()), "")
                .map_err(|error| error.to_string())?;
            misbehave(world, scenario)?;
        }
        let mut data = vec![rank as f32 + 1.0; 1000];
        world.all_reduce(name, Reduction::Sum, &mut data).map_err(|error| error.to_string())?;
        let sum = (world.size() * (world.size() + 1) / 2) as f32;
        if data.iter().any(|value| *value != sum) {
            return Err(format!("the sum is {}, not {sum}", data[0]));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    if scenario == "saves" && rank == 0 {
        let _busy = member.monitor.busy("writing a checkpoint");
        std::thread::sleep(Duration::from_millis(700));
        return std::fs::write(saved_file()?, "").map_err(|error| error.to_string());
    }
    Ok(())
}

/// What rank 0 writes after the last step.
fn saved_file() -> Result<PathBuf, String> {
    let folder = std::env::var(FOLDER).map_err(|error| error.to_string())?;
    Ok(Path::new(&folder).join("saved"))
}

fn misbehave(world: &Communicator, scenario: &str) -> Result<(), String> {
    match (scenario, world.rank()) {
        ("error", 2) => return Err("no image 7".to_string()),
        ("same error", _) => return Err("no image 7".to_string()),
        ("killed", 2) => signal_myself("-KILL"),
        ("stopped", 2) => signal_myself("-STOP"),
        ("panic", 1) => panic!("index out of bounds"),
        ("memory", 2) => {
            // What Rust does when memory is out; a limit would hit the thread's stack or the test harness first.
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; 1 << 30]>())
        }
        ("order", 1) => {
            let mut all = vec![0u8; world.size()];
            let gathered = world.all_gather(world.name("head"), &[1u8], &mut all);
            gathered.map_err(|error| error.to_string())?;
        }
        ("stuck", 1) => std::thread::sleep(Duration::from_secs(60)),
        _ => {}
    }
    Ok(())
}

fn signal_myself(signal: &str) {
    let _ = Command::new("kill").args([signal, &std::process::id().to_string()]).status();
}

const SOON: Duration = Duration::from_secs(10);
/// Longer than any of these tests: the watch must see the fault by itself, not for the time.
const PATIENT: u64 = 60_000;

#[test]
fn ranks_that_agree_end_well_and_say_nothing() {
    let outcomes = Ranks::of("fine", "fine", 4, PATIENT).end_within(SOON);
    assert!(outcomes.iter().all(|o| o.status.success() && !o.said.contains("vitesse")));
}

#[test]
fn no_rank_leaves_while_the_first_still_saves() {
    let outcomes = Ranks::of("saves", "saves", 3, PATIENT).end_within(SOON);
    assert!(outcomes.iter().all(|o| o.status.success()), "{}", outcomes[2].said);
}

#[test]
fn ranks_count_those_on_their_machine() {
    let outcomes = Ranks::of("locals", "locals", 3, PATIENT).end_within(SOON);
    assert!(outcomes.iter().all(|o| o.status.success()), "{}", outcomes[2].said);
}

#[test]
fn a_killed_rank_ends_all_at_once() {
    let ranks = Ranks::of("killed", "work", 4, PATIENT);
    ranks.are_working();
    ranks.signal(2, "-KILL");
    let (line, codes) = one_line(&ranks.end_within(SOON));
    assert_eq!(codes, [Some(3), Some(3), None, Some(3)]);
    assert_has(
        &line,
        &[
            "rank 2 (host ",
            "was lost",
            "ranks 0, 1 and 3 wait for it in all_reduce #",
            "of blocks.7 (4.0 kB)",
        ],
    );
}

#[test]
fn a_stopped_rank_is_missed_and_ended_too() {
    let ranks = Ranks::of("stopped", "work", 4, 2000);
    ranks.are_working();
    ranks.signal(3, "-STOP");
    let (line, codes) = one_line(&ranks.end_within(Duration::from_secs(2) + SOON));
    assert_eq!(codes, [Some(3), Some(3), Some(3), None]);
    // Who waits is as their last signs of life said: on a busy machine not everyone's has come.
    assert_has(&line, &["rank 3 (host ", "sent no heartbeat for 2 s", "for it in all_reduce #"]);
}

#[test]
fn without_rank_0_rank_1_tells() {
    let ranks = Ranks::of("coordinator-killed", "work", 3, PATIENT);
    ranks.are_working();
    ranks.signal(0, "-KILL");
    let outcomes = ranks.end_within(SOON);
    let (line, codes) = one_line(&outcomes);
    assert_eq!(codes, [None, Some(3), Some(3)]);
    assert_has(&line, &["rank 0 (host ", "was lost", "rank 1 waits for it in all_reduce #"]);
    assert!(outcomes[1].said.contains(&line));
}

#[test]
fn a_stopped_rank_0_is_missed_and_ended_too() {
    let ranks = Ranks::of("coordinator-stopped", "work", 3, 2000);
    ranks.are_working();
    ranks.signal(0, "-STOP");
    let (line, codes) = one_line(&ranks.end_within(Duration::from_secs(2) + SOON));
    assert_eq!(codes, [None, Some(3), Some(3)]);
    assert_has(&line, &["rank 0 (host ", "sent no heartbeat for 2 s", "all_reduce #"]);
}

#[test]
fn a_rank_that_fails_tells_why_once() {
    let (line, codes) = one_line(&Ranks::of("error", "error", 4, PATIENT).end_within(SOON));
    assert_eq!((line.as_str(), codes), ("vitesse: rank 2: no image 7", vec![Some(1); 4]));
    let (line, codes) = one_line(&Ranks::of("same-error", "same error", 4, PATIENT).end_within(SOON));
    assert_eq!((line.as_str(), codes), ("vitesse: no image 7", vec![Some(1); 4]));
}

#[test]
fn a_panic_and_the_end_of_memory_name_the_rank() {
    let (line, codes) = one_line(&Ranks::of("panic", "panic", 3, PATIENT).end_within(SOON));
    assert_eq!(codes, [Some(3); 3]);
    assert_has(
        &line,
        &[
            "rank 1 (host ",
            "panicked at ",
            "index out of bounds (in backward of blocks.5); ranks 0 and 2 wait",
        ],
    );
    let (line, codes) = one_line(&Ranks::of("memory", "memory", 3, PATIENT).end_within(SOON));
    assert_eq!(codes, [Some(3), Some(3), None]);
    assert_has(
        &line,
        &["rank 2 (host ", "was lost", "ranks 0 and 1 wait for it in all_reduce #11 of blocks.7"],
    );
}

#[test]
fn calls_out_of_order_name_both() {
    let (line, codes) = one_line(&Ranks::of("order", "order", 3, PATIENT).end_within(SOON));
    assert_eq!(codes, [Some(1); 3]);
    assert_has(&line, &["rank 1", "all_gather", "head", "all_reduce", "blocks.7"]);
}

#[test]
fn a_rank_that_makes_no_progress_is_reported() {
    let ranks = Ranks::of("stuck", "stuck", 3, 1500);
    ranks.are_working();
    let (line, codes) = one_line(&ranks.end_within(SOON));
    assert_eq!(codes, [Some(3); 3]);
    assert_has(
        &line,
        &["rank 1 (host ", "no progress for 2 s in backward of blocks.5; ranks 0 and 2 wait for it"],
    );
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let mut ranks = Ranks::new("missing");
    for rank in [0, 1, 3] {
        ranks.start("fine", rank, 4, 2000);
    }
    let (line, codes) = one_line(&ranks.end_within(Duration::from_secs(2) + SOON));
    assert_eq!(codes, [Some(3); 3]);
    assert_has(&line, &["rank 2 of 4 did not connect to host ", "within 2 s"]);
}

#[test]
fn without_rank_0_the_others_say_where_they_looked() {
    let mut ranks = Ranks::new("no-coordinator");
    ranks.start("fine", 1, 2, 1000);
    let port = ranks.port;
    let (line, codes) = one_line(&ranks.end_within(SOON));
    assert_eq!(codes, [Some(3)]);
    assert_has(
        &line,
        &["rank 1 (host ", &format!("can't reach rank 0 at 127.0.0.1:{port} within 1 s"), "refused"],
    );
}

#[test]
fn foreign_ranks_are_refused_and_the_run_goes_on() {
    let mut ranks = Ranks::new("strangers");
    ranks.start("fine", 0, 3, 15_000);
    let connected = (0..400).find_map(|_| {
        std::thread::sleep(Duration::from_millis(20));
        TcpStream::connect(("127.0.0.1", ranks.port)).ok()
    });
    let mut stranger = connected.expect("rank 0 listens");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it can be talked to");
    ranks.start("fine", 1, 3, 15_000);
    std::thread::sleep(Duration::from_millis(500));
    let mut wrong = Ranks::new("strangers-refused");
    wrong.port = ranks.port;
    wrong.start("fine", 1, 2, 15_000);
    wrong.start("fine", 1, 3, 15_000);
    let refused = wrong.end_within(SOON);
    assert_has(&refused[0].said, &["refused by rank 0: rank 1 has a world size of 2, rank 0 of 3"]);
    assert_has(&refused[1].said, &["refused by rank 0: rank 1 is connected already (host "]);
    assert!(refused.iter().all(|o| !o.status.success()));
    ranks.start("fine", 2, 3, 15_000);
    let outcomes = ranks.end_within(SOON);
    assert!(outcomes.iter().all(|o| o.status.success()), "{}", outcomes[0].said);
}
