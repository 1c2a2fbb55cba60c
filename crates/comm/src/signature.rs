//! Signature of a call: what must be the same on every rank.

use crate::call::{Call, Collective};
use crate::engine::CommError;

/// Readable form of [`Call::fingerprint`], so that a mismatch can be described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The collective, its reduction or root, and its element type.
    what: u64,
    len: u64,
    name: u64,
}

const COLLECTIVES: [&str; 8] = [
    "nothing",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "barrier",
    "a split of the group",
];
const SPLIT: u64 = 7;
const REDUCTIONS: [&str; 3] = ["sum", "mean", "max"];
const KINDS: [&str; 8] = ["f32", "f64", "bf16", "f16", "u8", "i32", "i64", "u64"];

impl Signature {
    pub const BYTES: usize = 24;
    pub const NOTHING: Signature = Signature { what: 0, len: 0, name: 0 };
    pub const SPLIT: Signature = Signature { what: SPLIT, len: 0, name: 0 };

    pub fn of(call: &Call) -> Self {
        let (code, detail, len) = match &call.collective {
            Collective::AllReduce(reduction) => (1, *reduction as u64, call.send.len),
            Collective::ReduceScatter(reduction) => (2, *reduction as u64, call.send.len),
            Collective::AllGather => (3, 0, call.send.len),
            // Lengths may differ from rank to rank, so they are no part of what must agree.
            Collective::AllToAll(Some(_)) => (4, 1, 0),
            Collective::AllToAll(None) => (4, 0, call.send.len),
            Collective::Broadcast { root } => (5, *root as u64, call.receive.len),
            Collective::Barrier => (6, 0, 0),
        };
        let what = code | (call.kind as u64) << 8 | detail << 16;
        Signature { what, len: len as u64, name: call.name.hash }
    }

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (part, word) in bytes.chunks_exact_mut(8).zip([self.what, self.len, self.name]) {
            part.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Signature { what: word(0), len: word(8), name: word(16) }
    }

    /// Describes the call for an error message. The name is a hash here, which [`Activity::spell`](crate::Activity::spell) turns into the text.
    pub fn describe(&self) -> String {
        let (code, kind, detail) = (self.what & 0xff, self.what >> 8 & 0xff, self.what >> 16);
        let pick = |texts: &[&'static str], at: u64| texts.get(at as usize).copied().unwrap_or("unknown");
        let (what, kind, len) = (pick(&COLLECTIVES, code), pick(&KINDS, kind), self.len);
        let detail = match code {
            1 | 2 => format!(" ({}) of {len} {kind}", pick(&REDUCTIONS, detail)),
            4 if detail == 1 => format!(" of {kind} in parts of any length"),
            3 | 4 => format!(" of {len} {kind}"),
            5 => format!(" of {len} {kind} from rank {detail}"),
            6 => String::new(),
            _ => return what.to_string(),
        };
        format!("{what}{detail} for #{:016x}", self.name)
    }
}

/// Compares the ranks' signatures with that of rank 0. Every rank finds the same mismatch.
pub(crate) fn compare(ranks: usize, of: impl Fn(usize) -> Signature) -> Result<(), CommError> {
    let first = of(0);
    match (1..ranks).find(|&rank| of(rank) != first) {
        None => Ok(()),
        Some(rank) => {
            Err(CommError::Mismatch { rank, theirs: of(rank).describe(), other: 0, ours: first.describe() })
        }
    }
}
