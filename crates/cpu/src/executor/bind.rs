//! Binding of a plan to addresses: operands in memory, collectives as calls.

use super::flow::{Stretch, stretches};
use super::operand::Operand;
use crate::error::CpuError;
use crate::kernels::Float;
use crate::memory::{Block, View};
use crate::steps::{self, Kernel, Types};
use calls::PlanCommunicators;
use comm::{Call, Communicator, Name, Span, Ticket};
use graph::graph::Phase;
use graph::op::Lane;
use graph::plan::{Place, Plan, PlanValue, Step};
use graph::run::CollectiveTime;
use graph::{Group, Op, Program, StateId};
use std::sync::Arc;

/// A step with its operands' addresses.
pub(crate) struct Bound<T> {
    pub op: Op,
    pub inputs: Vec<Operand<T>>,
    pub outputs: Vec<Operand<T>>,
    pub scratch: View<u8>,
    pub kernel: Kernel<T>,
    /// Pairs (input, output) of which the output may lie where the input does.
    pub in_place: Vec<(usize, usize)>,
    /// The operands, and the results, that are stored in another type than the executor computes in.
    pub widened: Vec<Operand<T>>,
    pub rounded: Vec<Operand<T>>,
    /// Bytes beside the plan's memory, which no other step uses meanwhile.
    pub(super) borrowed: usize,
    pub(super) is_matmul: bool,
    pub(super) work: Work,
    /// States that what an earlier plan has left may be working on still.
    pub(super) after: Vec<StateId>,
    /// Such as "backward of blocks.5.mlp.fc1 (linear_grad_w)".
    pub(super) name: Arc<str>,
    pub(super) doing: Option<Name>,
    pub(super) phase: Phase,
    pub(super) nanoseconds: u64,
}

/// Runner of a step.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// The pool, after the collective of this number.
    Compute { after: Option<usize> },
    /// The communicator: a collective, by its number in the plan.
    Call(usize),
}

/// A collective with its addresses.
pub(super) struct BoundCall {
    /// Communicator of the group.
    pub comm: Communicator,
    pub call: Call,
    /// The step it is.
    pub step: usize,
    /// States that it works on, if the plan's end doesn't wait for it.
    pub left: Option<Vec<StateId>>,
    /// Its number among the calls that plans leave, if it is one.
    pub number: usize,
    /// Ticket of the present run.
    pub ticket: Option<Ticket>,
    /// Seconds of all runs, from its start on this rank to its end.
    pub seconds: f64,
}

pub(super) struct BoundPlan<T> {
    pub steps: Vec<Bound<T>>,
    pub calls: Vec<BoundCall>,
    /// Time of each collective, as it last ran.
    pub collectives: Vec<CollectiveTime>,
    pub runs: u64,
    pub stretches: Vec<Stretch>,
    /// Nanoseconds of all runs in which threads of a flow had nothing to do, divided by the threads.
    pub idle_nanoseconds: u64,
}

/// Memory that plans are bound to.
pub(super) struct PlanMemory<'a> {
    pub arena: &'a Block,
    pub states: &'a [View<u8>],
    pub groups: Option<&'a PlanCommunicators>,
    pub threads: usize,
}

