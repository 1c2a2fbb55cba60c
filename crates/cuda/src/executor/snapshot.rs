//! Copies of states that another thread reads while training goes on.
//!
//! States are copied on the GPU, in a stream of their own, beside the next step's forward and backward. Only `update` waits for that; it
//! takes milliseconds, where copies to the host would take longer than a step. The reader then fetches them through a ring of pinned
//! buffers that is filled ahead of it: the host's memory that a checkpoint takes doesn't grow with the model. All that costs time to get is
//! got ahead ([`Executor::prepare_snapshots`]).

use super::Executor;
use super::states::extend_from_bytes;
use crate::action::Address;
use crate::driver::{Block, Context, Event, Pinned, Stream, prepare_lock};
use crate::error::CudaError;
use crate::moves::Move;
use graph::{ALIGN, DType, StateId};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a buffer of the ring: large enough for the full speed of the bus.
const CHUNK: usize = 16 << 20;
/// Buffers: one is read while the others are filled.
const RING: usize = 4;
/// States that lie closer together than this are copied at once, with what lies between.
const GAP: usize = 64 << 10;

/// Values of a state, on the GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    address: Address,
    bytes: usize,
    dtype: DType,
}

/// Where snapshots are taken from and to.
pub(super) struct Snapshots {
    reader: Arc<Mutex<Reader>>,
    moves: Vec<Move>,
    /// Where the copies are.
    pieces: Arc<[Piece]>,
    /// Bytes of the GPU's memory that copies take.
    pub bytes: usize,
    /// Everything that was queued before the snapshot is done: on the compute and on the communication lane.
    before: [Event; 2],
    copied: Event,
    /// An update has yet to wait for the copy.
    pending: bool,
}

/// What the reading thread works with. Fields are dropped in this order.
struct Reader {
    ring: Vec<(Pinned, Event)>,
    stream: Stream,
    _copies: Block,
    /// The states themselves, which are copied in this stream.
    _states: Arc<Block>,
    context: Arc<Context>,
}

/// Moves of pieces to a memory of their own, close ones together, where each piece is then, and the bytes of that memory. Places in it are
/// offsets.
fn gathered(pieces: &[Piece]) -> (Vec<Move>, Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|index| pieces[*index].address);
    let (mut moves, mut places, mut end): (Vec<Move>, Vec<usize>, usize) = (vec![], vec![0; pieces.len()], 0);
    for index in order {
        let Piece { address, bytes, .. } = pieces[index];
        match moves.last_mut().filter(|last| address <= last.from + (last.bytes + GAP) as Address) {
            Some(last) => last.bytes = last.bytes.max((address - last.from) as usize + bytes),
            None => moves.push(Move { from: address, to: end as Address, bytes }),
        }
        if let Some(last) = moves.last() {
            places[index] = last.to as usize + (address - last.from) as usize;
            end = (last.to as usize + last.bytes).next_multiple_of(ALIGN);
        }
    }
    (moves, places, end)
}

impl Executor {
    /// Gets ready for snapshots of these states. Returns the bytes of a copy if there is no memory on the GPU for one: then there are no
    /// snapshots.
    pub fn prepare_snapshots(&mut self, ids: &[StateId]) -> Result<Option<usize>, CudaError> {
        self.context.enter()?;
        let (states, mesh) = (&self.program.states, self.program.last.mesh);
        let rank = self.options.comm.as_ref().map_or(0, |comm| comm.rank());
        let piece = |id: &StateId| {
            let (held, dtype) =
                (states[id.index()].elements_of(states, mesh, rank).0, states[id.index()].ty.dtype);
            Piece { address: self.plans.states[id.index()], bytes: held.len() * dtype.bytes(), dtype }
        };
        let mut pieces: Vec<Piece> = ids.iter().map(piece).collect();
        let (mut moves, places, bytes) = gathered(&pieces);
        // What a run gets later, evaluation above all, finds room too.
        if bytes > self.context.memory()?.0 / 2 {
            return Ok(Some(bytes));
        }
        let context = &self.context;
        let _alone = prepare_lock();
        let copies = Block::new(context, bytes, "a copy of the states")?;
        moves.iter_mut().for_each(|one| one.to += copies.address);
        let copied = pieces.iter_mut().zip(places);
        copied.for_each(|(piece, place)| piece.address = copies.address + place as Address);
        let slot = |_| Ok::<_, CudaError>((Pinned::new(context, CHUNK)?, Event::sleeping(context)?));
        let reader = Reader {
            ring: (0..RING).map(slot).collect::<Result<_, _>>()?,
            stream: Stream::new(context)?,
            _copies: copies,
            _states: Arc::clone(&self.state_block),
            context: Arc::clone(context),
        };
        self.snapshots = Some(Snapshots {
            reader: Arc::new(Mutex::new(reader)),
            moves,
            pieces: pieces.into(),
            bytes,
            before: [Event::new(context)?, Event::new(context)?],
            copied: Event::new(context)?,
            pending: false,
        });
        Ok(None)
    }

    /// Takes a snapshot of the states as they are after all that was queued, without waiting for it. None that was taken before is left.
    pub fn snapshot(&mut self) -> Result<Option<Snapshot>, CudaError> {
        self.context.enter()?;
        let Some(snapshots) = &mut self.snapshots else { return Ok(None) };
        if Arc::strong_count(&snapshots.reader) > 1 {
            return Err(CudaError::Misuse("a snapshot of the states is being read still".into()));
        }
        {
            let reader = lock(&snapshots.reader);
            let lanes = [self.streams.compute(), self.streams.comm()];
            for (event, lane) in snapshots.before.iter().zip(lanes) {
                event.record(lane)?;
                reader.stream.wait(event)?;
            }
            for Move { from, to, bytes } in &snapshots.moves {
                reader.stream.copy(*from, *to, *bytes)?;
            }
            snapshots.copied.record(&reader.stream)?;
        }
        snapshots.pending = true;
        Ok(Some(Snapshot {
            reader: Arc::clone(&snapshots.reader),
            pieces: Arc::clone(&snapshots.pieces),
            ahead: (0, 0),
            filled: VecDeque::with_capacity(RING),
            next: 0,
            values: Vec::new(),
        }))
    }

