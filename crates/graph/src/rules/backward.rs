//! Backward rules: from the gradients of an op's outputs to ops that give those of its inputs.

use crate::graph::{At, Graph, GraphError, Node, Phase, ValueId};
use crate::op::{Op, Window};
use crate::types::Shape;

/// The gradient of each input, where there is one.
type Grads = Result<Vec<Option<ValueId>>, GraphError>;

/// Adds the backward ops of `node` to `graph`. `dout` holds the gradient of each output, where it has one; `wants`
/// says which inputs need theirs.
pub fn backward(graph: &mut Graph, node: &Node, dout: &[Option<ValueId>], wants: &[bool]) -> Grads {
    let mut emit = Emit { graph, node };
    if let Op::LayerNorm { add: true, .. } = node.op {
        return residual_norm(&mut emit, dout);
    }
    // Side outputs (statistics, saved activations) have no gradient.
    let Some(dy) = dout[0] else { return Ok(vec![None; node.inputs.len()]) };
    let (inputs, outputs) = (&node.inputs[..], &node.outputs[..]);
    match &node.op {
        Op::Patches { patch } => {
            let [_, channels, height, width] = emit.axes(inputs[0])?;
            emit.one(Op::Unpatches { patch: *patch, channels, height, width }, &[dy])
        }
        Op::Unpatches { patch, .. } => emit.one(Op::Patches { patch: *patch }, &[dy]),
        Op::Linear { gelu, .. } => linear(&mut emit, *gelu, dy, wants),
        Op::Gelu => emit.one(Op::GeluGrad { bias: false }, &[inputs[0], dy]),
        Op::SwiGlu => emit.one(Op::SwiGluGrad { sum: false }, &[inputs[0], dy]),
        Op::Embed { class_token } => emit.each(Op::EmbedGrad { class_token: *class_token }, &[dy]),
        Op::Prepend => prepend(&mut emit, dy, wants),
        Op::LayerNorm { .. } => {
            let op = Op::LayerNormGrad { add: false, sum: false, half: None };
            emit.each(op, &[inputs[0], outputs[1], outputs[2], inputs[1], dy])
        }
        Op::LayerScale => emit.each(Op::LayerScaleGrad { sum: false }, &[inputs, &[dy]].concat()),
        Op::Attention { heads, drop } => {
            let op = Op::AttentionGrad { heads: *heads, drop: *drop, sum: false };
            emit.one(op, &[inputs[0], outputs[0], outputs[1], dy])
        }
        Op::Drop { .. } | Op::Scale { .. } => emit.one(node.op.clone(), &[dy]),
        Op::Add => Ok(vec![Some(dy), Some(dy)]),
        Op::Pool { kind } => {
            let [_, tokens, _] = emit.axes(inputs[0])?;
            emit.one(Op::PoolGrad { kind: *kind, tokens }, &[dy])
        }
        Op::CrossEntropy { smoothing, mixed } => {
            let op = Op::CrossEntropyGrad { smoothing: *smoothing, mixed: *mixed };
            emit.one(op, &[inputs, &[dy]].concat())
        }
        Op::Reshape { .. } => {
            let shape = emit.shape(inputs[0]);
            emit.one(Op::Reshape { shape }, &[dy])
        }

        Op::WindowAttention { heads, windows } => {
            let op = Op::WindowAttentionGrad { heads: *heads, windows: *windows };
            emit.each(op, &[inputs, outputs, &[dy]].concat())
        }
        Op::PositionBias { window, pretrained } => {
            let op = Op::PositionBiasGrad { window: *window, pretrained: *pretrained };
            emit.each(op, &[inputs, &[dy]].concat())
        }
        Op::NormAdd { drop, .. } => {
            let op = Op::NormAddGrad { drop: *drop };
            let grads = emit.all(op, &[inputs[0], outputs[1], outputs[2], inputs[2], dy])?;
            Ok([grads[0], dy, grads[1], grads[2]].map(Some).to_vec())
        }
        Op::MergePatches => {
            let [_, height, width, _] = emit.axes(inputs[0])?;
            emit.one(Op::SplitPatches { height, width }, &[dy])
        }
        Op::SplitPatches { .. } => emit.one(Op::MergePatches, &[dy]),

        Op::Conv { window, .. } => conv(&mut emit, *window, dy, wants),
        Op::BatchNorm { eps, relu, running: false } => batch_norm(&mut emit, (*eps, *relu), dy, wants),
        Op::Resize { sampling, .. } => {
            let [_, height, width, _] = emit.axes(inputs[0])?;
            emit.one(Op::ResizeGrad { height, width, sampling: *sampling }, &[dy])
        }
        Op::Concat => concat(&mut emit, dy, wants),
        Op::ResizedCrossEntropy { smoothing } => {
            let op = Op::ResizedCrossEntropyGrad { smoothing: *smoothing };
            emit.one(op, &[inputs, &[outputs[2], dy]].concat())
        }
        Op::Grid { .. } => {
            let [_, tokens, _] = emit.axes(inputs[0])?;
            emit.one(Op::Ungrid { tokens }, &[dy])
        }
        Op::Ungrid { .. } => {
            let [_, height, width, _] = emit.axes(inputs[0])?;
            emit.one(Op::Grid { height, width }, &[dy])
        }

        Op::Input | Op::Read { .. } | Op::Assign { .. } | Op::Seed { .. } | Op::Prepare { .. } => {
            emit.no_rule()
        }
        Op::LinearGradX { .. } | Op::LinearGradW { .. } | Op::ColumnSum { .. } => emit.no_rule(),
        Op::GeluGrad { .. } | Op::EmbedGrad { .. } | Op::LayerNormGrad { .. } => emit.no_rule(),
        Op::LayerScaleGrad { .. } | Op::SwiGluGrad { .. } | Op::TokenSum { .. } => emit.no_rule(),
        Op::AttentionGrad { .. } | Op::PoolGrad { .. } | Op::CrossEntropyGrad { .. } => emit.no_rule(),
        Op::WindowAttentionGrad { .. } | Op::PositionBiasGrad { .. } => emit.no_rule(),
        Op::NormAddGrad { .. } | Op::Accumulate | Op::SumSquares { .. } | Op::Clip { .. } => emit.no_rule(),
        Op::AddUp { .. } => emit.no_rule(),
        Op::Advance | Op::AdamW { .. } | Op::Sgd { .. } | Op::Ema { .. } => emit.no_rule(),
        Op::LambMoments { .. } | Op::LambApply { .. } => emit.no_rule(),
        Op::MuonMomentum { .. } | Op::MuonApply { .. } => emit.no_rule(),
        Op::Matmul { .. } | Op::UnitTrace { .. } | Op::NewtonSchulz { .. } => emit.no_rule(),
        Op::Pack { .. } | Op::Unpack { .. } | Op::AllReduce { .. } => emit.no_rule(),
        Op::ReduceScatter { .. } | Op::AllGather { .. } | Op::Cast { .. } => emit.no_rule(),
        Op::LossScale { .. } | Op::ConvGradX { .. } | Op::ConvGradW { .. } => emit.no_rule(),
        Op::Moments | Op::JoinMoments | Op::BatchNorm { running: true, .. } => emit.no_rule(),
        Op::BatchNormSums { .. } | Op::BatchNormGrad { .. } | Op::RunningMoments { .. } => emit.no_rule(),
        Op::Commit | Op::ResizeGrad { .. } | Op::Slice { .. } => emit.no_rule(),
        Op::ResizedCrossEntropyGrad { .. } => emit.no_rule(),
        Op::Quantize { .. } | Op::ScaledMatmul { .. } | Op::Rescale { .. } => emit.no_rule(),
    }
}

