//! Binding of a plan: the list of its actions, with addresses. Needs no GPU.

use crate::action::{Action, Address, Constants, Facts, Operand, PartialSum, StepContext};
use crate::collectives::collective;
use crate::error::CudaError;
use crate::steps;
use graph::plan::{Place, Plan, ScratchRange, Step};
use graph::{Held, Home, Lane, Mesh, Op, State, StateId};
use std::collections::HashMap;

/// Addresses of arena, states and header.
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a> {
    pub arena: Address,
    /// Address of every state.
    pub states: &'a [Address],
    pub header: Address,
}

/// Addresses of what a rank holds of states, whose own memory begins at `own`: of a part within a buffer its own part, of a tensor in a
/// shard the first element that it has.
pub fn state_addresses(
    states: &[State],
    (mesh, rank): (Mesh, usize),
    own: Address,
    arena: Address,
) -> Vec<Address> {
    let ahead = |state: &State| match state.held {
        Held::Whole | Held::Shard(_) => 0,
        Held::Within(group) => mesh.place(rank, group).1 * state.ty.bytes(),
        Held::Of { .. } => state.elements_of(states, mesh, rank).1 * state.ty.dtype.bytes(),
    };
    let address = |state: &State| match state.home {
        Home::Own(offset) => own + (offset + ahead(state)) as Address,
        Home::Arena(offset) => arena + (offset + ahead(state)) as Address,
        // Refused before anything is bound.
        Home::Host(_) | Home::Nowhere => 0,
    };
    states.iter().map(address).collect()
}

/// Action with its lane and dependencies.
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
    /// Values of the plan that are complete when it is done.
    pub results: Vec<usize>,
    /// States that a collective works on that may still run when the plan has ended; none if it may not.
    pub left: Vec<StateId>,
    /// States that what an earlier plan has left may still be working on: it waits for that.
    pub after: Vec<StateId>,
}

