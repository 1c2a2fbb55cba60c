//! From a plan to the list of actions, with addresses. Touches no GPU.

use crate::action::{Action, Address, Constants, Context, Facts, Operand, PartialSum};
use crate::error::CudaError;
use crate::exchange::collective;
use crate::overlap::overlap;
use crate::steps;
use crate::sums::{Range, Sums, Waiting};
use graph::plan::{Home, Place, Plan, Step, homes};
use graph::{Lane, Op, State, StateId};
use std::collections::HashMap;

/// Where things lie.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    pub arena: Address,
    /// Of every state.
    pub states: &'a [Address],
    pub header: Address,
    /// For partial sums: as many bytes as [`Bound::parts`] says.
    pub parts: Address,
}

/// Where states lie, whose own memory begins at `own`.
pub fn state_addresses(states: &[State], own: Address, arena: Address) -> Vec<Address> {
    let address = |home: Home| match home {
        Home::Own(offset) => own + offset as Address,
        Home::Arena(offset) => arena + offset as Address,
    };
    homes(states).0.into_iter().map(address).collect()
}

/// An action in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    pub action: Action,
    pub lane: Lane,
    /// The step of the plan that it is part of; the last, where steps are launched together.
    pub step: usize,
    /// The first step that it is part of.
    pub first: usize,
    /// Earlier actions of other lanes that must have finished.
    pub waits: Vec<usize>,
    /// Partial sums that it leaves: where, and how many bytes.
    pub parts: (Address, usize),
    /// The sums that it makes, of this step and earlier ones.
    pub sums: Vec<PartialSum>,
    /// Values of the plan that are there when it is done.
    pub results: Vec<usize>,
}

