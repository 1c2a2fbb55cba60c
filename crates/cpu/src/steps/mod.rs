//! Each op on the thread pool: how it is cut into pieces, and which kernel runs on a piece.
//!
//! How an op is cut depends on its shapes alone, never on the number of threads. Values of many rows are cut into blocks of
//! samples (`blocks.rs`), the same for every op, so that a thread can carry a block from step to step.

mod attention;
mod batch_norm;
mod blocks;
mod channels;
mod context;
mod conv;
mod linear;
mod loss;
mod maps;
mod position_bias;
mod random;
mod reduce;
mod resize;
mod resized_loss;
mod rows;
mod tokens;
mod update;
mod windows;
mod wire;

pub(crate) use blocks::{Blocks, flows, samples};
pub(crate) use context::{Context, Cut, Phase, Share, Team};

use crate::kernels::Float;
use graph::graph::Node;
use graph::{Graph, Op};

/// Elements a piece of an elementwise op has: enough to outweigh the hand-over, few enough to share out.
const PIECE: usize = 1 << 15;

/// Rows a piece of a row-wise op has.
pub(crate) fn row_piece(cols: usize) -> usize {
    (PIECE / cols.max(1)).max(1)
}

/// Whether there is a kernel for `op`.
pub(crate) fn supports(op: &Op, inputs: usize) -> bool {
    let scaled_seed = matches!(op, Op::Seed { .. }) && inputs > 0;
    let copies = match op {
        Op::AdamW { .. } | Op::Lamb { .. } => inputs > 6,
        Op::Sgd { .. } => inputs > 5,
        Op::LayerNormGrad { half, .. } | Op::NormAdd { half, .. } => half.is_some(),
        _ => false,
    };
    !scaled_seed && !copies && !matches!(op, Op::LossScale { .. } | Op::Clip { scaled: true, .. })
}

/// Bytes of working memory for a node, given the number of threads. Passed to `graph::compile`.
pub fn scratch(threads: usize) -> impl Fn(&Graph, usize) -> usize {
    move |graph, index| {
        let node = &graph.nodes[index];
        let input = |i: usize| graph.ty(node.inputs[i]);
        let elements = match node.op {
            Op::Attention { heads, .. } => attention::forward_scratch(&input(0).shape, heads, threads),
            Op::AttentionGrad { heads, sum, .. } => {
                let sums = if sum { reduce::partial_elements(&input(0).shape) } else { 0 };
                attention::backward_scratch(&input(0).shape, heads, threads) + sums
            }
            Op::WindowAttention { .. } | Op::WindowAttentionGrad { .. } => {
                windows::scratch_elements(&node.op, input(0), threads)
            }
            Op::PositionBias { .. } | Op::PositionBiasGrad { .. } => {
                position_bias::scratch_elements(&node.op, input(2), threads)
            }
            Op::NormAddGrad { .. } => 2 * reduce::partial_elements(&input(0).shape),
            Op::LinearGradX { gelu: true } => linear::bias_scratch(&graph.ty(node.outputs[0]).shape),
            Op::LinearGradW { .. } => linear::gradient_scratch(&input(0).shape, input(1).shape.last()),
            Op::LayerNormGrad { sum, .. } => {
                (2 + usize::from(sum)) * reduce::partial_elements(&input(0).shape)
            }
            Op::ColumnSum { .. } | Op::GeluGrad { bias: true } => reduce::partial_elements(&input(0).shape),
            _ => 0,
        };
        let doubles = match node.op {
            Op::SumSquares => node.inputs.len(),
            Op::Lamb { .. } => 2 * input(0).shape.count().div_ceil(PIECE),
            _ => 0,
        };
        let bytes = node.inputs.first().map_or(0, |v| graph.ty(*v).dtype.bytes());
        elements * bytes + doubles * size_of::<f64>() + dense_scratch(graph, node, threads)
    }
}

/// As [`scratch`], for the ops of dense prediction.
fn dense_scratch(graph: &Graph, node: &Node, threads: usize) -> usize {
    let input = |i: usize| graph.ty(node.inputs[i]);
    let output = || graph.ty(node.outputs[0]);
    let elements = match &node.op {
        Op::Conv { .. } => conv::forward_scratch(input(0), input(1), output(), threads),
        Op::ConvGradX { .. } => conv::grad_x_scratch(input(0), input(1), output(), threads),
        Op::ConvGradW { shape, .. } => conv::grad_w_scratch(input(0), shape),
        _ => 0,
    };
    let doubles = match &node.op {
        Op::Moments | Op::BatchNormSums { .. } => batch_norm::sums_scratch(&input(0).shape),
        Op::BatchNorm { .. } | Op::BatchNormGrad { .. } => batch_norm::coefficients_scratch(&input(0).shape),
        _ => 0,
    };
    let bytes = match &node.op {
        Op::Resize { sampling, .. } => resize::scratch(input(0), output(), *sampling, false, threads),
        Op::ResizeGrad { sampling, .. } => resize::scratch(input(0), output(), *sampling, true, threads),
        Op::CrossEntropy { .. } => loss::scratch(input(0)),
        Op::ResizedCrossEntropy { .. } | Op::ResizedCrossEntropyGrad { .. } => {
            resized_loss::scratch(input(0), input(1), threads)
        }
        _ => 0,
    };
    let size = node.inputs.first().map_or(0, |v| graph.ty(*v).dtype.bytes());
    elements * size + doubles * size_of::<f64>() + bytes
}

