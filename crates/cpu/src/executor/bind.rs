//! From a plan to addresses: operands in memory, collectives as calls.

use super::flow::{Stretch, stretches};
use crate::account::ExchangeTime;
use crate::error::CpuError;
use crate::kernels::Float;
use crate::memory::{Block, View};
use crate::steps::{self, Kernel, Types};
use comm::{Call, Communicator, Name, Span, Ticket};
use graph::graph::Phase;
use graph::op::Lane;
use graph::plan::{Place, Plan, PlanValue, Step};
use graph::{DType, Op, Program, Shape, Type};
use std::sync::Arc;

/// A value of a bound plan: where it is and how it is shaped. Labels are integers, what travels may be of 16 bits, and
/// everything else is `T`.
pub(crate) struct Operand<T> {
    pub data: View<T>,
    pub ints: View<i32>,
    pub halves: View<u16>,
    pub dtype: DType,
    pub shape: Shape,
}

impl<T> Operand<T> {
    pub(super) fn address(&self) -> *mut u8 {
        match self.dtype {
            DType::I32 => self.ints.address().cast(),
            dtype if dtype.is_half() => self.halves.address().cast(),
            _ => self.data.address().cast(),
        }
    }
}

/// A step with its operands' addresses.
pub(crate) struct Bound<T> {
    pub op: Op,
    pub inputs: Vec<Operand<T>>,
    pub outputs: Vec<Operand<T>>,
    pub scratch: View<u8>,
    pub kernel: Kernel<T>,
    /// Pairs (input, output) of which the output may lie where the input does.
    pub in_place: Vec<(usize, usize)>,
    pub(super) is_product: bool,
    pub(super) work: Work,
    /// Such as "backward of blocks.5.mlp.fc1 (linear_grad_w)".
    pub(super) name: Arc<str>,
    pub(super) doing: Option<Name>,
    pub(super) phase: Phase,
    pub(super) nanoseconds: u64,
}

/// Who does a step.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// The pool, after the collective of this number.
    Compute { after: Option<usize> },
    /// The communicator: a collective, by its number in the plan.
    Call(usize),
}

/// A collective with its addresses.
pub(super) struct BoundCall {
    pub call: Call,
    /// The step it is.
    pub step: usize,
    /// Of the present run.
    pub ticket: Option<Ticket>,
}

pub(super) struct BoundPlan<T> {
    pub steps: Vec<Bound<T>>,
    pub calls: Vec<BoundCall>,
    /// Of each call, as it last ran.
    pub exchanges: Vec<ExchangeTime>,
    pub runs: u64,
    pub stretches: Vec<Stretch>,
    /// Of all runs, the nanoseconds in which threads of a flow had nothing to do, divided by the threads.
    pub idle_nanoseconds: u64,
}

/// What plans are bound to.
pub(super) struct Memory<'a, T> {
    pub arena: &'a Block,
    pub states: &'a [View<T>],
    pub comm: Option<&'a Communicator>,
    pub threads: usize,
}