impl Placed {
    /// An action of some steps, from the first to the last.
    pub fn new(action: Action, lane: Lane, (first, step): (usize, usize)) -> Self {
        let (waits, parts, sums, results) = (vec![], (0, 0), vec![], vec![]);
        Placed { action, lane, step, first, waits, parts, sums, results }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bound {
    pub actions: Vec<Placed>,
    /// Of every value of the plan.
    pub addresses: Vec<Address>,
    /// Bytes of memory for partial sums.
    pub parts: usize,
}

/// Steps that are launched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    /// One step for itself.
    One,
    /// A sum of squares, with the clip and the advance after it.
    Norm,
    /// Optimizers and averages.
    Optimizers,
    /// Weight gradients.
    Weights,
}

/// Who makes the actions: [`Steps`], or a fake in tests.
pub trait Maker {
    /// Bytes of partial sums that the actions of a step leave.
    fn parts(&self, op: &Op, inputs: &[Operand], outputs: &[Operand], facts: &Facts) -> usize;
    fn actions(&self, cx: &Context<'_>) -> Result<Vec<Action>, CudaError>;
    /// Those of a sum of squares, with the clip and the advance that may follow it.
    fn norm(&self, steps: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError>;
    /// Those of optimizers that follow each other.
    fn optimizers(&self, steps: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError>;
    /// Those of weight gradients that follow each other.
    fn weights(&self, steps: &[Context<'_>]) -> Result<Vec<Action>, CudaError>;
    /// Those that make sums of what steps have left.
    fn sums(&self, sums: &[PartialSum], constants: &mut Constants) -> Vec<Action>;
}

/// The kernels of `steps/`.
pub struct Steps;

impl Maker for Steps {
    fn parts(&self, op: &Op, inputs: &[Operand], outputs: &[Operand], facts: &Facts) -> usize {
        steps::parts(op, inputs, outputs, facts)
    }

    fn actions(&self, cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
        steps::actions(cx)
    }

    fn norm(&self, contexts: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
        steps::update::norm(contexts, constants)
    }

    fn optimizers(
        &self,
        contexts: &[Context<'_>],
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        steps::update::optimizers(contexts, constants)
    }

    fn weights(&self, contexts: &[Context<'_>]) -> Result<Vec<Action>, CudaError> {
        steps::weights::actions(contexts)
    }

    fn sums(&self, sums: &[PartialSum], constants: &mut Constants) -> Vec<Action> {
        vec![steps::rows::sum_parts(sums, constants)]
    }
}

/// What a plan is bound with.
pub struct Binder<'a> {
    pub memory: Memory<'a>,
    /// Whether gradients and statistics add to what earlier micro-steps left.
    pub accumulate: bool,
    pub tf32: bool,
    /// Whether gradients of weights get a lane of their own.
    pub overlap: bool,
    pub facts: &'a Facts,
    pub maker: &'a dyn Maker,
}

fn is_optimizer(op: &Op) -> bool {
    matches!(op, Op::AdamW { .. } | Op::Sgd { .. } | Op::Lamb { .. } | Op::Ema { .. })
}

/// The group that the first of these steps begins, and how many it has.
fn group(steps: &[Step]) -> (Group, usize) {
    let optimizers = steps.iter().take_while(|s| is_optimizer(&s.op) && s.lane == steps[0].lane).count();
    if optimizers > 0 {
        return (Group::Optimizers, optimizers);
    }
    let beside = steps.windows(2).take_while(|pair| pair[1].op.runs_beside(&pair[0].op)).count();
    if beside > 0 {
        return (Group::Weights, (beside + 1).min(steps::weights::MOST));
    }
    let ops: Vec<&Op> = steps.iter().take(3).map(|step| &step.op).collect();
    match ops[..] {
        [Op::SumSquares, Op::Clip { .. }, Op::Advance] => (Group::Norm, 3),
        [Op::SumSquares, ..] => (Group::Norm, 1),
        _ => (Group::One, 1),
    }
}

impl Binder<'_> {
    pub fn bind(&self, plan: &Plan, constants: &mut Constants) -> Result<Bound, CudaError> {
        let mut addresses: Vec<Address> = plan.values.iter().map(|v| self.address(v.place)).collect();
        let forwarded = forwarded(plan);
        if !self.accumulate {
            for (value, sum) in forwarded.values() {
                addresses[*value] = addresses[*sum];
            }
        }
        let mut list = List::new(plan);
        let mut sums = Sums::at(self.memory.parts);
        let mut at = 0;
        while at < plan.steps.len() {
            let (group, count) = group(&plan.steps[at..]);
            let steps = at..at + count;
            at += count;
            if let Some((value, sum)) = forwarded.get(&steps.start) {
                let so_far = addresses[plan.steps[steps.start].inputs[0]];
                if !self.accumulate || sums.add_to(*value, so_far, (*sum, addresses[*sum])) {
                    list.push(steps, Vec::new());
                    continue;
                }
            }
            let parts = self.parts(plan, &plan.steps[steps.clone()], &addresses);
            let mut touched = self.touched(plan, &plan.steps[steps.clone()], &addresses);
            if !sums.has_room(parts) || touched.any(|range| sums.concern(&range)) {
                self.add_up(&mut sums, &mut list, constants);
            }
            let place = (if parts > 0 { sums.take(parts) } else { 0 }, parts);
            let actions = self.actions(plan, group, steps.clone(), &addresses, place.0, constants)?;
            let (now, later) = split(actions);
            let later = waiting(plan, steps.end - 1, later, &addresses)?;
            list.push(steps, now);
            list.leaves(place, &later);
            // What nobody needs has no memory of its own either, once its step is done.
            let needed = later.into_iter().filter(|waiting| is_needed(plan, waiting.value));
            needed.for_each(|waiting| sums.wait(waiting));
        }
        self.add_up(&mut sums, &mut list, constants);
        let bound = Bound { actions: list.actions, addresses, parts: sums.used };
        let Memory { arena, states, .. } = self.memory;
        Ok(if self.overlap { overlap(plan, bound, arena, states) } else { bound })
    }

    /// Bytes of partial sums that steps leave. Only single ones do.
    fn parts(&self, plan: &Plan, steps: &[Step], addresses: &[Address]) -> usize {
        let of = |step: &Step| {
            let (inputs, outputs) = self.operands(plan, step, addresses);
            self.maker.parts(&step.op, &inputs, &outputs, self.facts)
        };
        steps.iter().map(of).sum()
    }

    /// The memory that steps have to do with.
    fn touched<'a>(
        &'a self,
        plan: &'a Plan,
        steps: &'a [Step],
        addresses: &'a [Address],
    ) -> impl Iterator<Item = Range> + 'a {
        let values = steps.iter().flat_map(|step| step.inputs.iter().chain(&step.outputs));
        let states = steps.iter().filter_map(|step| match step.op {
            Op::Assign { state } => Some(state),
            _ => None,
        });
        let of_states = states.map(|state| {
            Range::new(self.memory.states[state.index()], plan.states[state.index()].ty.bytes())
        });
        let scratch = steps.iter().filter_map(|step| step.scratch);
        let of_scratch =
            scratch.map(|range| Range::new(self.memory.arena + range.offset as Address, range.bytes));
        let of_values = values.map(|value| Range::new(addresses[*value], plan.values[*value].ty.bytes()));
        of_values.chain(of_states).chain(of_scratch)
    }

    /// Makes the sums that wait.
    fn add_up(&self, sums: &mut Sums, list: &mut List<'_>, constants: &mut Constants) {
        let waiting = sums.take_all();
        if !waiting.is_empty() {
            let all: Vec<PartialSum> = waiting.iter().map(|waiting| waiting.sum).collect();
            list.push_sums(&waiting, self.maker.sums(&all, constants));
        }
    }

    fn address(&self, place: Place) -> Address {
        match place {
            Place::Arena(offset) => self.memory.arena + offset as Address,
            Place::State(state) => self.memory.states[state.index()],
        }
    }

    fn actions(
        &self,
        plan: &Plan,
        group: Group,
        range: std::ops::Range<usize>,
        addresses: &[Address],
        parts: Address,
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        let steps = &plan.steps[range];
        let operands: Vec<_> = steps.iter().map(|step| self.operands(plan, step, addresses)).collect();
        let contexts: Vec<Context<'_>> = steps
            .iter()
            .zip(&operands)
            .map(|(step, (inputs, outputs))| Context {
                op: &step.op,
                layer: &step.layer,
                inputs,
                outputs,
                scratch: step.scratch.map_or(0, |s| self.memory.arena + s.offset as Address),
                parts,
                header: self.memory.header,
                accumulate: self.accumulate,
                tf32: self.tf32,
                facts: self.facts,
            })
            .collect();
        match (group, &contexts[..]) {
            (_, [one, ..]) if steps[0].lane == Lane::Comm => {
                let names = |values: &[usize]| values.iter().map(|v| plan.values[*v].name.as_str()).collect();
                collective(one, names(&steps[0].inputs), names(&steps[0].outputs))
            }
            (Group::Optimizers, all) => self.maker.optimizers(all, constants),
            (Group::Norm, all) => self.maker.norm(all, constants),
            (Group::Weights, all) => self.maker.weights(all),
            (_, all) => {
                Ok(all.iter().map(|cx| self.maker.actions(cx)).collect::<Result<Vec<_>, _>>()?.concat())
            }
        }
    }

    fn operands(&self, plan: &Plan, step: &Step, addresses: &[Address]) -> (Vec<Operand>, Vec<Operand>) {
        let operand = |value: &usize| {
            let ty = &plan.values[*value].ty;
            Operand { address: addresses[*value], dtype: ty.dtype, shape: ty.shape.clone() }
        };
        let inputs = step.inputs.iter().map(operand).collect();
        let mut outputs: Vec<Operand> = step.outputs.iter().map(operand).collect();
        if let Op::Assign { state } = step.op {
            let ty = &plan.states[state.index()].ty;
            let address = self.address(Place::State(state));
            outputs.push(Operand { address, dtype: ty.dtype, shape: ty.shape.clone() });
        }
        (inputs, outputs)
    }
}

/// The list as it grows, and what of it stands for each step of the plan.
struct List<'a> {
    plan: &'a Plan,
    actions: Vec<Placed>,
    /// For each step, the actions that are done when it is.
    done: Vec<Vec<usize>>,
    /// For each lane, its last action, and what the next one has to wait for in place of steps without actions.
    last: HashMap<Lane, usize>,
    owed: HashMap<Lane, Vec<usize>>,
}

impl<'a> List<'a> {
    fn new(plan: &'a Plan) -> Self {
        let (last, owed) = (HashMap::new(), HashMap::new());
        List { plan, actions: Vec::new(), done: Vec::new(), last, owed }
    }

    fn push(&mut self, steps: std::ops::Range<usize>, actions: Vec<Action>) {
        let lane = self.plan.steps[steps.start].lane;
        let needs = self.plan.steps[steps.clone()].iter().flat_map(|step| &step.waits);
        let mut waits: Vec<usize> = needs.flat_map(|step| self.done[*step].iter().copied()).collect();
        waits.extend(self.owed.remove(&lane).into_iter().flatten());
        waits.retain(|action| self.actions[*action].lane != lane);
        waits.sort_unstable();
        waits.dedup();
        if actions.is_empty() {
            let stands_in = self.last.get(&lane).copied().into_iter().chain(waits.iter().copied()).collect();
            self.done.extend(steps.map(|_| Vec::clone(&stands_in)));
            self.owed.insert(lane, waits);
            return;
        }
        let range = (steps.start, steps.end - 1);
        for action in actions {
            let waits = std::mem::take(&mut waits);
            self.last.insert(lane, self.actions.len());
            self.actions.push(Placed { waits, ..Placed::new(action, lane, range) });
        }
        self.done.extend(steps.clone().map(|_| vec![self.actions.len() - 1]));
        let results = self.plan.steps[steps].iter().flat_map(|step| step.outputs.iter().copied()).collect();
        self.last_mut(|placed| placed.results = results);
    }

    /// The step that was pushed last leaves parts, and sums of them that are made later.
    fn leaves(&mut self, parts: (Address, usize), later: &[Waiting]) {
        let step = self.done.len() - 1;
        for placed in self.actions.iter_mut().rev().take_while(|placed| placed.step == step) {
            placed.parts = parts;
            placed.results.retain(|value| later.iter().all(|waiting| waiting.value != *value));
        }
    }

    /// Sums of what earlier steps have left.
    fn push_sums(&mut self, waiting: &[Waiting], actions: Vec<Action>) {
        let lane = Lane::Compute;
        let step = waiting.iter().map(|waiting| waiting.step).max().unwrap_or(0);
        for action in actions {
            let sums = waiting.iter().map(|waiting| waiting.sum).collect();
            self.last.insert(lane, self.actions.len());
            self.actions.push(Placed { sums, ..Placed::new(action, lane, (step, step)) });
        }
        // Whoever waits for one of these steps, or for one that adds such a sum to another, waits for the sums.
        let (first, made) = (waiting.iter().map(|waiting| waiting.step).min(), self.actions.len() - 1);
        self.done[first.unwrap_or(0)..].iter_mut().for_each(|done| done.push(made));
        let results = waiting.iter().map(|waiting| waiting.value).collect();
        self.last_mut(|placed| placed.results = results);
    }

    fn last_mut(&mut self, change: impl FnOnce(&mut Placed)) {
        if let Some(placed) = self.actions.last_mut() {
            change(placed);
        }
    }
}

/// The sums that a step leaves, each with the value that it will be.
fn waiting(
    plan: &Plan,
    step: usize,
    sums: Vec<PartialSum>,
    addresses: &[Address],
) -> Result<Vec<Waiting>, CudaError> {
    let Step { op, layer, outputs, .. } = &plan.steps[step];
    let of = |sum: PartialSum| match outputs.iter().copied().find(|v| addresses[*v] == sum.out) {
        Some(value) => Ok(Waiting { sum, step, value }),
        None => Err(CudaError::Misuse(format!("{layer}: {} sums what is none of its results", op.name()))),
    };
    sums.into_iter().map(of).collect()
}

/// Whether anyone needs a value: a later step, whoever reads the plan's outputs, or, of a state, the next plan.
fn is_needed(plan: &Plan, value: usize) -> bool {
    matches!(plan.values[value].place, Place::State(_))
        || plan.outputs.contains(&value)
        || plan.steps.iter().any(|step| step.inputs.contains(&value))
}

/// What is done at once, and the sums.
fn split(actions: Vec<Action>) -> (Vec<Action>, Vec<PartialSum>) {
    let (mut now, mut later) = (Vec::new(), Vec::new());
    for action in actions {
        match action {
            Action::Sum(sum) => later.push(sum),
            other => now.push(other),
        }
    }
    (now, later)
}

/// Sums that are their first part: from the `accumulate` step to (the value it would add, the sum). The step that makes the
/// value may write it to the sum's state at once, if nobody else has to do with either until then.
fn forwarded(plan: &Plan) -> HashMap<usize, (usize, usize)> {
    let mut makers: HashMap<usize, usize> = HashMap::new();
    let mut uses: HashMap<usize, usize> = HashMap::new();
    for (index, step) in plan.steps.iter().enumerate() {
        makers.extend(step.outputs.iter().map(|value| (*value, index)));
        step.inputs.iter().for_each(|value| *uses.entry(*value).or_default() += 1);
    }
    let forwards = |(index, step): (usize, &Step)| {
        let (Op::Accumulate, [_, value], [sum]) = (&step.op, &step.inputs[..], &step.outputs[..]) else {
            return None;
        };
        let Place::State(state) = plan.values[*sum].place else { return None };
        let maker = *makers.get(value)?;
        let legal = maker < index
            && plan.values[*value].ty == plan.values[*sum].ty
            && matches!(plan.values[*value].place, Place::Arena(_))
            && uses.get(value) == Some(&1)
            && !plan.outputs.contains(value)
            && makes_anew(&plan.steps[maker], *value)
            && plan.steps[maker].lane == step.lane
            && is_left_alone(plan, state, maker, index);
        legal.then_some((index, (*value, *sum)))
    };
    plan.steps.iter().enumerate().filter_map(forwards).collect()
}

/// Whether a step writes `value` and nothing but it there, rather than going on with an input.
fn makes_anew(step: &Step, value: usize) -> bool {
    let output = step.outputs.iter().position(|v| *v == value);
    !is_optimizer(&step.op) && output.is_some_and(|o| step.op.overwritten_by(step.inputs.len(), o).is_none())
}

/// Whether no step from `maker` to before `end` has to do with a state, nor one of another lane that may run beside them.
fn is_left_alone(plan: &Plan, state: StateId, maker: usize, end: usize) -> bool {
    let here = Place::State(state);
    let touches = |step: &Step| {
        step.op == (Op::Assign { state })
            || step.inputs.iter().chain(&step.outputs).any(|value| plan.values[*value].place == here)
    };
    let lane = plan.steps[end].lane;
    !plan.steps[..end]
        .iter()
        .enumerate()
        .any(|(index, step)| (index >= maker || step.lane != lane) && touches(step))
}

#[cfg(test)]
#[path = "bind_tests.rs"]
mod tests;
