//! The rules of dense prediction: convolution, batch norm, resizing, and what moves channels about.
//!
//! Legend: B batch, h and w height and width, C channels, I and O input and output channels of a convolution.

use super::backward::Emit;
use super::shape::{Inferred, accumulator, axes, one, one_dtype, require, shaped, typed, without_last};
use crate::graph::{GraphError, Node, ValueId};
use crate::op::{Op, Window};
use crate::types::{DType, Shape, Type};
use std::ops::RangeInclusive;

/// How many inputs an op of this file takes.
pub fn arity(op: &Op) -> Option<RangeInclusive<usize>> {
    Some(match op {
        Op::Conv { bias, .. } => one(2 + usize::from(*bias)),
        Op::ConvGradX { .. } => one(2),
        Op::ConvGradW { accumulate, .. } => one(2 + usize::from(*accumulate)),
        Op::BatchNorm { .. } => one(4),
        Op::BatchNormSums { .. } => one(5),
        Op::BatchNormGrad { .. } => one(6),
        Op::RunningMoments { .. } => 2..=3,
        Op::Commit => 3..=usize::MAX,
        Op::Concat => 1..=usize::MAX,
        Op::ResizedCrossEntropy { .. } => one(3),
        Op::ResizedCrossEntropyGrad { .. } => one(5),
        _ => return None,
    })
}

/// The types of an op's outputs; none for an op of another file.
pub fn infer(op: &Op, inputs: &[&Type]) -> Option<Inferred> {
    let x = inputs.first()?;
    Some(match op {
        Op::Conv { window, bias } => conv_biased(inputs, *window, *bias),
        Op::ConvGradX { window, height, width } => conv_grad_x(inputs, *window, (*height, *width)),
        Op::ConvGradW { window, shape, .. } => conv_grad_w(inputs, *window, shape),
        Op::Moments => Ok(vec![Type::new(accumulator(x.dtype), [3, x.shape.last()])]),
        Op::JoinMoments => join_moments(x),
        Op::BatchNorm { .. } => batch_norm(inputs).map(|()| vec![(*x).clone()]),
        Op::BatchNormSums { .. } => {
            gradients_match(inputs).map(|()| vec![Type::new(accumulator(x.dtype), [2, x.shape.last()])])
        }
        Op::BatchNormGrad { .. } => gradients_match(inputs)
            .and_then(|()| shaped(inputs[5], [2, x.shape.last()], "the sums"))
            .map(|()| vec![(*x).clone()]),
        Op::RunningMoments { .. } => running_moments(inputs),
        Op::Commit => commit(inputs),
        Op::Resize { height, width, .. } | Op::ResizeGrad { height, width, .. } => resize(x, *height, *width),
        Op::Concat => concat(inputs),
        Op::Slice { start, channels } => slice(x, *start, *channels),
        Op::ResizedCrossEntropy { .. } => resized_loss(inputs).map(|()| {
            let sums = accumulator(x.dtype);
            let lse = Type { dtype: sums, shape: inputs[1].shape.clone() };
            vec![Type::new(sums, []), Type::new(sums, [4]), lse]
        }),
        Op::ResizedCrossEntropyGrad { .. } => resized_loss(inputs)
            .and_then(|()| {
                let fits = inputs[3].shape == inputs[1].shape;
                require(fits, || format!("labels are {}, but log-sum-exp {}", inputs[1], inputs[3]))
            })
            .map(|()| vec![(*x).clone()]),
        Op::Grid { height, width } => grid(x, *height, *width),
        Op::Ungrid { tokens } => ungrid(x, *tokens),
        _ => return None,
    })
}

fn conv(x: &Type, w: &Type, window: Window) -> Inferred {
    let ([b, h, wd, c], [o, kh, kw, i]) = (axes(x)?, axes(w)?);
    require(c == i, || format!("x is {x}, the weight {w}: input channels differ"))?;
    require(window.stride > 0, || "can't step by 0".into())?;
    let out = |size: usize, kernel: usize| {
        (size + 2 * window.pad).checked_sub(kernel).map(|room| room / window.stride + 1)
    };
    match (out(h, kh), out(wd, kw)) {
        (Some(h), Some(w)) => Ok(vec![typed(x, [b, h, w, o])]),
        _ => Err(format!("a {kh}×{kw} kernel is larger than the padded {h}×{wd} input")),
    }
}

