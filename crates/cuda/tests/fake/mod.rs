//! Launches that do nothing but say what they read and write, so that plans bound to addresses can be played in memory.

// Each test takes what it needs.
#![allow(dead_code)]

use cuda::CudaError;
use cuda::action::{
    Action, Address, Arg, Constants, Facts, Kernel, Launch, Operand, PartialSum, Source, StepContext,
};
use cuda::bind::Maker;
use graph::{Graph, Lane, Op};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Elements that the partial sums of one sum may have; few of them are used.
pub const PARTS: usize = 6_000;
/// Of every step.
pub const SCRATCH: usize = 300;

/// Makes a launch of every step: its name, how many operands are read, and the ranges of all, scratch being one that is written.
pub struct Fake;

/// The gradients that leave sums over rows in parts.
pub fn leaves_parts(op: &Op) -> bool {
    matches!(
        op,
        Op::LayerNormGrad { .. }
            | Op::AttentionGrad { .. }
            | Op::LinearGradX { gelu: true }
            | Op::ColumnSum { .. }
            | Op::NormAddGrad { .. }
            | Op::WindowAttentionGrad { .. }
    )
}

/// Whether an output is a sum over rows, or over windows.
pub fn is_sum(op: &Op, output: &Operand) -> bool {
    let rank = output.shape.rank();
    rank == 1 || (matches!(op, Op::WindowAttentionGrad { .. }) && rank == 3)
}

/// What is no sum is made at once, and parts of all sums are left.
fn with_parts(cx: &StepContext<'_>) -> Vec<Action> {
    let (sums, rest): (Vec<Operand>, Vec<Operand>) =
        cx.outputs.iter().cloned().partition(|o| is_sum(cx.op, o));
    let Action::Launch(mut first) = launch(&StepContext { outputs: &rest, ..*cx }) else { unreachable!() };
    let sum = |(i, out): (usize, &Operand)| {
        let (parts, stride) = (cx.parts + (4 * PARTS * i) as Address, out.shape.count());
        let (rows, columns, start, out) = (4, stride, None, out.address);
        PartialSum { parts, rows, stride, columns, start, out }
    };
    let sums: Vec<PartialSum> = sums.iter().enumerate().map(sum).collect();
    for PartialSum { parts, rows, stride, .. } in &sums {
        first.args.extend([Arg::Pointer(*parts), Arg::I64((4 * rows * stride) as i64)]);
    }
    [Action::Launch(first)].into_iter().chain(sums.into_iter().map(Action::Sum)).collect()
}

/// As if nothing was accumulated: what was there is not read.
fn add_up(sum: &PartialSum) -> Action {
    let PartialSum { parts, rows, stride, columns, out, .. } = *sum;
    let range = |address: Address, elements: usize| [Arg::Pointer(address), Arg::I64(4 * elements as i64)];
    let ranges = [range(parts, rows * stride), range(out, columns)].concat();
    let args = [Arg::U32(1)].into_iter().chain(ranges).collect();
    let kernel = Kernel::new(Source::Rows, "sum_parts");
    Action::Launch(Launch { kernel, grid: [1; 3], block: 1, shared: 0, args })
}

fn launch(cx: &StepContext<'_>) -> Action {
    let mut inputs = cx.inputs.to_vec();
    // As if nothing was accumulated: what was there is not read.
    match cx.op {
        Op::Accumulate => drop(inputs.remove(0)),
        Op::LinearGradW { accumulate: true, .. }
        | Op::ConvGradW { accumulate: true, .. }
        | Op::ColumnSum { accumulate: true } => drop(inputs.pop()),
        _ => {}
    }
    let range = |o: &Operand| [Arg::Pointer(o.address), Arg::I64((o.shape.count() * o.dtype.bytes()) as i64)];
    let mut args = vec![Arg::U32(inputs.len() as u32)];
    args.extend(inputs.iter().chain(cx.outputs).flat_map(range));
    args.extend([Arg::Pointer(cx.scratch), Arg::I64(SCRATCH as i64)]);
    let kernel = Kernel::new(Source::Rows, format!("{} of {}", cx.op.name(), cx.layer));
    Action::Launch(Launch { kernel, grid: [1; 3], block: 1, shared: 0, args })
}

impl Maker for Fake {
    fn sums(&self, sums: &[PartialSum], _: &mut Constants) -> Vec<Action> {
        sums.iter().map(add_up).collect()
    }

    fn actions(&self, cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
        Ok(if leaves_parts(cx.op) { with_parts(cx) } else { vec![launch(cx)] })
    }

    fn norm(&self, steps: &[StepContext<'_>], _: &mut Constants) -> Result<Vec<Action>, CudaError> {
        Ok(steps.iter().map(launch).collect())
    }

    // In the other order: they may run at the same time.
    fn weights(&self, steps: &[StepContext<'_>]) -> Result<Vec<Action>, CudaError> {
        Ok(steps.iter().rev().map(launch).collect())
    }

    fn optimizers(&self, steps: &[StepContext<'_>], _: &mut Constants) -> Result<Vec<Action>, CudaError> {
        Ok(steps.iter().map(launch).collect())
    }
}

/// A GPU whose steps all take working memory, and that makes weight gradients together.
pub struct Batches;

impl graph::Target for Batches {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        // Collectives work in their operands alone, also when a plan has ended.
        if graph.nodes[node].op.lane() == Lane::Comm { 0 } else { SCRATCH }
    }

    fn batching(&self) -> graph::Batching {
        cuda::steps::weights::BATCHING
    }

    fn lane(&self, op: &Op) -> Lane {
        gpu().lane(op)
    }

    /// As [`with_parts`] leaves them.
    fn partial(&self, graph: &Graph, node: usize) -> Option<graph::Partial> {
        let node = &graph.nodes[node];
        let is_sum = |output: &usize| {
            let graph::Type { dtype, shape } = graph.ty(node.outputs[*output]).clone();
            is_sum(&node.op, &Operand { address: 0, dtype, shape })
        };
        let sums = (0..node.outputs.len()).filter(is_sum).enumerate();
        let results: Vec<_> = sums.map(|(at, output)| (output, 4 * PARTS * at)).collect();
        let bytes = 4 * PARTS * results.len();
        leaves_parts(&node.op).then_some(graph::Partial { bytes, results })
    }

    fn deferred(&self) -> graph::Deferred {
        graph::Deferred { most: 250_000, ..gpu().deferred() }
    }

    fn launch(&self, next: &[&Op]) -> usize {
        gpu().launch(next)
    }
}

fn gpu() -> cuda::Target {
    cuda::Target { half_precision: true, facts: Facts::h200() }
}

/// A range of memory: address and bytes.
pub type Range = (Address, u64);

/// What a launch reads and writes; none of another action.
pub fn ranges(action: &Action) -> Option<(Vec<Range>, Vec<Range>)> {
    let Action::Launch(Launch { args, .. }) = action else { return None };
    let [Arg::U32(inputs), rest @ ..] = &args[..] else { panic!("{args:?}") };
    let range = |pair: &[Arg]| match pair {
        [Arg::Pointer(address), Arg::I64(bytes)] => (*address, *bytes as u64),
        _ => panic!("{pair:?}"),
    };
    let (read, written) = rest.split_at(2 * *inputs as usize);
    let ranges = |args: &[Arg]| args.chunks(2).map(range).collect();
    Some((ranges(read), ranges(written)))
}

/// A number for what something was made of.
pub fn mark(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
