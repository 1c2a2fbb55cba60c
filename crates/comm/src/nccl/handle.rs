//! NCCL's own object for a group, and how it ends.

use super::ffi::{Comm, Functions};
use super::library::Library;
use crate::engine::CommError;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// A call is in the queue long before this, unless it waits for other ranks: then only an abort ends it.
const GRACE: Duration = Duration::from_millis(50);

/// An `ncclComm_t`, of which exactly one of `ncclCommDestroy` and `ncclCommAbort` is called, once.
pub(super) struct Handle {
    library: Arc<Library>,
    shared: Arc<Shared>,
    /// Groups that were split off end with this one.
    parts: Mutex<Vec<Weak<Handle>>>,
    ending: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Nobody is inside any more.
    left: Condvar,
}

struct State {
    comm: Comm,
    /// Threads in a call of NCCL with this group.
    inside: usize,
    /// The first failure; every later call has it too.
    failed: Option<CommError>,
    /// It was aborted, or will be in a moment.
    aborted: bool,
}

// SAFETY: NCCL's groups may be used from any thread; calls that must not be made at once aren't (see `Engine::run`).
unsafe impl Send for State {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Whole between any two statements, whoever panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handle {
    /// # Safety
    /// `comm` is a group of this library, and nobody else's.
    pub unsafe fn new(library: Arc<Library>, comm: Comm) -> Arc<Self> {
        let state = State { comm, inside: 0, failed: None, aborted: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), left: Condvar::new() });
        Arc::new(Handle { library, shared, parts: Mutex::new(Vec::new()), ending: Mutex::new(None) })
    }

    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Makes a call of NCCL, unless one has failed. `what` is its name.
    pub fn within(&self, what: &str, call: impl FnOnce(&Functions, Comm) -> c_int) -> Result<(), CommError> {
        let mut state = self.shared.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.inside += 1;
        let comm = state.comm;
        drop(state);
        let code = call(&self.library.functions, comm);
        let result = self.library.checked(what, code);
        let mut state = self.shared.lock();
        state.inside -= 1;
        if state.inside == 0 {
            self.shared.left.notify_all();
        }
        // Whatever the call of an aborted group came to, the abort is the reason.
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.failed = result.as_ref().err().cloned();
        result
    }

    /// Remembers a failure that came to light by itself.
    pub fn fail(&self, error: CommError) -> CommError {
        self.shared.lock().failed.get_or_insert(error).clone()
    }

    /// A group that was split off.
    pub fn add_part(&self, part: &Arc<Handle>) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(part));
        drop(parts);
        // An abort sets the failure first and looks for parts then; so one of the two sees the other.
        if let Some(CommError::Aborted(why)) = self.shared.lock().failed.clone() {
            part.abort(&why);
        }
    }

    /// Ends the calls under way and all later ones. Doesn't wait for the end: NCCL frees the group within its abort, for which it
    /// waits until the last CUDA graph with a call of this group is gone, and it is up to others to let go of those. What
    /// runs on the device is stopped before that.
    pub fn abort(&self, why: &str) {
        let mut state = self.shared.lock();
        state.failed.get_or_insert_with(|| CommError::Aborted(Arc::from(why)));
        if !state.aborted {
            state.aborted = true;
            drop(state);
            let (library, shared) = (Arc::clone(&self.library), Arc::clone(&self.shared));
            let thread = std::thread::Builder::new().name("vitesse-nccl-end".to_string());
            match thread.spawn(move || end(&library, &shared)) {
                Ok(thread) => {
                    *self.ending.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
                }
                Err(_) => end(&self.library, &self.shared),
            }
        } else {
            drop(state);
        }
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for part in parts.iter().filter_map(Weak::upgrade) {
            part.abort(why);
        }
    }
}

/// Aborts a group that no new call enters.
fn end(library: &Library, shared: &Shared) {
    // NCCL allows an abort while a thread is stuck in a call, but it frees what that works on: better is none.
    let waited = shared.left.wait_timeout_while(shared.lock(), GRACE, |state| state.inside > 0);
    let comm = waited.unwrap_or_else(PoisonError::into_inner).0.comm;
    // SAFETY: a group that was neither destroyed nor aborted, as `aborted` is set once. What it returns tells nobody anything.
    unsafe { (library.functions.comm_abort)(comm) };
}

impl Drop for Handle {
    fn drop(&mut self) {
        let ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = ending {
            let _ = thread.join();
            return;
        }
        let state = self.shared.lock();
        if state.aborted {
            return;
        }
        let (comm, functions) = (state.comm, &self.library.functions);
        // A rank that fails or panics can't count on the others, for which an orderly end waits.
        let healthy = state.failed.is_none() && !std::thread::panicking();
        drop(state);
        // SAFETY: neither was called before, and nobody has the group any more. What they return tells nobody anything.
        unsafe { if healthy { (functions.comm_destroy)(comm) } else { (functions.comm_abort)(comm) } };
    }
}
