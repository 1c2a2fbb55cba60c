//! How long a blocking all-reduce of f32 takes: our threads, our MPI engine, and MPI's own `MPI_Allreduce`.
//!
//!     cargo run --release -p comm --features mpi --example all_reduce -- [--ranks 2,4] [--bytes 1024,…] [--rounds 21] [--bind yes] [--out FILE]
//!
//! Sizes go from 1 KB to 100 MB unless given. Rounds of the three alternate, so that all see the same machine: this program holds
//! the threads, and starts `mpirun` of itself to serve rounds on request; a process without a round sleeps. A round is a loop
//! of calls, and gives the mean time of one as rank 0 sees it. The table shows the median of the rounds and their quartiles;
//! the JSON, written after every size, has them all. With `--bind yes` every rank of all three has a core of its own, in turn; with
//! `no`, the default, the system places all of them. Left to itself `mpirun` binds and threads are free, and the two can't be
//! compared: on a busy machine both threads end up on one core. Without the feature `mpi` only the threads are measured.

#[cfg(feature = "mpi")]
mod processes;

use comm::{Activity, Communicator, Reduction};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

/// A loop of calls that all ranks make.
#[derive(Clone, Copy)]
struct Round {
    bytes: usize,
    calls: usize,
}

/// Somebody who does rounds.
trait Runner {
    fn run(&mut self, round: Round) -> Result<Duration, Failure>;
}

