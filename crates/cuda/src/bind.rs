//! From a plan to the list of actions, with addresses. Touches no GPU.

use crate::action::{Action, Address, Constants, Context, Facts, Operand};
use crate::error::CudaError;
use crate::exchange::collective;
use crate::overlap::overlap;
use crate::steps;
use graph::passes::ALIGN;
use graph::plan::{Place, Plan, Step};
use graph::{Lane, Op, State, StateId};
use std::collections::HashMap;

/// Where things lie.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    pub arena: Address,
    /// Of every state.
    pub states: &'a [Address],
    pub header: Address,
}

/// Offsets of the states, and the bytes of all. They lie in the order of their table, each at a border: collectives of
/// neighbours rely on it.
pub fn state_offsets(states: &[State]) -> (Vec<usize>, usize) {
    let mut bytes = 0;
    let offset = |state: &State| {
        let offset = bytes;
        bytes += state.ty.bytes().next_multiple_of(ALIGN);
        offset
    };
    (states.iter().map(offset).collect(), bytes)
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
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bound {
    pub actions: Vec<Placed>,
    /// Of every value of the plan.
    pub addresses: Vec<Address>,
}

/// Steps that are launched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    /// One step for itself.
    One,
    /// Sum of squares, clip, advance.
    Norm,
    /// Optimizers and averages.
    Optimizers,
}

/// Who makes the actions: [`Steps`], or a fake in tests.
pub trait Maker {
    fn actions(&self, cx: &Context<'_>) -> Result<Vec<Action>, CudaError>;
    /// Those of a sum of squares, a clip and an advance that follow each other.
    fn norm(&self, steps: [&Context<'_>; 3]) -> Result<Vec<Action>, CudaError>;
    /// Those of optimizers that follow each other.
    fn optimizers(&self, steps: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError>;
}

/// The kernels of `steps/`.
pub struct Steps;

impl Maker for Steps {
    fn actions(&self, cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
        steps::actions(cx)
    }

    fn norm(&self, [squares, clip, advance]: [&Context<'_>; 3]) -> Result<Vec<Action>, CudaError> {
        steps::update::norm_clip_advance(squares, clip, advance)
    }

    fn optimizers(
        &self,
        contexts: &[Context<'_>],
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        steps::update::optimizers(contexts, constants)
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
    let ops: Vec<&Op> = steps.iter().take(3).map(|step| &step.op).collect();
    if let [Op::SumSquares, Op::Clip { .. }, Op::Advance] = ops[..] {
        return (Group::Norm, 3);
    }
    (Group::One, 1)
}

impl Binder<'_> {
    pub fn bind(&self, plan: &Plan, constants: &mut Constants) -> Result<Bound, CudaError> {
        let mut addresses: Vec<Address> = plan.values.iter().map(|v| self.address(v.place)).collect();
        let forwarded = if self.accumulate { HashMap::new() } else { forwarded(plan) };
        for (value, sum) in forwarded.values() {
            addresses[*value] = addresses[*sum];
        }
        let mut list = List::new(plan);
        let mut at = 0;
        while at < plan.steps.len() {
            let (group, count) = group(&plan.steps[at..]);
            let steps = at..at + count;
            let actions = if forwarded.contains_key(&at) {
                Vec::new()
            } else {
                self.actions(plan, group, steps.clone(), &addresses, constants)?
            };
            list.push(steps, actions);
            at += count;
        }
        let bound = Bound { actions: list.actions, addresses };
        let Memory { arena, states, .. } = self.memory;
        Ok(if self.overlap { overlap(plan, bound, arena, states) } else { bound })
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
            (Group::Norm, [squares, clip, advance]) => self.maker.norm([squares, clip, advance]),
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
        let (first, step) = (steps.start, steps.end - 1);
        for action in actions {
            let waits = std::mem::take(&mut waits);
            self.last.insert(lane, self.actions.len());
            self.actions.push(Placed { action, lane, step, first, waits });
        }
        self.done.extend(steps.map(|_| vec![self.actions.len() - 1]));
    }
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
