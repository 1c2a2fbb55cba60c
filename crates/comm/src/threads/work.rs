//! One rank's part of a call in which all ranks see each other's buffers.

use super::slot::CallDescriptor;
use crate::call::{Call, Collective, Counts};
use crate::engine::CommError;
use crate::reduce::reduce;
use crate::share::{agree, part_of, pull};
use std::ops::Range;
use std::ptr::copy_nonoverlapping;

/// Elements that rank `from` sends to rank `to`; checks that both counts agree.
fn parcel(from: &Counts, from_rank: usize, to: &Counts, to_rank: usize) -> Result<Range<usize>, CommError> {
    let sent = from.send[to_rank];
    agree(from_rank, sent, to_rank, to.receive[from_rank])?;
    let start = from.send[..to_rank].iter().sum();
    Ok(start..start + sent)
}

/// # Safety
/// Spans and counts of all descriptors are valid, and nobody uses them but the ranks of the group, each for its own part.
pub(super) unsafe fn work(
    call: &Call,
    me: usize,
    ranks: usize,
    all: &dyn Fn(usize) -> CallDescriptor,
) -> Result<(), CommError> {
    let bytes = call.kind.bytes();
    match &call.collective {
        Collective::AllReduce(reduction) => {
            let part = part_of(call.send.len, bytes, ranks, me);
            let start = part.start * bytes;
            // SAFETY: all spans are as long, since signatures agree, and this part is nobody else's.
            unsafe {
                let source = |rank: usize| all(rank).send.address.add(start).cast_const();
                let place = |copy: usize| all((me + copy) % ranks).receive.address.add(start);
                reduce(call.kind, *reduction, ranks, part.len(), &source, ranks, &place);
            }
        }
        Collective::AllToAll(Some(mine)) => {
            let mut into = call.receive.address;
            for rank in 0..ranks {
                let Some(theirs) = all(rank).counts else { continue };
                // SAFETY: the rank's call keeps its counts.
                let parcel = parcel(unsafe { &*theirs }, rank, mine, me)?;
                let length = parcel.len() * bytes;
                // SAFETY: the parcel is within what the rank sends, and all of them together within what this one receives, as each
                // communicator has checked its counts.
                unsafe {
                    copy_nonoverlapping(all(rank).send.address.add(parcel.start * bytes), into, length);
                    into = into.add(length);
                }
            }
        }
        Collective::Broadcast { .. } => {
            // SAFETY: passed on to the caller.
            unsafe { pull(call, me, ranks, &|rank| all(rank).receive.address) };
        }
        Collective::ReduceScatter(_)
        | Collective::AllGather
        | Collective::AllToAll(None)
        | Collective::Barrier => {
            // SAFETY: passed on to the caller.
            unsafe { pull(call, me, ranks, &|rank| all(rank).send.address) };
        }
    }
    Ok(())
}
