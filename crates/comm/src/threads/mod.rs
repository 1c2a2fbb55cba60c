//! Engine for ranks that are threads of one process: they read and write each other's buffers.
//!
//! A call has three steps. A rank puts its call into its slot and waits for the others; all compare the signatures. Each does its part
//! of the work, on all ranks' buffers. Then they wait for each other again, and only then may a rank leave, as its buffers are its own
//! again. Small data goes through the slots instead: then no rank uses another's buffers, and the second wait is not needed.

mod group;
mod slot;
mod work;

use crate::call::{Call, Collective, Span};
use crate::engine::{CommError, Engine};
use crate::share::pull;
use crate::signature::{self, Signature};
use group::{PendingSplit, Stage, ThreadGroup, lock};
use slot::{CallDescriptor, SMALL};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Makes one engine for each of `ranks` threads.
///
/// A rank whose engine is dropped is lost to the others: calls that need it fail. [`Engine::abort`] on any of them aborts the calls
/// of all, and of the sub-groups.
pub fn group(ranks: usize) -> Vec<Arc<dyn Engine>> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let group = ThreadGroup::new(ranks, cores);
    (0..ranks)
        .map(|rank| Arc::new(Threads::new(Arc::clone(&group), rank, cores)) as Arc<dyn Engine>)
        .collect()
}

struct Threads {
    group: Arc<ThreadGroup>,
    rank: usize,
    cores: usize,
    /// Number of calls so far; the first is 1.
    calls: AtomicU64,
    /// Copy of what is sent, for an all-to-all in place; in words, so that it is aligned for every element type.
    copy: Mutex<Vec<u64>>,
}

impl Threads {
    fn new(group: Arc<ThreadGroup>, rank: usize, cores: usize) -> Self {
        Threads { group, rank, cores, calls: AtomicU64::new(0), copy: Mutex::new(Vec::new()) }
    }

    /// Publishes the descriptor of a call, waits for those of the others, and compares their signatures.
    ///
    /// # Safety
    /// What the descriptor points to stays valid until the rank has settled, if the call is broken.
    unsafe fn gather_signatures(&self, call: u64, descriptor: CallDescriptor) -> Result<(), CommError> {
        let group = &*self.group;
        // SAFETY: this rank's slot, before it arrives.
        unsafe { group.slot(self.rank, call).put(descriptor) };
        group.arrive(self.rank, call, Stage::Arrived);
        group.meet(call, Stage::Arrived)?;
        // SAFETY: all have arrived, and this rank has not gone on.
        signature::compare(group.ranks(), |rank| unsafe { group.slot(rank, call).descriptor().signature })
            .map_err(|mismatch| group.fail(mismatch))
    }

    /// # Safety
    /// As [`Engine::run`].
    unsafe fn run_small(&self, number: u64, call: &Call, own: Span) -> Result<(), CommError> {
        let slot = self.group.slot(self.rank, number);
        // SAFETY: this rank's slot, before it arrives; the span is valid by the caller's promise.
        unsafe { slot.fill(own.address, own.len * call.kind.bytes()) };
        // SAFETY: with small data nobody uses what the descriptor points to.
        unsafe { self.gather_signatures(number, CallDescriptor::of(call)) }?;
        let source = |rank: usize| self.group.slot(rank, number).data();
        // SAFETY: all ranks have filled their slots with as much, since their signatures agree.
        unsafe { pull(call, self.rank, self.group.ranks(), &source) };
        Ok(())
    }

    /// # Safety
    /// As [`Engine::run`].
    unsafe fn run_large(
        &self,
        number: u64,
        call: &Call,
        descriptor: CallDescriptor,
    ) -> Result<(), CommError> {
        let group = &*self.group;
        // SAFETY: a rank that leaves early settles first, see `run`.
        unsafe { self.gather_signatures(number, descriptor) }?;
        group.begin_work(self.rank, number)?;
        // SAFETY: all ranks have arrived and none leaves while this one is working, so their descriptors and spans are valid.
        let all = |rank: usize| unsafe { group.slot(rank, number).descriptor() };
        // SAFETY: as above, and signatures agree.
        unsafe { work::work(call, self.rank, group.ranks(), &all) }.map_err(|error| group.fail(error))?;
        group.arrive(self.rank, number, Stage::Done);
        group.meet(number, Stage::Done)
    }
}

