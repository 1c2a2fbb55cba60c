//! What a rank is doing, for others to see: cheap to write from the thread that does it, readable at any time.

use crate::call::{Call, mix};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A name that was registered with a [`Pulse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    id: u32,
    /// Of the text: the same on every rank, whatever was registered before.
    pub hash: u64,
}

/// The state of one rank. Written by its threads with plain atomic stores, so it costs nothing to speak of.
#[derive(Debug)]
pub struct Pulse {
    names: Mutex<Vec<Arc<str>>>,
    /// Grows with everything the rank does; while it doesn't, the rank is stuck.
    progress: AtomicU64,
    doing: AtomicU32,
    /// Collectives entered and left, over all communicators of the rank.
    entered: AtomicU64,
    left: AtomicU64,
    call_name: AtomicU32,
    call_kind: AtomicU32,
    call_bytes: AtomicU64,
    /// Of all calls so far: ranks that made the same calls in the same order have the same.
    digest: AtomicU64,
    /// The digest when `entered` was last a multiple of [`Pulse::MILESTONE`].
    milestone: AtomicU64,
}

/// A collective that a rank is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    pub sequence: u64,
    pub collective: &'static str,
    pub name: Arc<str>,
    pub bytes: u64,
}

/// A pulse at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub progress: u64,
    pub doing: Arc<str>,
    /// The collective the rank is in, if it is in one.
    pub at: Option<At>,
    pub entered: u64,
    pub digest: u64,
    pub milestone: u64,
}

/// In the order of `Collective`'s variants.
const COLLECTIVES: [&str; 6] =
    ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"];

impl Default for Pulse {
    fn default() -> Self {
        Self::new()
    }
}

impl Pulse {
    pub const MILESTONE: u64 = 64;

    pub fn new() -> Self {
        Pulse {
            names: Mutex::new(vec![Arc::from("starting")]),
            progress: AtomicU64::new(0),
            doing: AtomicU32::new(0),
            entered: AtomicU64::new(0),
            left: AtomicU64::new(0),
            call_name: AtomicU32::new(0),
            call_kind: AtomicU32::new(0),
            call_bytes: AtomicU64::new(0),
            digest: AtomicU64::new(0),
            milestone: AtomicU64::new(0),
        }
    }

    /// Registers a text; the same text gives the same name. Not for the steady state: it allocates.
    pub fn name(&self, text: &str) -> Name {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let id = names.iter().position(|n| &**n == text).unwrap_or_else(|| {
            names.push(Arc::from(text));
            names.len() - 1
        });
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| mix(h, u64::from(b)));
        Name { id: id as u32, hash }
    }

    /// The rank turns to something else.
    pub fn doing(&self, name: Name) {
        self.doing.store(name.id, Ordering::Relaxed);
        self.beat();
    }

    /// The rank goes on with what it does.
    pub fn beat(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// The rank enters a collective; returns its number, from 1.
    pub fn enter(&self, call: &Call) -> u64 {
        let kind = COLLECTIVES.iter().position(|n| *n == call.collective.name()).unwrap_or(0);
        self.call_name.store(call.name.id, Ordering::Relaxed);
        self.call_kind.store(kind as u32, Ordering::Relaxed);
        self.call_bytes.store(call.bytes() as u64, Ordering::Relaxed);
        let digest = mix(self.digest.load(Ordering::Relaxed), call.fingerprint());
        self.digest.store(digest, Ordering::Relaxed);
        self.beat();
        let sequence = self.entered.load(Ordering::Relaxed) + 1;
        if sequence.is_multiple_of(Self::MILESTONE) {
            self.milestone.store(digest, Ordering::Relaxed);
        }
        self.entered.store(sequence, Ordering::Release);
        sequence
    }

    pub fn leave(&self) {
        self.beat();
        self.left.store(self.entered.load(Ordering::Relaxed), Ordering::Release);
    }

    pub fn snapshot(&self) -> Snapshot {
        let left = self.left.load(Ordering::Acquire);
        let entered = self.entered.load(Ordering::Acquire);
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let text = |id: &AtomicU32| names[id.load(Ordering::Relaxed) as usize].clone();
        let at = (entered > left).then(|| At {
            sequence: entered,
            collective: COLLECTIVES[self.call_kind.load(Ordering::Relaxed) as usize],
            name: text(&self.call_name),
            bytes: self.call_bytes.load(Ordering::Relaxed),
        });
        Snapshot {
            progress: self.progress.load(Ordering::Relaxed),
            doing: text(&self.doing),
            at,
            entered,
            digest: self.digest.load(Ordering::Relaxed),
            milestone: self.milestone.load(Ordering::Relaxed),
        }
    }
}
