//! Checkpoints beside the training: states are copied between two updates, and a thread writes the copy while training goes on.
//!
//! A device may copy them by itself while steps are in flight ([`Prepared`]); else the host does, with none in flight, into memory that is
//! kept from one checkpoint to the next. Where memory is short there is no copy: training waits until the states were read where they lie.
//!
//! One checkpoint is on its way at a time: the next is not copied before it is written. Where ranks divide states every rank copies what it
//! gives, and the threads of all ranks bring the parts together on rank 0, over a communicator of their own.

mod source;

use crate::error::TrainError;
use crate::metrics::Unsynced;
use crate::session::{Session, shards};
use comm::Communicator;
use data::available_memory;
use devices::Real;
use devices::device::{Prepared, Snapshot};
use formats::checkpoint::{Checkpoints, Progress};
use formats::tensors::{Outline, Writer};
use graph::StateId;
use source::{HostCopy, Live, Source};
use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A state in a checkpoint.
struct Content {
    id: StateId,
    name: String,
    shape: Vec<usize>,
    /// The elements that each rank gives, where ranks divide it.
    given: Option<Vec<Range<usize>>>,
    /// This rank gives all of it, or a part.
    mine: bool,
}

/// What rank 0 writes beside the states.
pub(crate) struct Order {
    pub checkpoints: Checkpoints,
    pub progress: Progress,
    /// Configuration, as JSON.
    pub config: String,
    pub best: bool,
    /// Metrics so far: no run must go on from a step whose metrics are lost.
    pub metrics: Vec<Unsynced>,
    /// Algorithms that the folder doesn't have yet.
    pub choices: Option<(PathBuf, serde_json::Value)>,
}

/// Memory for a copy on the host.
enum Spare<T> {
    /// The device copies, or nobody does.
    None,
    /// A thread touches its pages first, so that no step waits for that.
    Making(JoinHandle<Vec<T>>),
    Made(Vec<T>),
}

/// What became of a checkpoint, and what it was written from.
type Written<T> = (Result<Option<PathBuf>, TrainError>, Source<T>);

pub(crate) struct Saver<T: Real> {
    contents: Arc<Vec<Content>>,
    beside: Option<Communicator>,
    prepared: Prepared,
    spare: Spare<T>,
    /// States after so many steps that are not being written yet: the results of these steps aren't all known.
    taken: Option<(u64, Source<T>)>,
    writing: Option<JoinHandle<Written<T>>>,
    /// Steps before the checkpoint that was begun last.
    begun: Option<u64>,
    /// The last checkpoint that was written, on rank 0.
    pub written: Option<PathBuf>,
    /// Seconds that training waited for copies, and for the checkpoint before, since the last step was accounted for.
    pub seconds: f64,
}

impl<T: Real> Saver<T> {
    /// Gets memory for copies of what this rank gives. Where ranks divide states all ranks call this; else rank 0 alone.
    pub fn new(session: &mut Session<T>) -> Result<Self, TrainError> {
        let (world, rank) = (session.world().clone(), session.world().rank());
        let program = session.device().program();
        let content = |id: StateId| {
            let state = &program.states[id.index()];
            let divided = world.size() > 1 && shards::is_divided(program, id);
            let given = divided.then(|| shards::given(program, id));
            let mine = given.as_ref().map_or(rank == 0, |given| !given[rank].is_empty());
            Content { id, name: state.name.clone(), shape: state.ty.shape.0.clone(), given, mine }
        };
        let contents: Vec<Content> = session.lasting_ids().into_iter().map(content).collect();
        let divided = contents.iter().any(|content| content.given.is_some());
        let beside = divided.then(|| world.beside()).transpose()?;
        let elements = contents.iter().filter(|content| content.mine).map(|content| match &content.given {
            Some(given) => given[rank].len(),
            None => content.shape.iter().product(),
        });
        let elements: usize = elements.sum();
        let mut prepared = session.device_mut().prepare_snapshots(&mine(&contents))?;
        let mut spare = Spare::None;
        if prepared == Prepared::No {
            let bytes = elements * size_of::<T>();
            match available_memory().is_none_or(|left| bytes as u64 <= left / 2) {
                true => spare = Spare::Making(touched(elements)?),
                false => prepared = Prepared::NoRoom { bytes },
            }
        }
        let contents = Arc::new(contents);
        let (taken, writing, begun, written, seconds) = (None, None, None, None, 0.0);
        Ok(Saver { contents, beside, prepared, spare, taken, writing, begun, written, seconds })
    }

    /// What to tell the user where training waits while checkpoints are written.
    pub fn note(&self) -> Option<String> {
        let Prepared::NoRoom { bytes } = self.prepared else { return None };
        let gigabytes = bytes as f64 / 1e9;
        Some(format!(
            "training waits for checkpoints: there is no room for a copy of the states ({gigabytes:.1} GB)"
        ))
    }

    /// Tells whether states can be copied while steps are in flight.
    pub fn takes_in_flight(&self) -> bool {
        self.prepared == Prepared::Beside
    }

    /// Tells whether the checkpoint after so many steps was begun.
    pub fn has(&self, step: u64) -> bool {
        self.begun == Some(step)
    }

    /// Tells whether a copy of the states after so many steps waits to be written.
    pub fn holds(&self, step: u64) -> bool {
        self.taken.as_ref().is_some_and(|(taken, _)| *taken == step)
    }

