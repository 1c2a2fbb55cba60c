//! Threads that work ahead.
//!
//! One lock guards who does what, and is held for moments; each batch has a lock of its own for the copies into it.

use super::{LoaderSettings, Request};
use crate::DataError;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// What went wrong first, and at which position of the global order.
pub(crate) type Problem = (usize, DataError);

/// What a thread does: prepares parts of a request and copies them into the batch. One for each thread.
pub(crate) trait Work: Send + 'static {
    type Batch: Fill;

    /// Numbers of the parts that hold a request's samples.
    fn parts(request: &Request) -> Range<usize>;

    fn make(&mut self, request: Request, part: usize) -> Result<(), Problem>;

    /// Copies into the batch what the request asks of the part. Where an image is bad and none may be skipped, says so.
    fn deliver(&mut self, request: Request, part: usize, batch: &mut Self::Batch) -> Result<(), Problem>;
}

/// A batch that is filled part by part.
pub(crate) trait Fill: Clone + Send + 'static {
    fn begin(&mut self, request: Request);

    /// Parts may have come in any order; from here on that can't be seen.
    fn end(&mut self);
}

/// A whole batch, on this thread.
fn fill<W: Work>(
    work: &mut W,
    request: Request,
    (samples, capacity): (usize, usize),
    batch: &mut W::Batch,
) -> Result<(), DataError> {
    request.check(samples, capacity)?;
    batch.begin(request);
    for part in W::parts(&request) {
        let made = work.make(request, part);
        let delivered = made.and_then(|()| work.deliver(request, part, batch));
        delivered.map_err(|(_, error)| error)?;
    }
    batch.end();
    Ok(())
}

/// Code that panics becomes a message: a batch that never gets ready would be waited for forever.
pub(crate) fn caught(body: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        let message = panic.downcast_ref::<&str>().map(|text| text.to_string());
        message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}

/// Where batches come from.
pub(crate) enum Source<W: Work> {
    Threads(Crew<W>),
    /// Nobody works ahead.
    Here {
        work: Box<W>,
        requests: Requests,
        /// As for [`Crew::new`].
        room: (usize, usize),
    },
}

pub(crate) type Requests = Box<dyn Iterator<Item = Request> + Send>;

impl<W: Work> Source<W> {
    /// `like` is what every batch begins as.
    pub(crate) fn new(
        work: impl Fn() -> Result<W, DataError>,
        like: &W::Batch,
        settings: &LoaderSettings,
        requests: Requests,
    ) -> Result<Self, DataError> {
        let room = (settings.sampler.len, settings.batch);
        if settings.workers == 0 {
            return Ok(Source::Here { work: Box::new(work()?), requests, room });
        }
        let works = (0..settings.workers).map(|_| work()).collect::<Result<Vec<_>, _>>()?;
        let slots = (0..settings.depth).map(|_| like.clone());
        Ok(Source::Threads(Crew::new(works, slots, requests, room)?))
    }

    /// Puts the next batch in the place of `current`; false after the last one.
    pub(crate) fn next(&mut self, current: &mut W::Batch) -> Result<bool, DataError> {
        match self {
            Source::Threads(crew) => crew.next(current),
            Source::Here { work, requests, room } => match requests.next() {
                Some(request) => fill(&mut **work, request, *room, current).map(|()| true),
                None => Ok(false),
            },
        }
    }
}

/// A batch under way, or ready.
struct Flight<B> {
    number: u64,
    request: Request,
    slot: Slot<B>,
    /// The next part nobody has claimed, and the end of them.
    part: usize,
    end: usize,
    unfinished: usize,
    problem: Option<Problem>,
}

type Slot<B> = Arc<Mutex<B>>;

struct State<B> {
    /// In the order in which they will be handed out.
    flights: VecDeque<Flight<B>>,
    stop: bool,
}

struct Shared<B> {
    state: Mutex<State<B>>,
    work: Condvar,
    ready: Condvar,
}

/// A part of one flight.
struct Claim<B> {
    number: u64,
    request: Request,
    slot: Slot<B>,
    part: usize,
}

