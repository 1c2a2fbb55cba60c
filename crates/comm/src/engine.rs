//! Engines: implementations of collectives.

use crate::call::Call;
use std::sync::Arc;

/// Error of a collective.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// The run is ending for a failure that is reported elsewhere.
    #[error("communication was aborted: {0}")]
    Aborted(Arc<str>),
    /// Ranks called different collectives.
    #[error("rank {rank} calls {theirs} where rank {other} calls {ours}")]
    Mismatch { rank: usize, theirs: String, other: usize, ours: String },
    /// Another rank was lost.
    #[error("lost rank {rank} ({why})")]
    Lost { rank: usize, why: String },
    /// Invalid lengths or ranks of a call, found before anything is sent.
    #[error("{0}")]
    Misuse(String),
    /// Error of MPI, NCCL or the network.
    #[error("{engine}: {why}")]
    Engine { engine: &'static str, why: String },
}

/// Implementation of collectives between the ranks of a group. Calls of one engine are made one at a time, and in the same order on
/// every rank; engines of different groups may be used concurrently.
pub trait Engine: Send + Sync {
    fn name(&self) -> &'static str;

    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// Runs the call, and returns when this rank may use its buffers again. An engine that [`enqueues`](Self::enqueues)
    /// returns when the call is in its queue.
    ///
    /// Sums are made in the order of the ranks, in at least f32, so that every rank, run and engine gets the same bits. A device sums in
    /// an order of its own.
    ///
    /// # Safety
    /// The spans are valid for the call's kind until the call is done; nobody writes `send`, and nobody touches `receive`, meanwhile.
    /// The two are the same or apart. Lengths were checked by the [`Communicator`](crate::Communicator).
    unsafe fn run(&self, call: &Call) -> Result<(), CommError>;

    /// True if calls run on a device, in the order of its queue (NCCL): the executor then waits by the device's own
    /// events, and no host thread works for this communicator.
    fn enqueues(&self) -> bool {
        false
    }

    /// Returns the error with which the next call would fail, if that is known already. To be called now and then by a rank that waits
    /// for something else, such as a device. Callable from any thread; never blocks.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Splits off the group of the ranks with the same `colour`, ordered by `key` and then by rank. All ranks call it.
    fn split(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError>;

    /// Makes the call under way and all later ones fail on this rank. Callable from any thread.
    fn abort(&self, why: &str);
}
