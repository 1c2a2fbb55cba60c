//! Bytes kept within a budget.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Room for one thing of each number.
pub(crate) struct Shelf {
    slots: Vec<OnceLock<Kept>>,
    /// Bytes that may be kept.
    budget: usize,
    used: AtomicUsize,
}

/// A sample without what all have in common.
pub(crate) struct Kept {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) bytes: Box<[u8]>,
}

impl Shelf {
    pub(crate) fn new(len: usize, budget: usize) -> Self {
        let slots = (0..len).map(|_| OnceLock::new()).collect();
        Self { slots, budget, used: AtomicUsize::new(0) }
    }

    /// Bytes kept by now.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Kept> {
        self.slots.get(index)?.get()
    }

    /// Keeps the parts one after the other, if there is room.
    pub(crate) fn keep(&self, index: usize, (width, height): (usize, usize), parts: &[&[u8]]) {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let Some(slot) = self.slots.get(index).filter(|_| self.reserve(bytes)) else { return };
        if slot.set(Kept { width, height, bytes: parts.concat().into() }).is_err() {
            // Another thread read the same image in the meantime, and keeps it.
            self.used.fetch_sub(bytes, Relaxed);
        }
    }

    /// Takes bytes from the budget, if that many are left.
    fn reserve(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|&used| used <= self.budget);
        self.used.fetch_update(Relaxed, Relaxed, more).is_ok()
    }
}
