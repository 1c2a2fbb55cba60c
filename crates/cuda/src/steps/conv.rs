//! Convolutions: by cuDNN, or as matmuls where the kernel is 1×1.
//!
//! cuDNN's operands and result are of one type, so results of another go to scratch memory first: those of half precision that are to be f32,
//! such as gradients of weights, and those that are added to others.

use super::rows::{self, launch, pointer, typed, vector_of};
use super::{linear, rows::THREADS};
use crate::action::{
    Action, Address, Arg, ConvOutput, Convolution, Images, Kernel, Operand, Source, StepContext,
};
use crate::error::CudaError;
use graph::op::Window;
use graph::{DType, Op, Shape, Type};

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match cx.op {
        Op::Conv { window, bias } => forward(cx, *window, *bias),
        Op::ConvGradX { window, .. } => grad_x(cx, *window),
        Op::ConvGradW { window, accumulate, .. } => grad_w(cx, *window, *accumulate),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes of scratch memory for a result of another type.
pub fn scratch(op: &Op, inputs: &[&Type], outputs: &[&Type]) -> usize {
    let (from, made) = (inputs[0].dtype, outputs[0]);
    let (window, weight, adds) = match op {
        Op::Conv { window, .. } | Op::ConvGradX { window, .. } => (*window, &inputs[1].shape, false),
        Op::ConvGradW { window, shape, accumulate } => (*window, shape, *accumulate),
        _ => return 0,
    };
    let aside = !is_point(window, weight) && (adds || made.dtype != from);
    if aside { made.shape.count() * from.bytes() } else { 0 }
}

/// Tells whether it is a linear layer.
fn is_point(window: Window, weight: &Shape) -> bool {
    weight.0[1..3] == [1, 1] && window == Window { stride: 1, pad: 0 }
}

fn forward(cx: &StepContext<'_>, window: Window, bias: bool) -> Result<Vec<Action>, CudaError> {
    let (x, weight, y) = (cx.input(0), cx.input(1), cx.output(0));
    if is_point(window, &weight.shape) {
        return linear::forward(cx, bias, false);
    }
    let at = if y.dtype == x.dtype { y.address } else { cx.scratch };
    let conv = convolution(cx, ConvOutput::Y, [x, weight, y], window)?.with_result_at(at);
    let mut actions = vec![Action::Convolution(conv)];
    if bias || at != y.address {
        let made = Operand { address: at, dtype: x.dtype, shape: y.shape.clone() };
        actions.push(add_bias(cx, &made, bias.then(|| cx.input(2)), y)?);
    }
    Ok(actions)
}

fn grad_x(cx: &StepContext<'_>, window: Window) -> Result<Vec<Action>, CudaError> {
    let (dy, weight, dx) = (cx.input(0), cx.input(1), cx.output(0));
    if is_point(window, &weight.shape) {
        return linear::grad_x(cx, false);
    }
    let at = if dx.dtype == dy.dtype { dx.address } else { cx.scratch };
    let conv = convolution(cx, ConvOutput::X, [dx, weight, dy], window)?.with_result_at(at);
    let mut actions = vec![Action::Convolution(conv)];
    if at != dx.address {
        actions.extend(widened(cx, at, dy.dtype, dx)?);
    }
    Ok(actions)
}

/// Weight gradient, or the old value plus that. cuDNN has no f32 gradient of half precision: each is rounded to its type once, as in other
/// programs, but sums of several are f32.
fn grad_w(cx: &StepContext<'_>, window: Window, adds: bool) -> Result<Vec<Action>, CudaError> {
    let (dy, x, dw) = (cx.input(0), cx.input(1), cx.output(0));
    if is_point(window, &dw.shape) {
        return linear::grad_w(cx, adds);
    }
    let at = if dw.dtype == dy.dtype && !adds { dw.address } else { cx.scratch };
    let conv = convolution(cx, ConvOutput::Weight, [x, dw, dy], window)?.with_result_at(at);
    let mut actions = vec![Action::Convolution(conv)];
    if adds {
        let made = Operand { address: at, dtype: dy.dtype, shape: dw.shape.clone() };
        actions.push(rows::add(cx, cx.input(2), &made, dw)?);
    } else if at != dw.address {
        actions.extend(widened(cx, at, dy.dtype, dw)?);
    }
    Ok(actions)
}

/// x, weight and y of a convolution, of which the two that are read must be of one type and the third of the same or f32.
fn convolution(
    cx: &StepContext<'_>,
    made: ConvOutput,
    [x, weight, y]: [&Operand; 3],
    window: Window,
) -> Result<Convolution, CudaError> {
    let (read, result) = match made {
        ConvOutput::Y => ([x, weight], y),
        ConvOutput::X => ([y, weight], x),
        ConvOutput::Weight => ([x, y], weight),
    };
    let dtype = read[0].dtype;
    typed(cx, read[0])?;
    if read[1].dtype != dtype || (result.dtype != dtype && result.dtype != DType::F32) {
        return Err(cx.no_kernel());
    }
    let images = |operand: &Operand| match operand.shape.0[..] {
        [b, h, w, c] => Ok(Images { address: operand.address, axes: [b, h, w, c] }),
        _ => Err(cx.no_kernel()),
    };
    let [_, kh, kw, _] = images(weight)?.axes;
    let (x, weight, y) = (images(x)?, weight.address, images(y)?);
    Ok(Convolution { made, x, weight, kernel: [kh, kw], y, window, dtype, tf32: cx.tf32 })
}

/// Converts the result in scratch memory to the result's type.
fn widened(
    cx: &StepContext<'_>,
    from: Address,
    dtype: DType,
    to: &Operand,
) -> Result<Vec<Action>, CudaError> {
    rows::convert(cx, (from, dtype), (to.address, to.dtype), to.shape.count())
}

/// y = x + bias, which may be in place.
fn add_bias(
    cx: &StepContext<'_>,
    x: &Operand,
    bias: Option<&Operand>,
    y: &Operand,
) -> Result<Action, CudaError> {
    let (rows, columns) = (y.shape.rows(), y.shape.last());
    let bias_type = bias.map_or(Ok("float"), |bias| typed(cx, bias))?;
    let most = vector_of(&[x.dtype, y.dtype, bias.map_or(y.dtype, |bias| bias.dtype)]);
    let vector = if columns.is_multiple_of(most) { most } else { 1 };
    let name = format!("add_bias<{}, {bias_type}, {}, {vector}>", typed(cx, x)?, typed(cx, y)?);
    let bias = Arg::Pointer(bias.map_or(0, |bias| bias.address));
    let args = vec![pointer(x), bias, pointer(y), Arg::I64(rows as i64), Arg::I32(columns as i32)];
    let grid = [(rows * columns).div_ceil(THREADS * vector), 1, 1];
    Ok(launch(Source::Channels, name, grid, THREADS, args))
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let names =
        ["float, float, float, 4", "bf16, bf16, bf16, 8", "f16, f16, float, 4", "bf16, float, float, 1"];
    let kernel = |types: &str| (Kernel::new(Source::Channels, format!("add_bias<{types}>")), 75);
    names.map(kernel).into()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const PAD: Window = Window { stride: 1, pad: 1 };
    const INPUT: Address = 1 << 32;
    const OUTPUT: Address = 2 << 32;

    fn made(actions: &[Action]) -> Convolution {
        match actions {
            [Action::Convolution(conv), ..] => *conv,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_convolution_is_one_call() {
        let op = Op::Conv { window: PAD, bias: false };
        let inputs = ["bf16[8,128,128,2048]", "bf16[512,3,3,2048]"];
        let output = ["bf16[8,128,128,512]"];
        let actions = step(op.clone(), &inputs, &output).unwrap();
        let conv = made(&actions);
        assert_eq!((actions.len(), conv.made, conv.kernel), (1, ConvOutput::Y, [3, 3]));
        assert_eq!((conv.x.axes, conv.y.axes), ([8, 128, 128, 2048], [8, 128, 128, 512]));
        assert_eq!(conv.result(), (OUTPUT, 8 * 128 * 128 * 512 * 2));
        let types = |list: &[&str]| list.iter().map(|t| t.parse().unwrap()).collect::<Vec<Type>>();
        let (inputs, output) = (types(&inputs), types(&output));
        assert_eq!(scratch(&op, &inputs.iter().collect::<Vec<_>>(), &[&output[0]]), 0);
        assert!(step(op, &["bf16[2,8,8,8]", "f32[8,3,3,8]"], &["bf16[2,8,8,8]"]).is_err());
    }

    #[test]
    fn one_pixel_is_a_matmul() {
        let point = Window { stride: 1, pad: 0 };
        let (x, w, y) = ("bf16[2,4,4,8]", "bf16[16,1,1,8]", "bf16[2,4,4,16]");
        let forward = step(Op::Conv { window: point, bias: false }, &[x, w], &[y]).unwrap();
        let grad_x = Op::ConvGradX { window: point, height: 4, width: 4 };
        let grad_x = step(grad_x, &[y, w], &[x]).unwrap();
        let shape = Shape::from([16, 1, 1, 8]);
        let grad_w = Op::ConvGradW { window: point, shape, accumulate: false };
        let grad_w = step(grad_w, &[y, x], &["f32[16,1,1,8]"]).unwrap();
        for actions in [forward, grad_x, grad_w] {
            assert!(matches!(actions[..], [Action::Matmul(_)]), "{actions:?}");
        }
        let stepping = Op::Conv { window: Window { stride: 2, pad: 0 }, bias: false };
        let actions = step(stepping, &[x, w], &["bf16[2,2,2,16]"]).unwrap();
        assert_eq!(made(&actions).window.stride, 2);
    }

    #[test]
    fn a_bias_and_another_type_are_added_behind() {
        let op = Op::Conv { window: PAD, bias: true };
        let inputs = ["bf16[2,4,4,8]", "bf16[16,3,3,8]", "bf16[16]"];
        let actions = step(op.clone(), &inputs, &["bf16[2,4,4,16]"]).unwrap();
        assert_eq!(names(&actions), ["add_bias<bf16, bf16, bf16, 8>"]);
        assert_eq!(launches(&actions)[0].args[0], launches(&actions)[0].args[2]);
        let actions = step(op, &inputs, &["f32[2,4,4,16]"]).unwrap();
        assert_eq!(made(&actions).result(), (SCRATCH, 2 * 4 * 4 * 16 * 2));
        assert_eq!(names(&actions), ["add_bias<bf16, bf16, float, 4>"]);
    }

    #[test]
    fn gradients_of_weights_are_summed_in_f32() {
        let shape = Shape::from([16, 3, 3, 8]);
        let op = |accumulate| Op::ConvGradW { window: PAD, shape: shape.clone(), accumulate };
        let (dy, x, dw) = ("bf16[2,4,4,16]", "bf16[2,4,4,8]", "f32[16,3,3,8]");
        let anew = step(op(false), &[dy, x], &[dw]).unwrap();
        assert_eq!(made(&anew).result(), (SCRATCH, 16 * 9 * 8 * 2));
        assert_eq!(names(&anew), ["cast<bf16, float, 4>"]);
        let adds = step(op(true), &[dy, x, dw], &[dw]).unwrap();
        assert_eq!(names(&adds), ["add<float, bf16, float>"]);
        assert_eq!(launches(&adds)[0].args[0], Arg::Pointer(INPUT + (2 << 20)));
        // In f32 the first is made where it belongs.
        let single = ["f32[2,4,4,16]", "f32[2,4,4,8]", dw];
        let anew = step(op(false), &single[..2], &[dw]).unwrap();
        assert_eq!((anew.len(), made(&anew).result().0), (1, OUTPUT));
        assert_eq!(made(&step(op(true), &single, &[dw]).unwrap()).result().0, SCRATCH);
        let types: Vec<Type> = single.iter().map(|t| t.parse().unwrap()).collect();
        let types: Vec<&Type> = types.iter().collect();
        assert_eq!(scratch(&op(true), &types, &[types[2]]), 16 * 9 * 8 * 4);
        assert_eq!(scratch(&op(false), &types[..2], &[types[2]]), 0);
    }
}
