//! Records that every executor leaves of a run: which plan, time, memory.

use crate::graph::Phase;
use crate::op::Lane;
use serde::Serialize;
use std::ops::{AddAssign, Index, IndexMut};
use std::sync::Arc;
use std::time::Instant;

/// One of a program's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The first micro-batch of several.
    First,
    /// One between the first and the last.
    Micro,
    /// The last micro-batch of a step, or the only one.
    Last,
    /// The update.
    Update,
    /// Loss and logits.
    Eval,
}

impl Which {
    /// All plans, in the order of [`crate::Program::plans`].
    pub const ALL: [Which; 5] = [Which::First, Which::Micro, Which::Last, Which::Update, Which::Eval];

    /// Plans of a training step.
    pub const TRAINING: [Which; 4] = [Which::First, Which::Micro, Which::Last, Which::Update];
}

/// One of each plan of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EachPlan<T>(pub [T; Which::ALL.len()]);

impl<T> EachPlan<T> {
    /// Makes one for every plan.
    pub fn of(make: impl FnMut(Which) -> T) -> Self {
        EachPlan(Which::ALL.map(make))
    }
}

impl<T> Index<Which> for EachPlan<T> {
    type Output = T;

    fn index(&self, which: Which) -> &T {
        &self.0[which as usize]
    }
}

impl<T> IndexMut<Which> for EachPlan<T> {
    fn index_mut(&mut self, which: Which) -> &mut T {
        &mut self.0[which as usize]
    }
}

/// Seconds of a rank, and `hidden`, which passed beside them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Account {
    /// Forward and backward.
    pub compute: f64,
    /// Norm, clipping and optimizer.
    pub update: f64,
    /// Plans that evaluate.
    pub evaluation: f64,
    /// Waiting for collectives.
    pub exposed: f64,
    /// Between steps: handing over collectives, and this account.
    pub idle: f64,
    /// Time in which collectives ran beside other steps; no part of the wall time.
    pub hidden: f64,
}

impl Account {
    /// The wall time of the runs.
    pub fn wall(&self) -> f64 {
        self.compute + self.update + self.evaluation + self.exposed + self.idle
    }
}

impl AddAssign for Account {
    fn add_assign(&mut self, other: Account) {
        self.compute += other.compute;
        self.update += other.update;
        self.evaluation += other.evaluation;
        self.exposed += other.exposed;
        self.idle += other.idle;
        self.hidden += other.hidden;
    }
}

/// One collective of the plans of training, as it ran in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveTime {
    /// Layer of the step, which names the bucket.
    pub layer: Arc<str>,
    /// Name of the op.
    pub kind: Arc<str>,
    /// Bytes of the message.
    pub bytes: usize,
    /// Ranks of its group.
    pub ranks: usize,
    /// Times that it ran: a plan of a micro-step may run several times.
    pub calls: u64,
    /// Seconds from its start on this rank to its end, with the wait for other ranks; of all calls.
    pub seconds: f64,
    /// Seconds of that in which the compute lane waited.
    pub exposed: f64,
}

impl CollectiveTime {
    /// One that has not run yet.
    pub fn new(layer: &str, kind: &str, bytes: usize, ranks: usize) -> Self {
        let (layer, kind) = (Arc::from(layer), Arc::from(kind));
        CollectiveTime { layer, kind, bytes, ranks, calls: 0, seconds: 0.0, exposed: 0.0 }
    }

    /// Adds calls of the same collective.
    pub fn add(&mut self, other: &CollectiveTime) {
        self.calls += other.calls;
        self.seconds += other.seconds;
        self.exposed += other.exposed;
    }

    /// Forgets all calls.
    pub fn reset(&mut self) {
        (self.calls, self.seconds, self.exposed) = (0, 0.0, 0.0);
    }
}

/// Time spent in the steps of one kind; of collectives, the time they were waited for.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// Name of the op.
    pub op: String,
    /// Part of the training step.
    pub phase: Phase,
    /// Flag: it is a matmul or a convolution.
    pub is_matmul: bool,
    /// Seconds of all such steps.
    pub seconds: f64,
    /// Floating-point operations of all of them.
    pub flops: f64,
    /// Bytes that they read and write.
    pub bytes: f64,
}

