//! Current activity of a rank, as other ranks and the control plane see it: cheap to write from the working thread, readable at any
//! time.

use crate::call::{Call, mix};
use crate::engine::CommError;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Name registered with an [`Activity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    id: u32,
    /// Hash of the text: the same on every rank, whatever was registered before.
    pub hash: u64,
}

/// Activity of one rank. Each step of a plan costs one atomic store; entering and leaving a collective takes a lock that nobody else
/// holds for longer than a copy, so that number, digest and name always belong together.
#[derive(Debug)]
pub struct Activity {
    names: Mutex<Vec<Arc<str>>>,
    /// Counter that grows with everything the rank does; while it doesn't, the rank is stuck.
    progress: AtomicU64,
    doing: AtomicU32,
    /// Flag: the rank waits for its device, in whose queue there may be collectives.
    awaits_device: AtomicBool,
    calls: Mutex<Calls>,
    /// First failure of a collective on this rank.
    failure: OnceLock<CommError>,
    /// The rank's own, where this is that of a thread beside it.
    of: Option<Arc<Activity>>,
}

/// Collectives over all communicators of the rank, except those in a device's queue (see `queue.rs`).
#[derive(Debug, Default)]
struct Calls {
    entered: u64,
    inside: u32,
    last: Option<Last>,
    /// Hash of all calls so far: equal on ranks that made the same calls in the same order.
    digest: u64,
    /// Digest when `entered` was last a multiple of [`Activity::MILESTONE`].
    milestone: u64,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    collective: &'static str,
    name: u32,
    bytes: u64,
}

/// A collective that a rank has entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallInfo {
    pub sequence: u64,
    pub collective: &'static str,
    pub name: Arc<str>,
    pub bytes: u64,
}

/// An [`Activity`] at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub progress: u64,
    pub doing: Arc<str>,
    /// Flag: it waits for its device.
    pub awaits_device: bool,
    /// Collective that the rank is in, if any. It stays in one that failed.
    pub current_call: Option<CallInfo>,
    /// Collective that it entered last.
    pub last_call: Option<CallInfo>,
    pub entered: u64,
    pub digest: u64,
    pub milestone: u64,
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| mix(h, u64::from(b)))
}

impl Default for Activity {
    fn default() -> Self {
        Self::new()
    }
}

impl Activity {
    pub const MILESTONE: u64 = 64;

    pub fn new() -> Self {
        Activity {
            names: Mutex::new(vec![Arc::from("startup")]),
            progress: AtomicU64::new(0),
            doing: AtomicU32::new(0),
            awaits_device: AtomicBool::new(false),
            calls: Mutex::default(),
            failure: OnceLock::new(),
            of: None,
        }
    }

    /// Activity of a thread that calls collectives in an order of its own, beside those of the rank: they are not part of the rank's digest,
    /// but its progress, and its failure if one fails.
    pub(crate) fn beside(rank: &Arc<Activity>) -> Self {
        Activity { of: Some(Arc::clone(rank)), ..Self::new() }
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

    /// Replaces hashes in an engine's message by the names that this rank has registered.
    pub(crate) fn spell(&self, message: &str) -> String {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().fold(message.to_string(), |message, name| {
            message.replace(&format!("#{:016x}", hash(name)), &format!("'{name}'"))
        })
    }

    /// Sets what the rank is doing.
    pub fn doing(&self, name: Name) {
        self.doing.store(name.id, Ordering::Relaxed);
        self.advance();
    }

    /// Sets whether the rank waits for its device.
    pub fn await_device(&self, awaits: bool) {
        self.awaits_device.store(awaits, Ordering::Relaxed);
    }

    /// Counts progress in what the rank is doing.
    pub fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
        if let Some(rank) = &self.of {
            rank.advance();
        }
    }

    /// Sets what the rank is doing and returns what it did before, for [`Self::resume`].
    pub(crate) fn turn_to(&self, name: Name) -> u32 {
        let before = self.doing.swap(name.id, Ordering::Relaxed);
        self.advance();
        before
    }

    pub(crate) fn resume(&self, before: u32) {
        self.doing.store(before, Ordering::Relaxed);
        self.advance();
    }

    /// Enters a collective; returns its number, from 1.
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
        self.advance();
        calls.entered
    }

    pub fn leave(&self) {
        let mut calls = self.calls();
        calls.inside = calls.inside.saturating_sub(1);
        self.advance();
    }

    /// Records that the collective entered last failed: the rank will get no further.
    pub(crate) fn record_failure(&self, error: &CommError) {
        self.advance();
        let _ = self.failure.set(error.clone());
        if let Some(rank) = &self.of {
            rank.record_failure(error);
        }
    }

    /// First failure of a collective.
    pub fn failure(&self) -> Option<&CommError> {
        self.failure.get()
    }

    pub fn snapshot(&self) -> Snapshot {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let text = |id: u32| names[id as usize].clone();
        let calls = self.calls();
        let last = calls.last.map(|last| CallInfo {
            sequence: calls.entered,
            collective: last.collective,
            name: text(last.name),
            bytes: last.bytes,
        });
        Snapshot {
            progress: self.progress.load(Ordering::Relaxed),
            doing: text(self.doing.load(Ordering::Relaxed)),
            awaits_device: self.awaits_device.load(Ordering::Relaxed),
            current_call: last.clone().filter(|_| calls.inside > 0),
            last_call: last,
            entered: calls.entered,
            digest: calls.digest,
            milestone: calls.milestone,
        }
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        // Counts and a copy: consistent at any moment, even after a panic.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
