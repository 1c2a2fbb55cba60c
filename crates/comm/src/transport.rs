//! Collectives over a transport that moves bytes between processes (MPI, TCP).
//!
//! Every call begins with a frame from each rank to each: the call's signature, so that ranks whose calls differ find out before
//! anything else is sent, and small data. Larger data follows in one or two message rounds. The receiving rank sums, with the code and
//! in the order of all engines.

use crate::call::{Call, Collective, Counts};
use crate::engine::{CommError, Engine};
use crate::reduce::reduce;
use crate::share::{agree, part_of, pull};
use crate::signature::{self, Signature};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Memory that is sent, with the byte range for each rank.
pub(crate) type Sent<'a> = (*const u8, &'a [Range<usize>]);
/// Memory that is received into, with the byte range from each rank.
pub(crate) type Received<'a> = (*mut u8, &'a [Range<usize>]);

/// Transfers bytes between the ranks of a group. Calls are made one at a time, and in the same order on every rank.
///
/// Lengths agree between ranks: [`TransportEngine`] makes sure of it.
pub(crate) trait Transport: Send + Sync + Sized + 'static {
    fn name(&self) -> &'static str;

    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// Sends part r of `send` to rank r, and receives part r of `receive` from it. This rank's own parts are not copied.
    ///
    /// # Safety
    /// The parts are valid, and those received apart from each other and from those sent.
    unsafe fn all_to_all(&self, send: Sent<'_>, receive: Received<'_>) -> Result<(), CommError>;

    /// Gathers `data` on all ranks; rank r contributes bytes `parts[r]`.
    ///
    /// # Safety
    /// The parts are valid and apart.
    unsafe fn all_gather(&self, data: *mut u8, parts: &[Range<usize>]) -> Result<(), CommError>;

    /// # Safety
    /// `len` bytes from `data` are valid.
    unsafe fn broadcast(&self, data: *mut u8, len: usize, root: usize) -> Result<(), CommError>;

    /// Makes the transport of a sub-group; `members` are its ranks in this group, in their order there, and this rank is among them.
    /// `number` is the same for all and new with every split. All ranks call it.
    fn split(&self, members: &[usize], number: u64) -> Result<Self, CommError>;

    /// Aborts as [`Engine::abort`] does, sub-groups included.
    fn abort(&self, why: &str);
}

/// Largest data, in bytes, that is sent with the signature.
const INLINE: usize = 1024;
/// Bytes before the data in a frame, for the signature; keeps the data aligned.
const HEAD: usize = 64;
const FRAME: usize = HEAD + INLINE;
/// Largest all-reduce, in bytes, in which every rank sends everything to every other: one message round instead of two.
const GATHER: usize = 8 << 10;
/// Bytes of a block of an all-reduce: what is received stays in the cache until it is summed.
const BLOCK: usize = 4 << 20;

/// Engine that implements collectives on a [`Transport`].
pub(crate) struct TransportEngine<T> {
    transport: T,
    scratch: Mutex<Scratch>,
    /// First failure; every later call returns it.
    failed: OnceLock<CommError>,
}

/// Buffers that are kept from call to call.
#[derive(Default)]
struct Scratch {
    frames: ScratchBuffer,
    frame_parts: Vec<Range<usize>>,
    data: ScratchBuffer,
    sent: Vec<Range<usize>>,
    received: Vec<Range<usize>>,
    splits: u64,
}

/// Buffer of words, so that it is aligned for every element type.
#[derive(Default)]
struct ScratchBuffer(Vec<u64>);

impl ScratchBuffer {
    /// Address of at least so many bytes; the old content is lost.
    fn of(&mut self, bytes: usize) -> *mut u8 {
        let words = bytes.div_ceil(8).max(self.0.len());
        self.0.resize(words, 0);
        self.0.as_mut_ptr().cast()
    }
}

fn fill(parts: &mut Vec<Range<usize>>, all: impl Iterator<Item = Range<usize>>) -> &[Range<usize>] {
    parts.clear();
    parts.extend(all);
    parts
}

/// Byte ranges of equal parts, one after the other.
fn equal(ranks: usize, part: usize) -> impl Iterator<Item = Range<usize>> {
    (0..ranks).map(move |rank| rank * part..(rank + 1) * part)
}

/// Byte ranges of parts of these lengths, one after the other.
fn lined_up(lens: &[usize], bytes: usize) -> impl Iterator<Item = Range<usize>> {
    lens.iter().scan(0, move |at, len| {
        let start = *at;
        *at += len * bytes;
        Some(start..*at)
    })
}