/// The time of one kernel or matmul of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Number of the step in the plan; of merged optimizers, the last.
    pub step: usize,
    /// Name of the op.
    pub op: String,
    /// Layer of the step.
    pub layer: String,
    /// Part of the training step.
    pub phase: Phase,
    /// A kernel's name or a matmul's shape.
    pub what: String,
    /// Seconds that it took.
    pub seconds: f64,
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes that must be moved at least.
    pub bytes: f64,
}

/// Something that took a while, for a trace.
#[derive(Clone, Debug)]
pub struct Event {
    /// Name in the trace.
    pub name: Arc<str>,
    /// Queue that it ran on.
    pub lane: Lane,
    /// Part of the training step.
    pub phase: Phase,
    /// Start.
    pub start: Instant,
    /// End.
    pub end: Instant,
}

/// Bytes allocated on a device, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// The plan's, to the byte.
    pub arena: usize,
    /// States, to the byte as planned.
    pub states: usize,
    /// Batches on their way.
    pub staging: usize,
    /// Tables of kernels, times noted down, the header.
    pub tables: usize,
    /// Working memory of the chosen matmul algorithms.
    pub workspace: usize,
    /// Copies of states that checkpoints are written from.
    pub copies: usize,
}

impl MemoryUse {
    /// All of it.
    pub fn total(&self) -> usize {
        self.arena + self.states + self.copies + self.constant()
    }

    /// Bytes that are neither arena nor states, nor copies of these.
    pub fn constant(&self) -> usize {
        self.staging + self.tables + self.workspace
    }
}

/// Time from the start to the first step, by what it was spent on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Startup {
    /// Phases one after the other, each with its seconds.
    pub phases: Vec<(&'static str, f64)>,
    /// Compilation of kernels, beside all that on other threads.
    pub kernels: Kernels,
    /// Choices of matmul algorithms.
    #[serde(rename = "products")]
    pub matmuls: MatmulTuning,
}

/// Kernels that a run begins with, by units that are compiled together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Kernels {
    /// Compiled anew.
    pub compiled: usize,
    /// Found on disk.
    pub found: usize,
    /// Seconds from the beginning to the last one's end.
    pub seconds: f64,
}

impl AddAssign for Kernels {
    fn add_assign(&mut self, other: Kernels) {
        self.compiled += other.compiled;
        self.found += other.found;
        self.seconds += other.seconds;
    }
}

/// Result of measuring matmul algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MatmulTuning {
    /// Different matmuls.
    #[serde(rename = "products")]
    pub matmuls: usize,
    /// Matmuls that had to be measured.
    pub measured: usize,
    /// Algorithms that were tried.
    pub tried: usize,
    /// Largest rank, from 0, that a chosen algorithm had among the library's proposals.
    pub furthest: usize,
    /// Seconds of first runs, which load kernels.
    pub loading: f64,
    /// Seconds of the runs that were timed.
    pub timing: f64,
}

impl Startup {
    /// Ends a phase that began then, and begins the next.
    pub fn lap(&mut self, phase: &'static str, began: Instant) -> Instant {
        let now = Instant::now();
        self.add(phase, now.duration_since(began).as_secs_f64());
        now
    }

    /// Adds seconds to a phase.
    pub fn add(&mut self, phase: &'static str, seconds: f64) {
        match self.phases.iter_mut().find(|(name, _)| *name == phase) {
            Some((_, sum)) => *sum += seconds,
            None => self.phases.push((phase, seconds)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_comes_again_is_added() {
        let mut startup = Startup::default();
        let began = startup.lap("a", Instant::now());
        startup.add("b", 2.0);
        startup.add("a", 1.0);
        assert!(began.elapsed().as_secs_f64() < 60.0);
        assert_eq!(startup.phases.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["a", "b"]);
        assert!(startup.phases[0].1 >= 1.0);
    }
}
