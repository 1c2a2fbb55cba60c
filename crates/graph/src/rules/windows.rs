//! Rules of the ops of Swin Transformer V2: shapes, backward ops, operations.
//!
//! Legend: B batch, h and w the map's rows and columns, C channels, H heads, T tokens in a window, N width of the position
//! bias's hidden layer.

use super::backward::Emit;
use super::shape::{Inferred, accumulator, axes, require, shaped, typed, without_last};
use crate::graph::{GraphError, Node, ValueId};
use crate::op::Op;
use crate::types::{Shape, Type};
use crate::windows::{Offsets, Windows};

/// How many inputs the op takes, if it is one of these.
pub fn arity(op: &Op) -> Option<usize> {
    match op {
        Op::WindowAttention { .. } | Op::NormAddGrad { .. } => Some(5),
        Op::WindowAttentionGrad { .. } => Some(8),
        Op::PositionBias { .. } => Some(3),
        Op::PositionBiasGrad { .. } | Op::NormAdd { .. } => Some(4),
        _ => None,
    }
}

/// None for other ops.
pub fn infer(op: &Op, inputs: &[&Type]) -> Option<Inferred> {
    let x = *inputs.first()?;
    Some(match op {
        Op::WindowAttention { heads, windows } => attention(inputs, *heads, *windows),
        Op::WindowAttentionGrad { heads, windows } => {
            attention(&inputs[..5], *heads, *windows).and_then(|made| {
                require(made.iter().eq(inputs[5..7].iter().copied()), || "out doesn't come from qkv".into())?;
                require(inputs[7] == inputs[5], || format!("out is {}, dout {}", inputs[5], inputs[7]))?;
                Ok(inputs[..5].iter().map(|t| (*t).clone()).collect())
            })
        }
        Op::PositionBias { window, pretrained } => position_bias(inputs, *window, *pretrained),
        Op::PositionBiasGrad { window, pretrained } => position_bias(&inputs[..3], *window, *pretrained)
            .and_then(|made| {
                require(made[0] == *inputs[3], || {
                    format!("the bias is {}, its gradient {}", made[0], inputs[3])
                })?;
                Ok(inputs[..3].iter().map(|t| (*t).clone()).collect())
            }),
        Op::NormAdd { half, .. } => norm_add(inputs).map(|mut out| {
            out.extend(half.map(|dtype| Type { dtype, shape: x.shape.clone() }));
            out
        }),
        Op::NormAddGrad { .. } => {
            let gamma = inputs[3];
            require(inputs[4] == x, || format!("y is {x}, the gradient {}", inputs[4]))
                .map(|()| vec![x.clone(), gamma.clone(), gamma.clone()])
        }
        Op::MergePatches => {
            axes::<4>(x).map(|[b, h, w, c]| vec![typed(x, [b, h.div_ceil(2), w.div_ceil(2), 4 * c])])
        }
        Op::SplitPatches { height, width } => split_patches(x, *height, *width),
        Op::Reshape { shape } => {
            require(shape.count() == x.shape.count(), || format!("{x} has not the elements of {shape}"))
                .map(|()| vec![Type { dtype: x.dtype, shape: shape.clone() }])
        }
        _ => return None,
    })
}

fn attention(inputs: &[&Type], heads: usize, windows: Windows) -> Inferred {
    let [qkv, q_bias, v_bias, scale, bias] = inputs else { return Err("takes 5 inputs".into()) };
    let [b, h, w, c3] = axes(qkv)?;
    require(heads > 0 && c3 % 3 == 0 && (c3 / 3) % heads == 0, || {
        format!("{c3} channels are not 3 × {heads} heads × a whole head size")
    })?;
    let Windows { size, shift } = windows;
    require(size.iter().all(|side| *side > 0) && shift[0] < size[0] && shift[1] < size[1], || {
        format!("windows of {}×{} can't be shifted by ({},{})", size[0], size[1], shift[0], shift[1])
    })?;
    require(shift[0] < h.max(1) && shift[1] < w.max(1), || {
        format!("a map of {h}×{w} can't be shifted by ({},{})", shift[0], shift[1])
    })?;
    let (c, t) = (c3 / 3, windows.tokens());
    shaped(q_bias, [c], "the bias of queries")?;
    shaped(v_bias, [c], "the bias of values")?;
    shaped(scale, [heads, 1, 1], "the logit scale")?;
    shaped(bias, [heads, t, t], "the position bias")?;
    let lse = Type::new(accumulator(qkv.dtype), [b, windows.count([h, w]), heads, t]);
    Ok(vec![typed(qkv, [b, h, w, c]), lse])
}

