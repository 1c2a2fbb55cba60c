//! Ranks joined by sockets, each to each.
//!
//! Every socket is read and written as it is ready, so that ranks which send to each other can't block each other. What was
//! split off has sockets of its own: threads that use different groups have nothing to wait for from one another.

mod flow;
mod join;

use crate::engine::{CommError, Engine};
use crate::transport::{Exchange, Transport};
use flow::Flow;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The engine of rank `rank`, with `streams[r]` connected to rank r and none at its own place.
pub fn engine(rank: usize, streams: Vec<Option<TcpStream>>) -> Result<Arc<dyn Engine>, CommError> {
    Ok(Arc::new(Exchange::new(Tcp::new(rank, streams)?)))
}

/// Before a rank asks to be woken it looks on for as long, giving way: most answers are on their way already.
const LOOK: Duration = Duration::from_micros(30);
/// Waiting ends at once when a socket is closed, so this is only for what nobody has thought of.
const NAP_MS: i32 = 100;

struct Tcp {
    rank: usize,
    links: Arc<Links>,
    pump: Mutex<Pump>,
}

/// What other threads need in order to end an exchange.
struct Links {
    streams: Vec<Option<TcpStream>>,
    failed: OnceLock<CommError>,
    parts: Mutex<Vec<Weak<Links>>>,
}

/// The state of an exchange, kept for its room.
struct Pump {
    /// Exchanges so far.
    sequence: u64,
    flows: Vec<Flow>,
    polls: Vec<libc::pollfd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whatever these locks guard is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fault(why: String) -> CommError {
    CommError::Engine { engine: "tcp", why }
}

impl Links {
    /// Ends everything on this rank; the others find their sockets closed.
    fn fail(&self, error: CommError) -> CommError {
        let error = self.failed.get_or_init(|| error).clone();
        for stream in self.streams.iter().flatten() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        error
    }

    fn abort(&self, why: &str) {
        self.fail(CommError::Aborted(Arc::from(why)));
        let parts: Vec<_> = lock(&self.parts).iter().filter_map(Weak::upgrade).collect();
        parts.iter().for_each(|part| part.abort(why));
    }

    fn check(&self) -> Result<(), CommError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl Tcp {
    fn new(rank: usize, streams: Vec<Option<TcpStream>>) -> Result<Self, CommError> {
        let ranks = streams.len();
        let misplaced = |(r, stream): (usize, &Option<TcpStream>)| stream.is_none() != (r == rank);
        if rank >= ranks || streams.iter().enumerate().any(misplaced) {
            let why = format!("rank {rank} of {ranks} needs a connection to each other rank");
            return Err(CommError::Misuse(why));
        }
        for stream in streams.iter().flatten() {
            let ready = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
            ready.map_err(|e| fault(format!("can't set up a connection: {e}")))?;
        }
        let links = Links { streams, failed: OnceLock::new(), parts: Mutex::default() };
        let pump = Pump {
            sequence: 0,
            flows: std::iter::repeat_with(Flow::default).take(ranks).collect(),
            polls: Vec::with_capacity(ranks),
        };
        Ok(Tcp { rank, links: Arc::new(links), pump: Mutex::new(pump) })
    }

    /// Sends and receives what the flows say, until all is there.
    fn exchange(&self, pump: &mut Pump) -> Result<(), CommError> {
        let mut idle: Option<Instant> = None;
        loop {
            let (mut moved, mut pending) = (false, false);
            for (rank, stream) in self.links.streams.iter().enumerate() {
                let Some(stream) = stream else { continue };
                let flow = &mut pump.flows[rank];
                if flow.is_done() {
                    continue;
                }
                let step = flow.step(stream, rank, pump.sequence);
                moved |= step.map_err(|error| self.links.fail(error))?;
                pending |= !flow.is_done();
            }
            if !pending {
                return Ok(());
            }
            // A socket that abort closes looks like one that the other rank closed; the flag says which it was.
            self.links.check()?;
            if moved {
                idle = None;
            } else if idle.get_or_insert_with(Instant::now).elapsed() < LOOK {
                std::thread::yield_now();
            } else {
                self.sleep(pump)?;
            }
        }
    }

    /// Until a socket can go on.
    fn sleep(&self, pump: &mut Pump) -> Result<(), CommError> {
        pump.polls.clear();
        for (flow, stream) in pump.flows.iter().zip(&self.links.streams) {
            let Some(stream) = stream else { continue };
            let events = flow.events();
            if events != 0 {
                pump.polls.push(libc::pollfd { fd: stream.as_raw_fd(), events, revents: 0 });
            }
        }
        // SAFETY: the list is as long as is said, and its sockets stay open meanwhile.
        let ready = unsafe { libc::poll(pump.polls.as_mut_ptr(), pump.polls.len() as libc::nfds_t, NAP_MS) };
        let error = std::io::Error::last_os_error();
        if ready < 0 && error.kind() != std::io::ErrorKind::Interrupted {
            return Err(self.links.fail(fault(format!("can't wait for the network: {error}"))));
        }
        Ok(())
    }

    /// Begins an exchange in which nothing moves yet.
    fn begin(&self) -> Result<MutexGuard<'_, Pump>, CommError> {
        self.links.check()?;
        let mut pump = lock(&self.pump);
        pump.sequence += 1;
        pump.flows.iter_mut().for_each(Flow::clear);
        Ok(pump)
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.links.streams.len()
    }