type Named = (&'static str, Box<dyn Runner>);

struct Settings {
    ranks: Vec<usize>,
    bytes: Vec<usize>,
    rounds: usize,
    bind: bool,
    out: Option<String>,
}

fn settings(mut arguments: impl Iterator<Item = String>) -> Result<Settings, Failure> {
    let sizes = (0..).map(|i| 1024 << (2 * i)).take_while(|&bytes| bytes < 100 << 20);
    let mut settings = Settings {
        ranks: vec![2, 4],
        bytes: sizes.chain([100 << 20]).collect(),
        rounds: 21,
        bind: false,
        out: None,
    };
    let numbers = |text: &str| text.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match &*flag {
            "--ranks" => settings.ranks = numbers(&value)?,
            "--bytes" => settings.bytes = numbers(&value)?,
            "--rounds" => settings.rounds = value.parse()?,
            "--bind" => {
                settings.bind = match &*value {
                    "yes" => true,
                    "no" => false,
                    _ => return Err("--bind takes yes or no".into()),
                }
            }
            "--out" => settings.out = Some(value),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    if settings.rounds == 0 || settings.ranks.contains(&0) {
        return Err("at least one round and one rank".into());
    }
    Ok(settings)
}

fn main() -> Result<(), Failure> {
    #[cfg(feature = "mpi")]
    if std::env::args().nth(1).as_deref() == Some(processes::SERVE) {
        return processes::serve();
    }
    let settings = settings(std::env::args().skip(1))?;
    let mut results = Vec::new();
    println!("{:>5} {:>10}  median (quartiles) in µs", "ranks", "bytes");
    for &ranks in &settings.ranks {
        let most = settings.bytes.iter().copied().max().unwrap_or(0);
        let mut runners: Vec<(&str, Box<dyn Runner>)> =
            vec![("threads", Box::new(Threads::new(ranks, most, settings.bind)))];
        #[cfg(feature = "mpi")]
        runners.extend(processes::runners(ranks, most, settings.bind)?);
        for &bytes in &settings.bytes {
            let times = alternate(&mut runners, bytes, settings.rounds)?;
            print!("{ranks:>5} {bytes:>10}");
            for ((name, _), times) in runners.iter().zip(times) {
                let at = |part: usize| times[(times.len() - 1) * part / 4];
                print!("  {name} {:.2} ({:.2}–{:.2})", at(2), at(1), at(3));
                results.push(entry(name, ranks, bytes, &times));
            }
            println!();
            if let Some(out) = &settings.out {
                std::fs::write(out, report(&settings, &results))?;
            }
        }
    }
    Ok(())
}

/// The times of a call in µs, in rising order, for each runner.
fn alternate(runners: &mut [Named], bytes: usize, rounds: usize) -> Result<Vec<Vec<f64>>, Failure> {
    // Some 20 ms, at a guess of what a call takes.
    let guess = 2e-6 + bytes as f64 / 4e9;
    let round = Round { bytes, calls: ((0.02 / guess) as usize).max(3) };
    let mut times = vec![Vec::new(); runners.len()];
    // The first round is to warm up.
    for number in 0..=rounds {
        for ((_, runner), times) in runners.iter_mut().zip(&mut times) {
            let time = runner.run(round)?.as_secs_f64() * 1e6 / round.calls as f64;
            if number > 0 {
                times.push(time);
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    Ok(times)
}

fn entry(name: &str, ranks: usize, bytes: usize, times: &[f64]) -> String {
    let all: Vec<String> = times.iter().map(|time| format!("{time:.3}")).collect();
    let median = times[(times.len() - 1) / 2];
    format!(
        r#"{{"engine": "{name}", "ranks": {ranks}, "bytes": {bytes}, "median_us": {median:.3}, "rounds_us": [{}]}}"#,
        all.join(", ")
    )
}

fn report(settings: &Settings, results: &[String]) -> String {
    let (rounds, bind) = (settings.rounds, settings.bind);
    let mut text = String::from("{\"bench\": \"all_reduce f32, blocking\", ");
    let _ = writeln!(text, "\"cores\": {}, \"rounds\": {rounds}, \"bound\": {bind},", cores());
    let _ = write!(text, " \"results\": [\n  {}\n]}}\n", results.join(",\n  "));
    text
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// Gives this thread, and those it starts, one core.
fn bind(rank: usize) -> Result<(), Failure> {
    // SAFETY: an empty set is all zeros, and the system only reads it.
    let code = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(rank % cores(), &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set)
    };
    if code == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

/// Zeros, so that sums stay what they are, but written, so that the memory is there.
fn buffer(bytes: usize) -> Vec<f32> {
    let mut data = vec![1.0; bytes / 4];
    data.fill(std::hint::black_box(0.0));
    data
}

/// A round as one rank of ours does it.
fn ours(comm: &Communicator, data: &mut [f32], round: Round) -> Result<Duration, Failure> {
    let name = comm.name("bench");
    let data = &mut data[..round.bytes / 4];
    comm.barrier(name)?;
    let start = Instant::now();
    for _ in 0..round.calls {
        comm.all_reduce(name, Reduction::Sum, data)?;
    }
    let time = start.elapsed();
    // Zeros say nothing about whether ranks wait for each other, so one more call has something to show.
    data.fill((comm.rank() + 1) as f32);
    comm.all_reduce(name, Reduction::Sum, data)?;
    let expected = (comm.size() * (comm.size() + 1) / 2) as f32;
    let wrong = data.iter().filter(|x| **x != expected).count();
    data.fill(0.0);
    if wrong > 0 { Err(format!("{wrong} elements are wrong").into()) } else { Ok(time) }
}

struct Threads {
    orders: Vec<Sender<Round>>,
    times: Receiver<Result<Duration, String>>,
}

impl Threads {
    fn new(ranks: usize, most: usize, bound: bool) -> Self {
        let (result, times) = channel();
        let start = |engine| {
            let (order, orders) = channel::<Round>();
            let result: Sender<_> = result.clone();
            std::thread::spawn(move || {
                let comm = Communicator::new(engine, Arc::new(Activity::new()));
                let ready = if bound { bind(comm.rank()) } else { Ok(()) }.map_err(|e| e.to_string());
                let mut data = buffer(most);
                for round in orders {
                    let mut run = || ours(&comm, &mut data, round).map_err(|e| e.to_string());
                    let time = ready.clone().and_then(|()| run());
                    if comm.rank() == 0 && result.send(time).is_err() {
                        return;
                    }
                }
            });
            order
        };
        let orders = comm::threads::group(ranks).into_iter().map(start).collect();
        Threads { orders, times }
    }
}

impl Runner for Threads {
    fn run(&mut self, round: Round) -> Result<Duration, Failure> {
        for order in &self.orders {
            order.send(round)?;
        }
        Ok(self.times.recv()??)
    }
}