/// A residual with its norm: the gradient of the sum passes to both summands, beside that of the norm.
fn residual_norm(emit: &mut Emit<'_>, dout: &[Option<ValueId>]) -> Grads {
    let Node { inputs, outputs, .. } = emit.node;
    let (dsum, Some(dy)) = (dout[0], dout[1]) else {
        return Ok(vec![dout[0], dout[0], None, None]);
    };
    let op = Op::LayerNormGrad { add: dsum.is_some(), sum: false, half: None };
    let mut operands = vec![outputs[0], outputs[2], outputs[3], inputs[2], dy];
    operands.extend(dsum);
    let grads = emit.all(op, &operands)?;
    Ok([grads[0], grads[0], grads[1], grads[2]].map(Some).to_vec())
}

fn linear(emit: &mut Emit<'_>, gelu: bool, dy: ValueId, wants: &[bool]) -> Grads {
    let Node { inputs, outputs, .. } = emit.node;
    let mut grads = vec![None; inputs.len()];
    let dpre = if gelu { emit.first(Op::GeluGrad { bias: false }, &[outputs[1], dy])? } else { dy };
    if wants[1] {
        let op = Op::LinearGradW { shape: emit.shape(inputs[1]), accumulate: false };
        grads[1] = Some(emit.first(op, &[dpre, inputs[0]])?);
    }
    if wants.get(2) == Some(&true) {
        grads[2] = Some(emit.first(Op::ColumnSum { accumulate: false }, &[dpre])?);
    }
    if wants[0] {
        grads[0] = Some(emit.first(Op::LinearGradX { gelu: false }, &[dpre, inputs[1]])?);
    }
    Ok(grads)
}

