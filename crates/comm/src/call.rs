//! One call of a collective, as engines see it.

use crate::activity::Name;
use crate::element::{Element, ElementType, Reduction};
use std::sync::Arc;

/// Elements in memory, as address and count: of the host, or of a device for engines that work there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub address: *mut u8,
    /// Elements, not bytes.
    pub len: usize,
}

// SAFETY: a span is an address; its provider promises what may be done with it (see `Engine::run`).
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub const EMPTY: Span = Span { address: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    pub fn of<E: Element>(slice: &[E]) -> Self {
        Span { address: slice.as_ptr().cast_mut().cast(), len: slice.len() }
    }

    pub fn of_mut<E: Element>(slice: &mut [E]) -> Self {
        Span { address: slice.as_mut_ptr().cast(), len: slice.len() }
    }
}

/// Numbers of elements sent to and received from each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Reduces over all ranks; every rank gets the result. In place if `send` and `receive` are the same.
    AllReduce(Reduction),
    /// Reduces over all ranks; rank r gets the r-th of equal parts: n·size → n.
    ReduceScatter(Reduction),
    /// Concatenates the elements of all ranks, in their order: n → n·size.
    AllGather,
    /// Sends part r to rank r; received parts lie in the order of the ranks. Without counts all parts are equal.
    AllToAll(Option<Arc<Counts>>),
    /// Copies `receive` of the root to all ranks.
    Broadcast {
        root: usize,
    },
    Barrier,
}

impl Collective {
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce(_) => "all_reduce",
            Collective::ReduceScatter(_) => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::AllToAll(_) => "all_to_all",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Barrier => "barrier",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Call {
    pub collective: Collective,
    pub kind: ElementType,
    pub send: Span,
    pub receive: Span,
    /// Name of the layer or purpose, for messages.
    pub name: Name,
}

impl Call {
    /// Bytes that this rank contributes.
    pub fn bytes(&self) -> usize {
        let elements = match self.collective {
            Collective::Broadcast { .. } => self.receive.len,
            _ => self.send.len,
        };
        elements * self.kind.bytes()
    }

    /// Hash of what must be the same on every rank. Lengths that may differ by rank are left out.
    pub fn fingerprint(&self) -> u64 {
        let (code, detail) = match &self.collective {
            Collective::AllReduce(r) => (1, *r as u64),
            Collective::ReduceScatter(r) => (2, *r as u64),
            Collective::AllGather => (3, 0),
            Collective::AllToAll(counts) => (4, u64::from(counts.is_some())),
            Collective::Broadcast { root } => (5, *root as u64),
            Collective::Barrier => (6, 0),
        };
        let len = match &self.collective {
            Collective::AllToAll(Some(_)) => 0,
            Collective::Broadcast { .. } => self.receive.len as u64,
            _ => self.send.len as u64,
        };
        [code, detail, self.kind as u64, len].into_iter().fold(self.name.hash, mix)
    }
}

/// One step of a hash that is the same on every machine. One multiplication per word, as every call takes a few steps.
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    let mixed = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}