fn conv_biased(inputs: &[&Type], window: Window, bias: bool) -> Inferred {
    let y = conv(inputs[0], inputs[1], window)?;
    if bias {
        shaped(inputs[2], [y[0].shape.last()], "the bias")?;
    }
    Ok(y)
}

fn conv_grad_x(inputs: &[&Type], window: Window, (height, width): (usize, usize)) -> Inferred {
    let (dy, w) = (inputs[0], inputs[1]);
    let ([b, ..], [_, _, _, i]) = (axes::<4>(dy)?, axes::<4>(w)?);
    let dx = typed(dy, [b, height, width, i]);
    require(conv(&dx, w, window)?[0] == *dy, || format!("dy {dy} doesn't come from {dx}"))?;
    Ok(vec![dx])
}

fn conv_grad_w(inputs: &[&Type], window: Window, shape: &Shape) -> Inferred {
    let (dy, x) = (inputs[0], inputs[1]);
    let dw = Type { dtype: dy.dtype, shape: shape.clone() };
    require(conv(x, &dw, window)?[0] == *dy, || format!("dy {dy} doesn't come from {x} by {dw}"))?;
    let so_far = inputs.get(2).copied();
    require(so_far.is_none_or(|sum| *sum == dw), || format!("accumulates {dw} into another type"))?;
    Ok(vec![dw])
}

fn join_moments(x: &Type) -> Inferred {
    let [rows, c] = axes(x)?;
    require(rows > 0 && rows % 3 == 0, || format!("needs three rows for each part, got {x}"))?;
    Ok(vec![typed(x, [3, c])])
}

/// x, moments, γ, β
fn batch_norm(inputs: &[&Type]) -> Result<(), String> {
    let c = inputs[0].shape.last();
    shaped(inputs[1], [3, c], "the moments")?;
    shaped(inputs[2], [c], "the scale")?;
    shaped(inputs[3], [c], "the shift")
}

/// x, moments, γ, β, dy
fn gradients_match(inputs: &[&Type]) -> Result<(), String> {
    batch_norm(inputs)?;
    require(inputs[4] == inputs[0], || format!("x is {}, dy {}", inputs[0], inputs[4]))
}

fn running_moments(inputs: &[&Type]) -> Inferred {
    let running = inputs[0];
    shaped(running, [3, running.shape.last()], "the running moments")?;
    let alike = inputs.iter().all(|t| *t == running);
    require(alike, || format!("needs moments like the running ones, {running}"))?;
    Ok(vec![running.clone()])
}

fn commit(inputs: &[&Type]) -> Inferred {
    shaped(inputs[0], [3], "control")?;
    let (before, after) = inputs[1..].split_at(inputs.len() / 2);
    require(before == after, || "needs every value as it was and as it is to be".into())?;
    Ok(before.iter().map(|t| (*t).clone()).collect())
}

fn resize(x: &Type, height: usize, width: usize) -> Inferred {
    let [b, h, w, c] = axes(x)?;
    require(h.min(w).min(height).min(width) > 0, || format!("can't resize {x} to {height}×{width}"))?;
    Ok(vec![typed(x, [b, height, width, c])])
}

/// logits, labels, weights
fn resized_loss(inputs: &[&Type]) -> Result<(), String> {
    let (logits, labels, weights) = (inputs[0], inputs[1], inputs[2]);
    let ([b, h, w, _], [samples, height, width]) = (axes(logits)?, axes(labels)?);
    let fits = labels.dtype == DType::I32 && b == samples && h.min(w).min(height).min(width) > 0;
    require(fits, || format!("logits are {logits}, but labels {labels}"))?;
    require(weights.shape == labels.shape, || format!("labels are {labels}, but weights {weights}"))
}

fn concat(inputs: &[&Type]) -> Inferred {
    one_dtype(inputs, "joins")?;
    let x = inputs[0];
    let differs = inputs.iter().find(|t| without_last(&t.shape) != without_last(&x.shape));
    require(differs.is_none(), || format!("{x} and {} differ in more than channels", inputs[1]))?;
    let channels = inputs.iter().map(|t| t.shape.last()).sum();
    Ok(vec![typed(x, x.shape.with_last(channels))])
}

fn slice(x: &Type, start: usize, channels: usize) -> Inferred {
    let end = start + channels;
    require(channels > 0 && end <= x.shape.last(), || format!("{x} has no channels {start} to {end}"))?;
    Ok(vec![typed(x, x.shape.with_last(channels))])
}