/// Runs one step.
///
/// # Safety
/// Nothing else touches the step's operands and scratch meanwhile, but for inputs that others only read; outputs
/// overlap inputs only where the op may work in place.
pub(crate) unsafe fn run<T: Float>(cx: &Context<'_, T>) {
    // SAFETY: each function relies on just what the caller promises.
    unsafe {
        match &cx.step.op {
            Op::Assign { .. } => rows::copy(cx),
            Op::Seed { .. } => rows::seed(cx),
            Op::Patches { patch } => tokens::patches(cx, *patch),
            Op::Unpatches { patch, .. } => tokens::unpatches(cx, *patch),
            Op::Linear { bias, gelu } => linear::forward(cx, *bias, *gelu),
            Op::LinearGradX { gelu } => linear::grad_x(cx, *gelu),
            Op::LinearGradW { accumulate, .. } => linear::grad_w(cx, *accumulate),
            Op::ColumnSum { accumulate } => reduce::column_sum(cx, *accumulate),
            Op::Gelu => rows::gelu(cx),
            Op::GeluGrad { bias } => reduce::gelu_grad(cx, *bias),
            Op::Embed { class_token } => tokens::embed(cx, *class_token),
            Op::EmbedGrad { class_token } => tokens::embed_grad(cx, *class_token),
            Op::LayerNorm { eps, add } => rows::layer_norm(cx, *eps, *add),
            Op::LayerNormGrad { add, sum, .. } => reduce::layer_norm_grad(cx, *add, *sum),
            Op::Attention { heads, drop } => attention::forward(cx, *heads, *drop),
            Op::AttentionGrad { heads, drop, sum } => {
                attention::backward(cx, *heads, *drop);
                if *sum && !cx.products_only {
                    let own = attention::backward_scratch(&cx.input(0).shape, *heads, cx.threads());
                    let partials = cx.scratch();
                    let partials = partials.part(own..partials.len());
                    reduce::column_sums(cx, cx.output(0), partials, &cx.step.outputs[1..2], None);
                }
            }
            Op::WindowAttention { heads, windows } => windows::forward(cx, *heads, *windows),
            Op::WindowAttentionGrad { heads, windows } => windows::backward(cx, *heads, *windows),
            Op::PositionBias { window, pretrained } => position_bias::forward(cx, *window, *pretrained),
            Op::PositionBiasGrad { window, pretrained } => position_bias::backward(cx, *window, *pretrained),
            Op::NormAdd { eps, drop, .. } => maps::norm_add(cx, *eps, *drop),
            Op::NormAddGrad { drop } => reduce::norm_add_grad(cx, *drop),
            Op::MergePatches => maps::merge_patches(cx),
            Op::SplitPatches { .. } => maps::split_patches(cx),
            Op::Reshape { .. } => maps::reshape(cx),
            Op::Drop { rate, site, per } => random::drop(cx, *rate, *site, *per),
            Op::Add => rows::add(cx),
            Op::Scale { factor } => rows::scale(cx, *factor),
            Op::Pool { kind } => tokens::pool(cx, *kind),
            Op::PoolGrad { kind, .. } => tokens::pool_grad(cx, *kind),
            Op::CrossEntropy { smoothing, mixed } => loss::cross_entropy(cx, *smoothing, *mixed),
            Op::CrossEntropyGrad { smoothing, mixed } => loss::cross_entropy_grad(cx, *smoothing, *mixed),
            Op::Accumulate => rows::accumulate(cx),
            Op::SumSquares => reduce::sum_squares(cx),
            Op::Clip { max_norm, .. } => update::clip(cx, *max_norm),
            Op::Advance => update::advance(cx),
            Op::AdamW { .. } => update::adamw(cx),
            Op::Sgd { .. } => update::sgd(cx),
            Op::Lamb { .. } => update::lamb(cx),
            Op::Ema { decay } => update::ema(cx, *decay),
            Op::Pack { .. } => wire::pack(cx),
            Op::Unpack { .. } => wire::unpack(cx),
            Op::Cast { .. } => wire::cast(cx),
            Op::Conv { window, bias } => conv::forward(cx, *window, *bias),
            Op::ConvGradX { window, .. } => conv::grad_x(cx, *window),
            Op::ConvGradW { window, accumulate, .. } => conv::grad_w(cx, *window, *accumulate),
            Op::Moments => batch_norm::moments(cx),
            Op::JoinMoments => batch_norm::join_moments(cx),
            Op::BatchNorm { eps, relu, running } => batch_norm::forward(cx, *eps, *relu, *running),
            Op::BatchNormSums { eps, relu } => batch_norm::sums(cx, *eps, *relu),
            Op::BatchNormGrad { eps, relu } => batch_norm::grad(cx, *eps, *relu),
            Op::RunningMoments { momentum } => batch_norm::running_moments(cx, *momentum),
            Op::Commit => batch_norm::commit(cx),
            Op::Resize { sampling, .. } => resize::resize(cx, *sampling, false),
            Op::ResizeGrad { sampling, .. } => resize::resize(cx, *sampling, true),
            Op::ResizedCrossEntropy { smoothing } => resized_loss::forward(cx, *smoothing),
            Op::ResizedCrossEntropyGrad { smoothing } => resized_loss::backward(cx, *smoothing),
            Op::Concat => channels::concat(cx),
            Op::Slice { start, .. } => channels::slice(cx, *start),
            Op::Grid { .. } => channels::grid(cx),
            Op::Ungrid { .. } => channels::ungrid(cx),
            other => unreachable!("{} was refused when the plan was bound", other.name()),
        }
    }
}
