//! What does the exchange.

use crate::call::Call;
use std::sync::Arc;

/// Why a collective did not happen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// The run is ending: somebody found a fault, which is reported elsewhere.
    #[error("the exchange was broken off: {0}")]
    Aborted(Arc<str>),
    /// Ranks called different collectives.
    #[error("rank {rank} calls {theirs} where rank {other} calls {ours}")]
    Mismatch { rank: usize, theirs: String, other: usize, ours: String },
    #[error("rank {rank} is gone ({why})")]
    Lost { rank: usize, why: String },
    /// Lengths or ranks of a call that can't be, found before anything is sent.
    #[error("{0}")]
    Misuse(String),
    /// What MPI, NCCL or the network said.
    #[error("{engine}: {why}")]
    Engine { engine: &'static str, why: String },
}

/// Does collectives between the ranks of a group. Calls of one engine are made one at a time, and in the same order on
/// every rank; engines of different groups may be used at once.
pub trait Engine: Send + Sync {
    fn name(&self) -> &'static str;

    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// Does the call, and returns when this rank may use its buffers again. An engine that [`enqueues`](Self::enqueues)
    /// returns when the call is in its queue.
    ///
    /// Sums are made in the order of the ranks, in at least f32, so that every rank, run and engine has the same bits; those of
    /// a device in whatever order it has.
    ///
    /// # Safety
    /// The spans are valid for the call's kind until the call is done; nobody writes `send`, and nobody touches `receive`, meanwhile.
    /// The two are the same or apart. Lengths were checked by the [`Communicator`](crate::Communicator).
    unsafe fn run(&self, call: &Call) -> Result<(), CommError>;

    /// Whether calls are done by a device, in the order of its queue (NCCL): the executor then waits by the device's own
    /// events, and no thread works for this communicator.
    fn enqueues(&self) -> bool {
        false
    }

    /// Whether the group can still be used: the reason why its next call would fail, if that is known already. To be asked
    /// now and then by a rank that waits for something else, such as a device. From any thread; never waits.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// The group of the ranks with the same `colour`, ordered by `key` and then by rank. All ranks call it.
    fn split(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError>;

    /// Makes the call under way and all later ones fail, on this rank. From any thread.
    fn abort(&self, why: &str);
}
