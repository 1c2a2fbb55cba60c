//! Queue of a rank's calls, with the thread that runs them concurrently with the caller. Groups may share one, so that there is one
//! order of all their calls.

use crate::activity::Activity;
use crate::call::Call;
use crate::engine::{CommError, Engine};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Handle to a started call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Start and end of a call on this rank. The time between includes the wait for the other ranks.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub started: Instant,
    pub finished: Instant,
}

/// Number of calls whose times are kept: more than any plan has under way.
const REMEMBERED: usize = 1024;

pub(crate) struct CallQueue {
    activity: Arc<Activity>,
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when a call was queued, or the queue is to stop.
    called: Condvar,
    /// Signalled when a call is done.
    done: Condvar,
}

struct State {
    queue: VecDeque<(Ticket, Arc<dyn Engine>, Call)>,
    started: u64,
    done: u64,
    /// Number of threads that sleep until a call is done: waking costs a system call even if nobody sleeps.
    waiting: usize,
    times: Vec<Timing>,
    /// First failure; every call from there on returns it.
    failed: Option<(u64, CommError)>,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent between any two statements, so a panic elsewhere doesn't spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a call as done, and wakes who waits for it or has the next one.
    fn finish(&self, ticket: Ticket, started: Instant, failure: Option<CommError>) {
        let finished = Instant::now();
        let mut state = self.lock();
        state.times[ticket.0 as usize % REMEMBERED] = Timing { started, finished };
        if let Some(error) = failure {
            state.failed.get_or_insert((ticket.0, error));
        }
        state.done = ticket.0;
        let (waiting, queued) = (state.waiting > 0, !state.queue.is_empty());
        drop(state);
        if waiting {
            self.done.notify_all();
        }
        if queued {
            self.called.notify_one();
        }
    }
}

impl CallQueue {
    pub fn new(activity: Arc<Activity>) -> Self {
        let now = Instant::now();
        let state = State {
            queue: VecDeque::with_capacity(REMEMBERED),
            started: 0,
            done: 0,
            waiting: 0,
            times: vec![Timing { started: now, finished: now }; REMEMBERED],
            failed: None,
            stop: false,
        };
        let shared = Shared { state: Mutex::new(state), called: Condvar::new(), done: Condvar::new() };
        CallQueue { activity, shared: Arc::new(shared), worker: Mutex::new(None) }
    }

    /// # Safety
    /// As [`Engine::run`], until the ticket was waited for.
    pub unsafe fn start(&self, engine: &Arc<dyn Engine>, call: Call) -> Result<Ticket, CommError> {
        if engine.enqueues() {
            // The device has a queue of its own, and the caller waits by its events.
            let (ticket, failed) = self.next_alone();
            // SAFETY: passed on to the caller.
            unsafe { perform(&**engine, &self.activity, &self.shared, &call, ticket, failed) };
            return Ok(ticket);
        }
        self.start_worker(engine)?;
        let mut state = self.shared.lock();
        state.started += 1;
        let ticket = Ticket(state.started);
        state.queue.push_back((ticket, Arc::clone(engine), call));
        drop(state);
        self.shared.called.notify_one();
        Ok(ticket)
    }

    pub fn wait(&self, ticket: Ticket) -> Result<Timing, CommError> {
        let mut state = self.shared.lock();
        while state.done < ticket.0 {
            state.waiting += 1;
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.result(ticket)
    }

    /// Tells whether a call is done; never blocks.
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.shared.lock().done >= ticket.0
    }

    /// Runs a call on the caller's thread, after those queued before.
    ///
    /// # Safety
    /// As [`Engine::run`].
    pub unsafe fn run(&self, engine: &dyn Engine, call: &Call) -> Result<Timing, CommError> {
        let (ticket, failed) = self.next_alone();
        // SAFETY: passed on to the caller.
        unsafe { perform(engine, &self.activity, &self.shared, call, ticket, failed) };
        self.shared.lock().result(ticket)
    }

    /// Does something else than a call with an engine, in its place among the calls.
    pub fn alone<R>(&self, work: impl FnOnce() -> R) -> R {
        let (ticket, _) = self.next_alone();
        let started = Instant::now();
        let result = work();
        self.shared.finish(ticket, started, None);
        result
    }

    /// The next ticket, once all calls before it are done: its holder may use the engine. And whether one of them failed.
    fn next_alone(&self) -> (Ticket, bool) {
        let mut state = self.shared.lock();
        state.started += 1;
        let ticket = Ticket(state.started);
        while state.done + 1 < ticket.0 {
            state.waiting += 1;
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        (ticket, state.failed.is_some())
    }

    /// Starts the thread that runs queued calls, unless there is one.
    fn start_worker(&self, engine: &Arc<dyn Engine>) -> Result<(), CommError> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.is_none() {
            let (activity, shared) = (Arc::clone(&self.activity), Arc::clone(&self.shared));
            let thread = std::thread::Builder::new().name(format!("vitesse-comm-{}", engine.rank()));
            let spawned = thread.spawn(move || work(&activity, &shared));
            *worker = Some(spawned.map_err(|e| CommError::Engine {
                engine: engine.name(),
                why: format!("can't start the communication thread: {e}"),
            })?);
        }
        Ok(())
    }
}

impl Drop for CallQueue {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.called.notify_one();
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(worker) = worker {
            let _ = worker.join();
        }
    }
}

impl State {
    fn result(&self, ticket: Ticket) -> Result<Timing, CommError> {
        match &self.failed {
            Some((first, error)) if *first <= ticket.0 => Err(error.clone()),
            _ => Ok(self.times[ticket.0 as usize % REMEMBERED]),
        }
    }
}

fn work(activity: &Activity, shared: &Shared) {
    loop {
        let mut state = shared.lock();
        let (ticket, engine, call) = loop {
            // A blocking call of another thread may come first.
            let next = Ticket(state.done + 1);
            if let Some(call) = state.queue.pop_front_if(|(ticket, _, _)| *ticket == next) {
                break call;
            }
            if state.stop && state.queue.is_empty() {
                return;
            }
            state = shared.called.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        let failed = state.failed.is_some();
        drop(state);
        // SAFETY: the caller that started it keeps its spans until it is done.
        unsafe { perform(&*engine, activity, shared, &call, ticket, failed) };
    }
}

/// # Safety
/// As [`Engine::run`].
unsafe fn perform(
    engine: &dyn Engine,
    activity: &Activity,
    shared: &Shared,
    call: &Call,
    ticket: Ticket,
    failed: bool,
) {
    let started = Instant::now();
    let result = if failed {
        Ok(())
    } else {
        // A call in a device's queue is neither numbered nor part of the digest by which ranks are compared: it is queued once and
        // run many times, and not by all ranks between the same two calls of the hosts. It shows as what the rank is doing.
        let before = engine.enqueues().then(|| activity.turn_to(call.name));
        if before.is_none() {
            activity.enter(call);
        }
        // SAFETY: passed on to the caller.
        let result = unsafe { engine.run(call) };
        match (&result, before) {
            (Ok(()), None) => activity.leave(),
            (Ok(()), Some(before)) => activity.resume(before),
            (Err(error), _) => activity.record_failure(error),
        }
        result
    };
    shared.finish(ticket, started, result.err().map(|error| named(error, activity)));
}

/// Replaces the hashes of names, which is all that engines know, by the names.
fn named(error: CommError, activity: &Activity) -> CommError {
    match error {
        CommError::Mismatch { rank, theirs, other, ours } => {
            CommError::Mismatch { rank, theirs: activity.spell(&theirs), other, ours: activity.spell(&ours) }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
