//! Steps that flow: blocks of samples go from step to step as threads get free, instead of threads meeting after each step.
//!
//! A step is one or more phases, each of pieces that don't depend on each other (`steps::Phase`). In a phase that is cut by
//! blocks of samples, a piece touches the rows of its own samples alone, so that a block may go on to the next such phase
//! whatever others do. All others (sums over samples, above all gradients of weights) have pieces that
//! any thread takes when what they need is there. Nobody waits at the end of a step; what waits for what follows from
//! the bytes that phases touch, and so from the plan's memory alone:
//!
//! - Blocks go through their phases in order.
//! - Else a phase waits for the whole of an earlier one if one of them writes what the other touches, unless both are cut by
//!   blocks and lie there alike, sample by sample: then each block meets only its own rows.
//!
//! Which thread has which piece changes no result: how steps are cut, and how sums are added, is fixed by shapes.

mod run;

use super::Operand;
use super::bind::{Bound, Work};
use crate::kernels::Float;
use crate::steps::{self, Blocks, Context, Cut, Phase, Team};
use graph::Header;
use run::Times;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Steps for which memory is best left alone after its last use, so that threads may be that far apart: see
/// `graph::Target::linger`.
pub const LINGER: usize = 8;

/// A part of a plan.
pub(super) enum Stretch {
    /// A step on its own, by number.
    Step(usize),
    Flow(Box<Flow>),
}

impl Stretch {
    /// The numbers of its steps.
    pub fn steps(&self) -> Range<usize> {
        match self {
            Stretch::Step(step) => *step..step + 1,
            Stretch::Flow(flow) => flow.steps.clone(),
        }
    }
}

/// A phase of a step, and how it is shared out.
#[derive(Debug)]
pub(super) struct Unit {
    /// The step's number in the plan.
    pub step: usize,
    /// Number of the phase in its step.
    pub phase: usize,
    /// Pieces of each of its parts: a block, or a piece.
    pub each: usize,
    /// Parts there are.
    pub parts: usize,
    pub by_block: bool,
    /// Earlier units that must be done, as numbers in the flow.
    pub needs: Vec<usize>,
}

/// Steps that follow each other, with all that threads need to run them.
pub(super) struct Flow {
    pub steps: Range<usize>,
    pub units: Vec<Unit>,
    /// The units that are cut by blocks, in order.
    carried: Vec<usize>,
    /// The others, in order.
    others: Vec<usize>,
    progress: Progress,
}

/// Progress of a run.
struct Progress {
    /// Number of parts that are done, for each unit.
    done: Vec<AtomicUsize>,
    /// Number of parts that were given out, for each unit that is not cut by blocks.
    given: Vec<AtomicUsize>,
    /// The first of the others of which not all parts were given out, or one before.
    open: AtomicUsize,
    /// State of each block: twice the number of the next unit among those carried, plus 1 while a thread has it.
    blocks: Vec<AtomicUsize>,
    /// Parts of all units that are not done.
    left: AtomicUsize,
    /// A thread panicked; nobody waits for it.
    broken: AtomicBool,
    times: Times,
}

/// Next job of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Takes a block through a unit: the one of this number among those that are cut by blocks.
    Carry { block: usize, from: usize },
    /// A part of a unit that is not cut by blocks.
    Part { unit: usize, part: usize },
}

/// Bytes that a unit touches.
#[derive(Clone, Copy, Debug)]
struct Access {
    start: usize,
    end: usize,
    writes: bool,
    /// Bytes of a sample, where a piece touches those of its samples alone.
    sample: Option<usize>,
}

impl Access {
    /// Checks whether one writes what the other touches, other than each block its own rows.
    fn clashes(&self, other: &Access) -> bool {
        let alike = self.sample.is_some() && self.sample == other.sample && self.start == other.start;
        (self.writes || other.writes) && self.start < other.end && other.start < self.end && !alike
    }
}

