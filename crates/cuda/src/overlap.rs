//! Work that nobody waits for soon, beside the rest: gradients of weights, biases and norms; position biases; the loss itself,
//! which its own gradient doesn't read.
//!
//! The backward pass is a chain: each layer's input gradient is needed by the next. The gradients of parameters are not, and small
//! models don't fill a GPU with one kernel. So these go to a lane of their own, and what may run when follows from the memory
//! that steps read and write: plans place their values for one lane, and this looks at where they lie.

use crate::action::Address;
use crate::bind::{Bound, Placed};
use crate::sums::Range;
use graph::plan::{Plan, Step};
use graph::{Lane, Op};
use std::collections::HashMap;

/// The lane that graphs have beside the others; outside of them it is that of copies.
const SIDE: Lane = Lane::Copy;

/// What a step does to memory.
#[derive(Clone, Debug, Default)]
struct Touched {
    reads: Vec<Range>,
    writes: Vec<Range>,
}

impl Touched {
    /// Whether the two must not run at the same time.
    fn conflicts(&self, other: &Touched) -> bool {
        let meet = |a: &[Range], b: &[Range]| a.iter().any(|a| b.iter().any(|b| a.meets(b)));
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
    }
}

/// Whether a step goes to the side. A position bias depends on parameters alone, and so may be made long before it is wanted.
fn is_aside(op: &Op) -> bool {
    matches!(
        op,
        Op::LinearGradW { .. }
            | Op::ConvGradW { .. }
            | Op::ColumnSum { .. }
            | Op::CrossEntropy { .. }
            | Op::PositionBias { .. }
            | Op::PositionBiasGrad { .. }
    )
}

/// Moves what can run beside the rest to a lane of its own. `states` are the addresses of states, `arena` that of the arena.
pub(crate) fn overlap(plan: &Plan, bound: Bound, arena: Address, states: &[Address]) -> Bound {
    let Bound { mut actions, addresses, parts } = bound;
    let goes_aside = |placed: &Placed| !placed.sums.is_empty() || is_aside(&plan.steps[placed.step].op);
    let aside: Vec<bool> = actions.iter().map(goes_aside).collect();
    if !aside.contains(&true) {
        return Bound { actions, addresses, parts };
    }
    let memory = Memory { plan, addresses: &addresses, arena, states };
    // Actions of one step follow each other, and are one here. Sums of what steps have left are for themselves.
    let mut groups: Vec<(std::ops::Range<usize>, Touched)> = Vec::new();
    for (index, placed) in actions.iter().enumerate() {
        let same = |range: &std::ops::Range<usize>| {
            let before = &actions[range.start];
            before.step == placed.step && before.sums == placed.sums
        };
        match groups.last_mut().filter(|(range, _)| same(range)) {
            Some((range, _)) => range.end = index + 1,
            None => groups.push((index..index + 1, memory.touched_by(placed))),
        }
    }
    let mut order = Order::default();
    for (number, (range, own)) in groups.iter().enumerate() {
        if aside[range.start] {
            actions[range.clone()].iter_mut().for_each(|placed| placed.lane = SIDE);
        }
        let lane = actions[range.start].lane;
        let mut waits: Vec<usize> = Vec::new();
        for (before, (earlier, theirs)) in groups[..number].iter().enumerate().rev() {
            let other = actions[earlier.start].lane;
            if other != lane && !order.knows(lane, other, before) && own.conflicts(theirs) {
                order.learn(lane, other, before);
                waits.push(earlier.end - 1);
            }
        }
        order.done(lane, number);
        waits.sort_unstable();
        for placed in &mut actions[range.clone()] {
            placed.waits = std::mem::take(&mut waits);
        }
    }
    Bound { actions, addresses, parts }
}

/// Where the values of a plan lie.
struct Memory<'a> {
    plan: &'a Plan,
    addresses: &'a [Address],
    arena: Address,
    states: &'a [Address],
}

impl Memory<'_> {
    fn value(&self, value: &usize) -> Range {
        Range::new(self.addresses[*value], self.plan.values[*value].ty.bytes())
    }

    fn scratch(&self, step: &Step) -> Option<Range> {
        let scratch = step.scratch?;
        Some(Range::new(self.arena + scratch.offset as Address, scratch.bytes))
    }

    /// By the group that an action begins.
    fn touched_by(&self, placed: &Placed) -> Touched {
        if placed.sums.is_empty() {
            let mut touched = self.touched(placed.first..placed.step + 1);
            let (address, bytes) = placed.parts;
            touched.writes.extend((bytes > 0).then(|| Range::new(address, bytes)));
            return touched;
        }
        let sums = placed.sums.iter();
        Touched {
            reads: sums.clone().flat_map(|sum| std::iter::once(sum.parts()).chain(sum.start())).collect(),
            writes: sums.map(|sum| sum.out()).collect(),
        }
    }

    fn touched(&self, steps: std::ops::Range<usize>) -> Touched {
        let mut touched = Touched::default();
        for step in &self.plan.steps[steps] {
            touched.reads.extend(step.inputs.iter().map(|value| self.value(value)));
            touched.writes.extend(step.outputs.iter().map(|value| self.value(value)));
            touched.writes.extend(self.scratch(step));
            if let Op::Assign { state } = step.op {
                let bytes = self.plan.states[state.index()].ty.bytes();
                touched.writes.push(Range::new(self.states[state.index()], bytes));
            }
        }
        touched
    }
}

/// What each lane knows to be done of the others.
#[derive(Default)]
struct Order {
    /// (lane that knows, lane that it knows of) → the last group that is done.
    known: HashMap<(Lane, Lane), usize>,
    /// What a lane knew when it was done with a group.
    then: HashMap<usize, HashMap<(Lane, Lane), usize>>,
}

impl Order {
    fn knows(&self, lane: Lane, other: Lane, group: usize) -> bool {
        self.known.get(&(lane, other)).is_some_and(|last| *last >= group)
    }

    /// `lane` waits for a group of `other`, and for all that one had waited for.
    fn learn(&mut self, lane: Lane, other: Lane, group: usize) {
        let theirs = self.then.get(&group).cloned().unwrap_or_default();
        let news = theirs.into_iter().filter(|((who, _), _)| *who == other).map(|((_, of), last)| (of, last));
        for (of, last) in news.chain([(other, group)]) {
            let known = self.known.entry((lane, of)).or_insert(last);
            *known = (*known).max(last);
        }
    }

    fn done(&mut self, lane: Lane, group: usize) {
        let mine = self.known.iter().filter(|((who, _), _)| *who == lane).map(|(key, last)| (*key, *last));
        let mine = mine.collect();
        self.then.insert(group, mine);
    }
}