impl Engine for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.ranks()
    }

    unsafe fn run(&self, call: &Call) -> Result<(), CommError> {
        self.group.check()?;
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let own = match call.collective {
            Collective::Broadcast { root } if root == self.rank => call.receive,
            Collective::Broadcast { .. } => Span::EMPTY,
            _ => call.send,
        };
        // Decided by what is in the signature, so that all ranks decide the same.
        let any_length = matches!(call.collective, Collective::AllToAll(Some(_)));
        if !any_length && call.bytes() <= SMALL {
            // SAFETY: passed on to the caller.
            return unsafe { self.run_small(number, call, own) };
        }
        let mut descriptor = CallDescriptor::of(call);
        let mut copy = lock(&self.copy);
        if matches!(call.collective, Collective::AllToAll(_)) && call.send.address == call.receive.address {
            let words = copy.len().max(call.bytes().div_ceil(8));
            copy.resize(words, 0);
            let into = copy.as_mut_ptr().cast::<u8>();
            // SAFETY: the span is valid by the caller's promise, and the copy as long.
            unsafe { std::ptr::copy_nonoverlapping(call.send.address, into, call.bytes()) };
            descriptor.send.address = into;
        }
        // SAFETY: passed on to the caller; the copy is kept until the call is over.
        let result = unsafe { self.run_large(number, call, descriptor) };
        if result.is_err() {
            self.group.settle(self.rank, number);
        }
        result
    }

    fn split(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError> {
        let group = &*self.group;
        group.check()?;
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let mine = [colour, key];
        // SAFETY: this rank's slot, before it arrives; two words are small.
        unsafe { group.slot(self.rank, number).fill(mine.as_ptr().cast(), size_of_val(&mine)) };
        let descriptor = CallDescriptor {
            signature: Signature::SPLIT,
            send: Span::EMPTY,
            receive: Span::EMPTY,
            counts: None,
        };
        // SAFETY: the descriptor points nowhere.
        unsafe { self.gather_signatures(number, descriptor) }?;
        // SAFETY: all ranks have filled their slots with two words, since their signatures agree.
        let words = |rank: usize| unsafe { group.slot(rank, number).data().cast::<[usize; 2]>().read() };
        let mut members: Vec<(usize, usize)> =
            (0..group.ranks()).filter(|&r| words(r)[0] == colour).map(|r| (words(r)[1], r)).collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, r)| r == self.rank).unwrap_or(0);
        let part = self.join(number, colour, members.len());
        Ok(Arc::new(Threads::new(part, rank, self.cores)))
    }

    fn check(&self) -> Result<(), CommError> {
        self.group.check()
    }

    fn abort(&self, why: &str) {
        self.group.abort(&Arc::from(why));
    }
}

impl Threads {
    /// Joins the sub-group of a colour: made by the first of its ranks to arrive, removed from the list by the last.
    fn join(&self, call: u64, colour: usize, ranks: usize) -> Arc<ThreadGroup> {
        let mut pending_splits = lock(&self.group.pending_splits);
        let found = pending_splits.iter().position(|j| j.call == call && j.colour == colour);
        let at = found.unwrap_or_else(|| {
            let group = self.group.part(ranks, self.cores);
            pending_splits.push(PendingSplit { call, colour, group, missing: ranks });
            pending_splits.len() - 1
        });
        pending_splits[at].missing -= 1;
        if pending_splits[at].missing == 0 {
            return pending_splits.swap_remove(at).group;
        }
        Arc::clone(&pending_splits[at].group)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activity, Communicator, Reduction};

    fn on_all<R: Send>(ranks: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let body = &body;
            let start =
                |engine| scope.spawn(move || body(Communicator::new(engine, Arc::new(Activity::new()))));
            let threads: Vec<_> = group(ranks).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn both_paths_sum_over_all_ranks() {
        for len in [0, 1, SMALL / 4, SMALL / 4 + 1, 100_003] {
            let sums = on_all(3, |comm| {
                let mut data: Vec<f32> = (0..len).map(|i| (i * (comm.rank() + 1)) as f32).collect();
                comm.all_reduce(comm.name("sum"), Reduction::Sum, &mut data).unwrap();
                data
            });
            let expected: Vec<f32> = (0..len).map(|i| (i + i * 2) as f32 + (i * 3) as f32).collect();
            assert!(sums.iter().all(|sum| *sum == expected), "{len}");
        }
    }

    #[test]
    fn a_rank_that_waits_long_sleeps_and_is_woken() {
        let comms = on_all(2, |comm| {
            if comm.rank() == 1 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            for _ in 0..100 {
                comm.barrier(comm.name("meet")).unwrap();
            }
            comm.rank()
        });
        assert_eq!(comms, [0, 1]);
    }
}
