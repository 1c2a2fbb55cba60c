//! Engine over MPI, for ranks that are processes of an MPI launcher.
//!
//! MPI only moves bytes here. Its own reductions leave the order of sums to the library; ours is the same for all engines. All calls
//! are non-blocking and polled: a rank that waits for a slower one can sleep, and can be aborted.

use crate::engine::{CommError, Engine};
use crate::transport::{Received, Sent, Transport, TransportEngine};
use mpi::ffi;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a message: what Open MPI sends over a socket without asking first is 64 KiB with its header. An answer to such a question waits
/// behind what the other rank sends meanwhile, so that a link works in one direction at a time: 2 MiB each way take 30 ms over
/// 1 Gbit/s instead of 17. Between ranks of a host, messages of this size take 0.1 ms more for as much.
const MESSAGE: usize = 63 << 10;
/// Largest broadcast in bytes: MPI counts in 31 bits.
const BROADCAST: usize = 1 << 30;
/// Time for which a rank polls in a loop, then yields between polls; after that it sleeps between them.
const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

fn fault(why: impl Into<String>) -> CommError {
    CommError::Engine { engine: "mpi", why: why.into() }
}

/// Turns the result of an MPI call into an error with MPI's message.
fn checked(what: &str, code: c_int) -> Result<(), CommError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; 1024];
    let mut len = 0;
    // SAFETY: the buffer is longer than any MPI's limit (256 and 512 in those in use).
    let found = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len) };
    let text: Vec<u8> = text[..len.clamp(0, 1024) as usize].iter().map(|&c| c as u8).collect();
    let why = if found == ffi::MPI_SUCCESS as c_int { String::from_utf8_lossy(&text) } else { "".into() };
    Err(fault(format!("{what} failed: {why} (code {code})")))
}

/// MPI runtime of this process. Dropping it finalizes MPI, unless communication was aborted: then the others might never finalize.
pub struct Mpi {
    process: Arc<Process>,
    world: Arc<dyn Engine>,
}

/// State shared by all groups of this process.
struct Process {
    /// Set once no more MPI calls may be made. MPI can't cancel what is under way, but it moves data only within calls, so
    /// no buffer is written any more (except by network hardware that writes on its own).
    ended: OnceLock<CommError>,
}

impl Process {
    fn check(&self) -> Result<(), CommError> {
        self.ended.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl Mpi {
    /// Initializes MPI, once in a process.
    pub fn init() -> Result<Self, CommError> {
        let mut initialized = 0;
        // SAFETY: allowed at any time.
        checked("MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut initialized) })?;
        if initialized != 0 {
            return Err(CommError::Misuse("MPI was started before in this process".to_string()));
        }
        let mut given = 0;
        // SAFETY: MPI was not started; null means no arguments. The constants are those of the library.
        unsafe {
            let wanted = ffi::RSMPI_THREAD_MULTIPLE;
            let code = ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), wanted, &mut given);
            checked("MPI_Init_thread", code)?;
            if given < wanted {
                ffi::MPI_Finalize();
                return Err(fault(
                    "this MPI does not support calls from several threads (MPI_THREAD_MULTIPLE)",
                ));
            }
        }
        let process = Arc::new(Process { ended: OnceLock::new() });
        // SAFETY: the group of all is there once MPI is started. Ours is a copy, so that nobody else's messages are in it.
        let own = unsafe {
            let all = ffi::RSMPI_COMM_WORLD;
            let code = ffi::MPI_Comm_set_errhandler(all, ffi::RSMPI_ERRORS_RETURN);
            checked("MPI_Comm_set_errhandler", code)?;
            let mut own = all;
            checked("MPI_Comm_dup", ffi::MPI_Comm_dup(all, &mut own))?;
            own
        };
        let world = MpiTransport::new(own, Arc::clone(&process))?;
        Ok(Mpi { process, world: Arc::new(TransportEngine::new(world)) })
    }

    pub fn engine(&self) -> Arc<dyn Engine> {
        Arc::clone(&self.world)
    }

    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    pub fn size(&self) -> usize {
        self.world.size()
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        let end = || CommError::Misuse("MPI has ended in this process".to_string());
        // A rank that panics would wait here for others that wait for it.
        if self.process.ended.set(end()).is_ok() && !std::thread::panicking() {
            // SAFETY: started by `init`, and no call is made after `ended` is set.
            unsafe { ffi::MPI_Finalize() };
        }
    }
}

/// MPI communicator of a group of ranks.
struct MpiTransport {
    comm: ffi::MPI_Comm,
    rank: usize,
    ranks: usize,
    process: Arc<Process>,
    requests: Mutex<Requests>,
}

/// Requests under way, kept for their buffer.
struct Requests(Vec<ffi::MPI_Request>);

// SAFETY: handles of MPI, which was initialized for calls from any thread.
unsafe impl Send for MpiTransport {}
// SAFETY: as above.
unsafe impl Sync for MpiTransport {}

impl MpiTransport {
    // Communicators are not freed: MPI wants all ranks to do that together, which ranks that drop them one by one don't. There are as
    // many as a run has meshes, and finalizing MPI frees them.
    fn new(comm: ffi::MPI_Comm, process: Arc<Process>) -> Result<Self, CommError> {
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: `comm` is a group of this process.
        unsafe {
            checked("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            checked("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank))?;
            checked("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut ranks))?;
        }
        let requests = Mutex::new(Requests(Vec::with_capacity(2 * ranks as usize)));
        Ok(MpiTransport { comm, rank: rank as usize, ranks: ranks as usize, process, requests })
    }

