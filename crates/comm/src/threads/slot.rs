//! Where a rank lays its call for the others to see, and its data if there is little of it.

use crate::call::{Call, Collective, Counts, Span};
use crate::signature::Signature;
use std::cell::UnsafeCell;

/// Data up to this size is laid into the slot, so that the call is done after one meeting.
pub(super) const SMALL: usize = 8 << 10;

/// What the others need to know of a rank's call.
#[derive(Clone, Copy)]
pub(super) struct Notice {
    pub signature: Signature,
    pub send: Span,
    pub receive: Span,
    /// Of an all-to-all with parts of any length; the call keeps them.
    pub counts: Option<*const Counts>,
}

#[repr(align(64))]
struct Bytes(UnsafeCell<[u8; SMALL]>);

/// Aligned so that no two slots share what a processor fetches at once.
#[repr(C, align(128))]
pub(super) struct Slot {
    notice: UnsafeCell<Notice>,
    data: Bytes,
}

// SAFETY: only the slot's own rank writes, before it arrives; others read after, until they arrive at the next call, before
// which the slot is not written again (see `Group::slots`). The pointers in it are used as `Group::begin_work` allows.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

impl Slot {
    pub fn new() -> Self {
        let nothing =
            Notice { signature: Signature::NOTHING, send: Span::EMPTY, receive: Span::EMPTY, counts: None };
        Slot { notice: UnsafeCell::new(nothing), data: Bytes(UnsafeCell::new([0; SMALL])) }
    }

    /// # Safety
    /// By the slot's own rank, before it arrives at the call that the slot is for.
    pub unsafe fn put(&self, notice: Notice) {
        // SAFETY: nobody else uses the slot now.
        unsafe { *self.notice.get() = notice };
    }

    /// # Safety
    /// By the slot's own rank, before it arrives at the call that the slot is for; `bytes` readable from `from`, at most [`SMALL`].
    pub unsafe fn fill(&self, from: *const u8, bytes: usize) {
        debug_assert!(bytes <= SMALL);
        // SAFETY: nobody else uses the slot now; the room is large enough.
        unsafe { std::ptr::copy_nonoverlapping(from, self.data.0.get().cast(), bytes) };
    }

    /// # Safety
    /// After all ranks have met at the call, and before this rank arrives at the next.
    pub unsafe fn notice(&self) -> Notice {
        // SAFETY: not written meanwhile.
        unsafe { *self.notice.get() }
    }

    /// What [`fill`](Self::fill) laid down; to be read in the same bounds as [`notice`](Self::notice).
    pub fn data(&self) -> *const u8 {
        self.data.0.get().cast_const().cast()
    }
}

impl Notice {
    pub fn of(call: &Call) -> Self {
        let counts = match &call.collective {
            Collective::AllToAll(Some(counts)) => Some(std::ptr::from_ref(&**counts)),
            _ => None,
        };
        Notice { signature: Signature::of(call), send: call.send, receive: call.receive, counts }
    }
}