impl Placed {
    /// Places an action of some steps, from the first to the last.
    pub fn new(action: Action, lane: Lane, (first, step): (usize, usize)) -> Self {
        let (waits, results, left, after) = (vec![], vec![], vec![], vec![]);
        Placed { action, lane, step, first, waits, results, left, after }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bound {
    pub actions: Vec<Placed>,
    /// Address of every value of the plan.
    pub addresses: Vec<Address>,
}

/// Maker of actions: [`Steps`], or a fake in tests.
pub trait Maker {
    fn actions(&self, cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError>;
    /// Actions of a sum of squares, with the clip and the advance that may follow it.
    fn norm(&self, steps: &[StepContext<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError>;
    /// Actions of consecutive optimizer steps.
    fn optimizers(
        &self,
        steps: &[StepContext<'_>],
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError>;
    /// Actions of consecutive weight gradients.
    fn weights(&self, steps: &[StepContext<'_>]) -> Result<Vec<Action>, CudaError>;
    /// Actions that add up the partial sums that steps have left.
    fn sums(&self, sums: &[PartialSum], constants: &mut Constants) -> Vec<Action>;
}

/// The kernels of `steps/`.
pub struct Steps;

impl Maker for Steps {
    fn actions(&self, cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
        steps::actions(cx)
    }

    fn norm(
        &self,
        contexts: &[StepContext<'_>],
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        steps::update::norm(contexts, constants)
    }

    fn optimizers(
        &self,
        contexts: &[StepContext<'_>],
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        steps::update::optimizers(contexts, constants)
    }

    fn weights(&self, contexts: &[StepContext<'_>]) -> Result<Vec<Action>, CudaError> {
        steps::weights::actions(contexts)
    }

    fn sums(&self, sums: &[PartialSum], constants: &mut Constants) -> Vec<Action> {
        vec![steps::rows::sum_parts(sums, constants)]
    }
}

/// Binds plans to addresses.
pub struct Binder<'a> {
    pub memory: Addresses<'a>,
    pub tf32: bool,
    pub facts: &'a Facts,
    pub maker: &'a dyn Maker,
    /// This rank among the plan's ranks.
    pub rank: usize,
}

/// Partial sums that steps have left, by the value that each becomes.
type Left = HashMap<usize, PartialSum>;

impl Binder<'_> {
    /// Lanes, waits and launches are the plan's: nothing is decided here but which kernels make a step.
    pub fn bind(&self, plan: &Plan, constants: &mut Constants) -> Result<Bound, CudaError> {
        let addresses: Vec<Address> = plan.values.iter().map(|v| self.address(v.place)).collect();
        let mut list = ListBuilder::new(plan);
        let mut left = Left::new();
        let mut at = 0;
        while at < plan.steps.len() {
            let launch = plan.launch(at);
            at = launch.end;
            let actions = self.actions(plan, launch.clone(), &addresses, &left, constants)?;
            let (now, later) = split(actions);
            for sum in later {
                left.insert(self.left(plan, launch.end - 1, &sum, &addresses)?, sum);
            }
            list.push(launch, now, |value| !left.contains_key(value));
        }
        Ok(Bound { actions: list.actions, addresses })
    }

    /// Result of a step that becomes a sum, if the plan has the step leave parts of it.
    fn left(
        &self,
        plan: &Plan,
        step: usize,
        sum: &PartialSum,
        addresses: &[Address],
    ) -> Result<usize, CudaError> {
        let Step { op, layer, outputs, parts, .. } = &plan.steps[step];
        let refused = |why: &str| CudaError::Misuse(format!("{layer}: {} {why}", op.name()));
        let parts = parts.ok_or_else(|| refused("leaves partial sums, for which the plan has no place"))?;
        let start = self.memory.arena + parts.offset as Address;
        let range = sum.range();
        let within = range.start >= start && range.end <= start + parts.bytes as Address;
        if !within || sum.start.is_some() {
            return Err(refused("leaves other partial sums than the plan has a place for"));
        }
        let value = outputs.iter().copied().find(|value| addresses[*value] == sum.parts);
        value.ok_or_else(|| refused("leaves partial sums of what is none of its results"))
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
        range: std::ops::Range<usize>,
        addresses: &[Address],
        left: &Left,
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        let steps = &plan.steps[range];
        let ops: Vec<Op> = steps.iter().map(|step| step.op.on_rank(plan.mesh, self.rank)).collect();
        let operands: Vec<_> = steps.iter().map(|step| self.operands(plan, step, addresses)).collect();
        let arena =
            |range: Option<ScratchRange>| range.map_or(0, |r| self.memory.arena + r.offset as Address);
        let contexts: Vec<StepContext<'_>> = steps
            .iter()
            .zip(&ops)
            .zip(&operands)
            .map(|((step, op), (inputs, outputs))| StepContext {
                op,
                layer: &step.layer,
                inputs,
                outputs,
                scratch: arena(step.scratch),
                parts: arena(step.parts),
                header: self.memory.header,
                tf32: self.tf32,
                facts: self.facts,
            })
            .collect();
        match (&steps[0].op, &contexts[..]) {
            (_, [one]) if steps[0].lane == Lane::Comm => {
                let names = |values: &[usize]| values.iter().map(|v| plan.values[*v].name.as_str()).collect();
                collective(one, names(&steps[0].inputs), names(&steps[0].outputs))
            }
            (Op::AddUp { starts }, [one]) => {
                Ok(self.maker.sums(&added_up(&steps[0], one, starts, left)?, constants))
            }
            (op, all) if steps::is_optimizer(op) => self.maker.optimizers(all, constants),
            (Op::SumSquares { .. }, all) => self.maker.norm(all, constants),
            (Op::LinearGradW { .. }, all @ [_, _, ..]) => self.maker.weights(all),
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

/// Sums that a step makes of what others have left.
fn added_up(
    step: &Step,
    cx: &StepContext<'_>,
    starts: &[usize],
    left: &Left,
) -> Result<Vec<PartialSum>, CudaError> {
    let sum = |(index, out): (usize, &Operand)| {
        let lost = || CudaError::Misuse(format!("{}: nobody left parts of sum {index}", cx.layer));
        let parts = step.inputs.get(index).and_then(|value| left.get(value)).ok_or_else(lost)?;
        let start = starts.iter().position(|of| *of == index);
        let start = start.and_then(|start| cx.inputs.get(cx.outputs.len() + start)).map(|o| o.address);
        Ok(PartialSum { start, out: out.address, ..*parts })
    };
    cx.outputs.iter().enumerate().map(sum).collect()
}

/// Builder of a list, with the actions of each step of the plan.
struct ListBuilder<'a> {
    plan: &'a Plan,
    actions: Vec<Placed>,
    /// Actions of each step that are done when it is.
    done: Vec<Vec<usize>>,
    /// Last action of each lane, and what the next one has to wait for in place of steps without actions.
    last: HashMap<Lane, usize>,
    owed: HashMap<Lane, Vec<usize>>,
}

impl<'a> ListBuilder<'a> {
    fn new(plan: &'a Plan) -> Self {
        let (last, owed) = (HashMap::new(), HashMap::new());
        ListBuilder { plan, actions: Vec::new(), done: Vec::new(), last, owed }
    }

    /// Adds the actions of some steps, with their results that are complete then.
    fn push(
        &mut self,
        steps: std::ops::Range<usize>,
        actions: Vec<Action>,
        is_there: impl Fn(&usize) -> bool,
    ) {
        let lane = self.plan.steps[steps.start].lane;
        let needs = self.plan.steps[steps.clone()].iter().flat_map(|step| &step.waits);
        let mut waits: Vec<usize> = needs.flat_map(|step| self.done[*step].iter().copied()).collect();
        waits.extend(self.owed.remove(&lane).into_iter().flatten());
        waits.retain(|action| self.actions[*action].lane != lane);
        waits.sort_unstable();
        waits.dedup();
        let mut after: Vec<StateId> =
            self.plan.steps[steps.clone()].iter().flat_map(|step| step.after.iter().copied()).collect();
        // A wait for an earlier plan needs an action.
        let nothing = Action::Zero { at: 0, bytes: 0 };
        let actions = if actions.is_empty() && !after.is_empty() { vec![nothing] } else { actions };
        if actions.is_empty() {
            let stands_in = self.last.get(&lane).copied().into_iter().chain(waits.iter().copied()).collect();
            self.done.extend(steps.map(|_| Vec::clone(&stands_in)));
            self.owed.insert(lane, waits);
            return;
        }
        let range = (steps.start, steps.end - 1);
        for action in actions {
            let (waits, after) = (std::mem::take(&mut waits), std::mem::take(&mut after));
            self.last.insert(lane, self.actions.len());
            self.actions.push(Placed { waits, after, ..Placed::new(action, lane, range) });
        }
        self.done.extend(steps.clone().map(|_| vec![self.actions.len() - 1]));
        let of = |values: &[usize]| states_of(self.plan, values);
        let left = self.plan.steps[steps.clone()].iter().filter(|step| step.left);
        let left = left.flat_map(|step| [of(&step.inputs), of(&step.outputs)].concat()).collect();
        let results = self.plan.steps[steps].iter().flat_map(|step| &step.outputs);
        let results = results.filter(|value| is_there(value)).copied().collect();
        if let Some(placed) = self.actions.last_mut() {
            (placed.results, placed.left) = (results, left);
        }
    }
}

/// States that values lie in.
fn states_of(plan: &Plan, values: &[usize]) -> Vec<StateId> {
    let state = |value: &usize| match plan.values[*value].place {
        Place::State(state) => Some(state),
        Place::Arena(_) => None,
    };
    values.iter().filter_map(state).collect()
}

/// Splits actions into those to run at once and partial sums.
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

#[cfg(test)]
#[path = "bind_tests.rs"]
mod tests;
