//! Where the ranks of a group meet: who has come how far, and how those who wait are told.

use super::slot::Slot;
use crate::engine::CommError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How far a rank is in a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its call lies in its slot.
    There = 1,
    /// It uses the buffers of others.
    AtWork = 2,
    /// It won't touch the buffers of others any more.
    Done = 3,
}

/// A rank's place. The phase has cache lines of its own, since others look at it while they wait.
#[repr(align(128))]
struct Seat {
    /// Four times the number of the call, plus the stage: it only grows, but for calls that are broken off.
    phase: AtomicU64,
    /// The rank's engine was dropped.
    gone: AtomicBool,
}

pub(super) struct Group {
    seats: Box<[Seat]>,
    /// Two for each rank, used in turn: a rank that begins a call knows that all have begun the one before, hence that all
    /// have left the one before that.
    slots: Box<[[Slot; 2]]>,
    /// Whether `error` is set.
    broken: AtomicBool,
    error: OnceLock<CommError>,
    /// Ranks that sleep, or are about to.
    asleep: AtomicUsize,
    bed: Mutex<()>,
    wake: Condvar,
    /// For [`abort`](Self::abort).
    parts: Mutex<Vec<Weak<Group>>>,
    /// Groups that some of their ranks have not joined yet.
    pub(super) nursery: Mutex<Vec<Joining>>,
    /// How often to look without giving way.
    looks: usize,
}

/// A sub-group that is being made.
pub(super) struct Joining {
    pub call: u64,
    pub colour: usize,
    pub group: Arc<Group>,
    pub missing: usize,
}

/// Looks before each further one gives way: some microseconds, as long as a meeting of ranks that arrive together takes. When
/// nobody else wants the core, giving way costs next to nothing; when the other rank is the one that does, it gains a lot.
const LOOKS: usize = 50;
/// A rank that has waited as long sleeps. Waking costs some tens of microseconds.
const PATIENCE: Duration = Duration::from_micros(200);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whatever these locks guard is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn phase(call: u64, stage: Stage) -> u64 {
    call * 4 + stage as u64
}

impl Group {
    pub fn new(ranks: usize, cores: usize) -> Arc<Self> {
        let seat = || Seat { phase: AtomicU64::new(0), gone: AtomicBool::new(false) };
        Arc::new(Group {
            seats: std::iter::repeat_with(seat).take(ranks).collect(),
            slots: std::iter::repeat_with(|| [Slot::new(), Slot::new()]).take(ranks).collect(),
            broken: AtomicBool::new(false),
            error: OnceLock::new(),
            asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            wake: Condvar::new(),
            parts: Mutex::new(Vec::new()),
            nursery: Mutex::new(Vec::new()),
            // With more ranks than cores, looking on keeps the one that is waited for from its core.
            looks: if ranks <= cores { LOOKS } else { 0 },
        })
    }

    pub fn ranks(&self) -> usize {
        self.seats.len()
    }

    pub fn slot(&self, rank: usize, call: u64) -> &Slot {
        &self.slots[rank][(call % 2) as usize]
    }

    /// The error that broke the group, if one did.
    pub fn check(&self) -> Result<(), CommError> {
        if self.broken.load(SeqCst) { Err(self.error()) } else { Ok(()) }
    }

    fn error(&self) -> CommError {
        let unknown = || CommError::Engine { engine: "threads", why: "broken for no known reason".into() };
        self.error.get().cloned().unwrap_or_else(unknown)
    }

    /// Breaks the group, on all ranks; the first reason counts, and is returned.
    pub fn fail(&self, error: CommError) -> CommError {
        let _ = self.error.set(error);
        self.broken.store(true, SeqCst);
        self.rouse();
        self.error()
    }

    /// Breaks the group and all made from it.
    pub fn abort(&self, why: &Arc<str>) {
        self.fail(CommError::Aborted(Arc::clone(why)));
        let parts: Vec<_> = lock(&self.parts).iter().filter_map(Weak::upgrade).collect();
        parts.iter().for_each(|part| part.abort(why));
    }

