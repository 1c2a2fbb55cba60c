//! Collectives for callers: typed slices, blocking or started and waited for.

use crate::activity::{Activity, Name};
use crate::call::{Call, Collective, Counts, Span};
use crate::element::{Element, ElementType, Reduction};
use crate::engine::{CommError, Engine};
use crate::queue::{CallQueue, Ticket, Timing};
use crate::solo::Solo;
use std::marker::PhantomData;
use std::sync::Arc;

/// A rank's handle to a group of ranks. Cheap to clone; clones share the queue.
///
/// All ranks make the same calls in the same order. A call runs on the caller's thread, or is started and waited for
/// later; the queue keeps the order of both.
#[derive(Clone)]
pub struct Communicator {
    engine: Arc<dyn Engine>,
    queue: Arc<CallQueue>,
    activity: Arc<Activity>,
}

impl Communicator {
    pub fn new(engine: Arc<dyn Engine>, activity: Arc<Activity>) -> Self {
        let queue = Arc::new(CallQueue::new(Arc::clone(&activity)));
        Communicator { engine, queue, activity }
    }

    /// Communicator of another group of this rank, over devices. It shares the rank's activity: names, failures, what it is doing. Its
    /// calls are not part of the rank's digest (see [`Activity::enter`]), as they are queued when a plan is captured, and then
    /// replayed without the host; a rank may capture again when another needn't.
    pub fn with_engine(&self, engine: Arc<dyn Engine>) -> Self {
        Self::new(engine, Arc::clone(&self.activity))
    }

    /// Communicator of a group of one rank.
    pub fn solo() -> Self {
        Self::new(Arc::new(Solo), Arc::new(Activity::new()))
    }

    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    pub fn size(&self) -> usize {
        self.engine.size()
    }

    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    pub fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// Registers a name for calls; see [`Activity::name`].
    pub fn name(&self, text: &str) -> Name {
        self.activity.name(text)
    }

    /// Splits off the group of the ranks with the same `colour`, ordered by `key` and then by rank, as `MPI_Comm_split` does. It has a
    /// queue of its own, for a thread of its own.
    pub fn split(&self, colour: usize, key: usize) -> Result<Self, CommError> {
        Ok(Self::new(self.split_engine(colour, key)?, Arc::clone(&self.activity)))
    }

    /// Splits as [`split`](Self::split) does, sharing the queue: a rank runs the calls of all such groups in the order in which they were
    /// started, so that groups can't deadlock.
    pub fn split_sharing_queue(&self, colour: usize, key: usize) -> Result<Self, CommError> {
        let (queue, activity) = (Arc::clone(&self.queue), Arc::clone(&self.activity));
        Ok(Communicator { engine: self.split_engine(colour, key)?, queue, activity })
    }

    /// Communicator of the same ranks for a thread of its own, in whatever calls this one is meanwhile. Its calls are not part of the rank's
    /// digest. All ranks call this.
    pub fn beside(&self) -> Result<Self, CommError> {
        let engine = self.split_engine(0, self.rank())?;
        Ok(Self::new(engine, Arc::new(Activity::beside(&self.activity))))
    }

    /// Splits the group in its place among calls: ranks talk to each other for it, as for a call.
    fn split_engine(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError> {
        self.queue.alone(|| self.engine.split(colour, key))
    }

    /// Starts a call that runs concurrently with the caller, after those started before.
    ///
    /// # Safety
    /// As [`Engine::run`], until the ticket was waited for (if the engine enqueues: until the device has run the call).
    pub unsafe fn start(&self, call: Call) -> Result<Ticket, CommError> {
        self.fits(&call)?;
        // SAFETY: passed on to the caller.
        unsafe { self.queue.start(&self.engine, call) }
    }

    /// Waits until a call is done.
    pub fn wait(&self, ticket: Ticket) -> Result<Timing, CommError> {
        self.queue.wait(ticket)
    }

    /// Returns the error if communication was aborted; see [`Engine::check`].
    pub fn check(&self) -> Result<(), CommError> {
        self.engine.check()
    }

    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.queue.is_done(ticket)
    }

    pub fn all_reduce<E: Element>(
        &self,
        name: Name,
        reduction: Reduction,
        data: &mut [E],
    ) -> Result<Timing, CommError> {
        let span = Span::of_mut(data);
        self.run::<E>(name, Collective::AllReduce(reduction), span, span)
    }

    /// `from` has a part for each rank; `into` gets this rank's part of the reduction.
    pub fn reduce_scatter<E: Element>(
        &self,
        name: Name,
        reduction: Reduction,
        from: &[E],
        into: &mut [E],
    ) -> Result<Timing, CommError> {
        self.run::<E>(name, Collective::ReduceScatter(reduction), Span::of(from), Span::of_mut(into))
    }

    pub fn all_gather<E: Element>(
        &self,
        name: Name,
        from: &[E],
        into: &mut [E],
    ) -> Result<Timing, CommError> {
        self.run::<E>(name, Collective::AllGather, Span::of(from), Span::of_mut(into))
    }

    pub fn all_to_all<E: Element>(
        &self,
        name: Name,
        from: &[E],
        into: &mut [E],
    ) -> Result<Timing, CommError> {
        self.run::<E>(name, Collective::AllToAll(None), Span::of(from), Span::of_mut(into))
    }

    /// All-to-all with parts of any length: `counts.send[r]` elements go to rank r, `counts.receive[r]` come from it.
    pub fn all_to_all_parts<E: Element>(
        &self,
        name: Name,
        counts: Counts,
        from: &[E],
        into: &mut [E],
    ) -> Result<Timing, CommError> {
        let collective = Collective::AllToAll(Some(Arc::new(counts)));
        self.run::<E>(name, collective, Span::of(from), Span::of_mut(into))
    }

