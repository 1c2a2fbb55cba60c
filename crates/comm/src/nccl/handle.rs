//! NCCL communicator of a group, and its destruction.

use super::ffi::{Comm, Functions, IN_PROGRESS, SUCCESS};
use super::library::Library;
use crate::engine::CommError;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time in which a call is queued, unless it waits for other ranks: then only an abort ends it.
const GRACE: Duration = Duration::from_millis(50);

/// An `ncclComm_t`, of which exactly one of `ncclCommDestroy` and `ncclCommAbort` is called, once.
pub(super) struct Handle {
    library: Arc<Library>,
    shared: Arc<Shared>,
    /// Sub-groups, which are aborted with this one.
    parts: Mutex<Vec<Weak<Handle>>>,
    ending: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when no thread is inside any more.
    left: Condvar,
}

struct State {
    comm: Comm,
    /// Number of threads in a call of NCCL with this group.
    inside: usize,
    /// First failure; every later call returns it.
    failed: Option<CommError>,
    /// True if it was aborted, or is about to be.
    aborted: bool,
}

// SAFETY: NCCL's groups may be used from any thread; calls that must not be made at once aren't (see `Engine::run`).
unsafe impl Send for State {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Consistent between any two statements, even after a panic.
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

    /// Makes a call of NCCL, unless an earlier one failed. `what` is its name.
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

    /// Returns the error of a queued call of this group or a sub-group that has failed since.
    pub fn check(&self) -> Result<(), CommError> {
        let mut found = SUCCESS;
        // SAFETY: a group; the number is written.
        let asked = |nccl: &Functions, comm| unsafe { (nccl.comm_get_async_error)(comm, &mut found) };
        self.within("ncclCommGetAsyncError", asked)?;
        if !matches!(found, SUCCESS | IN_PROGRESS) {
            let failed = self.library.checked("an earlier call", found);
            return failed.map_err(|error| self.shared.lock().failed.get_or_insert(error).clone());
        }
        let parts: Vec<Arc<Handle>> = self.parts().iter().filter_map(Weak::upgrade).collect();
        parts.iter().try_for_each(|part| part.check())
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Weak<Handle>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sub-group.
    pub fn add_part(&self, part: &Arc<Handle>) {
        let mut parts = self.parts();
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(part));
        drop(parts);
        // An abort sets the failure first and looks for parts then; so one of the two sees the other.
        if let Some(CommError::Aborted(why)) = self.shared.lock().failed.clone() {
            part.abort(&why);
        }
    }

    /// Aborts the calls under way and all later ones. Doesn't wait for NCCL's abort: that frees the group, for which it waits until the
    /// last CUDA graph with a call of this group is destroyed by its owner. What runs on the device is stopped before that.
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
    // SAFETY: a group that was neither destroyed nor aborted, as `aborted` is set once. Its result is of no use.
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
        // A rank that failed or panics must not wait for the others, as `ncclCommDestroy` does.
        let healthy = state.failed.is_none() && !std::thread::panicking();
        drop(state);
        // SAFETY: neither was called before, and nobody has the group any more. Their result is of no use.
        unsafe { if healthy { (functions.comm_destroy)(comm) } else { (functions.comm_abort)(comm) } };
    }
}