    /// Tells whether a checkpoint is being written.
    pub fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// Copies the states after so many steps, which are all that were handed to the device. None is being written.
    pub fn take(&mut self, session: &mut Session<T>, step: u64) -> Result<(), TrainError> {
        let source = match (session.device_mut().snapshot()?, self.memory()) {
            (Some(snapshot), _) => Source::Device(snapshot),
            (None, Some(memory)) => {
                Source::Host(HostCopy::of(session.device(), &mine(&self.contents), memory)?)
            }
            (None, None) => Source::Live,
        };
        (self.taken, self.begun) = (Some((step, source)), Some(step));
        Ok(())
    }

    fn memory(&mut self) -> Option<Vec<T>> {
        match std::mem::replace(&mut self.spare, Spare::None) {
            Spare::None => None,
            Spare::Made(memory) => Some(memory),
            Spare::Making(thread) => Some(joined(thread)),
        }
    }

    /// Begins to write what was taken; rank 0 has the order. Where there is no copy it is written when this returns, with its path.
    pub fn write(
        &mut self,
        session: &Session<T>,
        order: Option<Order>,
    ) -> Result<Option<PathBuf>, TrainError> {
        let Some((_, mut source)) = self.taken.take() else { return Ok(None) };
        let (contents, beside) = (Arc::clone(&self.contents), self.beside.clone());
        if let Source::Live = source {
            let mut live = Live::of(session.device(), mine(&contents));
            self.written = write(&contents, beside.as_ref(), &mut live, order)?;
            return Ok(self.written.clone());
        }
        let work = move || {
            give_way();
            let beside = beside.as_ref();
            let written = match &mut source {
                Source::Live => Ok(None),
                Source::Host(copy) => write(&contents, beside, copy, order),
                Source::Device(snapshot) => write(&contents, beside, &mut **snapshot, order),
            };
            (written, source)
        };
        self.writing = Some(spawn(work)?);
        Ok(None)
    }

    /// Takes note of the checkpoint that was written since this was called last, if one was, or waits for it; returns its path on rank 0.
    pub fn finish(&mut self, wait: bool) -> Result<Option<PathBuf>, TrainError> {
        let Some(thread) = self.writing.take_if(|thread| wait || thread.is_finished()) else {
            return Ok(None);
        };
        let (written, source) = joined(thread);
        if let Source::Host(copy) = source {
            self.spare = Spare::Made(copy.values);
        }
        self.written = written?;
        Ok(self.written.clone())
    }
}

/// What is being written is whole when a run ends, however it ends.
impl<T: Real> Drop for Saver<T> {
    fn drop(&mut self) {
        if let Some(thread) = self.writing.take() {
            // There is nobody left to tell of a failure.
            let _ = thread.join();
        }
    }
}

/// The states of which this rank gives something.
fn mine(contents: &[Content]) -> Vec<StateId> {
    contents.iter().filter(|content| content.mine).map(|content| content.id).collect()
}

/// Writes a checkpoint on rank 0, and returns its path; other ranks give their parts.
fn write<T: Real>(
    contents: &[Content],
    beside: Option<&Communicator>,
    source: &mut dyn Snapshot<T>,
    order: Option<Order>,
) -> Result<Option<PathBuf>, TrainError> {
    let mut given = 0;
    let mut next = |content: &Content, write: &mut Writer<'_, T>| -> Result<io::Result<()>, TrainError> {
        let mine = if content.mine { source.read(given)? } else { &[] };
        given += usize::from(content.mine);
        let whole = match (&content.given, beside) {
            (Some(given), Some(world)) => Cow::Owned(shards::gather(world, &content.name, given, mine)?),
            _ => Cow::Borrowed(mine),
        };
        Ok(write(&whole))
    };
    let Some(Order { checkpoints, progress, config, best, metrics, choices }) = order else {
        let mut divided = contents.iter().filter(|content| content.given.is_some());
        // Nobody writes here.
        divided.try_for_each(|content| next(content, &mut |_| Ok(())).map(drop))?;
        return Ok(None);
    };
    metrics.into_iter().try_for_each(Unsynced::sync)?;
    if let Some((folder, choices)) = choices {
        devices::write_algorithms(&folder, &choices)?;
    }
    let outlines: Vec<Outline<'_>> =
        contents.iter().map(|content| Outline { name: &content.name, shape: &content.shape }).collect();
    let mut failure = None;
    let values = |index: usize, write: &mut Writer<'_, T>| {
        next(&contents[index], write)
            .unwrap_or_else(|error| Err(io::Error::other(failure.insert(error).to_string())))
    };
    let saved = checkpoints.save(&outlines, values, &progress, &config, best);
    failure.map_or(Ok(()), Err)?;
    Ok(Some(saved?))
}

/// Memory for so many values whose pages were touched.
fn touched<T: Real>(elements: usize) -> Result<JoinHandle<Vec<T>>, TrainError> {
    spawn(move || {
        give_way();
        // Not `vec!`, whose zeros are pages that nobody touched.
        let mut memory = Vec::new();
        memory.resize(elements, T::ZERO);
        memory
    })
}

fn spawn<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<JoinHandle<R>, TrainError> {
    let thread = std::thread::Builder::new().name("vitesse-checkpoint".to_string()).spawn(work);
    thread.map_err(|source| TrainError::Thread { what: "checkpoints", source })
}

fn joined<R>(thread: JoinHandle<R>) -> R {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Lets threads that train go first, where cores are few.
fn give_way() {
    #[cfg(target_os = "linux")]
    // SAFETY: of this thread alone: on Linux 0 is the calling thread, not its process. A failure costs time.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 5);
    }
}
