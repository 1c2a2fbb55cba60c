//! Work that nobody waits for soon, beside the rest: gradients of weights and biases.
//!
//! The backward pass is a chain: each layer's input gradient is needed by the next. The gradients of weights are not, and small
//! models don't fill a GPU with one kernel. So these go to a lane of their own, and what may run when follows from the memory
//! that steps read and write: plans place their values for one lane, and this looks at where they lie.

use crate::action::Address;
use crate::bind::{Bound, Placed};
use graph::plan::Plan;
use graph::{Lane, Op};
use std::collections::HashMap;

/// The lane that graphs have beside the others; outside of them it is that of copies.
const SIDE: Lane = Lane::Copy;

/// From the first byte to the last but one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: Address,
    end: Address,
}

impl Range {
    fn meets(&self, other: &Range) -> bool {
        self.start < other.end && other.start < self.end
    }
}

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

/// Whether a step goes to the side.
fn is_aside(op: &Op) -> bool {
    matches!(op, Op::LinearGradW { .. } | Op::ColumnSum { .. })
}

/// Moves what can run beside the rest to a lane of its own. `states` are the addresses of states, `arena` that of the arena.
pub(crate) fn overlap(plan: &Plan, bound: Bound, arena: Address, states: &[Address]) -> Bound {
    let Bound { mut actions, addresses } = bound;
    if !actions.iter().any(|placed| is_aside(&plan.steps[placed.step].op)) {
        return Bound { actions, addresses };
    }
    let touched = |placed: &Placed| touched(plan, placed.first..placed.step + 1, &addresses, arena, states);
    // Actions of one step follow each other, and are one here.
    let mut groups: Vec<(std::ops::Range<usize>, Touched)> = Vec::new();
    for (index, placed) in actions.iter().enumerate() {
        match groups.last_mut().filter(|(range, _)| actions[range.start].step == placed.step) {
            Some((range, _)) => range.end = index + 1,
            None => groups.push((index..index + 1, touched(placed))),
        }
    }
    let mut order = Order::default();
    for (number, (range, own)) in groups.iter().enumerate() {
        if is_aside(&plan.steps[actions[range.start].step].op) {
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
    Bound { actions, addresses }
}

fn touched(
    plan: &Plan,
    steps: std::ops::Range<usize>,
    addresses: &[Address],
    arena: Address,
    states: &[Address],
) -> Touched {
    let mut touched = Touched::default();
    for step in &plan.steps[steps] {
        let range = |value: &usize| {
            let start = addresses[*value];
            Range { start, end: start + plan.values[*value].ty.bytes() as Address }
        };
        touched.reads.extend(step.inputs.iter().map(range));
        touched.writes.extend(step.outputs.iter().map(range));
        if let Op::Assign { state } = step.op {
            let start = states[state.index()];
            let bytes = plan.states[state.index()].ty.bytes() as Address;
            touched.writes.push(Range { start, end: start + bytes });
        }
        if let Some(scratch) = step.scratch {
            let start = arena + scratch.offset as Address;
            touched.writes.push(Range { start, end: start + scratch.bytes as Address });
        }
    }
    touched
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