fn position_bias(inputs: &[&Type], window: [usize; 2], pretrained: Option<[usize; 2]>) -> Inferred {
    let (w1, b1, w2) = (inputs[0], inputs[1], inputs[2]);
    let some = |sides: [usize; 2]| sides.iter().all(|side| *side > 0);
    require(some(window) && pretrained.is_none_or(some), || "windows have at least one token".into())?;
    let [hidden, coordinates] = axes(w1)?;
    require(coordinates == 2, || format!("offsets have 2 coordinates, but the weight is {w1}"))?;
    shaped(b1, [hidden], "the bias of the hidden layer")?;
    let [heads, width] = axes(w2)?;
    require(width == hidden, || format!("the hidden layer is {w1}, the next {w2}"))?;
    let t = window[0] * window[1];
    Ok(vec![typed(w1, [heads, t, t])])
}

fn norm_add(inputs: &[&Type]) -> Inferred {
    let [y, shortcut, gamma, beta] = inputs else { return Err("takes 4 inputs".into()) };
    require(y == shortcut, || format!("adds {y} to {shortcut}"))?;
    shaped(gamma, [y.shape.last()], "the scale")?;
    shaped(beta, [y.shape.last()], "the shift")?;
    let rows = Type { dtype: accumulator(y.dtype), shape: without_last(&y.shape) };
    Ok(vec![(*y).clone(), rows.clone(), rows])
}

fn split_patches(x: &Type, height: usize, width: usize) -> Inferred {
    let [b, h, w, c4] = axes(x)?;
    let fits = c4 % 4 == 0 && height.div_ceil(2) == h && width.div_ceil(2) == w;
    require(fits, || format!("{x} is not of blocks of a {height}×{width} map"))?;
    Ok(vec![typed(x, [b, height, width, c4 / 4])])
}

/// The gradients of the inputs; none for other ops.
pub fn backward(
    emit: &mut Emit<'_>,
    node: &Node,
    dy: ValueId,
) -> Result<Option<Vec<Option<ValueId>>>, GraphError> {
    let all = |values: Vec<ValueId>| Ok(Some(values.into_iter().map(Some).collect()));
    match &node.op {
        Op::WindowAttention { heads, windows } => {
            let op = Op::WindowAttentionGrad { heads: *heads, windows: *windows };
            all(emit.all(op, &[&node.inputs[..], &node.outputs, &[dy]].concat())?)
        }
        Op::PositionBias { window, pretrained } => {
            let op = Op::PositionBiasGrad { window: *window, pretrained: *pretrained };
            all(emit.all(op, &[&node.inputs[..], &[dy]].concat())?)
        }
        Op::NormAdd { drop, .. } => {
            let (y, gamma) = (node.inputs[0], node.inputs[2]);
            let inputs = [y, node.outputs[1], node.outputs[2], gamma, dy];
            let grads = emit.all(Op::NormAddGrad { drop: *drop }, &inputs)?;
            all(vec![grads[0], dy, grads[1], grads[2]])
        }
        Op::MergePatches => {
            let Shape(map) = emit.shape(node.inputs[0]);
            all(emit.all(Op::SplitPatches { height: map[1], width: map[2] }, &[dy])?)
        }
        Op::SplitPatches { .. } => all(emit.all(Op::MergePatches, &[dy])?),
        Op::Reshape { .. } => {
            let shape = emit.shape(node.inputs[0]);
            all(emit.all(Op::Reshape { shape }, &[dy])?)
        }
        _ => Ok(None),
    }
}

/// Floating-point operations; none for other ops.
pub fn flops(op: &Op, inputs: &[&Type]) -> Option<f64> {
    let first = inputs.first().map_or(0.0, |t| t.shape.count() as f64);
    let hidden =
        |w2: &Type, window: [usize; 2]| w2.shape.count() as f64 * Offsets::new(window, None).count() as f64;
    Some(match op {
        Op::WindowAttention { heads, windows } => products(inputs[0], *windows, 2.0, 14.0 * *heads as f64),
        Op::WindowAttentionGrad { heads, windows } => {
            products(inputs[0], *windows, 5.0, 18.0 * *heads as f64)
        }
        Op::PositionBias { window, .. } => 2.0 * hidden(inputs[2], *window),
        Op::PositionBiasGrad { window, .. } => 6.0 * hidden(inputs[2], *window),
        Op::NormAdd { .. } => 9.0 * first,
        Op::NormAddGrad { .. } => 14.0 * first,
        Op::MergePatches | Op::SplitPatches { .. } | Op::Reshape { .. } => 0.0,
        _ => return None,
    })
}

/// `count` products such as queries × keys over all windows, padding included, and `each` operations for every pair of tokens.
fn products(qkv: &Type, windows: Windows, count: f64, each: f64) -> f64 {
    let [b, h, w, c3] = qkv.shape.0[..] else { return 0.0 };
    let t = windows.tokens() as f64;
    let pairs = (b * windows.count([h, w])) as f64 * t * t;
    pairs * (count * 2.0 * (c3 / 3) as f64 + each)
}