    /// A group of some of these ranks, that ends with this one.
    pub fn part(&self, ranks: usize, cores: usize) -> Arc<Self> {
        let part = Self::new(ranks, cores);
        let mut parts = lock(&self.parts);
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&part));
        drop(parts);
        // Whoever aborts from now on finds the part in the list; who did before is found here.
        if let Err(CommError::Aborted(why)) = self.check() {
            part.abort(&why);
        }
        part
    }

    /// The rank makes no more calls.
    pub fn leave(&self, rank: usize) {
        self.seats[rank].gone.store(true, SeqCst);
        self.rouse();
    }

    fn rouse(&self) {
        // A rank holds the bed from its last look until it sleeps, so it can't miss this.
        drop(lock(&self.bed));
        self.wake.notify_all();
    }

    /// Tells the others how far this rank is.
    pub fn arrive(&self, rank: usize, call: u64, stage: Stage) {
        let phase = phase(call, stage);
        self.seats[rank].phase.store(phase, SeqCst);
        // Sleepers want all ranks, so only the last one need wake them. Of two that come last at once, at least one sees both.
        if self.asleep.load(SeqCst) > 0 && self.seats.iter().all(|seat| seat.phase.load(SeqCst) >= phase) {
            self.rouse();
        }
    }

    /// Waits until all ranks are as far.
    pub fn meet(&self, call: u64, stage: Stage) -> Result<(), CommError> {
        let phase = phase(call, stage);
        let mut met = 0;
        for _ in 0..self.looks {
            if self.look(phase, &mut met)? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if self.look(phase, &mut met)? {
                return Ok(());
            }
            std::thread::yield_now();
        }
        let mut bed = lock(&self.bed);
        self.asleep.fetch_add(1, SeqCst);
        let result = loop {
            match self.glance(phase, &mut met) {
                Look::NotYet => bed = self.wake.wait(bed).unwrap_or_else(PoisonError::into_inner),
                look => break look,
            }
        };
        self.asleep.fetch_sub(1, SeqCst);
        drop(bed);
        self.judge(result).map(|_| ())
    }

    fn look(&self, phase: u64, met: &mut usize) -> Result<bool, CommError> {
        match self.glance(phase, met) {
            Look::NotYet => Ok(false),
            Look::All => Ok(true),
            other => self.judge(other),
        }
    }

    #[cold]
    fn judge(&self, look: Look) -> Result<bool, CommError> {
        match look {
            Look::NotYet => Ok(false),
            Look::All => Ok(true),
            Look::Broken => Err(self.error()),
            Look::Gone(rank) => Err(self.fail(CommError::Lost { rank, why: "its thread ended".to_string() })),
        }
    }

    /// One look at the ranks from `met` on, which counts those that have come.
    #[inline]
    fn glance(&self, phase: u64, met: &mut usize) -> Look {
        while let Some(seat) = self.seats.get(*met) {
            if seat.phase.load(SeqCst) < phase {
                // Asked in this order: a rank may arrive and then go.
                let gone = seat.gone.load(SeqCst) && seat.phase.load(SeqCst) < phase;
                return match (self.broken.load(SeqCst), gone) {
                    (true, _) => Look::Broken,
                    (_, true) => Look::Gone(*met),
                    _ => Look::NotYet,
                };
            }
            *met += 1;
        }
        Look::All
    }

    /// Whether this rank may use the others' buffers: from here until it is done, none of them leaves the call. If the
    /// group is broken, some may have left already, and it may not.
    pub fn begin_work(&self, rank: usize, call: u64) -> Result<(), CommError> {
        // Either this store comes before the group is broken, and whoever leaves sees it in `settle`; or the check fails.
        self.seats[rank].phase.store(phase(call, Stage::AtWork), SeqCst);
        self.check()
    }

    /// Before a rank leaves a broken call: waits until nobody uses its buffers. Not long, as no rank waits while it works.
    pub fn settle(&self, rank: usize, call: u64) {
        let at_work = phase(call, Stage::AtWork);
        let _ = self.seats[rank].phase.compare_exchange(at_work, phase(call, Stage::There), SeqCst, SeqCst);
        while self.seats.iter().any(|seat| seat.phase.load(SeqCst) == at_work) {
            std::thread::yield_now();
        }
    }
}

enum Look {
    All,
    NotYet,
    Broken,
    Gone(usize),
}
