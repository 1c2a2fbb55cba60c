//! Threads that work ahead.
//!
//! One lock guards who does what, and is held for moments; each batch has a lock of its own for the copies into it.

use super::maker::Maker;
use super::{Batch, LoaderSettings, Request};
use crate::DataError;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Position of the global order, and what went wrong there.
pub(super) type Problem = (usize, DataError);

/// Makes a whole batch on this thread.
fn fill(maker: &mut Maker, request: Request, room: Room, batch: &mut Batch) -> Result<(), DataError> {
    request.check(room.samples, room.capacity)?;
    batch.begin(request);
    for part in request.groups(room.group) {
        let made = maker.make(request, part);
        let delivered = made.and_then(|()| maker.deliver(request, part, batch));
        delivered.map_err(|(_, error)| error)?;
    }
    Ok(())
}

/// Batches of up to `capacity` of an epoch's `samples`, made in groups.
#[derive(Clone, Copy)]
pub(super) struct Room {
    samples: usize,
    capacity: usize,
    group: usize,
}

impl Batch {
    fn begin(&mut self, request: Request) {
        self.skipped.clear();
        self.request = request;
    }
}

/// Turns a panic into a message: a batch that never gets ready would be waited for forever.
pub(super) fn caught(body: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        let message = panic.downcast_ref::<&str>().map(|text| text.to_string());
        message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}

/// Source of batches.
pub(super) enum Source {
    Threads(Crew),
    /// Nobody works ahead.
    Here {
        maker: Box<Maker>,
        requests: Requests,
        room: Room,
    },
}

pub(super) type Requests = Box<dyn Iterator<Item = Request> + Send>;

impl Source {
    /// Starts threads, each with a maker of groups of `group` samples. `like` is what every batch begins as.
    pub(super) fn new(
        maker: impl Fn() -> Result<Maker, DataError>,
        group: usize,
        like: &Batch,
        settings: &LoaderSettings,
        requests: Requests,
    ) -> Result<Self, DataError> {
        let room = Room { samples: settings.sampler.len, capacity: settings.batch, group };
        if settings.workers == 0 {
            return Ok(Source::Here { maker: Box::new(maker()?), requests, room });
        }
        let makers = (0..settings.workers).map(|_| maker()).collect::<Result<Vec<_>, _>>()?;
        let slots = (0..settings.depth).map(|_| like.clone());
        Ok(Source::Threads(Crew::new(makers, slots, requests, room)?))
    }

    /// Puts the next batch in the place of `current`; false after the last one.
    pub(super) fn next(&mut self, current: &mut Batch) -> Result<bool, DataError> {
        match self {
            Source::Threads(crew) => crew.next(current),
            Source::Here { maker, requests, room } => match requests.next() {
                Some(request) => fill(maker, request, *room, current).map(|()| true),
                None => Ok(false),
            },
        }
    }
}

/// A batch under way, or ready.
struct Flight {
    number: u64,
    request: Request,
    slot: Slot,
    /// The next part nobody has claimed, and the end of them.
    part: usize,
    end: usize,
    unfinished: usize,
    problem: Option<Problem>,
}

type Slot = Arc<Mutex<Batch>>;

struct State {
    /// Batches in the order in which they will be handed out.
    flights: VecDeque<Flight>,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    ready: Condvar,
}

/// A part of one flight.
struct Claim {
    number: u64,
    request: Request,
    slot: Slot,
    part: usize,
}

pub(super) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    requests: Requests,
    started: u64,
    room: Room,
}

impl Crew {
    fn new(
        makers: Vec<Maker>,
        slots: impl Iterator<Item = Batch>,
        requests: Requests,
        room: Room,
    ) -> Result<Self, DataError> {
        let state = Mutex::new(State { flights: VecDeque::new(), stop: false });
        let shared = Arc::new(Shared { state, work: Condvar::new(), ready: Condvar::new() });
        let mut crew = Self { shared, threads: vec![], requests, started: 0, room };
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
    fn next(&mut self, current: &mut Batch) -> Result<bool, DataError> {
        let Some(Flight { slot, problem, .. }) = self.shared.wait() else { return Ok(false) };
        std::mem::swap(current, &mut lock(&slot));
        self.start(slot);
        problem.map_or(Ok(true), |(_, error)| Err(error))
    }

    /// Lets the threads fill a slot with the next request, if there is one.
    fn start(&mut self, slot: Slot) {
        let Some(request) = self.requests.next() else { return };
        let problem =
            request.check(self.room.samples, self.room.capacity).err().map(|error| (request.first, error));
        let parts = if problem.is_none() { request.groups(self.room.group) } else { 0..0 };
        lock(&slot).begin(request);
        let (number, unfinished) = (self.started, parts.len());
        let (part, end) = (parts.start, parts.end);
        self.started += 1;
        let flight = Flight { number, request, slot, part, end, unfinished, problem };
        self.shared.lock().flights.push_back(flight);
        self.shared.work.notify_all();
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already, and there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

fn work(shared: &Shared, mut maker: Maker) {
    while let Some(Claim { number, request, slot, part }) = shared.claim() {
        let made = maker.make(request, part);
        let delivered = made.and_then(|()| maker.deliver(request, part, &mut lock(&slot)));
        shared.finish(number, delivered.err());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The first part nobody works on; none once the loader is dropped.
    fn claim(&self) -> Option<Claim> {
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

    /// Notes that a part is done. Of several problems the first in the global order is kept.
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
    fn wait(&self) -> Option<Flight> {
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