    pub fn broadcast<E: Element>(
        &self,
        name: Name,
        root: usize,
        data: &mut [E],
    ) -> Result<Timing, CommError> {
        let span = Span::of_mut(data);
        self.run::<E>(name, Collective::Broadcast { root }, span, span)
    }

    pub fn barrier(&self, name: Name) -> Result<Timing, CommError> {
        self.run::<u8>(name, Collective::Barrier, Span::EMPTY, Span::EMPTY)
    }

    /// Gathers the bytes of every rank, in the order of the ranks; lengths may differ.
    pub fn gather_bytes(&self, name: Name, mine: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut lens = vec![0u64; self.size()];
        self.all_gather(name, &[mine.len() as u64], &mut lens)?;
        let lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
        let all: Vec<u8> = mine.iter().copied().cycle().take(mine.len() * self.size()).collect();
        let mut into = vec![0u8; lens.iter().sum()];
        let counts = Counts { send: vec![mine.len(); self.size()], receive: lens.clone() };
        self.all_to_all_parts(name, counts, &all, &mut into)?;
        let mut rest = &into[..];
        let texts = lens.into_iter().map(|len| {
            let (text, after) = rest.split_at(len);
            rest = after;
            text.to_vec()
        });
        Ok(texts.collect())
    }

    /// Broadcasts the root's bytes; the others' `bytes` are ignored.
    pub fn broadcast_bytes(&self, name: Name, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let mut len = [bytes.len() as u64];
        self.broadcast(name, root, &mut len)?;
        let mut bytes = bytes;
        bytes.resize(len[0] as usize, 0);
        self.broadcast(name, root, &mut bytes)?;
        Ok(bytes)
    }

    /// Starts calls on borrowed buffers; all are done when this returns.
    pub fn scope<'a, R>(
        &'a self,
        calls: impl FnOnce(&mut Scope<'a>) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let mut scope = Scope { communicator: self, last: None, buffers: PhantomData };
        let result = calls(&mut scope);
        let ended = scope.wait();
        let result = result?;
        ended?;
        Ok(result)
    }

    fn run<E: Element>(
        &self,
        name: Name,
        collective: Collective,
        send: Span,
        receive: Span,
    ) -> Result<Timing, CommError> {
        let call = Call { collective, kind: E::TYPE, send, receive, name };
        self.fits(&call)?;
        // SAFETY: the spans are those of slices that the caller lends until this returns.
        unsafe { self.queue.run(&*self.engine, &call) }
    }

    /// Checks the lengths that an engine relies on.
    fn fits(&self, call: &Call) -> Result<(), CommError> {
        let (n, send, receive) = (self.size(), call.send.len, call.receive.len);
        let fits = match &call.collective {
            Collective::AllReduce(_) | Collective::Barrier => send == receive,
            Collective::ReduceScatter(_) => send == receive * n,
            Collective::AllGather => receive == send * n,
            Collective::AllToAll(None) => send == receive && send.is_multiple_of(n),
            Collective::AllToAll(Some(counts)) => {
                let sums = |counts: &[usize], len| counts.len() == n && counts.iter().sum::<usize>() == len;
                sums(&counts.send, send) && sums(&counts.receive, receive)
            }
            Collective::Broadcast { root } => *root < n,
        };
        if fits {
            return Ok(());
        }
        let what = call.collective.name();
        Err(CommError::Misuse(format!("{what} among {n} ranks can't turn {send} elements into {receive}")))
    }
}

/// Calls under way on borrowed buffers; see [`Communicator::scope`].
pub struct Scope<'a> {
    communicator: &'a Communicator,
    last: Option<Ticket>,
    /// Buffers must outlive the scope.
    buffers: PhantomData<&'a mut [u8]>,
}

impl<'a> Scope<'a> {
    pub fn all_reduce<E: Element>(
        &mut self,
        name: Name,
        reduction: Reduction,
        data: &'a mut [E],
    ) -> Result<(), CommError> {
        let span = Span::of_mut(data);
        self.start(name, Collective::AllReduce(reduction), E::TYPE, span, span)
    }

    pub fn reduce_scatter<E: Element>(
        &mut self,
        name: Name,
        reduction: Reduction,
        from: &'a [E],
        into: &'a mut [E],
    ) -> Result<(), CommError> {
        self.start(name, Collective::ReduceScatter(reduction), E::TYPE, Span::of(from), Span::of_mut(into))
    }

    pub fn all_gather<E: Element>(
        &mut self,
        name: Name,
        from: &'a [E],
        into: &'a mut [E],
    ) -> Result<(), CommError> {
        self.start(name, Collective::AllGather, E::TYPE, Span::of(from), Span::of_mut(into))
    }

    pub fn broadcast<E: Element>(
        &mut self,
        name: Name,
        root: usize,
        data: &'a mut [E],
    ) -> Result<(), CommError> {
        let span = Span::of_mut(data);
        self.start(name, Collective::Broadcast { root }, E::TYPE, span, span)
    }

    fn start(
        &mut self,
        name: Name,
        collective: Collective,
        kind: ElementType,
        send: Span,
        receive: Span,
    ) -> Result<(), CommError> {
        let call = Call { collective, kind, send, receive, name };
        // SAFETY: the buffers are borrowed for 'a, and the scope waits for every call before 'a can end, also when it is
        // dropped by a panic; it can't be leaked, as only a reference to it is ever handed out.
        self.last = Some(unsafe { self.communicator.start(call) }?);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), CommError> {
        self.last.take().map_or(Ok(()), |last| self.communicator.wait(last).map(|_| ()))
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