/// Cuts a plan into stretches. A collective ends a flow, and so do a step that waits for one, a step that borrows memory, and another
/// cut of samples.
pub(super) fn stretches<T: Float>(bound: &[Bound<T>], threads: usize) -> Vec<Stretch> {
    let mut all = vec![];
    let mut draft: Option<Draft> = None;
    for (index, step) in bound.iter().enumerate() {
        let after = match step.work {
            // What a step borrows, the next one may borrow too.
            Work::Compute { after } if step.borrowed == 0 => after,
            _ => {
                all.extend(draft.take().map(|d| Stretch::Flow(Box::new(d.finish()))));
                all.push(Stretch::Step(index));
                continue;
            }
        };
        let phases = survey(step, threads);
        let fits = |d: &Draft| after.is_none() && step.after.is_empty() && d.takes(step, &phases);
        if !draft.as_ref().is_some_and(fits) {
            all.extend(draft.take().map(|d| Stretch::Flow(Box::new(d.finish()))));
        }
        draft.get_or_insert_with(|| Draft::new(index, threads)).push(index, step, &phases);
    }
    all.extend(draft.map(|d| Stretch::Flow(Box::new(d.finish()))));
    all
}

/// The phases of a step.
fn survey<T: Float>(step: &Bound<T>, threads: usize) -> Vec<Phase> {
    // How a step is cut doesn't depend on it.
    let header = Header { seed: 0, step: 0, first_sample: 0, learning_rate: 0.0, nominal: 1.0 };
    let team = Team::Survey { phases: Mutex::default(), threads };
    let context = Context { team, header: &header, step, matmuls_only: false };
    // SAFETY: no piece runs, and outside of its pieces a step writes nothing.
    unsafe { steps::run(&context) };
    match context.team {
        Team::Survey { phases, .. } => phases.into_inner().unwrap_or_else(PoisonError::into_inner),
        _ => vec![],
    }
}

/// A flow in the making.
struct Draft {
    threads: usize,
    first: usize,
    end: usize,
    blocks: Option<Blocks>,
    units: Vec<Unit>,
    touched: Vec<Vec<Access>>,
    /// Units that are done whenever a part of each unit starts.
    known: Vec<Vec<bool>>,
    last_carried: Option<usize>,
}

impl Draft {
    fn new(first: usize, threads: usize) -> Self {
        let (units, touched, known) = (vec![], vec![], vec![]);
        Draft { threads, first, end: first, blocks: None, units, touched, known, last_carried: None }
    }

    /// Checks whether the blocks of a step have the same samples as those so far.
    fn takes<T: Float>(&self, bound: &Bound<T>, phases: &[Phase]) -> bool {
        let blocks = phases.iter().filter_map(|phase| carried(bound, phase, self.threads));
        self.blocks.is_none_or(|ours| blocks.into_iter().all(|blocks| ours.same(&blocks)))
    }

    fn push<T: Float>(&mut self, step: usize, bound: &Bound<T>, phases: &[Phase]) {
        self.end = step + 1;
        for (number, phase) in phases.iter().enumerate().filter(|(_, phase)| phase.pieces > 0) {
            let blocks = carried(bound, phase, self.threads);
            let (each, parts) = match phase.cut {
                Cut::Blocks { pieces, .. } if blocks.is_some() => (pieces, phase.pieces / pieces),
                _ => (1, phase.pieces),
            };
            let touched = accesses(bound, phase.cut, blocks);
            let (needs, known) = self.needs(step, blocks.is_some(), &touched);
            if blocks.is_some() {
                (self.blocks, self.last_carried) = (blocks, Some(self.units.len()));
            }
            let by_block = blocks.is_some();
            self.units.push(Unit { step, phase: number, each, parts, by_block, needs });
            self.touched.push(touched);
            self.known.push(known);
        }
    }

