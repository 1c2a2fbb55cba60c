//! One call of a collective, as an engine sees it.

use crate::element::{Element, Kind, Reduction};
use crate::pulse::Name;
use std::sync::Arc;

/// Elements in memory: an address and how many. Of the host, or of a device for engines that work there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub address: *mut u8,
    /// Elements, not bytes.
    pub len: usize,
}

// SAFETY: a span is an address; whoever hands it over promises what may be done with it (see `Engine::run`).
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

/// How many elements go to and come from each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the reduction of all; in place if `send` and `receive` are the same.
    AllReduce(Reduction),
    /// Rank r gets the r-th of equal parts of the reduction: n·size → n.
    ReduceScatter(Reduction),
    /// Every rank gets what all have, in their order: n → n·size.
    AllGather,
    /// Part r goes to rank r; what comes lies in the order of the ranks. Without counts all parts are equal.
    AllToAll(Option<Arc<Counts>>),
    /// `receive` becomes what it is on the root.
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
    pub kind: Kind,
    pub send: Span,
    pub receive: Span,
    /// What it is for: the layer, or the occasion.
    pub name: Name,
}

impl Call {
    /// Bytes that this rank brings in.
    pub fn bytes(&self) -> usize {
        let elements = match self.collective {
            Collective::Broadcast { .. } => self.receive.len,
            _ => self.send.len,
        };
        elements * self.kind.bytes()
    }

    /// What must be the same on every rank, as one number. Lengths that may differ by rank are left out.
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

/// One step of a hash that is the same on every machine. A multiplication for a word, as every call takes a few steps.
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    let mixed = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}
