//! The rounds that processes of MPI do.

use crate::{Failure, Named, Round, Runner, bind, buffer, ours};
use comm::mpi::Mpi;
use comm::{Activity, Communicator};
use mpi::ffi;
use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const SERVE: &str = "--serve";
const BOUND: &str = "bound";

/// `mpirun` and the connections with its ranks, the first of which says how long a round took.
struct Server {
    child: Child,
    ranks: Vec<BufReader<TcpStream>>,
}

struct Ordered {
    server: Rc<RefCell<Server>>,
    engine: &'static str,
}

pub fn runners(ranks: usize, most: usize, bound: bool) -> Result<Vec<Named>, Failure> {
    // Every rank gets every order, so that those without a round wait for the next line and not in MPI, which would look on.
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let child = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .arg(std::env::current_exe()?)
        .args([SERVE, &most.to_string(), &listener.local_addr()?.to_string(), if bound { BOUND } else { "" }])
        .spawn()?;
    let mut streams = Vec::new();
    for _ in 0..ranks {
        let mut stream = BufReader::new(listener.accept()?.0);
        let mut line = String::new();
        stream.read_line(&mut line)?;
        streams.push((line.trim().parse::<usize>()?, stream));
    }
    streams.sort_by_key(|(rank, _)| *rank);
    let ranks = streams.into_iter().map(|(_, stream)| stream).collect();
    let server = Rc::new(RefCell::new(Server { child, ranks }));
    let runner = |engine| -> Named { (engine, Box::new(Ordered { server: Rc::clone(&server), engine })) };
    Ok(vec![runner("mpi"), runner("MPI_Allreduce")])
}

impl Runner for Ordered {
    fn run(&mut self, round: Round) -> Result<Duration, Failure> {
        let mut server = self.server.borrow_mut();
        let order = format!("{} {} {}\n", self.engine, round.bytes, round.calls);
        for rank in &mut server.ranks {
            rank.get_mut().write_all(order.as_bytes())?;
        }
        let mut line = String::new();
        server.ranks[0].read_line(&mut line)?;
        let nanos = line.trim().parse().map_err(|_| format!("rank 0 said {line:?}"))?;
        Ok(Duration::from_nanos(nanos))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The end of the orders is the end of the ranks.
        self.ranks.clear();
        let _ = self.child.wait();
    }
}

/// As a process of `mpirun`.
pub fn serve() -> Result<(), Failure> {
    let most = std::env::args().nth(2).ok_or("how much?")?.parse()?;
    let address = std::env::args().nth(3).ok_or("for whom?")?;
    let mpi = Mpi::init()?;
    if std::env::args().nth(4).as_deref() == Some(BOUND) {
        bind(mpi.rank())?;
    }
    let comm = Communicator::new(mpi.engine(), Arc::new(Activity::new()));
    let (mut data, from) = (buffer(most), buffer(most));
    let mut times = TcpStream::connect(address)?;
    writeln!(times, "{}", mpi.rank())?;
    for line in BufReader::new(times.try_clone()?).lines() {
        let line = line?;
        let mut words = line.split(' ');
        let mut word = || words.next().ok_or("a word is missing");
        let engine = word()?;
        let round = Round { bytes: word()?.parse()?, calls: word()?.parse()? };
        let time = match engine {
            "mpi" => ours(&comm, &mut data, round)?,
            _ => theirs(&comm, &from, &mut data, round)?,
        };
        if mpi.rank() == 0 {
            writeln!(times, "{}", time.as_nanos())?;
        }
    }
    Ok(())
}

/// From one buffer into another, which spares MPI a copy.
fn theirs(comm: &Communicator, from: &[f32], into: &mut [f32], round: Round) -> Result<Duration, Failure> {
    let len = round.bytes / 4;
    let (from, into) = (from[..len].as_ptr().cast(), into[..len].as_mut_ptr().cast());
    comm.barrier(comm.name("bench"))?;
    let start = Instant::now();
    for _ in 0..round.calls {
        // SAFETY: two buffers of as many elements, of which nobody else knows.
        let code = unsafe {
            let (kind, sum, all) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD);
            ffi::MPI_Allreduce(from, into, len as i32, kind, sum, all)
        };
        if code != ffi::MPI_SUCCESS as i32 {
            return Err(format!("MPI_Allreduce: code {code}").into());
        }
    }
    Ok(start.elapsed())
}
