//! Synchronization of the ranks of a thread group: how far each is in a call, and waking those that wait.

use super::slot::Slot;
use crate::engine::CommError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Stage of a rank in a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its call is in its slot.
    Arrived = 1,
    /// It uses the buffers of other ranks.
    Working = 2,
    /// It no longer uses the buffers of other ranks.
    Done = 3,
}

/// Phase of a rank. It has cache lines of its own, since others poll it while they wait.
#[repr(align(128))]
struct RankPhase {
    /// Four times the number of the call, plus the stage: it only grows, except in aborted calls.
    phase: AtomicU64,
    /// True once the rank's engine was dropped.
    gone: AtomicBool,
}

pub(super) struct ThreadGroup {
    phases: Box<[RankPhase]>,
    /// Two for each rank, used in turn: a rank that begins a call knows that all have begun the one before, hence that all
    /// have left the one before that.
    slots: Box<[[Slot; 2]]>,
    /// True once `error` is set.
    broken: AtomicBool,
    error: OnceLock<CommError>,
    /// Number of ranks that sleep, or are about to.
    asleep: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake: Condvar,
    /// Sub-groups, for [`abort`](Self::abort).
    parts: Mutex<Vec<Weak<ThreadGroup>>>,
    /// Sub-groups that some of their ranks have not joined yet.
    pub(super) pending_splits: Mutex<Vec<PendingSplit>>,
    /// Number of polls before yielding.
    spins: usize,
}

/// A sub-group that some of its ranks have yet to join.
pub(super) struct PendingSplit {
    pub call: u64,
    pub colour: usize,
    pub group: Arc<ThreadGroup>,
    pub missing: usize,
}

/// Polls before each further one yields: some microseconds, as long as ranks that arrive together take. When nobody else wants the
/// core, yielding costs next to nothing; when the other rank does, it gains a lot.
const SPINS: usize = 50;
/// Time after which a waiting rank sleeps. Waking costs some tens of microseconds.
const PATIENCE: Duration = Duration::from_micros(200);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is consistent between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn phase(call: u64, stage: Stage) -> u64 {
    call * 4 + stage as u64
}

impl ThreadGroup {
    pub fn new(ranks: usize, cores: usize) -> Arc<Self> {
        let phase_of = || RankPhase { phase: AtomicU64::new(0), gone: AtomicBool::new(false) };
        Arc::new(ThreadGroup {
            phases: std::iter::repeat_with(phase_of).take(ranks).collect(),
            slots: std::iter::repeat_with(|| [Slot::new(), Slot::new()]).take(ranks).collect(),
            broken: AtomicBool::new(false),
            error: OnceLock::new(),
            asleep: AtomicUsize::new(0),
            sleep_lock: Mutex::new(()),
            wake: Condvar::new(),
            parts: Mutex::new(Vec::new()),
            pending_splits: Mutex::new(Vec::new()),
            // With more ranks than cores, polling keeps the rank that is waited for from its core.
            spins: if ranks <= cores { SPINS } else { 0 },
        })
    }

    pub fn ranks(&self) -> usize {
        self.phases.len()
    }

    pub fn slot(&self, rank: usize, call: u64) -> &Slot {
        &self.slots[rank][(call % 2) as usize]
    }

    /// Returns the error that broke the group, if one did.
    pub fn check(&self) -> Result<(), CommError> {
        if self.broken.load(SeqCst) { Err(self.error()) } else { Ok(()) }
    }

    fn error(&self) -> CommError {
        let unknown = || CommError::Engine { engine: "threads", why: "broken for no known reason".into() };
        self.error.get().cloned().unwrap_or_else(unknown)
    }

    /// Breaks the group on all ranks; the first error counts, and is returned.
    pub fn fail(&self, error: CommError) -> CommError {
        let _ = self.error.set(error);
        self.broken.store(true, SeqCst);
        self.wake_sleepers();
        self.error()
    }

    /// Breaks the group and its sub-groups.
    pub fn abort(&self, why: &Arc<str>) {
        self.fail(CommError::Aborted(Arc::clone(why)));
        let parts: Vec<_> = lock(&self.parts).iter().filter_map(Weak::upgrade).collect();
        parts.iter().for_each(|part| part.abort(why));
    }