    /// Keeps what is queued from here on from writing states before they were copied.
    pub(super) fn settle_snapshots(&mut self) -> Result<(), CudaError> {
        let Some(Snapshots { pending, copied, .. }) = &mut self.snapshots else { return Ok(()) };
        if std::mem::take(pending) { self.streams.compute().wait(copied) } else { Ok(()) }
    }
}

fn lock(reader: &Mutex<Reader>) -> MutexGuard<'_, Reader> {
    // Handles, which a panic elsewhere doesn't spoil.
    reader.lock().unwrap_or_else(PoisonError::into_inner)
}

/// States as they were at one moment, to be read by another thread, each once and in order.
pub struct Snapshot {
    reader: Arc<Mutex<Reader>>,
    pieces: Arc<[Piece]>,
    /// Piece to be fetched next, and its bytes that were fetched.
    ahead: (usize, usize),
    /// Buffers that are being filled or were, oldest first: which, its bytes, and those that were read.
    filled: VecDeque<(usize, usize, usize)>,
    /// Piece to be read next.
    next: usize,
    values: Vec<f32>,
}

impl Snapshot {
    /// Values of a state, by its place among those that the snapshot was taken of; waits for them.
    pub fn read(&mut self, index: usize) -> Result<&[f32], CudaError> {
        if index != self.next || index >= self.pieces.len() {
            return Err(CudaError::Misuse(format!("state {index} of a snapshot is read out of turn")));
        }
        let shared = Arc::clone(&self.reader);
        let mut reader = lock(&shared);
        reader.context.enter()?;
        if index == 0 {
            (0..RING).try_for_each(|slot| self.fill(&mut reader, slot))?;
        }
        let Piece { bytes, dtype, .. } = self.pieces[index];
        self.values.clear();
        let mut left = bytes;
        while left > 0 {
            let Some((slot, filled, read)) = self.filled.front_mut() else {
                return Err(CudaError::Misuse("a snapshot ends too early".into()));
            };
            let (buffer, arrived) = &reader.ring[*slot];
            arrived.synchronise(|| "fetching states for a checkpoint".into())?;
            let taken = left.min(*filled - *read);
            // SAFETY: it has arrived, and is filled again only below.
            extend_from_bytes(&mut self.values, unsafe { buffer.bytes(*read, taken) }, dtype);
            (left, *read) = (left - taken, *read + taken);
            if read == filled {
                let slot = *slot;
                self.filled.pop_front();
                self.fill(&mut reader, slot)?;
            }
        }
        self.next += 1;
        Ok(&self.values)
    }

    /// Begins to fill a buffer with what comes next, if there is more.
    fn fill(&mut self, reader: &mut Reader, slot: usize) -> Result<(), CudaError> {
        let mut filled = 0;
        while let Some(piece) = self.pieces.get(self.ahead.0) {
            // No number is cut.
            let room = (CHUNK - filled) / size_of::<f64>() * size_of::<f64>();
            let bytes = (piece.bytes - self.ahead.1).min(room);
            let to: *mut c_void = reader.ring[slot].0.address(filled);
            // SAFETY: the buffer is read only when its event was waited for, and freed when the stream was.
            unsafe { reader.stream.fetch(piece.address + self.ahead.1 as Address, to, bytes) }?;
            (filled, self.ahead.1) = (filled + bytes, self.ahead.1 + bytes);
            if self.ahead.1 < piece.bytes {
                break;
            }
            self.ahead = (self.ahead.0 + 1, 0);
        }
        if filled > 0 {
            reader.ring[slot].1.record(&reader.stream)?;
            self.filled.push_back((slot, filled, 0));
        }
        Ok(())
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let reader = lock(&self.reader);
        // The next snapshot uses the same buffers.
        let _ =
            reader.context.enter().and_then(|()| reader.stream.synchronise(|| "ending a snapshot".into()));
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Nothing may be freed that the GPU still works with.
        let _ = self.context.enter().and_then(|()| self.stream.synchronise(|| "ending snapshots".into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(address: Address, bytes: usize) -> Piece {
        Piece { address, bytes, dtype: DType::F32 }
    }

    #[test]
    fn close_states_are_copied_at_once_and_found_again() {
        let far = 1_000_000;
        let pieces =
            [piece(far + 4096, 512), piece(1024, 100), piece(1152, 64), piece(far, 4000), piece(1024, 8)];
        let (moves, places, bytes) = gathered(&pieces);
        let spans: Vec<_> = moves.iter().map(|one| (one.from, one.to, one.bytes)).collect();
        assert_eq!(spans, [(1024, 0, 192), (far, 256, 4608)]);
        assert_eq!(places, [256 + 4096, 0, 128, 256, 0]);
        assert_eq!(bytes, (256 + 4608usize).next_multiple_of(ALIGN));
        for (piece, place) in pieces.iter().zip(places) {
            let moved =
                spans.iter().find(|(_, to, bytes)| (*to as usize..*to as usize + bytes).contains(&place));
            let (from, to, _) = moved.unwrap();
            assert_eq!(from + (place as Address - to), piece.address);
        }
    }
}