fn grid(x: &Type, height: usize, width: usize) -> Inferred {
    let [b, t, c] = axes(x)?;
    require(t >= height * width, || format!("{t} tokens are too few for a grid of {height}×{width}"))?;
    Ok(vec![typed(x, [b, height, width, c])])
}

fn ungrid(x: &Type, tokens: usize) -> Inferred {
    let [b, h, w, c] = axes(x)?;
    require(tokens >= h * w, || format!("{tokens} tokens are too few for {x}"))?;
    Ok(vec![typed(x, [b, tokens, c])])
}

/// Floating-point operations; none for an op of another file.
pub fn flops(op: &Op, inputs: &[&Type], outputs: &[&Type]) -> Option<f64> {
    let count = |t: &Type| t.shape.count() as f64;
    // Multiply-adds for each element of y: the weight of one output channel.
    let of_channel = |w: &Shape| w.count() as f64 / w.0[0] as f64;
    Some(match op {
        Op::Conv { .. } => 2.0 * count(outputs[0]) * of_channel(&inputs[1].shape),
        Op::ConvGradX { .. } => 2.0 * count(inputs[0]) * of_channel(&inputs[1].shape),
        Op::ConvGradW { shape, .. } => 2.0 * count(inputs[0]) * of_channel(shape),
        Op::Moments => 4.0 * count(inputs[0]),
        Op::BatchNorm { .. } => 4.0 * count(inputs[0]),
        Op::BatchNormSums { .. } => 6.0 * count(inputs[0]),
        Op::BatchNormGrad { .. } => 8.0 * count(inputs[0]),
        // Rows first, then columns: a few taps each.
        Op::Resize { .. } | Op::ResizeGrad { .. } => 4.0 * count(inputs[0]).max(count(outputs[0])),
        // For each class of a pixel: four taps, and an exponential.
        Op::ResizedCrossEntropy { .. } => 22.0 * count(inputs[1]) * inputs[0].shape.last() as f64,
        Op::ResizedCrossEntropyGrad { .. } => 26.0 * count(inputs[1]) * inputs[0].shape.last() as f64,
        Op::Concat | Op::Slice { .. } | Op::Grid { .. } | Op::Ungrid { .. } | Op::Commit => 0.0,
        _ => return None,
    })
}

/// The gradients of a node's inputs from that of its result; none for an op of another file.
pub(super) fn backward(
    emit: &mut Emit<'_>,
    node: &Node,
    dy: ValueId,
    wants: &[bool],
) -> Result<Option<Vec<Option<ValueId>>>, GraphError> {
    let mut grads = vec![None; node.inputs.len()];
    let x = node.inputs[0];
    match &node.op {
        Op::Conv { window, .. } => conv_backward(emit, node, (*window, dy), wants, &mut grads)?,
        Op::BatchNorm { eps, relu, running: false } => {
            let (eps, relu) = (*eps, *relu);
            let inputs = [&node.inputs[..], &[dy]].concat();
            let sums = emit.one(Op::BatchNormSums { eps, relu }, &inputs)?;
            let c = emit.shape(x).last();
            // The gradients of β and γ are this rank's own sums; what the gradient of x takes may be those of all.
            let shapes = vec![Shape::from([c]), Shape::from([c])];
            let own = emit.all(Op::Unpack { shapes, to: None, over: false }, &[sums])?;
            (grads[2], grads[3]) = (Some(own[1]), Some(own[0]));
            if wants[0] {
                let inputs = [&inputs[..], &[sums]].concat();
                grads[0] = Some(emit.one(Op::BatchNormGrad { eps, relu }, &inputs)?);
            }
        }
        Op::Resize { sampling, .. } => {
            let Shape(axes) = emit.shape(x);
            let op = Op::ResizeGrad { height: axes[1], width: axes[2], sampling: *sampling };
            grads[0] = Some(emit.one(op, &[dy])?);
        }
        Op::Concat => {
            let mut start = 0;
            for (i, part) in node.inputs.iter().enumerate() {
                let channels = emit.shape(*part).last();
                if wants[i] {
                    grads[i] = Some(emit.one(Op::Slice { start, channels }, &[dy])?);
                }
                start += channels;
            }
        }
        Op::ResizedCrossEntropy { smoothing } => {
            let inputs = [&node.inputs[..], &[node.outputs[2], dy]].concat();
            grads[0] = Some(emit.one(Op::ResizedCrossEntropyGrad { smoothing: *smoothing }, &inputs)?);
        }
        Op::Grid { .. } => {
            let tokens = emit.shape(x).0[1];
            grads[0] = Some(emit.one(Op::Ungrid { tokens }, &[dy])?);
        }
        Op::Ungrid { .. } => {
            let Shape(axes) = emit.shape(x);
            grads[0] = Some(emit.one(Op::Grid { height: axes[1], width: axes[2] }, &[dy])?);
        }
        _ => return Ok(None),
    }
    Ok(Some(grads))
}

