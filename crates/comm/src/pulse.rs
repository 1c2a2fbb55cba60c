//! What a rank is doing, for others to see: cheap to write from the thread that does it, readable at any time.

use crate::call::{Call, mix};
use crate::engine::CommError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A name that was registered with a [`Pulse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    id: u32,
    /// Of the text: the same on every rank, whatever was registered before.
    pub hash: u64,
}

/// The state of one rank. What happens at every step of a plan is one atomic store; entering and leaving a collective takes
/// a lock that nobody else holds for longer than a copy, so that number, digest and name always belong together.
#[derive(Debug)]
pub struct Pulse {
    names: Mutex<Vec<Arc<str>>>,
    /// Grows with everything the rank does; while it doesn't, the rank is stuck.
    progress: AtomicU64,
    doing: AtomicU32,
    calls: Mutex<Calls>,
    /// The first failure of a collective on this rank.
    broken: OnceLock<CommError>,
}

/// Collectives over all communicators of the rank, but those that a device queues (see `lane.rs`).
#[derive(Debug, Default)]
struct Calls {
    entered: u64,
    inside: u32,
    last: Option<Last>,
    /// Of all calls so far: ranks that made the same calls in the same order have the same.
    digest: u64,
    /// The digest when `entered` was last a multiple of [`Pulse::MILESTONE`].
    milestone: u64,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    collective: &'static str,
    name: u32,
    bytes: u64,
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
    /// The collective the rank is in, if it is in one. It stays in one that failed.
    pub at: Option<At>,
    /// The collective it entered last.
    pub last: Option<At>,
    pub entered: u64,
    pub digest: u64,
    pub milestone: u64,
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| mix(h, u64::from(b)))
}

impl Default for Pulse {
    fn default() -> Self {
        Self::new()
    }
}

impl Pulse {
    pub const MILESTONE: u64 = 64;

    pub fn new() -> Self {
        Pulse {
            names: Mutex::new(vec![Arc::from("its start")]),
            progress: AtomicU64::new(0),
            doing: AtomicU32::new(0),
            calls: Mutex::default(),
            broken: OnceLock::new(),
        }
    }

    /// Registers a text; the same text gives the same name. Not for the steady state: it allocates.
    pub fn name(&self, text: &str) -> Name {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let id = names.iter().position(|n| &**n == text).unwrap_or_else(|| {
            names.push(Arc::from(text));
            names.len() - 1
        });
        Name { id: id as u32, hash: hash(text) }
    }

    /// An engine's message with names in the place of their hashes, as far as this rank has registered them.
    pub(crate) fn spell(&self, message: &str) -> String {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().fold(message.to_string(), |message, name| {
            message.replace(&format!("#{:016x}", hash(name)), &format!("'{name}'"))
        })
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

    /// As [`Self::doing`]; gives what the rank did before to [`Self::resume`].
    pub(crate) fn turn_to(&self, name: Name) -> u32 {
        let before = self.doing.swap(name.id, Ordering::Relaxed);
        self.beat();
        before
    }

    pub(crate) fn resume(&self, before: u32) {
        self.doing.store(before, Ordering::Relaxed);
        self.beat();
    }

    /// The rank enters a collective; returns its number, from 1.
    pub fn enter(&self, call: &Call) -> u64 {
        let mut calls = self.calls();
        calls.entered += 1;
        calls.inside += 1;
        calls.last =
            Some(Last { collective: call.collective.name(), name: call.name.id, bytes: call.bytes() as u64 });
        calls.digest = mix(calls.digest, call.fingerprint());
        if calls.entered.is_multiple_of(Self::MILESTONE) {
            calls.milestone = calls.digest;
        }
        self.beat();
        calls.entered
    }

    pub fn leave(&self) {
        let mut calls = self.calls();
        calls.inside = calls.inside.saturating_sub(1);
        self.beat();
    }

    /// The collective entered last failed: the rank will get no further.
    pub(crate) fn breaks(&self, error: &CommError) {
        self.beat();
        let _ = self.broken.set(error.clone());
    }

    /// The first failure of a collective.
    pub fn broken(&self) -> Option<&CommError> {
        self.broken.get()
    }

    pub fn snapshot(&self) -> Snapshot {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let text = |id: u32| names[id as usize].clone();
        let calls = self.calls();
        let last = calls.last.map(|last| At {
            sequence: calls.entered,
            collective: last.collective,
            name: text(last.name),
            bytes: last.bytes,
        });
        Snapshot {
            progress: self.progress.load(Ordering::Relaxed),
            doing: text(self.doing.load(Ordering::Relaxed)),
            at: last.clone().filter(|_| calls.inside > 0),
            last,
            entered: calls.entered,
            digest: calls.digest,
            milestone: calls.milestone,
        }
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        // Counts and a copy: whole at any moment, whoever panicked.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
