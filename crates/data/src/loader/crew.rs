//! Threads that work ahead.
//!
//! One lock guards who does what, and is held for moments; each batch has a lock of its own for the copies into it.

use super::pair::{Maker, Problem};
use super::{LoadedBatch, LoaderSettings, Request};
use crate::DataError;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// A batch under way, or ready.
struct Flight {
    number: u64,
    request: Request,
    slot: Slot,
    /// The next pair nobody has claimed, and the end of them.
    pair: usize,
    end: usize,
    unfinished: usize,
    problem: Option<Problem>,
}

type Slot = Arc<Mutex<LoadedBatch>>;

#[derive(Default)]
struct State {
    /// In the order in which they will be handed out.
    flights: VecDeque<Flight>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    ready: Condvar,
}

/// A pair of one flight.
struct Claim {
    number: u64,
    request: Request,
    slot: Slot,
    pair: usize,
}

pub(super) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    requests: Box<dyn Iterator<Item = Request> + Send>,
    started: u64,
    samples: usize,
    capacity: usize,
}

impl Crew {
    pub(super) fn new(
        makers: Vec<Maker>,
        slots: impl Iterator<Item = LoadedBatch>,
        requests: Box<dyn Iterator<Item = Request> + Send>,
        settings: &LoaderSettings,
    ) -> Result<Self, DataError> {
        let (shared, threads) = Default::default();
        let (samples, capacity) = (settings.sampler.len, settings.batch);
        let mut crew = Self { shared, threads, requests, started: 0, samples, capacity };
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
    pub(super) fn next(&mut self, current: &mut LoadedBatch) -> Result<bool, DataError> {
        let Some(Flight { request, slot, problem, .. }) = self.shared.wait() else { return Ok(false) };
        std::mem::swap(current, &mut lock(&slot));
        // Threads add to it as they finish.
        let position = |index| current.indices[..request.count].iter().position(|&other| other == index);
        current.skipped.sort_unstable_by_key(|skipped| position(skipped.index));
        self.start(slot);
        problem.map_or(Ok(true), |(_, error)| Err(error))
    }

    /// Lets the threads fill a slot with the next request, if there is one.
    fn start(&mut self, slot: Slot) {
        let Some(request) = self.requests.next() else { return };
        let problem = request.check(self.samples, self.capacity).err().map(|error| (request.first, error));
        let pairs = if problem.is_none() { request.pairs() } else { 0..0 };
        {
            let mut batch = lock(&slot);
            batch.skipped.clear();
            batch.request = request;
        }
        let (number, unfinished) = (self.started, pairs.len());
        let (pair, end) = (pairs.start, pairs.end);
        self.started += 1;
        let flight = Flight { number, request, slot, pair, end, unfinished, problem };
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
    while let Some(Claim { number, request, slot, pair }) = shared.claim() {
        let made = maker.make(request, pair);
        let delivered = made.and_then(|()| maker.deliver(request, pair, &mut lock(&slot)));
        shared.finish(number, delivered.err());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The first pair nobody works on; none once the loader is dropped.
    fn claim(&self) -> Option<Claim> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            if let Some(flight) = state.flights.iter_mut().find(|flight| flight.pair < flight.end) {
                let (number, request, pair) = (flight.number, flight.request, flight.pair);
                flight.pair += 1;
                return Some(Claim { number, request, slot: Arc::clone(&flight.slot), pair });
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