impl PlanMemory<'_> {
    /// The plans of a program, and the memory that their steps borrow, if they do.
    pub fn bind_all<T: Float>(
        &self,
        program: &Program,
    ) -> Result<([BoundPlan<T>; 5], Option<Block>), CpuError> {
        let [first, micro, last, update, eval] = program.plans();
        let training = [self.bind(first)?, self.bind(micro)?, self.bind(last)?];
        let [first, micro, last] = training;
        let mut plans = [first, micro, last, self.bind(update)?, self.bind(eval)?];
        let steps = plans.iter_mut().flat_map(|plan| &mut plan.steps);
        let bytes = steps.map(|step| step.borrow(None)).max().filter(|bytes| *bytes > 0);
        let what = "numbers in the precision of the arithmetic";
        let block = |bytes| Block::new(bytes).ok_or(CpuError::Memory { what, bytes });
        let borrowed = bytes.map(block).transpose()?;
        for plan in &mut plans {
            plan.steps.iter_mut().for_each(|step| {
                step.borrow(borrowed.as_ref());
            });
            plan.stretches = stretches(&plan.steps, self.threads);
        }
        Ok((plans, borrowed))
    }

    fn bind<T: Float>(&self, plan: &Plan) -> Result<BoundPlan<T>, CpuError> {
        let mut bound = BoundPlan {
            steps: vec![],
            calls: vec![],
            collectives: vec![],
            runs: 0,
            stretches: vec![],
            idle_nanoseconds: 0,
        };
        for (index, step) in plan.steps.iter().enumerate() {
            let mut one = self.step(plan, step)?;
            if step.lane == Lane::Comm {
                let (comm, call) = self.call(plan, step, &one)?;
                let ranks = step.op.group().map_or(1, Group::ranks);
                let time = CollectiveTime::new(&step.layer, &step.op.name(), call.bytes(), ranks);
                bound.collectives.push(time);
                one.work = Work::Call(bound.calls.len());
                let left = step.left.then(|| states_of(plan, step));
                let (ticket, seconds) = (None, 0.0);
                bound.calls.push(BoundCall { comm, call, step: index, left, number: 0, ticket, seconds });
            } else {
                // Collectives are done in order, so the last one waited for implies the others.
                let waits = |call: &BoundCall| step.waits.contains(&call.step);
                one.work = Work::Compute { after: bound.calls.iter().rposition(waits) };
            }
            bound.steps.push(one);
        }
        Ok(bound)
    }

    fn step<T: Float>(&self, plan: &Plan, step: &Step) -> Result<Bound<T>, CpuError> {
        let no_kernel = || CpuError::NoKernel { layer: step.layer.clone(), op: step.op.name() };
        let rank = self.groups.map_or(0, |groups| groups.world().rank());
        let op = step.op.on_rank(plan.mesh, rank);
        let kernel = self.kernel(plan, step, &op).ok_or_else(no_kernel)?;
        let operand = |v: &usize| self.operand(&plan.values[*v], kernel.takes_doubles);
        let inputs: Vec<Operand<T>> = step.inputs.iter().map(operand).collect::<Result<_, _>>()?;
        let mut outputs: Vec<Operand<T>> = step.outputs.iter().map(operand).collect::<Result<_, _>>()?;
        if let Op::Assign { state } = step.op {
            let written = &plan.states[state.index()];
            outputs.push(Operand::new(&written.name, &written.ty, self.state(state), false)?);
        }
        let given = step.scratch.filter(|given| given.bytes >= kernel.scratch);
        let scratch = given.map_or(View::EMPTY, |given| self.arena.view(given.offset, kernel.scratch));
        let name = format!("{} of {} ({})", step.phase.name(), step.layer, step.op.name());
        Ok(Bound {
            in_place: step.op.in_place(inputs.len()).collect(),
            is_matmul: step.op.is_matmul(),
            op,
            inputs,
            outputs,
            scratch,
            kernel,
            widened: vec![],
            rounded: vec![],
            borrowed: 0,
            work: Work::Compute { after: None },
            after: step.after.clone(),
            doing: self.groups.map(|groups| groups.world().name(&name)),
            name: name.into(),
            phase: step.phase,
            nanoseconds: 0,
        })
    }

    /// Kernel of a step, if there is one.
    fn kernel<T: Float>(&self, plan: &Plan, step: &Step, op: &Op) -> Option<Kernel<T>> {
        if step.lane == Lane::Comm {
            return Some(Kernel::none());
        }
        let list = |values: &[usize]| values.iter().map(|v| &plan.values[*v].ty).collect();
        let types = Types { inputs: list(&step.inputs), outputs: list(&step.outputs) };
        steps::kernel(op, &types, self.threads)
    }

    fn operand<T: Float>(&self, value: &PlanValue, sums: bool) -> Result<Operand<T>, CpuError> {
        let stored = match value.place {
            Place::State(state) => self.state(state),
            Place::Arena(offset) => self.arena.view(offset, value.ty.bytes()),
        };
        Operand::new(&value.name, &value.ty, stored, sums)
    }

    fn state(&self, state: StateId) -> View<u8> {
        self.states[state.index()]
    }

    fn call<T: Float>(
        &self,
        plan: &Plan,
        step: &Step,
        bound: &Bound<T>,
    ) -> Result<(Communicator, Call), CpuError> {
        let (layer, op) = (step.layer.clone(), step.op.name());
        let (needs, are) = (plan.mesh.ranks(), self.groups.map(|groups| groups.world().size()));
        let group = step.op.group().filter(|_| are == Some(needs));
        let Some(comm) = self.groups.zip(group).and_then(|(groups, group)| groups.get(group)) else {
            return Err(CpuError::Ranks { layer, op, needs, are });
        };
        let no_kernel = || CpuError::NoKernel { layer: layer.clone(), op: op.clone() };
        let collective = calls::collective(&step.op).ok_or_else(no_kernel)?;
        let dtype = bound.inputs[0].dtype;
        let kind = calls::element_type(dtype).ok_or_else(no_kernel)?;
        let places = |operands: &[Operand<T>]| -> Vec<(u64, usize)> {
            operands.iter().map(|o| (o.stored.address() as u64, o.shape.count())).collect()
        };
        let ranges = calls::ranges(&step.op, &places(&bound.inputs), &places(&bound.outputs), dtype.bytes());
        let (send, receive) = ranges.map_err(|apart| {
            let (values, at) = match apart {
                calls::Apart::Inputs(at) => (&step.inputs, at),
                calls::Apart::Outputs(at) => (&step.outputs, at),
            };
            let name = |at: usize| plan.values[values[at]].name.clone();
            CpuError::Scattered {
                layer: step.layer.clone(),
                op: step.op.name(),
                first: name(at),
                second: name(at + 1),
            }
        })?;
        let (send, receive) = (span(&bound.inputs[0], send), span(&bound.outputs[0], receive));
        let name = comm.name(&step.layer);
        Ok((comm.clone(), Call { collective, kind, send, receive, name }))
    }
}

/// The states that a step works on.
fn states_of(plan: &Plan, step: &Step) -> Vec<StateId> {
    let values = step.inputs.iter().chain(&step.outputs);
    let state = |value: &usize| match plan.values[*value].place {
        Place::State(state) => Some(state),
        Place::Arena(_) => None,
    };
    values.filter_map(state).collect()
}

/// A range of memory as a span, from an operand that lies in it.
fn span<T>(operand: &Operand<T>, range: calls::Range) -> Span {
    let address = operand.stored.address();
    Span {
        address: address.wrapping_sub((address as u64).wrapping_sub(range.address) as usize),
        len: range.len,
    }
}