/// The gradient of the tokens is the last part of dy, and that of each prefix a sum over the batch.
fn prepend(emit: &mut Emit<'_>, dy: ValueId, wants: &[bool]) -> Grads {
    let inputs = &emit.node.inputs;
    let mut grads = vec![None; inputs.len()];
    let mut start = 0;
    for (index, prefix) in inputs.iter().enumerate().skip(1) {
        let [_, tokens, _] = emit.axes(*prefix)?;
        if wants[index] {
            grads[index] = Some(emit.first(Op::TokenSum { start, tokens }, &[dy])?);
        }
        start += tokens;
    }
    if wants[0] {
        let [_, width, _] = emit.axes(inputs[0])?;
        let last = emit.first(Op::Grid { height: 1, width }, &[dy])?;
        grads[0] = Some(emit.first(Op::Reshape { shape: emit.shape(inputs[0]) }, &[last])?);
    }
    Ok(grads)
}

fn conv(emit: &mut Emit<'_>, window: Window, dy: ValueId, wants: &[bool]) -> Grads {
    let inputs = &emit.node.inputs;
    let mut grads = vec![None; inputs.len()];
    if wants[1] {
        let op = Op::ConvGradW { window, shape: emit.shape(inputs[1]), accumulate: false };
        grads[1] = Some(emit.first(op, &[dy, inputs[0]])?);
    }
    if wants.get(2) == Some(&true) {
        grads[2] = Some(emit.first(Op::ColumnSum { accumulate: false }, &[dy])?);
    }
    if wants[0] {
        let [_, height, width, _] = emit.axes(inputs[0])?;
        grads[0] = Some(emit.first(Op::ConvGradX { window, height, width }, &[dy, inputs[1]])?);
    }
    Ok(grads)
}

fn batch_norm(emit: &mut Emit<'_>, (eps, relu): (f64, bool), dy: ValueId, wants: &[bool]) -> Grads {
    let inputs = [&emit.node.inputs[..], &[dy]].concat();
    let sums = emit.first(Op::BatchNormSums { eps, relu }, &inputs)?;
    let channels = Shape::from([emit.shape(inputs[0]).last()]);
    // The gradients of β and γ are this rank's own sums; what the gradient of x takes may be those of all.
    let shapes = vec![channels.clone(), channels];
    let own = emit.all(Op::Unpack { shapes, to: None, over: false }, &[sums])?;
    let mut grads = vec![None, None, Some(own[1]), Some(own[0])];
    if wants[0] {
        grads[0] = Some(emit.first(Op::BatchNormGrad { eps, relu }, &[&inputs[..], &[sums]].concat())?);
    }
    Ok(grads)
}

fn concat(emit: &mut Emit<'_>, dy: ValueId, wants: &[bool]) -> Grads {
    let mut start = 0;
    let mut grads = vec![];
    for (part, wanted) in emit.node.inputs.iter().zip(wants) {
        let channels = emit.shape(*part).last();
        let slice = Op::Slice { start, channels };
        grads.push(if *wanted { Some(emit.first(slice, &[dy])?) } else { None });
        start += channels;
    }
    Ok(grads)
}

/// Adds backward ops of one node.
struct Emit<'a> {
    graph: &'a mut Graph,
    node: &'a Node,
}

impl Emit<'_> {
    fn shape(&self, value: ValueId) -> Shape {
        self.graph.ty(value).shape.clone()
    }

    fn axes<const N: usize>(&self, value: ValueId) -> Result<[usize; N], GraphError> {
        let ty = self.graph.ty(value);
        <[usize; N]>::try_from(&ty.shape.0[..]).map_err(|_| GraphError::Shape {
            layer: self.node.layer.clone(),
            op: self.node.op.name(),
            why: format!("needs {N} axes, got {ty}"),
        })
    }

    /// The results of a backward op.
    fn all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
        let layer = &self.node.layer;
        let at = At::named(layer, format!("d.{layer}"), Phase::Backward);
        self.graph.push(op, inputs, &at)
    }

    fn first(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        Ok(self.all(op, inputs)?[0])
    }

    /// The gradient of the first input, and of no other.
    fn one(&mut self, op: Op, inputs: &[ValueId]) -> Grads {
        let mut grads = vec![None; self.node.inputs.len()];
        grads[0] = Some(self.first(op, inputs)?);
        Ok(grads)
    }

    /// The gradients of all inputs, in their order.
    fn each(&mut self, op: Op, inputs: &[ValueId]) -> Grads {
        Ok(self.all(op, inputs)?.into_iter().map(Some).collect())
    }

    fn no_rule(&self) -> Grads {
        Err(GraphError::NoBackward { layer: self.node.layer.clone(), op: self.node.op.name() })
    }
}
