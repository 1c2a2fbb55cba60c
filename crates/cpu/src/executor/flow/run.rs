//! Threads in a flow, and where their time goes.

use super::{Flow, Job, Progress, Unit};
use crate::account::{Clock, Mark};
use crate::executor::bind::Bound;
use crate::kernels::Float;
use crate::pool::{Pool, pause};
use crate::steps::{self, Context, Share, Team};
use comm::Activity;
use graph::Header;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Units of all runs so far.
static MOMENTS: AtomicU64 = AtomicU64::new(0);

/// A number for each unit of each run.
struct Moments {
    first: u64,
    threads: usize,
}

impl Moments {
    fn new(flow: &Flow, threads: usize) -> Self {
        Moments { first: MOMENTS.fetch_add(flow.units.len() as u64, Ordering::Relaxed), threads }
    }

    /// None where a thread is unlikely to have several pieces of a unit.
    fn of(&self, number: usize, unit: &Unit) -> Option<u64> {
        (unit.parts * unit.each >= 2 * self.threads).then_some(self.first + number as u64)
    }
}

/// Times of one run.
pub(super) struct Times {
    /// Nanoseconds of all threads in each unit.
    spent: Vec<AtomicU64>,
    /// Marks of the walking thread, one after the other, for a trace.
    marks: Mutex<Vec<Mark>>,
}

impl Times {
    pub fn new(units: usize) -> Self {
        Times { spent: (0..units).map(|_| AtomicU64::new(0)).collect(), marks: Mutex::default() }
    }

    fn marks(&self) -> MutexGuard<'_, Vec<Mark>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flow {
    /// Runs all steps of the flow, which are a part of `steps`, on all threads.
    pub fn run<T: Float>(
        &self,
        steps: &[Bound<T>],
        header: &Header,
        pool: &Pool,
        activity: Option<&Activity>,
        clock: &Clock,
    ) {
        self.reset();
        let (timing, threads) = (clock.is_timing(), pool.threads());
        let tracing = timing && clock.is_tracing();
        self.clear_times(tracing);
        let moments = Moments::new(self, threads);
        pool.together(|thread| {
            let waited = Cell::new(false);
            let run = |unit: usize, pieces| {
                let Unit { step, phase, .. } = self.units[unit];
                let (bound, moment) = (&steps[step], moments.of(unit, &self.units[unit]));
                if let (0, Some(activity), Some(name)) = (thread, activity, bound.doing) {
                    activity.doing(name);
                }
                let start = timing.then(Instant::now);
                let team = Team::One { share: Share::new(phase, pieces), thread, threads, moment };
                // SAFETY: pieces of a phase don't touch what others write, and `needs` orders phases whose pieces do: see
                // this module's beginning. `&mut Executor` keeps the host away.
                unsafe { steps::run(&Context { team, header, step: bound, matmuls_only: false }) };
                let Some(start) = start else { return };
                let end = Instant::now();
                let nanoseconds = end.saturating_duration_since(start).as_nanos() as u64;
                self.progress.times.spent[unit].fetch_add(nanoseconds, Ordering::Relaxed);
                if tracing && thread == 0 {
                    self.note(step, waited.replace(false).then_some(start), end);
                }
            };
            let wait = |idle: usize| {
                waited.set(true);
                pause(idle);
            };
            self.work((thread, threads), run, wait);
        });
    }

    /// Runs all steps of the flow on the calling thread, one part after the other, each time any of those that may come next:
    /// the one of `choose(how many there are)`.
    pub fn run_in_any_order<T: Float>(
        &self,
        steps: &[Bound<T>],
        header: &Header,
        threads: usize,
        choose: &mut dyn FnMut(usize) -> usize,
    ) {
        self.reset();
        let moments = Moments::new(self, threads);
        loop {
            let jobs = self.jobs();
            if jobs.is_empty() {
                return assert!(self.is_done(), "a flow came to a halt");
            }
            let (thread, job) = (choose(threads), jobs[choose(jobs.len())]);
            if let Job::Part { unit, .. } = job {
                self.progress.given[unit].fetch_add(1, Ordering::Relaxed);
            }
            self.take(job, &mut |unit, pieces| {
                let Unit { step, phase, .. } = self.units[unit];
                let moment = moments.of(unit, &self.units[unit]);
                let team = Team::One { share: Share::new(phase, pieces), thread, threads, moment };
                // SAFETY: nothing else runs, and what must come before has.
                unsafe { steps::run(&Context { team, header, step: &steps[step], matmuls_only: false }) };
            });
        }
    }

    fn clear_times(&self, tracing: bool) {
        let Times { spent, marks: _ } = &self.progress.times;
        spent.iter().for_each(|spent| spent.store(0, Ordering::Relaxed));
        let mut marks = self.progress.times.marks();
        marks.clear();
        if tracing {
            // Each part, and perhaps a wait before it.
            marks.reserve(2 * self.units.iter().map(|unit| unit.parts).sum::<usize>());
        }
    }

    /// All parts that may come next.
    fn jobs(&self) -> Vec<Job> {
        let Progress { blocks, given, .. } = &self.progress;
        let at = |block: usize| blocks[block].load(Ordering::Relaxed) / 2;
        let carries = (0..blocks.len()).map(|block| Job::Carry { block, from: at(block) });
        let carries = carries.filter(|job| match job {
            Job::Carry { from, .. } => self.carried.get(*from).is_some_and(|unit| self.is_ready(*unit)),
            Job::Part { .. } => false,
        });
        let part = |&unit: &usize| {
            let part = given[unit].load(Ordering::Relaxed);
            (part < self.units[unit].parts && self.is_ready(unit)).then_some(Job::Part { unit, part })
        };
        carries.chain(self.others.iter().filter_map(part)).collect()
    }

    /// A part of a step has ended, before which the thread may have waited.
    fn note(&self, step: usize, waited_until: Option<Instant>, end: Instant) {
        let mut marks = self.progress.times.marks();
        marks.extend(waited_until.map(|end| Mark { step: None, end }));
        match marks.last_mut() {
            Some(last) if last.step == Some(step) => last.end = end,
            _ => marks.push(Mark { step: Some(step), end }),
        }
    }

    /// Marks of the walking thread in the last run.
    pub fn trace(&self) -> MutexGuard<'_, Vec<Mark>> {
        self.progress.times.marks()
    }

    /// Adds the time of a run to its steps, divided by the threads; returns what is left of `took`, in which there was nothing
    /// to do.
    pub fn settle<T>(&self, steps: &mut [Bound<T>], took: u64, threads: usize) -> u64 {
        let mut left = took;
        for (unit, spent) in self.units.iter().zip(&self.progress.times.spent) {
            let share = (spent.load(Ordering::Relaxed) / threads as u64).min(left);
            steps[unit.step].nanoseconds += share;
            left -= share;
        }
        left
    }
}