pub(crate) struct Crew<W: Work> {
    shared: Arc<Shared<W::Batch>>,
    threads: Vec<JoinHandle<()>>,
    requests: Requests,
    started: u64,
    samples: usize,
    capacity: usize,
}

impl<W: Work> Crew<W> {
    /// Batches of up to `capacity` of an epoch's `samples`.
    fn new(
        makers: Vec<W>,
        slots: impl Iterator<Item = W::Batch>,
        requests: Requests,
        (samples, capacity): (usize, usize),
    ) -> Result<Self, DataError> {
        let state = Mutex::new(State { flights: VecDeque::new(), stop: false });
        let shared = Arc::new(Shared { state, work: Condvar::new(), ready: Condvar::new() });
        let mut crew = Self { shared, threads: vec![], requests, started: 0, samples, capacity };
        slots.for_each(|slot| crew.start(Arc::new(Mutex::new(slot))));
        for maker in makers {
            let shared = Arc::clone(&crew.shared);
            let thread = Builder::new().name("loader".into()).spawn(move || work(&shared, maker));
            let thread = thread.map_err(|error| DataError::Worker { problem: error.to_string() })?;
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// Waits for the next batch and puts it in the place of `current`; false after the last one.
    fn next(&mut self, current: &mut W::Batch) -> Result<bool, DataError> {
        let Some(Flight { slot, problem, .. }) = self.shared.wait() else { return Ok(false) };
        std::mem::swap(current, &mut lock(&slot));
        current.end();
        self.start(slot);
        problem.map_or(Ok(true), |(_, error)| Err(error))
    }

    /// Lets the threads fill a slot with the next request, if there is one.
    fn start(&mut self, slot: Slot<W::Batch>) {
        let Some(request) = self.requests.next() else { return };
        let problem = request.check(self.samples, self.capacity).err().map(|error| (request.first, error));
        let parts = if problem.is_none() { W::parts(&request) } else { 0..0 };
        lock(&slot).begin(request);
        let (number, unfinished) = (self.started, parts.len());
        let (part, end) = (parts.start, parts.end);
        self.started += 1;
        let flight = Flight { number, request, slot, part, end, unfinished, problem };
        self.shared.lock().flights.push_back(flight);
        self.shared.work.notify_all();
    }
}

impl<W: Work> Drop for Crew<W> {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already, and there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

fn work<W: Work>(shared: &Shared<W::Batch>, mut maker: W) {
    while let Some(Claim { number, request, slot, part }) = shared.claim() {
        let made = maker.make(request, part);
        let delivered = made.and_then(|()| maker.deliver(request, part, &mut lock(&slot)));
        shared.finish(number, delivered.err());
    }
}

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        lock(&self.state)
    }

    /// The first part nobody works on; none once the loader is dropped.
    fn claim(&self) -> Option<Claim<B>> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            if let Some(flight) = state.flights.iter_mut().find(|flight| flight.part < flight.end) {
                let (number, request, part) = (flight.number, flight.request, flight.part);
                flight.part += 1;
                return Some(Claim { number, request, slot: Arc::clone(&flight.slot), part });
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Of several problems the one that comes first in the global order is kept.
    fn finish(&self, number: u64, problem: Option<Problem>) {
        let mut state = self.lock();
        let Some(flight) = state.flights.iter_mut().find(|flight| flight.number == number) else { return };
        flight.unfinished -= 1;
        flight.problem = match (flight.problem.take(), problem) {
            (Some(old), Some(new)) => Some(if new.0 < old.0 { new } else { old }),
            (old, new) => old.or(new),
        };
        if flight.unfinished == 0 {
            self.ready.notify_one();
        }
    }

    /// The batch whose turn it is, once it is ready; none if nothing is under way.
    fn wait(&self) -> Option<Flight<B>> {
        let mut state = self.lock();
        while state.flights.front()?.unfinished > 0 {
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.flights.pop_front()
    }
}

/// No lock is held while code of others runs, so that what a panic leaves behind one is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
