//! Slot in which a rank publishes its call, and small data.

use crate::call::{Call, Collective, Counts, Span};
use crate::signature::Signature;
use std::cell::UnsafeCell;

/// Largest data in bytes that goes through the slot, so that the call needs one wait only.
pub(super) const SMALL: usize = 8 << 10;

/// Description of a rank's call for the others.
#[derive(Clone, Copy)]
pub(super) struct CallDescriptor {
    pub signature: Signature,
    pub send: Span,
    pub receive: Span,
    /// Counts of an all-to-all with parts of any length; the call keeps them.
    pub counts: Option<*const Counts>,
}

#[repr(align(64))]
struct Bytes(UnsafeCell<[u8; SMALL]>);

/// Slot of one rank, aligned so that no two share a cache line or its prefetched neighbour.
#[repr(C, align(128))]
pub(super) struct Slot {
    descriptor: UnsafeCell<CallDescriptor>,
    data: Bytes,
}

// SAFETY: only the slot's own rank writes, before it arrives; others read after, until they arrive at the next call, before
// which the slot is not written again (see `ThreadGroup::slots`). The pointers in it are used as `ThreadGroup::begin_work` allows.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

impl Slot {
    pub fn new() -> Self {
        let nothing = CallDescriptor {
            signature: Signature::NOTHING,
            send: Span::EMPTY,
            receive: Span::EMPTY,
            counts: None,
        };
        Slot { descriptor: UnsafeCell::new(nothing), data: Bytes(UnsafeCell::new([0; SMALL])) }
    }

    /// # Safety
    /// By the slot's own rank, before it arrives at the call that the slot is for.
    pub unsafe fn put(&self, descriptor: CallDescriptor) {
        // SAFETY: nobody else uses the slot now.
        unsafe { *self.descriptor.get() = descriptor };
    }

    /// # Safety
    /// By the slot's own rank, before it arrives at the call that the slot is for; `bytes` readable from `from`, at most [`SMALL`].
    pub unsafe fn fill(&self, from: *const u8, bytes: usize) {
        debug_assert!(bytes <= SMALL);
        // SAFETY: nobody else uses the slot now; the room is large enough.
        unsafe { std::ptr::copy_nonoverlapping(from, self.data.0.get().cast(), bytes) };
    }

    /// # Safety
    /// After all ranks have arrived at the call, and before this rank arrives at the next.
    pub unsafe fn descriptor(&self) -> CallDescriptor {
        // SAFETY: not written meanwhile.
        unsafe { *self.descriptor.get() }
    }

    /// Data that [`fill`](Self::fill) copied; to be read in the same bounds as [`descriptor`](Self::notice).
    pub fn data(&self) -> *const u8 {
        self.data.0.get().cast_const().cast()
    }
}

impl CallDescriptor {
    pub fn of(call: &Call) -> Self {
        let counts = match &call.collective {
            Collective::AllToAll(Some(counts)) => Some(std::ptr::from_ref(&**counts)),
            _ => None,
        };
        CallDescriptor { signature: Signature::of(call), send: call.send, receive: call.receive, counts }
    }
}
