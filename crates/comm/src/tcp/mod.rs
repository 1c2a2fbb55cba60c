//! Engine over TCP sockets, one between every two ranks.
//!
//! Every socket is read and written as it becomes ready, so that ranks which send to each other can't block each other. Sub-groups
//! have sockets of their own: threads that use different groups don't wait for each other.

mod flow;
mod join;

use crate::engine::{CommError, Engine};
use crate::transport::{Received, Sent, Transport, TransportEngine};
use flow::Flow;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Makes the engine of rank `rank`; `streams[r]` is connected to rank r, `None` for itself.
pub fn engine(rank: usize, streams: Vec<Option<TcpStream>>) -> Result<Arc<dyn Engine>, CommError> {
    Ok(Arc::new(TransportEngine::new(TcpTransport::new(rank, streams)?)))
}

/// Time for which a rank yields and retries before it blocks in `poll`: most answers are on their way already.
const YIELD_FOR: Duration = Duration::from_micros(30);
/// Timeout of one `poll`. Closing a socket ends it at once, so this is only a safeguard.
const NAP_MS: i32 = 100;

struct TcpTransport {
    rank: usize,
    sockets: Arc<Sockets>,
    transfers: Mutex<Transfers>,
}

/// Sockets to the other ranks, shared with threads that abort a transfer.
struct Sockets {
    streams: Vec<Option<TcpStream>>,
    failed: OnceLock<CommError>,
    parts: Mutex<Vec<Weak<Sockets>>>,
}

/// State of a round of transfers, kept for its buffers.
struct Transfers {
    /// Number of rounds so far.
    sequence: u64,
    flows: Vec<Flow>,
    polls: Vec<libc::pollfd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is consistent between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fault(why: String) -> CommError {
    CommError::Engine { engine: "tcp", why }
}

impl Sockets {
    /// Closes all sockets of this rank; the others see the end of the connection.
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

impl TcpTransport {
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
        let sockets = Sockets { streams, failed: OnceLock::new(), parts: Mutex::default() };
        let transfers = Transfers {
            sequence: 0,
            flows: std::iter::repeat_with(Flow::default).take(ranks).collect(),
            polls: Vec::with_capacity(ranks),
        };
        Ok(TcpTransport { rank, sockets: Arc::new(sockets), transfers: Mutex::new(transfers) })
    }

    /// Sends and receives until every flow is done.
    fn transfer(&self, transfers: &mut Transfers) -> Result<(), CommError> {
        let mut idle: Option<Instant> = None;
        loop {
            let (mut moved, mut pending) = (false, false);
            for (rank, stream) in self.sockets.streams.iter().enumerate() {
                let Some(stream) = stream else { continue };
                let flow = &mut transfers.flows[rank];
                if flow.is_done() {
                    continue;
                }
                let step = flow.step(stream, rank, transfers.sequence);
                moved |= step.map_err(|error| self.sockets.fail(error))?;
                pending |= !flow.is_done();
            }
            if !pending {
                return Ok(());
            }
            // A socket that abort closes looks like one that the other rank closed; the flag says which it was.
            self.sockets.check()?;
            if moved {
                idle = None;
            } else if idle.get_or_insert_with(Instant::now).elapsed() < YIELD_FOR {
                std::thread::yield_now();
            } else {
                self.sleep(transfers)?;
            }
        }
    }

    /// Blocks until a socket is ready.
    fn sleep(&self, transfers: &mut Transfers) -> Result<(), CommError> {
        transfers.polls.clear();
        for (flow, stream) in transfers.flows.iter().zip(&self.sockets.streams) {
            let Some(stream) = stream else { continue };
            let events = flow.events();
            if events != 0 {
                transfers.polls.push(libc::pollfd { fd: stream.as_raw_fd(), events, revents: 0 });
            }
        }
        // SAFETY: pointer and length are those of the list, and its sockets stay open meanwhile.
        let ready = unsafe {
            libc::poll(transfers.polls.as_mut_ptr(), transfers.polls.len() as libc::nfds_t, NAP_MS)
        };
        let error = std::io::Error::last_os_error();
        if ready < 0 && error.kind() != std::io::ErrorKind::Interrupted {
            return Err(self.sockets.fail(fault(format!("can't wait for the network: {error}"))));
        }
        Ok(())
    }