    /// Makes a sub-group, which is aborted with this one.
    pub fn part(&self, ranks: usize, cores: usize) -> Arc<Self> {
        let part = Self::new(ranks, cores);
        let mut parts = lock(&self.parts);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&part));
        drop(parts);
        // A later abort finds the part in the list; an earlier one is found here.
        if let Err(CommError::Aborted(why)) = self.check() {
            part.abort(&why);
        }
        part
    }

    /// Records that the rank makes no more calls.
    pub fn leave(&self, rank: usize) {
        self.phases[rank].gone.store(true, SeqCst);
        self.wake_sleepers();
    }

    fn wake_sleepers(&self) {
        // A rank holds the lock from its last poll until it sleeps, so it can't miss this.
        drop(lock(&self.sleep_lock));
        self.wake.notify_all();
    }

    /// Publishes this rank's stage.
    pub fn arrive(&self, rank: usize, call: u64, stage: Stage) {
        let phase = phase(call, stage);
        self.phases[rank].phase.store(phase, SeqCst);
        // Sleepers wait for all ranks, so only the last one need wake them. Of two that arrive last at once, at least one sees both.
        if self.asleep.load(SeqCst) > 0
            && self.phases.iter().all(|phase_of| phase_of.phase.load(SeqCst) >= phase)
        {
            self.wake_sleepers();
        }
    }

    /// Waits until all ranks have reached the stage.
    pub fn meet(&self, call: u64, stage: Stage) -> Result<(), CommError> {
        let phase = phase(call, stage);
        let mut met = 0;
        for _ in 0..self.spins {
            if self.all_arrived(phase, &mut met)? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if self.all_arrived(phase, &mut met)? {
                return Ok(());
            }
            std::thread::yield_now();
        }
        let mut sleep_lock = lock(&self.sleep_lock);
        self.asleep.fetch_add(1, SeqCst);
        let result = loop {
            match self.poll(phase, &mut met) {
                Arrivals::NotYet => {
                    sleep_lock = self.wake.wait(sleep_lock).unwrap_or_else(PoisonError::into_inner)
                }
                all_arrived => break all_arrived,
            }
        };
        self.asleep.fetch_sub(1, SeqCst);
        drop(sleep_lock);
        self.outcome(result).map(|_| ())
    }

    fn all_arrived(&self, phase: u64, met: &mut usize) -> Result<bool, CommError> {
        match self.poll(phase, met) {
            Arrivals::NotYet => Ok(false),
            Arrivals::All => Ok(true),
            other => self.outcome(other),
        }
    }

    #[cold]
    fn outcome(&self, all_arrived: Arrivals) -> Result<bool, CommError> {
        match all_arrived {
            Arrivals::NotYet => Ok(false),
            Arrivals::All => Ok(true),
            Arrivals::Broken => Err(self.error()),
            Arrivals::Gone(rank) => {
                Err(self.fail(CommError::Lost { rank, why: "its thread ended".to_string() }))
            }
        }
    }

    /// Polls the ranks from `met` on, which counts those that have arrived.
    #[inline]
    fn poll(&self, phase: u64, met: &mut usize) -> Arrivals {
        while let Some(phase_of) = self.phases.get(*met) {
            if phase_of.phase.load(SeqCst) < phase {
                // Loaded in this order: a rank may arrive and then be dropped.
                let gone = phase_of.gone.load(SeqCst) && phase_of.phase.load(SeqCst) < phase;
                return match (self.broken.load(SeqCst), gone) {
                    (true, _) => Arrivals::Broken,
                    (_, true) => Arrivals::Gone(*met),
                    _ => Arrivals::NotYet,
                };
            }
            *met += 1;
        }
        Arrivals::All
    }

    /// Begins the use of other ranks' buffers: until this rank is done, none of them leaves the call. Fails if the group is broken, as
    /// some may have left already.
    pub fn begin_work(&self, rank: usize, call: u64) -> Result<(), CommError> {
        // Either this store comes before the group is broken, and a leaving rank sees it in `settle`; or the check fails.
        self.phases[rank].phase.store(phase(call, Stage::Working), SeqCst);
        self.check()
    }

    /// Waits until no rank uses this one's buffers, before it leaves a broken call. Not long, as no rank waits while it works.
    pub fn settle(&self, rank: usize, call: u64) {
        let at_work = phase(call, Stage::Working);
        let _ =
            self.phases[rank].phase.compare_exchange(at_work, phase(call, Stage::Arrived), SeqCst, SeqCst);
        while self.phases.iter().any(|phase_of| phase_of.phase.load(SeqCst) == at_work) {
            std::thread::yield_now();
        }
    }
}

enum Arrivals {
    All,
    NotYet,
    Broken,
    Gone(usize),
}