fn conv_backward(
    emit: &mut Emit<'_>,
    node: &Node,
    (window, dy): (Window, ValueId),
    wants: &[bool],
    grads: &mut [Option<ValueId>],
) -> Result<(), GraphError> {
    let (x, w) = (node.inputs[0], node.inputs[1]);
    if wants[1] {
        let op = Op::ConvGradW { window, shape: emit.shape(w), accumulate: false };
        grads[1] = Some(emit.one(op, &[dy, x])?);
    }
    if wants.get(2) == Some(&true) {
        grads[2] = Some(emit.one(Op::ColumnSum { accumulate: false }, &[dy])?);
    }
    if wants[0] {
        let Shape(axes) = emit.shape(x);
        let op = Op::ConvGradX { window, height: axes[1], width: axes[2] };
        grads[0] = Some(emit.one(op, &[dy, w])?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::op::{Op, Sampling, Window};
    use crate::rules::shape;
    use crate::types::{DType, Type};

    fn f32s<const N: usize>(shape: [usize; N]) -> Type {
        Type::new(DType::F32, shape)
    }

    fn refused(op: Op, inputs: &[&Type]) -> String {
        shape::infer(&op, inputs).unwrap_err()
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_shapes() {
        let (x, w) = (f32s([2, 8, 6, 4]), f32s([16, 3, 3, 4]));
        let conv = |stride, pad| Op::Conv { window: Window { stride, pad }, bias: false };
        assert_eq!(shape::infer(&conv(1, 1), &[&x, &w]).unwrap(), [f32s([2, 8, 6, 16])]);
        assert_eq!(shape::infer(&conv(2, 1), &[&x, &w]).unwrap(), [f32s([2, 4, 3, 16])]);
        assert_eq!(refused(conv(0, 1), &[&x, &w]), "can't step by 0");
        let wide = f32s([16, 9, 9, 4]);
        assert_eq!(refused(conv(1, 0), &[&x, &wide]), "a 9×9 kernel is larger than the padded 8×6 input");
        let other = f32s([16, 3, 3, 5]);
        let differ = "x is f32[2,8,6,4], the weight f32[16,3,3,5]: input channels differ";
        assert_eq!(refused(conv(1, 1), &[&x, &other]), differ);
        let biased = Op::Conv { window: Window { stride: 1, pad: 1 }, bias: true };
        let error = refused(biased, &[&x, &w, &f32s([4])]);
        assert_eq!(error, "needs the bias of shape [16], got f32[4]");
    }

    #[test]
    fn channels_join_and_part() {
        let (a, b) = (f32s([2, 3, 3, 4]), f32s([2, 3, 3, 6]));
        assert_eq!(shape::infer(&Op::Concat, &[&a, &b]).unwrap(), [f32s([2, 3, 3, 10])]);
        let small = f32s([2, 3, 2, 6]);
        let differ = "f32[2,3,3,4] and f32[2,3,2,6] differ in more than channels";
        assert_eq!(refused(Op::Concat, &[&a, &small]), differ);
        let beyond = "f32[2,3,3,6] has no channels 4 to 8";
        assert_eq!(refused(Op::Slice { start: 4, channels: 4 }, &[&b]), beyond);
        let none = Op::Resize { height: 0, width: 2, sampling: Sampling::Bilinear };
        assert_eq!(refused(none, &[&a]), "can't resize f32[2,3,3,4] to 0×2");
        let few = "9 tokens are too few for a grid of 3×4";
        assert_eq!(refused(Op::Grid { height: 3, width: 4 }, &[&f32s([2, 9, 4])]), few);
    }

    #[test]
    fn a_commit_has_each_value_twice() {
        let (control, a, b) = (f32s([3]), f32s([3, 4]), f32s([3, 5]));
        assert_eq!(shape::infer(&Op::Commit, &[&control, &a, &b, &a, &b]).unwrap(), [a.clone(), b.clone()]);
        let error = "needs every value as it was and as it is to be";
        assert_eq!(refused(Op::Commit, &[&control, &a, &b]), error);
        assert_eq!(refused(Op::Commit, &[&control, &a, &b, &a]), error);
    }
}
