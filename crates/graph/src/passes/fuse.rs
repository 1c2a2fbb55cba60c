//! Merges neighbouring forward ops into one, before anything else looks: linear + GELU, residual + norm.

use super::pattern::{Rewriter, rewrite};
use crate::graph::Graph;
use crate::op::Op;

/// Merges every pair that nobody looks between.
pub fn fuse(graph: Graph) -> Graph {
    rewrite(rewrite(graph, linear_gelu), residual_norm)
}

/// linear → GELU becomes one op that also keeps the value before the GELU, which the backward op needs.
fn linear_gelu(at: &mut Rewriter, gelu: usize) -> Option<()> {
    let Op::Gelu = at.op(gelu) else { return None };
    let (pre, y) = (at.node(gelu).inputs[0], at.node(gelu).outputs[0]);
    let linear = at.own_maker(pre, gelu)?;
    let Op::Linear { bias, gelu: false } = *at.op(linear) else { return None };
    at.replace(linear, Op::Linear { bias, gelu: true }, at.node(linear).inputs.clone(), vec![y, pre]);
    at.merge(gelu)
}

/// add → layer norm becomes one op that gives both the sum and its norm.
fn residual_norm(at: &mut Rewriter, norm: usize) -> Option<()> {
    let Op::LayerNorm { eps, add: false } = *at.op(norm) else { return None };
    let sum = at.node(norm).inputs[0];
    let add = at.maker(sum)?;
    let Op::Add = at.op(add) else { return None };
    // The sum is defined where the norm stands now, so its other users must come later.
    if !at.is_first_use(sum, norm) {
        return None;
    }
    at.merge(add)?;
    let inputs = [&at.node(add).inputs[..], &at.node(norm).inputs[1..]].concat();
    let outputs = [&[sum], &at.node(norm).outputs[..]].concat();
    at.replace(norm, Op::LayerNorm { eps, add: true }, inputs, outputs);
    Some(())
}
