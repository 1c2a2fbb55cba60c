//! Backward rules: from the gradients of an op's outputs to ops that give those of its inputs.

use super::{dense, windows};
use crate::graph::{At, Graph, GraphError, Node, Phase, ValueId};
use crate::op::Op;
use crate::types::Shape;

/// Adds the backward ops of `node` to `graph`. `dout` holds the gradient of each output, where it has one; `wants`
/// says which inputs need theirs.
pub fn backward(
    graph: &mut Graph,
    node: &Node,
    dout: &[Option<ValueId>],
    wants: &[bool],
) -> Result<Vec<Option<ValueId>>, GraphError> {
    let mut emit = Emit { graph, layer: &node.layer };
    let mut grads = vec![None; node.inputs.len()];
    let input = |i: usize| node.inputs[i];
    let Some(dy) = main_gradient(&node.op, dout) else {
        // Only the sum of a fused residual + norm is used: its gradient passes to both summands.
        if let (Op::LayerNorm { add: true, .. }, Some(dsum)) = (&node.op, dout[0]) {
            (grads[0], grads[1]) = (Some(dsum), Some(dsum));
        }
        return Ok(grads);
    };
    match &node.op {
        Op::Patches { patch } => {
            let Shape(axes) = emit.shape(input(0));
            let (channels, height, width) = (axes[1], axes[2], axes[3]);
            grads[0] = Some(emit.one(Op::Unpatches { patch: *patch, channels, height, width }, &[dy])?);
        }
        Op::Unpatches { patch, .. } => grads[0] = Some(emit.one(Op::Patches { patch: *patch }, &[dy])?),
        Op::Linear { bias, gelu } => {
            let dpre =
                if *gelu { emit.one(Op::GeluGrad { bias: false }, &[node.outputs[1], dy])? } else { dy };
            if wants[1] {
                let shape = emit.shape(input(1));
                grads[1] = Some(emit.one(Op::LinearGradW { shape, accumulate: false }, &[dpre, input(0)])?);
            }
            if *bias && wants[2] {
                grads[2] = Some(emit.one(Op::ColumnSum { accumulate: false }, &[dpre])?);
            }
            if wants[0] {
                grads[0] = Some(emit.one(Op::LinearGradX { gelu: false }, &[dpre, input(1)])?);
            }
        }
        Op::Gelu => grads[0] = Some(emit.one(Op::GeluGrad { bias: false }, &[input(0), dy])?),
        Op::Embed { class_token } => {
            let outs = emit.all(Op::EmbedGrad { class_token: *class_token }, &[dy])?;
            grads = outs.into_iter().map(Some).collect();
        }
        Op::LayerNorm { add, .. } => {
            let first = usize::from(*add);
            let (x, gamma) = if *add { (node.outputs[0], input(2)) } else { (input(0), input(1)) };
            let (mean, rstd) = (node.outputs[first + 1], node.outputs[first + 2]);
            let mut inputs = vec![x, mean, rstd, gamma, dy];
            let dsum = if *add { dout[0] } else { None };
            inputs.extend(dsum);
            let outs =
                emit.all(Op::LayerNormGrad { add: dsum.is_some(), sum: false, half: None }, &inputs)?;
            grads[0] = Some(outs[0]);
            grads[first] = Some(outs[0]);
            (grads[first + 1], grads[first + 2]) = (Some(outs[1]), Some(outs[2]));
        }
        Op::Attention { heads, drop } => {
            let op = Op::AttentionGrad { heads: *heads, drop: *drop, sum: false };
            grads[0] = Some(emit.one(op, &[input(0), node.outputs[0], node.outputs[1], dy])?);
        }
        Op::Drop { .. } | Op::Scale { .. } => grads[0] = Some(emit.one(node.op.clone(), &[dy])?),
        Op::Add => (grads[0], grads[1]) = (Some(dy), Some(dy)),
        Op::Pool { kind } => {
            let tokens = emit.shape(input(0)).0[1];
            grads[0] = Some(emit.one(Op::PoolGrad { kind: *kind, tokens }, &[dy])?);
        }
        Op::CrossEntropy { smoothing, mixed } => {
            let op = Op::CrossEntropyGrad { smoothing: *smoothing, mixed: *mixed };
            grads[0] = Some(emit.one(op, &[&node.inputs[..], &[dy]].concat())?);
        }
        other => {
            if let Some(grads) = dense::backward(&mut emit, node, dy, wants)? {
                return Ok(grads);
            }
            return windows::backward(&mut emit, node, dy)?
                .ok_or_else(|| GraphError::NoBackward { layer: node.layer.clone(), op: other.name() });
        }
    }
    Ok(grads)
}

/// The gradient the rule starts from; side outputs (statistics, saved activations) have none.
fn main_gradient(op: &Op, dout: &[Option<ValueId>]) -> Option<ValueId> {
    match op {
        Op::LayerNorm { add: true, .. } => dout[1],
        _ => dout[0],
    }
}

pub(super) struct Emit<'a> {
    graph: &'a mut Graph,
    layer: &'a str,
}

impl Emit<'_> {
    pub(super) fn shape(&self, value: ValueId) -> Shape {
        self.graph.ty(value).shape.clone()
    }

    pub(super) fn all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
        let at = At::named(self.layer, format!("d.{}", self.layer), Phase::Backward);
        self.graph.push(op, inputs, &at)
    }

    pub(super) fn one(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        Ok(self.all(op, inputs)?[0])
    }
}