impl<T: Float> Memory<'_, T> {
    pub fn bind_all(&self, program: &Program) -> Result<[BoundPlan<T>; 4], CpuError> {
        let [micro, last, update, eval] = program.plans();
        Ok([self.bind(micro)?, self.bind(last)?, self.bind(update)?, self.bind(eval)?])
    }

    fn bind(&self, plan: &Plan) -> Result<BoundPlan<T>, CpuError> {
        let mut bound = BoundPlan {
            steps: vec![],
            calls: vec![],
            exchanges: vec![],
            runs: 0,
            stretches: vec![],
            idle_nanoseconds: 0,
        };
        for (index, step) in plan.steps.iter().enumerate() {
            let mut one = self.step(plan, step)?;
            if step.lane == Lane::Comm {
                let call = self.call(plan, step, &one)?;
                let (layer, bytes) = (Arc::from(step.layer.as_str()), call.bytes());
                bound.exchanges.push(ExchangeTime { layer, bytes, seconds: 0.0, exposed: 0.0 });
                one.work = Work::Call(bound.calls.len());
                bound.calls.push(BoundCall { call, step: index, ticket: None });
            } else {
                // Collectives are done in order, so the last one waited for implies the others.
                let waits = |call: &BoundCall| step.waits.contains(&call.step);
                one.work = Work::Compute { after: bound.calls.iter().rposition(waits) };
            }
            bound.steps.push(one);
        }
        bound.stretches = stretches(&bound.steps, self.threads);
        Ok(bound)
    }

    fn step(&self, plan: &Plan, step: &Step) -> Result<Bound<T>, CpuError> {
        let no_kernel = || CpuError::NoKernel { layer: step.layer.clone(), op: step.op.name() };
        let kernel = self.kernel(plan, step).ok_or_else(no_kernel)?;
        let operand = |v: &usize| self.operand(&step.op, &plan.values[*v]);
        let inputs: Vec<Operand<T>> = step.inputs.iter().map(operand).collect::<Result<_, _>>()?;
        let mut outputs: Vec<Operand<T>> = step.outputs.iter().map(operand).collect::<Result<_, _>>()?;
        let halves = |list: &[Operand<T>]| list.iter().any(|o| o.dtype.is_half());
        let from_half_to_half = step.lane == Lane::Compute && halves(&inputs) && halves(&outputs);
        if from_half_to_half {
            return Err(no_kernel());
        }
        if let Op::Assign { state } = step.op {
            let Type { dtype, shape } = plan.states[state.index()].ty.clone();
            let data = self.states[state.index()];
            outputs.push(Operand { data, ints: View::EMPTY, halves: View::EMPTY, dtype, shape });
        }
        let scratch = self.scratch(step, kernel.scratch)?;
        let name = format!("{} of {} ({})", step.phase.name(), step.layer, step.op.name());
        Ok(Bound {
            in_place: step.op.in_place(inputs.len()).collect(),
            is_product: step.op.is_product(),
            op: step.op.clone(),
            inputs,
            outputs,
            scratch,
            kernel,
            work: Work::Compute { after: None },
            doing: self.comm.map(|comm| comm.name(&name)),
            name: name.into(),
            phase: step.phase,
            nanoseconds: 0,
        })
    }

    /// What runs a step, if there is something.
    fn kernel(&self, plan: &Plan, step: &Step) -> Option<Kernel<T>> {
        if step.lane == Lane::Comm {
            return Some(Kernel::none());
        }
        let list = |values: &[usize]| values.iter().map(|v| &plan.values[*v].ty).collect();
        let types = Types { inputs: list(&step.inputs), outputs: list(&step.outputs) };
        steps::kernel(&step.op, &types, self.threads)
    }

    /// The working memory that the plan has for a step, of which its kernel needs so many bytes.
    fn scratch(&self, step: &Step, needs: usize) -> Result<View<u8>, CpuError> {
        match step.scratch {
            _ if needs == 0 => Ok(View::EMPTY),
            Some(given) if given.bytes >= needs => Ok(self.arena.view(given.offset, needs)),
            _ => {
                let (layer, op) = (step.layer.clone(), step.op.name());
                Err(CpuError::Scratch { layer, op, needs, has: step.scratch.map_or(0, |s| s.bytes) })
            }
        }
    }

    fn operand(&self, op: &Op, value: &PlanValue) -> Result<Operand<T>, CpuError> {
        let Type { dtype, shape } = value.ty.clone();
        let travels =
            matches!(op, Op::Pack { .. } | Op::Unpack { .. } | Op::Cast { .. }) || op.ranks().is_some();
        if !(dtype.is_half() && travels) {
            check_dtype::<T>(&value.name, &value.ty)?;
        }
        let count = shape.count();
        let mut operand = Operand { data: View::EMPTY, ints: View::EMPTY, halves: View::EMPTY, dtype, shape };
        match value.place {
            Place::State(state) => operand.data = self.states[state.index()],
            Place::Arena(offset) if dtype == DType::I32 => operand.ints = self.arena.view(offset, count),
            Place::Arena(offset) if dtype.is_half() => operand.halves = self.arena.view(offset, count),
            Place::Arena(offset) => operand.data = self.arena.view(offset, count),
        }
        Ok(operand)
    }

    fn call(&self, plan: &Plan, step: &Step, bound: &Bound<T>) -> Result<Call, CpuError> {
        let (layer, op) = (step.layer.clone(), step.op.name());
        let needs = step.op.ranks().unwrap_or(0);
        let Some(comm) = self.comm.filter(|comm| comm.size() == needs) else {
            let are = self.comm.map(Communicator::size);
            return Err(CpuError::Ranks { layer, op, needs, are });
        };
        let no_kernel = || CpuError::NoKernel { layer: layer.clone(), op: op.clone() };
        let collective = calls::collective(&step.op).ok_or_else(no_kernel)?;
        let dtype = bound.inputs[0].dtype;
        let kind = calls::kind(dtype).ok_or_else(no_kernel)?;
        let span = |operands: &[Operand<T>], values: &[usize]| {
            span(operands, dtype.bytes()).map_err(|at| CpuError::Scattered {
                layer: step.layer.clone(),
                op: step.op.name(),
                first: plan.values[values[at]].name.clone(),
                second: plan.values[values[at + 1]].name.clone(),
            })
        };
        let send = span(&bound.inputs, &step.inputs)?;
        let receive = span(&bound.outputs, &step.outputs)?;
        Ok(Call { collective, kind, send, receive, name: comm.name(&step.layer) })
    }
}

/// The range of operands that follow each other, or the number of the first that is not followed by the next.
fn span<T>(operands: &[Operand<T>], size: usize) -> Result<Span, usize> {
    let places: Vec<(u64, usize)> = operands.iter().map(|o| (o.address() as u64, o.shape.count())).collect();
    let calls::Range { len, .. } = calls::range(&places, size)?;
    Ok(Span { address: operands[0].address(), len })
}

pub(super) fn check_dtype<T: Float>(name: &str, ty: &Type) -> Result<(), CpuError> {
    let computes = if size_of::<T>() == 8 { DType::F64 } else { DType::F32 };
    if ty.dtype == computes || ty.dtype == DType::I32 {
        return Ok(());
    }
    Err(CpuError::DType { name: name.to_string(), ty: ty.clone(), computes })
}