impl<T: Transport> TransportEngine<T> {
    pub fn new(transport: T) -> Self {
        TransportEngine { transport, scratch: Mutex::default(), failed: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Scratch> {
        // It holds nothing between two calls.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `what`, unless an earlier call failed.
    fn guarded<R>(&self, what: impl FnOnce(&mut Scratch) -> Result<R, CommError>) -> Result<R, CommError> {
        let mut scratch = self.lock();
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        what(&mut scratch).map_err(|error| self.failed.get_or_init(|| error).clone())
    }

    /// Gathers all ranks' signatures and `len` bytes of each, and compares the signatures; returns the address of the frames.
    ///
    /// # Safety
    /// `len` bytes from `own` are readable.
    unsafe fn gather_signatures(
        &self,
        scratch: &mut Scratch,
        signature: Signature,
        own: *const u8,
        len: usize,
    ) -> Result<*const u8, CommError> {
        let (me, ranks) = (self.transport.rank(), self.transport.size());
        let frames = scratch.frames.of(ranks * FRAME);
        let parts = fill(&mut scratch.frame_parts, equal(ranks, FRAME));
        let head = signature.to_bytes();
        // SAFETY: a frame for each rank, and room for `INLINE` in each.
        unsafe {
            let frame = frames.add(me * FRAME);
            std::ptr::copy_nonoverlapping(head.as_ptr(), frame, head.len());
            std::ptr::copy_nonoverlapping(own, frame.add(HEAD), len.min(INLINE));
            self.transport.all_gather(frames, parts)?;
        }
        // SAFETY: every frame begins with a signature.
        signature::compare(ranks, |rank| unsafe {
            Signature::from_bytes(&*frames.add(rank * FRAME).cast_const().cast())
        })?;
        Ok(frames)
    }

    /// Runs a call whose data does not fit into the frames.
    ///
    /// # Safety
    /// As [`Engine::run`].
    unsafe fn run_large(&self, scratch: &mut Scratch, call: &Call) -> Result<(), CommError> {
        let (me, ranks, bytes) = (self.transport.rank(), self.transport.size(), call.kind.bytes());
        let (send, receive) = (call.send.address, call.receive.address);
        // SAFETY: all parts are within the spans, by the lengths that the communicator has checked, or within the scratch.
        unsafe {
            match &call.collective {
                Collective::AllReduce(_) if call.bytes() <= GATHER => {
                    let all = scratch.data.of(ranks * call.bytes());
                    std::ptr::copy_nonoverlapping(send, all.add(me * call.bytes()), call.bytes());
                    self.transport
                        .all_gather(all, fill(&mut scratch.received, equal(ranks, call.bytes())))?;
                    pull(call, me, ranks, &|rank| all.add(rank * call.bytes()));
                }
                Collective::AllReduce(_) => self.all_reduce(scratch, call)?,
                Collective::ReduceScatter(reduction) => {
                    let part = call.receive.len * bytes;
                    let all = scratch.data.of(ranks * part);
                    let sent = fill(&mut scratch.sent, equal(ranks, part));
                    self.transport.all_to_all((send, sent), (all, sent))?;
                    let own = send.add(me * part);
                    let source = |rank| if rank == me { own } else { all.add(rank * part) }.cast_const();
                    reduce(call.kind, *reduction, ranks, call.receive.len, &source, 1, &|_| receive);
                }
                Collective::AllGather => {
                    let part = call.send.len * bytes;
                    let own = receive.add(me * part);
                    if own != send {
                        std::ptr::copy_nonoverlapping(send, own, part);
                    }
                    self.transport.all_gather(receive, fill(&mut scratch.received, equal(ranks, part)))?;
                }
                Collective::AllToAll(counts) => self.all_to_all(scratch, call, counts.as_deref())?,
                Collective::Broadcast { root } => {
                    self.transport.broadcast(receive, call.receive.len * bytes, *root)?;
                }
                Collective::Barrier => {}
            }
        }
        Ok(())
    }

    /// All-reduce as reduce-scatter and all-gather: each rank reduces its part and sends the result to all.
    ///
    /// # Safety
    /// As [`Engine::run`].
    unsafe fn all_reduce(&self, scratch: &mut Scratch, call: &Call) -> Result<(), CommError> {
        let Collective::AllReduce(reduction) = call.collective else { return Ok(()) };
        let (me, ranks, bytes) = (self.transport.rank(), self.transport.size(), call.kind.bytes());
        let block = BLOCK / bytes;
        for start in (0..call.send.len).step_by(block) {
            let len = block.min(call.send.len - start);
            // SAFETY: within the spans.
            let (send, receive) =
                unsafe { (call.send.address.add(start * bytes), call.receive.address.add(start * bytes)) };
            let part = |rank| {
                let part = part_of(len, bytes, ranks, rank);
                part.start * bytes..part.end * bytes
            };
            let own = part(me);
            let parts = fill(&mut scratch.sent, (0..ranks).map(part));
            let stride = own.len().next_multiple_of(64);
            let all = scratch.data.of(ranks * stride);
            let slots = (0..ranks).map(|rank| rank * stride..rank * stride + own.len());
            let received = fill(&mut scratch.received, slots);
            // SAFETY: parts of the block and of the scratch; what is received is read after it came.
            unsafe {
                self.transport.all_to_all((send, parts), (all, received))?;
                let mine = send.add(own.start);
                let source = |rank| if rank == me { mine } else { all.add(rank * stride) }.cast_const();
                let place = |_| receive.add(own.start);
                reduce(call.kind, reduction, ranks, own.len() / bytes, &source, 1, &place);
                self.transport.all_gather(receive, parts)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Engine::run`].
    unsafe fn all_to_all(
        &self,
        scratch: &mut Scratch,
        call: &Call,
        counts: Option<&Counts>,
    ) -> Result<(), CommError> {
        let (me, ranks, bytes) = (self.transport.rank(), self.transport.size(), call.kind.bytes());
        if let Some(counts) = counts {
            self.compare_counts(scratch, counts)?;
            fill(&mut scratch.sent, lined_up(&counts.send, bytes));
            fill(&mut scratch.received, lined_up(&counts.receive, bytes));
        } else {
            fill(&mut scratch.sent, equal(ranks, call.send.len / ranks * bytes));
            fill(&mut scratch.received, equal(ranks, call.send.len / ranks * bytes));
        }
        let (mut send, receive) = (call.send.address, call.receive.address);
        // SAFETY: parts of the spans; what is sent in place is copied first.
        unsafe {
            if send == receive {
                send = scratch.data.of(call.bytes());
                std::ptr::copy_nonoverlapping(receive, send, call.bytes());
            }
            let (from, to) = (&scratch.sent[me], &scratch.received[me]);
            std::ptr::copy_nonoverlapping(send.add(from.start), receive.add(to.start), from.len());
            self.transport.all_to_all((send, &scratch.sent), (receive, &scratch.received))
        }
    }

    /// Compares the counts of all ranks with each other, so that all find the same mismatch.
    fn compare_counts(&self, scratch: &mut Scratch, counts: &Counts) -> Result<(), CommError> {
        let (me, ranks) = (self.transport.rank(), self.transport.size());
        let all = scratch.data.of(ranks * 2 * ranks * 8).cast::<u64>();
        let at = |rank: usize, index: usize| rank * 2 * ranks + index;
        // SAFETY: the room has twice as many words as there are ranks for each rank, all of which have been sent before they are read.
        unsafe {
            for (i, count) in counts.send.iter().chain(&counts.receive).enumerate() {
                all.add(at(me, i)).write(*count as u64);
            }
            let parts = fill(&mut scratch.received, equal(ranks, 2 * ranks * 8));
            self.transport.all_gather(all.cast(), parts)?;
            for from in 0..ranks {
                for to in 0..ranks {
                    let (sent, awaited) =
                        (all.add(at(from, to)).read(), all.add(at(to, ranks + from)).read());
                    agree(from, sent as usize, to, awaited as usize)?;
                }
            }
        }
        Ok(())
    }
}

impl<T: Transport> Engine for TransportEngine<T> {
    fn name(&self) -> &'static str {
        self.transport.name()
    }

    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    unsafe fn run(&self, call: &Call) -> Result<(), CommError> {
        self.guarded(|scratch| {
            // Decided by what is in the signature, so that all ranks decide the same.
            let any_length = matches!(call.collective, Collective::AllToAll(Some(_)));
            let inline = !any_length && call.bytes() <= INLINE;
            let own = match call.collective {
                Collective::Broadcast { .. } => call.receive,
                _ => call.send,
            };
            let len = if inline { own.len * call.kind.bytes() } else { 0 };
            // SAFETY: passed on to the caller; frames hold as much of each rank, since signatures agree.
            unsafe {
                let frames = self.gather_signatures(scratch, Signature::of(call), own.address, len)?;
                if inline {
                    let ranks = self.transport.size();
                    pull(call, self.transport.rank(), ranks, &|rank| frames.add(rank * FRAME + HEAD));
                    return Ok(());
                }
                self.run_large(scratch, call)
            }
        })
    }

    fn split(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError> {
        self.guarded(|scratch| {
            let mine = [colour as u64, key as u64];
            // SAFETY: two words, which every rank has sent once signatures agree.
            let (ranks, words) = unsafe {
                let frames = self.gather_signatures(scratch, Signature::SPLIT, mine.as_ptr().cast(), 16)?;
                let words = move |rank: usize| frames.add(rank * FRAME + HEAD).cast::<[u64; 2]>().read();
                (self.transport.size(), words)
            };
            let same = (0..ranks).filter(|&rank| words(rank)[0] == mine[0]);
            let mut members: Vec<(u64, usize)> = same.map(|rank| (words(rank)[1], rank)).collect();
            members.sort_unstable();
            let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
            scratch.splits += 1;
            let part = self.transport.split(&members, scratch.splits)?;
            Ok(Arc::new(TransportEngine::new(part)) as Arc<dyn Engine>)
        })
    }

    fn check(&self) -> Result<(), CommError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn abort(&self, why: &str) {
        self.transport.abort(why);
        let _ = self.failed.set(CommError::Aborted(Arc::from(why)));
    }
}