    /// The units that a new one waits for expressly, and all that it knows to be done.
    fn needs(&self, step: usize, by_block: bool, touched: &[Access]) -> (Vec<usize>, Vec<bool>) {
        let mut known = vec![false; self.units.len()];
        let mut needs = vec![];
        if let Some(before) = self.last_carried.filter(|_| by_block) {
            // A block that comes here has been there.
            known[..before].copy_from_slice(&self.known[before]);
        }
        for (other, unit) in self.units.iter().enumerate().rev() {
            if known[other] || !self.clash(step, by_block, touched, other, unit) {
                continue;
            }
            needs.push(other);
            self.learn(other, &mut known);
        }
        needs.reverse();
        (needs, known)
    }

    fn clash(&self, step: usize, by_block: bool, touched: &[Access], other: usize, unit: &Unit) -> bool {
        match (by_block && unit.by_block, unit.step == step) {
            // Each piece writes scratch of its own, and rows of its own samples.
            (true, true) => false,
            (false, true) => true,
            (both, false) => {
                let whole = |access: &Access| Access { sample: access.sample.filter(|_| both), ..*access };
                touched.iter().any(|a| self.touched[other].iter().any(|b| whole(a).clashes(b)))
            }
        }
    }

    /// `other` is done, and with it all that it waited for; of units that are cut by blocks, all before.
    fn learn(&self, other: usize, known: &mut [bool]) {
        known[other] = true;
        known.iter_mut().zip(&self.known[other]).for_each(|(known, theirs)| *known |= theirs);
        if !self.units[other].by_block {
            return;
        }
        for before in (0..other).filter(|before| self.units[*before].by_block) {
            known[before] = true;
            known.iter_mut().zip(&self.known[before]).for_each(|(known, theirs)| *known |= theirs);
        }
    }

    fn finish(self) -> Flow {
        let of = |by_block: bool| {
            let units = self.units.iter().enumerate().filter(move |(_, unit)| unit.by_block == by_block);
            units.map(|(number, _)| number).collect::<Vec<_>>()
        };
        let counters = |count: usize| (0..count).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>();
        let (carried, others) = (of(true), of(false));
        let progress = Progress {
            done: counters(self.units.len()),
            given: counters(self.units.len()),
            open: AtomicUsize::new(0),
            blocks: counters(self.blocks.map_or(0, |blocks| blocks.count())),
            left: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            times: Times::new(self.units.len()),
        };
        Flow { steps: self.first..self.end, carried, others, progress, units: self.units }
    }
}

/// The blocks of samples that so many threads carry through a phase, if it is cut by such.
fn carried<T: Float>(bound: &Bound<T>, phase: &Phase, threads: usize) -> Option<Blocks> {
    let Cut::Blocks { blocks, .. } = phase.cut else { return None };
    let of_samples = (steps::samples(&bound.op).inputs)(0);
    (of_samples && blocks.carried_by(threads)).then_some(blocks)
}

/// The bytes that the pieces of a phase touch.
fn accesses<T>(bound: &Bound<T>, cut: Cut, blocks: Option<Blocks>) -> Vec<Access> {
    let of_samples = steps::samples(&bound.op);
    let mut found = vec![];
    let mut add = |operand: &Operand<T>, writes: bool, is_rows: bool| {
        let (start, bytes) = (operand.stored.address() as usize, operand.stored.len());
        let sample = blocks.filter(|_| is_rows).map(|blocks| bytes / blocks.batch());
        let touched = match (cut, blocks) {
            (Cut::Blocks { .. }, Some(_)) => is_rows || !writes,
            (Cut::Shared, _) => !is_rows,
            _ => true,
        };
        if touched && bytes > 0 {
            found.push(Access { start, end: start + bytes, writes, sample });
        }
    };
    bound.inputs.iter().enumerate().for_each(|(i, x)| add(x, false, (of_samples.inputs)(i)));
    bound.outputs.iter().enumerate().for_each(|(i, x)| add(x, true, (of_samples.outputs)(i)));
    let (start, bytes) = (bound.scratch.address() as usize, bound.scratch.len());
    if bytes > 0 {
        found.push(Access { start, end: start + bytes, writes: true, sample: None });
    }
    found
}

