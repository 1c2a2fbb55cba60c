//! One rank's part of a collective, shared by all host engines.

use crate::call::{Call, Collective};
use crate::engine::CommError;
use crate::reduce::reduce;
use std::ops::Range;
use std::ptr::copy_nonoverlapping;

/// Elements that rank `rank` of `ranks` reduces in an all-reduce: whole cache lines, so that no two ranks write the same one.
pub(crate) fn part_of(len: usize, bytes: usize, ranks: usize, rank: usize) -> Range<usize> {
    let line = 64 / bytes;
    let part = len.div_ceil(ranks).next_multiple_of(line);
    (rank * part).min(len)..((rank + 1) * part).min(len)
}

/// Checks that one rank sends another as many elements as that expects.
pub(crate) fn agree(from: usize, sent: usize, to: usize, awaited: usize) -> Result<(), CommError> {
    if sent == awaited {
        return Ok(());
    }
    Err(CommError::Mismatch {
        rank: from,
        theirs: format!("all_to_all with {sent} elements for rank {to}"),
        other: to,
        ours: format!("all_to_all with {awaited} elements from rank {from}"),
    })
}

/// Computes what this rank receives from what all ranks send.
///
/// # Safety
/// `source(rank)` is readable for what the rank sends (for a broadcast: what the root has), and apart from what this rank receives
/// unless it is the root.
pub(crate) unsafe fn pull(call: &Call, me: usize, ranks: usize, source: &dyn Fn(usize) -> *const u8) {
    let bytes = call.kind.bytes();
    let into = call.receive.address;
    // SAFETY: within what each sends and this rank receives, by the lengths that the communicator has checked.
    unsafe {
        match &call.collective {
            Collective::AllReduce(reduction) => {
                reduce(call.kind, *reduction, ranks, call.receive.len, source, 1, &|_| into);
            }
            Collective::ReduceScatter(reduction) => {
                let part = call.receive.len;
                let source = |rank: usize| source(rank).add(me * part * bytes);
                reduce(call.kind, *reduction, ranks, part, &source, 1, &|_| into);
            }
            Collective::AllGather => {
                let part = call.send.len * bytes;
                for rank in 0..ranks {
                    let (from, to) = (source(rank), into.add(rank * part));
                    // What this rank sends may lie where it receives it.
                    if from != to.cast_const() {
                        copy_nonoverlapping(from, to, part);
                    }
                }
            }
            Collective::AllToAll(_) => {
                let part = call.send.len / ranks * bytes;
                let from = |rank: usize| source(rank).add(me * part);
                (0..ranks).for_each(|r| copy_nonoverlapping(from(r), into.add(r * part), part));
            }
            Collective::Broadcast { root } if *root != me => {
                copy_nonoverlapping(source(*root), into, call.receive.len * bytes);
            }
            Collective::Broadcast { .. } | Collective::Barrier => {}
        }
    }
}
