//! The actions of each op: which kernels and products make it, with which grids and arguments.
//!
//! Pure functions of shapes, types and addresses. How an op is cut depends on its shapes alone, and no sum depends on which block
//! comes first, so that results repeat bit for bit.

pub mod attention;
pub mod attention_flash;
pub mod attention_hopper;
pub mod attention_plain;
pub mod attention_tf32;
pub mod batch_norm;
pub mod channels;
pub mod conv;
pub mod hopper;
pub mod linear;
pub mod loss;
pub mod maps;
pub mod norm_add;
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

use crate::action::{Action, Context, Facts, Operand};
use crate::error::CudaError;
use graph::{Batching, Graph, Op, Type};

/// The actions of one step. Optimizers are no part of this: those of a plan are merged ([`update::optimizers`]).
pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
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

/// A GPU, as plans are made for it. They are the same for all of one precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Whether products are of half precision.
    pub halves: bool,
}

impl graph::Target for Target {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        scratch(graph, node)
    }

    /// As the kernel that makes some at once takes them; it is of halves alone.
    fn batching(&self) -> Batching {
        if self.halves { weights::BATCHING } else { Batching::NONE }
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
        Op::SumSquares | Op::Lamb { .. } => update::scratch(&node.op, &inputs, &outputs),
        _ => 0,
    }
}