    /// Begins a round of transfers without flows.
    fn begin(&self) -> Result<MutexGuard<'_, Transfers>, CommError> {
        self.sockets.check()?;
        let mut transfers = lock(&self.transfers);
        transfers.sequence += 1;
        transfers.flows.iter_mut().for_each(Flow::clear);
        Ok(transfers)
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.sockets.streams.len()
    }

    unsafe fn all_to_all(&self, send: Sent<'_>, receive: Received<'_>) -> Result<(), CommError> {
        let ((send, sent), (receive, received)) = (send, receive);
        let mut transfers = self.begin()?;
        let sequence = transfers.sequence;
        for (rank, flow) in transfers.flows.iter_mut().enumerate().filter(|&(rank, _)| rank != self.rank) {
            // SAFETY: valid parts, by the caller's promise, for which the transfer is over before this returns.
            unsafe {
                flow.send(sequence, send.add(sent[rank].start), sent[rank].len());
                flow.receive(receive.add(received[rank].start), received[rank].len());
            }
        }
        self.transfer(&mut transfers)
    }

    unsafe fn all_gather(&self, data: *mut u8, parts: &[Range<usize>]) -> Result<(), CommError> {
        let mut transfers = self.begin()?;
        let (sequence, own) = (transfers.sequence, &parts[self.rank]);
        for (rank, flow) in transfers.flows.iter_mut().enumerate().filter(|&(rank, _)| rank != self.rank) {
            // SAFETY: valid parts, by the caller's promise, for which the transfer is over before this returns.
            unsafe {
                flow.send(sequence, data.add(own.start), own.len());
                flow.receive(data.add(parts[rank].start), parts[rank].len());
            }
        }
        self.transfer(&mut transfers)
    }

    /// Broadcasts down a binomial tree: a rank receives from the one whose number, counted from the root, lacks its own lowest bit.
    unsafe fn broadcast(&self, data: *mut u8, len: usize, root: usize) -> Result<(), CommError> {
        let ranks = self.size();
        let place = (self.rank + ranks - root) % ranks;
        let rank_at = |place: usize| (place + root) % ranks;
        let lowest = if place == 0 { ranks.next_power_of_two() } else { 1 << place.trailing_zeros() };
        let mut transfers = self.begin()?;
        if place != 0 {
            // SAFETY: valid, by the caller's promise, and over before this returns.
            unsafe { transfers.flows[rank_at(place - lowest)].receive(data, len) };
            self.transfer(&mut transfers)?;
            transfers.flows.iter_mut().for_each(Flow::clear);
        }
        let (sequence, mut step) = (transfers.sequence, lowest / 2);
        while step > 0 {
            if place + step < ranks {
                // SAFETY: as above.
                unsafe { transfers.flows[rank_at(place + step)].send(sequence, data, len) };
            }
            step /= 2;
        }
        self.transfer(&mut transfers)
    }

    fn split(&self, members: &[usize], number: u64) -> Result<Self, CommError> {
        let (rank, streams) = join::connect(self, members, number)?;
        let part = TcpTransport::new(rank, streams)?;
        let mut parts = lock(&self.sockets.parts);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&part.sockets));
        drop(parts);
        // A later abort finds the part in the list; an earlier one is found here.
        if let Err(error) = self.sockets.check() {
            part.sockets.fail(error.clone());
            return Err(error);
        }
        Ok(part)
    }

    fn abort(&self, why: &str) {
        self.sockets.abort(why);
    }
}
