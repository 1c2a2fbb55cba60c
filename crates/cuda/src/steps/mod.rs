//! Actions of each op: its kernels and matmuls, with grids and arguments.
//!
//! Pure functions of shapes, types and addresses. The tiling of an op depends on its shapes only, and no sum depends on which block
//! comes first, so that results repeat bit for bit.

pub mod attention;
pub mod attention_flash;
pub mod attention_hopper;
pub mod attention_plain;
pub mod attention_sides;
pub mod attention_tf32;
pub mod batch_norm;
pub mod channels;
pub mod conv;
pub mod hopper;
pub mod linear;
pub mod loss;
pub mod maps;
pub mod norm_add;
pub mod orthogonalise;
pub mod position_bias;
pub mod prepare;
pub mod resize;
pub mod resized_loss;
pub mod rows;
pub mod scaling;
#[cfg(test)]
mod testing;
pub mod tokens;
pub mod update;
pub mod weights;
pub mod windows;
pub mod windows_plain;

use crate::action::{Action, Address, Facts, Operand, StepContext};
use crate::error::CudaError;
use crate::libraries;
use graph::{Batching, Deferred, Graph, Lane, Op, Partial, Type, ValueId};

/// Actions of one step. Optimizers are not here: those of a plan are merged ([`update::optimizers`]).
pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match cx.op {
        Op::Attention { .. } | Op::AttentionGrad { .. } => attention::actions(cx),
        Op::Linear { .. } | Op::LinearGradX { .. } | Op::LinearGradW { .. } => linear::actions(cx),
        Op::WindowAttention { .. } | Op::WindowAttentionGrad { .. } => windows::actions(cx),
        Op::PositionBias { .. } | Op::PositionBiasGrad { .. } => position_bias::actions(cx),
        Op::NormAdd { .. } | Op::NormAddGrad { .. } => norm_add::actions(cx),
        Op::MergePatches | Op::SplitPatches { .. } | Op::Grid { .. } | Op::Ungrid { .. } => maps::actions(cx),
        Op::LayerScale | Op::LayerScaleGrad { .. } | Op::SwiGlu | Op::SwiGluGrad { .. } => {
            scaling::actions(cx)
        }
        Op::Prepare { .. } => prepare::actions(cx),
        Op::Patches { .. }
        | Op::Unpatches { .. }
        | Op::Embed { .. }
        | Op::Prepend
        | Op::TokenSum { .. }
        | Op::EmbedGrad { .. }
        | Op::Pool { .. }
        | Op::PoolGrad { .. } => tokens::actions(cx),
        Op::CrossEntropy { .. } | Op::CrossEntropyGrad { .. } | Op::Seed { .. } => loss::actions(cx),
        Op::Conv { .. } | Op::ConvGradX { .. } | Op::ConvGradW { .. } => conv::actions(cx),
        Op::Moments
        | Op::JoinMoments
        | Op::BatchNorm { .. }
        | Op::BatchNormSums { .. }
        | Op::BatchNormGrad { .. }
        | Op::RunningMoments { .. }
        | Op::Commit => batch_norm::actions(cx),
        Op::Resize { .. } | Op::ResizeGrad { .. } => resize::actions(cx),
        Op::ResizedCrossEntropy { .. } | Op::ResizedCrossEntropyGrad { .. } => resized_loss::actions(cx),
        Op::Concat | Op::Slice { .. } => channels::actions(cx),
        Op::Clip { .. } | Op::Advance | Op::LossScale { .. } => update::actions(cx),
        Op::Matmul { .. } | Op::UnitTrace { .. } | Op::NewtonSchulz { .. } => orthogonalise::actions(cx),
        Op::Assign { .. }
        | Op::Reshape { .. }
        | Op::ColumnSum { .. }
        | Op::Gelu
        | Op::GeluGrad { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGrad { .. }
        | Op::Drop { .. }
        | Op::Add
        | Op::Scale { .. }
        | Op::Accumulate
        | Op::Cast { .. }
        | Op::Pack { .. }
        | Op::Unpack { .. } => rows::actions(cx),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes for the partial sums of a step.
pub fn parts(op: &Op, inputs: &[Operand], outputs: &[Operand], facts: &Facts) -> usize {
    match op {
        Op::AttentionGrad { .. } => attention::parts(op, inputs, facts),
        Op::LinearGradX { gelu: true } => linear::parts(outputs),
        Op::NormAddGrad { .. } => norm_add::parts(inputs),
        Op::LayerScaleGrad { .. } | Op::SwiGluGrad { .. } => scaling::parts(op, inputs),
        Op::WindowAttentionGrad { .. } => windows::parts(op, inputs, facts),
        Op::ColumnSum { .. } | Op::GeluGrad { .. } | Op::LayerNormGrad { .. } => rows::parts(op, inputs),
        _ => 0,
    }
}

/// Target of the planner: a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// True if matmuls are in half precision.
    pub half_precision: bool,
    pub facts: Facts,
}

impl Target {
    /// Target for one of this machine's GPUs; an H200 where there is none, so that plans can be printed anywhere.
    pub fn of(gpu: usize, half_precision: bool) -> Self {
        let found = libraries::devices().unwrap_or_default();
        let facts = found.get(gpu % found.len().max(1)).cloned().unwrap_or_else(Facts::h200);
        Target { half_precision, facts }
    }
}

/// Most bytes of waiting partial sums, and steps for which their memory is not reused while they are added up.
const DEFERRED: Deferred = Deferred { most: 8 << 20, stays: 24 };

/// Tells whether an op is an optimizer or average, which one launch runs for all parameters.
pub fn is_optimizer(op: &Op) -> bool {
    matches!(op, Op::AdamW { .. } | Op::Sgd { .. } | Op::Ema { .. })
        || matches!(op, Op::LambMoments { .. } | Op::LambApply { .. })
        || matches!(op, Op::MuonMomentum { .. } | Op::MuonApply { .. })
}

impl graph::Target for Target {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        scratch(graph, node)
    }

    /// Batching of weight gradients by the kernel for several, which is for half precision only.
    fn batching(&self) -> Batching {
        if self.half_precision { weights::BATCHING } else { Batching::NONE }
    }

    /// The backward pass is a chain: each layer's input gradient is needed by the next. The gradients of parameters are not, and
    /// small models don't fill a GPU with one kernel. So these go to a lane of their own; and so do the loss, which its own gradient
    /// doesn't read, and position biases, which depend on parameters alone and may be made long before they are wanted.
    fn lane(&self, op: &Op) -> Lane {
        match op {
            Op::LinearGradW { .. }
            | Op::ConvGradW { .. }
            | Op::ColumnSum { .. }
            | Op::AddUp { .. }
            | Op::CrossEntropy { .. }
            | Op::PositionBias { .. }
            | Op::PositionBiasGrad { .. } => Lane::Side,
            _ => op.lane(),
        }
    }

    /// Partial sums that the step's kernels leave, whatever its addresses.
    fn partial(&self, graph: &Graph, node: usize) -> Option<Partial> {
        let node = &graph.nodes[node];
        let somewhere = |number: Address| number << 44;
        let operands = |values: &[ValueId], number: Address| {
            let of = |(i, value): (usize, &ValueId)| {
                let Type { dtype, shape } = graph.ty(*value).clone();
                Operand { address: somewhere(number) + ((i as Address) << 36), dtype, shape }
            };
            values.iter().enumerate().map(of).collect::<Vec<_>>()
        };
        let (inputs, outputs) = (operands(&node.inputs, 1), operands(&node.outputs, 2));
        let bytes = parts(&node.op, &inputs, &outputs, &self.facts);
        let (scratch, parts, header) = (somewhere(3), somewhere(4), somewhere(5));
        let (op, layer, facts) = (&node.op, node.layer.as_str(), &self.facts);
        let (inputs, outputs) = (&inputs[..], &outputs[..]);
        let cx = StepContext { op, layer, inputs, outputs, scratch, parts, header, tf32: false, facts };
        // A step without a kernel is refused when it is bound.
        let actions = if bytes > 0 { actions(&cx).unwrap_or_default() } else { vec![] };
        let result = |action: Action| match action {
            Action::Sum(sum) => {
                let output = outputs.iter().position(|out| out.address == sum.out)?;
                Some((output, (sum.parts - parts) as usize))
            }
            _ => None,
        };
        let results: Vec<_> = actions.into_iter().filter_map(result).collect();
        (!results.is_empty()).then_some(Partial { bytes, results })
    }

    fn deferred(&self) -> Deferred {
        DEFERRED
    }

    /// Steps that share a launch: optimizers and averages; a sum of squares, with the clip and the advance after it; a few weight gradients.
    fn launch(&self, next: &[&Op]) -> usize {
        let optimizers = next.iter().take_while(|op| is_optimizer(op)).count();
        let weights = 1 + next.windows(2).take_while(|pair| pair[1].runs_beside(pair[0])).count();
        match next {
            [Op::SumSquares { .. }, Op::Clip { .. }, Op::Advance, ..] => 3,
            _ => optimizers.max(weights.min(weights::MOST)),
        }
    }
}

/// Bytes of working memory for a node.
fn scratch(graph: &Graph, index: usize) -> usize {
    let node = &graph.nodes[index];
    let inputs: Vec<&Type> = node.inputs.iter().map(|v| graph.ty(*v)).collect();
    let outputs: Vec<&Type> = node.outputs.iter().map(|v| graph.ty(*v)).collect();
    match node.op {
        Op::AttentionGrad { .. } => attention::scratch(&node.op, &inputs, &outputs),
        Op::WindowAttentionGrad { .. } => windows::scratch(&node.op, &inputs),
        Op::PositionBiasGrad { .. } => position_bias::scratch(&node.op, &inputs),
        Op::EmbedGrad { .. } => tokens::scratch(&node.op, &inputs, &outputs),
        Op::CrossEntropy { .. } => loss::scratch(&node.op, &inputs, &outputs),
        Op::Conv { .. } | Op::ConvGradX { .. } | Op::ConvGradW { .. } => {
            conv::scratch(&node.op, &inputs, &outputs)
        }
        Op::Moments | Op::BatchNormSums { .. } => batch_norm::scratch(&node.op, &inputs),
        Op::ResizedCrossEntropy { .. } => resized_loss::scratch(&node.op, &inputs),
        _ => 0,
    }
}