    unsafe fn all_to_all(
        &self,
        send: *const u8,
        sent: &[Range<usize>],
        receive: *mut u8,
        received: &[Range<usize>],
    ) -> Result<(), CommError> {
        let mut pump = self.begin()?;
        let sequence = pump.sequence;
        for (rank, flow) in pump.flows.iter_mut().enumerate().filter(|&(rank, _)| rank != self.rank) {
            // SAFETY: valid parts, by the caller's promise, for which the exchange is over before this returns.
            unsafe {
                flow.send(sequence, send.add(sent[rank].start), sent[rank].len());
                flow.receive(receive.add(received[rank].start), received[rank].len());
            }
        }
        self.exchange(&mut pump)
    }

    unsafe fn all_gather(&self, data: *mut u8, parts: &[Range<usize>]) -> Result<(), CommError> {
        let mut pump = self.begin()?;
        let (sequence, own) = (pump.sequence, &parts[self.rank]);
        for (rank, flow) in pump.flows.iter_mut().enumerate().filter(|&(rank, _)| rank != self.rank) {
            // SAFETY: valid parts, by the caller's promise, for which the exchange is over before this returns.
            unsafe {
                flow.send(sequence, data.add(own.start), own.len());
                flow.receive(data.add(parts[rank].start), parts[rank].len());
            }
        }
        self.exchange(&mut pump)
    }

    /// Down a tree: a rank has it from the one whose number lacks its own lowest bit, counted from the root.
    unsafe fn broadcast(&self, data: *mut u8, len: usize, root: usize) -> Result<(), CommError> {
        let ranks = self.size();
        let place = (self.rank + ranks - root) % ranks;
        let rank_at = |place: usize| (place + root) % ranks;
        let lowest = if place == 0 { ranks.next_power_of_two() } else { 1 << place.trailing_zeros() };
        let mut pump = self.begin()?;
        if place != 0 {
            // SAFETY: valid, by the caller's promise, and over before this returns.
            unsafe { pump.flows[rank_at(place - lowest)].receive(data, len) };
            self.exchange(&mut pump)?;
            pump.flows.iter_mut().for_each(Flow::clear);
        }
        let (sequence, mut step) = (pump.sequence, lowest / 2);
        while step > 0 {
            if place + step < ranks {
                // SAFETY: as above.
                unsafe { pump.flows[rank_at(place + step)].send(sequence, data, len) };
            }
            step /= 2;
        }
        self.exchange(&mut pump)
    }

    fn split(&self, members: &[usize], number: u64) -> Result<Self, CommError> {
        let (rank, streams) = join::connect(self, members, number)?;
        let part = Tcp::new(rank, streams)?;
        let mut parts = lock(&self.links.parts);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&part.links));
        drop(parts);
        // Whoever aborts from now on finds the part in the list; who did before is found here.
        if let Err(error) = self.links.check() {
            part.links.fail(error.clone());
            return Err(error);
        }
        Ok(part)
    }

    fn abort(&self, why: &str) {
        self.links.abort(why);
    }
}
