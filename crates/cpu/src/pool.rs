//! A fork-join pool of N threads: the caller and N-1 workers.
//!
//! Work is cut into numbered pieces by the shapes alone, threads claim pieces as they get free, and results never
//! depend on who ran which piece. That keeps runs bit-reproducible without paying for a slow thread.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Looks at the other side before a waiting worker goes to sleep: longer than the gap between two steps.
const LOOKS: usize = 4_000;
/// Looks before each further one gives way, so that waiting does not starve the one waited for on a busy machine.
const PATIENCE: usize = 2_000;

/// Pauses between two looks.
pub(crate) fn pause(look: usize) {
    if look < PATIENCE { std::hint::spin_loop() } else { std::thread::yield_now() }
}

type Task = dyn Fn(usize) + Sync;

struct Shared {
    /// The task of the current round. Written by the caller before `round` advances, read by workers after.
    task: UnsafeCell<Option<*const Task>>,
    round: AtomicUsize,
    running: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `task` is written only by the caller while no worker runs (`running` is 0) and read only between the
// release of `round` and the release of `running`, which order the two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `task` is to a `Sync` closure that outlives the round (see `Pool::run`).
unsafe impl Send for Shared {}

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            task: UnsafeCell::new(None),
            round: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let spawn = |index: usize| {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("vitesse-cpu-{index}"))
                .spawn(move || work(&shared, index))
        };
        let workers = (1..threads.max(1)).map(spawn).collect::<Result<_, _>>()?;
        Ok(Pool { shared, workers })
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(piece, thread)` for every piece in `0..pieces`, on all threads, and returns when all are done.
    pub fn each(&self, pieces: usize, task: impl Fn(usize, usize) + Sync) {
        if pieces <= 1 || self.workers.is_empty() {
            (0..pieces).for_each(|piece| task(piece, 0));
            return;
        }
        let next = AtomicUsize::new(0);
        self.run(&|thread| {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    return;
                }
                task(piece, thread);
            }
        });
    }

    /// Calls `task(range, thread)` for ranges of at most `size` that cover `0..len`.
    pub fn ranges(&self, len: usize, size: usize, task: impl Fn(std::ops::Range<usize>, usize) + Sync) {
        let size = size.max(1);
        self.each(len.div_ceil(size), |piece, thread| {
            task(piece * size..((piece + 1) * size).min(len), thread);
        });
    }

    /// Calls `task(thread)` once on every thread, and returns when all are done.
    pub fn together(&self, task: impl Fn(usize) + Sync) {
        if self.workers.is_empty() { task(0) } else { self.run(&task) }
    }

    fn run(&self, task: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; this function returns after every worker has left the task.
        let task_ptr: *const Task = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync), _>(task) };
        // SAFETY: `running` is 0 here, so no worker reads the cell.
        unsafe { *shared.task.get() = Some(task_ptr) };
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        shared.round.fetch_add(1, Ordering::SeqCst);
        if *lock(&shared.sleepers) > 0 {
            shared.wake.notify_all();
        }
        let mine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task(0)));
        let mut looks = 0;
        while shared.running.load(Ordering::Acquire) > 0 {
            pause(looks);
            looks += 1;
        }
        if let Err(payload) = mine {
            std::panic::resume_unwind(payload);
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a worker thread of the CPU executor panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.round.fetch_add(1, Ordering::SeqCst);
        drop(lock(&self.shared.sleepers));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// The counter under the lock stays true whatever panics, so a poisoned lock is as good as any.
fn lock(sleepers: &Mutex<usize>) -> std::sync::MutexGuard<'_, usize> {
    sleepers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        seen = next_round(shared, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the caller wrote the task before it advanced `round`, and waits for `running` before it goes on.
        let task = unsafe { (*shared.task.get()).map(|task| &*task) };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            if let Some(task) = task {
                task(thread);
            }
        }));
        if done.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

fn next_round(shared: &Shared, seen: usize) -> usize {
    for look in 0..LOOKS {
        let round = shared.round.load(Ordering::Acquire);
        if round != seen {
            return round;
        }
        pause(look);
    }
    let mut sleepers = lock(&shared.sleepers);
    *sleepers += 1;
    loop {
        let round = shared.round.load(Ordering::SeqCst);
        if round != seen {
            *sleepers -= 1;
            return round;
        }
        sleepers = shared.wake.wait(sleepers).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_piece_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            for round in 0..200 {
                let sum = AtomicU64::new(0);
                pool.ranges(1000 + round, 7, |range, _| {
                    sum.fetch_add(range.map(|i| i as u64).sum(), Ordering::Relaxed);
                });
                let n = 1000 + round as u64;
                assert_eq!(sum.into_inner(), n * (n - 1) / 2);
            }
        }
    }

    #[test]
    fn workers_wake_after_a_long_pause() {
        let pool = Pool::new(3).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        let threads = Mutex::new(std::collections::HashSet::new());
        pool.each(64, |_, thread| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            threads.lock().unwrap().insert(thread);
        });
        assert_eq!(threads.into_inner().unwrap().len(), 3);
    }
}