    /// Begins a round of transfers.
    fn begin(&self) -> Result<MutexGuard<'_, Requests>, CommError> {
        self.process.check()?;
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        // What a failed round left; MPI keeps its own record of it.
        requests.0.clear();
        Ok(requests)
    }

    /// # Safety
    /// `len` bytes from `from` are readable until the transfer is over.
    unsafe fn send(
        &self,
        requests: &mut Requests,
        rank: usize,
        from: *const u8,
        len: usize,
    ) -> Result<(), CommError> {
        for at in (0..len).step_by(MESSAGE) {
            // SAFETY: within the length, by the caller's promise.
            unsafe {
                let (from, count) = (from.add(at).cast::<c_void>(), MESSAGE.min(len - at) as c_int);
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let bytes = ffi::RSMPI_UINT8_T;
                let code = ffi::MPI_Isend(from, count, bytes, rank as c_int, 0, self.comm, &mut request);
                checked("MPI_Isend", code)?;
                requests.0.push(request);
            }
        }
        Ok(())
    }

    /// # Safety
    /// `len` bytes from `into` are writable, and nobody else's, until the transfer is over.
    unsafe fn receive(
        &self,
        requests: &mut Requests,
        rank: usize,
        into: *mut u8,
        len: usize,
    ) -> Result<(), CommError> {
        for at in (0..len).step_by(MESSAGE) {
            // SAFETY: within the length, by the caller's promise.
            unsafe {
                let (into, count) = (into.add(at).cast::<c_void>(), MESSAGE.min(len - at) as c_int);
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let bytes = ffi::RSMPI_UINT8_T;
                let code = ffi::MPI_Irecv(into, count, bytes, rank as c_int, 0, self.comm, &mut request);
                checked("MPI_Irecv", code)?;
                requests.0.push(request);
            }
        }
        Ok(())
    }

    /// Polls until all requests are done. `bytes` are transferred meanwhile, and only within polls: that long the rank doesn't sleep.
    fn finish(&self, requests: &mut Requests, bytes: usize) -> Result<(), CommError> {
        let patience = YIELD + Duration::from_nanos(2 * bytes as u64);
        let start = Instant::now();
        loop {
            let mut done = 0;
            // SAFETY: requests of ours, whose buffers the callers of `send` and `receive` vouch for.
            let code = unsafe {
                let (list, len) = (requests.0.as_mut_ptr(), requests.0.len() as c_int);
                ffi::MPI_Testall(len, list, &mut done, ffi::RSMPI_STATUSES_IGNORE)
            };
            checked("MPI_Testall", code)?;
            if done != 0 {
                return Ok(());
            }
            self.process.check()?;
            let waited = start.elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
            } else if waited < patience {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        // Each begins with its neighbour, so that not all send to the same rank at once.
        let (rank, ranks) = (self.rank, self.ranks);
        (1..ranks).map(move |step| (rank + step) % ranks)
    }
}

impl Transport for MpiTransport {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks
    }

    unsafe fn all_to_all(&self, send: Sent<'_>, receive: Received<'_>) -> Result<(), CommError> {
        let ((send, sent), (receive, received)) = (send, receive);
        let mut requests = self.begin()?;
        let mut bytes = 0;
        // SAFETY: valid parts, by the caller's promise; the transfer is over when this returns, or no more calls are made.
        unsafe {
            for rank in self.others() {
                let part = &received[rank];
                self.receive(&mut requests, rank, receive.add(part.start), part.len())?;
                bytes += part.len();
            }
            for rank in self.others() {
                self.send(&mut requests, rank, send.add(sent[rank].start), sent[rank].len())?;
            }
        }
        self.finish(&mut requests, bytes)
    }

    unsafe fn all_gather(&self, data: *mut u8, parts: &[Range<usize>]) -> Result<(), CommError> {
        let mut requests = self.begin()?;
        let (mut bytes, own) = (0, &parts[self.rank]);
        // SAFETY: as in `all_to_all`.
        unsafe {
            for rank in self.others() {
                let part = &parts[rank];
                self.receive(&mut requests, rank, data.add(part.start), part.len())?;
                bytes += part.len();
            }
            for rank in self.others() {
                self.send(&mut requests, rank, data.add(own.start), own.len())?;
            }
        }
        self.finish(&mut requests, bytes)
    }

    unsafe fn broadcast(&self, data: *mut u8, len: usize, root: usize) -> Result<(), CommError> {
        let mut requests = self.begin()?;
        for at in (0..len).step_by(BROADCAST) {
            // SAFETY: as in `all_to_all`.
            unsafe {
                let (data, count) = (data.add(at).cast::<c_void>(), BROADCAST.min(len - at) as c_int);
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let bytes = ffi::RSMPI_UINT8_T;
                let code = ffi::MPI_Ibcast(data, count, bytes, root as c_int, self.comm, &mut request);
                checked("MPI_Ibcast", code)?;
                requests.0.push(request);
            }
        }
        self.finish(&mut requests, len)
    }

    fn split(&self, members: &[usize], _: u64) -> Result<Self, CommError> {
        self.process.check()?;
        let place = members.iter().position(|&rank| rank == self.rank).unwrap_or(0);
        let colour = members.first().copied().unwrap_or(0);
        let mut part = self.comm;
        // SAFETY: a group of ours. This can't be aborted, but all ranks have just made the same call, and are here or about to be.
        let code = unsafe { ffi::MPI_Comm_split(self.comm, colour as c_int, place as c_int, &mut part) };
        checked("MPI_Comm_split", code)?;
        Self::new(part, Arc::clone(&self.process))
    }

    /// Aborts all groups of the process, not only those split off this one: MPI can't tell them apart when it moves data.
    fn abort(&self, why: &str) {
        let _ = self.process.ended.set(CommError::Aborted(Arc::from(why)));
    }
}