/// Lets the other threads go if this one panics.
struct Leaving<'a>(&'a AtomicBool);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Release);
        }
    }
}

impl Flow {
    /// Before each run, while no thread works.
    pub fn reset(&self) {
        let Progress { done, given, open, blocks, left, broken, .. } = &self.progress;
        for counter in done.iter().chain(given).chain(blocks).chain([open]) {
            counter.store(0, Ordering::Relaxed);
        }
        left.store(self.units.iter().map(|unit| unit.parts).sum(), Ordering::Relaxed);
        broken.store(false, Ordering::Relaxed);
    }

    /// Works until all is done: `run(unit, pieces)` for parts of units. `wait` is called as long as there is nothing to
    /// do, with the number of times so far.
    pub fn work(
        &self,
        (thread, threads): (usize, usize),
        mut run: impl FnMut(usize, Range<usize>),
        mut wait: impl FnMut(usize),
    ) {
        let _leaving = Leaving(&self.progress.broken);
        let mut idle = 0;
        while !self.is_done() && !self.progress.broken.load(Ordering::Acquire) {
            let Some(job) = self.next(thread * self.progress.blocks.len() / threads) else {
                wait(idle);
                idle += 1;
                continue;
            };
            idle = 0;
            self.take(job, &mut run);
        }
    }

    /// The first piece of work that is ready, in the order of the plan, if one can be had; of blocks that are as far, the
    /// first from number `first` on. It belongs to the caller then.
    pub fn next(&self, first: usize) -> Option<Job> {
        let Progress { blocks, given, open, .. } = &self.progress;
        let mut best: Option<(usize, usize, usize)> = None;
        for block in (first..blocks.len()).chain(0..first) {
            let at = blocks[block].load(Ordering::Relaxed);
            if at % 2 == 1 || at / 2 == self.carried.len() {
                continue;
            }
            let unit = self.carried[at / 2];
            if best.is_none_or(|(other, ..)| unit < other) && self.is_ready(unit) {
                best = Some((unit, block, at));
            }
        }
        let mut first_open = open.load(Ordering::Relaxed);
        for (number, &unit) in self.others.iter().enumerate().skip(first_open) {
            if best.is_some_and(|(other, ..)| other < unit) {
                break;
            }
            if given[unit].load(Ordering::Relaxed) >= self.units[unit].parts {
                if number == first_open {
                    first_open += 1;
                    open.fetch_max(first_open, Ordering::Relaxed);
                }
            } else if self.is_ready(unit) {
                let part = given[unit].fetch_add(1, Ordering::Relaxed);
                if part < self.units[unit].parts {
                    return Some(Job::Part { unit, part });
                }
            }
        }
        let (_, block, at) = best?;
        let taken = blocks[block].compare_exchange(at, at + 1, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().map(|_| Job::Carry { block, from: at / 2 })
    }

    /// Does a job.
    pub fn take(&self, job: Job, run: &mut impl FnMut(usize, Range<usize>)) {
        match job {
            Job::Part { unit, part } => {
                run(unit, part..part + 1);
                self.finish(unit);
            }
            Job::Carry { block, from } => {
                let unit = self.carried[from];
                let each = self.units[unit].each;
                run(unit, block * each..(block + 1) * each);
                self.finish(unit);
                self.progress.blocks[block].store(2 * (from + 1), Ordering::Release);
            }
        }
    }

    fn finish(&self, unit: usize) {
        self.progress.done[unit].fetch_add(1, Ordering::AcqRel);
        self.progress.left.fetch_sub(1, Ordering::AcqRel);
    }

    fn is_done(&self) -> bool {
        self.progress.left.load(Ordering::Acquire) == 0
    }

    fn is_ready(&self, unit: usize) -> bool {
        let done =
            |need: &usize| self.progress.done[*need].load(Ordering::Acquire) == self.units[*need].parts;
        self.units[unit].needs.iter().all(done)
    }
}
