//! Epilogues after `differentiate`: a bias gradient folds into the op that makes what it sums (the backward op of a
//! GELU, a norm or attention), a GELU's backward op into the matmul before it, the gradient that bypasses a norm into
//! the norm's, and adding to the gradient so far into the matmul that makes the gradient.

use super::pattern::{Rewriter, rewrite};
use crate::graph::Graph;
use crate::op::Op;

/// Merges what can be merged around backward ops.
pub fn peephole(graph: Graph) -> Graph {
    let graph = rewrite(graph, residual);
    let graph = rewrite(graph, bias);
    let graph = rewrite(graph, gelu_matmul);
    rewrite(graph, accumulate)
}

/// Merges residual gradients: a value that is normalised and also used beside its norm, as a first block's input, has a
/// gradient of two parts; the norm's backward op adds the other to its own.
fn residual(at: &mut Rewriter, add: usize) -> Option<()> {
    let Op::Add = at.op(add) else { return None };
    let (parts, sum) = (at.node(add).inputs.clone(), at.node(add).outputs[0]);
    for (dx, other) in [(parts[0], parts[1]), (parts[1], parts[0])] {
        let Some(norm) = at.own_maker(dx, add).filter(|norm| at.is_before(other, *norm)) else { continue };
        let Op::LayerNormGrad { add: false, sum: sums, half } = *at.op(norm) else { continue };
        if at.node(norm).outputs[0] == dx {
            let inputs = [&at.node(norm).inputs[..], &[other]].concat();
            let outputs = [&[sum], &at.node(norm).outputs[1..]].concat();
            at.replace(norm, Op::LayerNormGrad { add: true, sum: sums, half }, inputs, outputs);
            return at.merge(add);
        }
    }
    None
}

/// Merges column sums into the op that makes the gradient, which spares reading it again.
fn bias(at: &mut Rewriter, sums: usize) -> Option<()> {
    let Op::ColumnSum { accumulate: false } = at.op(sums) else { return None };
    let (summed, sum) = (at.node(sums).inputs[0], at.node(sums).outputs[0]);
    let maker = at.maker(summed).filter(|maker| at.node(*maker).outputs[0] == summed)?;
    let op = with_sums(at.op(maker))?;
    let outputs = [&at.node(maker).outputs[..], &[sum]].concat();
    at.replace(maker, op, at.node(maker).inputs.clone(), outputs);
    at.merge(sums)
}

/// The op that gives the column sums of its first output too, as the last of its outputs; none if it can't or does already.
fn with_sums(op: &Op) -> Option<Op> {
    match *op {
        Op::GeluGrad { bias: false } => Some(Op::GeluGrad { bias: true }),
        Op::SwiGluGrad { sum: false } => Some(Op::SwiGluGrad { sum: true }),
        Op::LayerScaleGrad { sum: false } => Some(Op::LayerScaleGrad { sum: true }),
        Op::LayerNormGrad { add, sum: false, half: None } => {
            Some(Op::LayerNormGrad { add, sum: true, half: None })
        }
        Op::AttentionGrad { heads, drop, sum: false } => Some(Op::AttentionGrad { heads, drop, sum: true }),
        _ => None,
    }
}

/// Merges a GELU's backward op into the matmul that makes its input, which then is never stored.
fn gelu_matmul(at: &mut Rewriter, gelu: usize) -> Option<()> {
    let Op::GeluGrad { bias: true } = at.op(gelu) else { return None };
    let (pre, dy) = (at.node(gelu).inputs[0], at.node(gelu).inputs[1]);
    let matmul = at.own_maker(dy, gelu)?;
    let Op::LinearGradX { gelu: false } = at.op(matmul) else { return None };
    let inputs = [&at.node(matmul).inputs[..], &[pre]].concat();
    at.replace(matmul, Op::LinearGradX { gelu: true }, inputs, at.node(gelu).outputs.clone());
    at.merge(gelu)
}

/// Lets a matmul, or a sum over rows, start from the gradient so far.
fn accumulate(at: &mut Rewriter, adds: usize) -> Option<()> {
    let Op::Accumulate = at.op(adds) else { return None };
    let (so_far, gradient) = (at.node(adds).inputs[0], at.node(adds).inputs[1]);
    let maker = at.own_maker(gradient, adds).filter(|maker| at.is_before(so_far, *maker))?;
    let op = match at.op(maker).clone() {
        Op::LinearGradW { shape, accumulate: false } => Op::LinearGradW { shape, accumulate: true },
        Op::ColumnSum { accumulate: false } => Op::ColumnSum { accumulate: true },
        Op::ConvGradW { window, shape, accumulate: false } => {
            Op::ConvGradW { window, shape, accumulate: true }
        }
        _ => return None,
    };
    let inputs = [&at.node(maker).inputs[..], &[so_far]].concat();
    at.replace(maker, op, inputs, at.node(adds).outputs.clone());
    at.merge(adds)
}
