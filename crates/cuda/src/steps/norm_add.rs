//! The residual after a norm, with stochastic depth, and its gradient.
//!
//! Rows and sums over them are tiled as those of layer norms. Legend: M rows, C columns.

use super::rows::{FORWARD, THREADS, launch, norm_parts, norm_rows, pointer, singles, typed};
use crate::action::{Action, Address, Arg, Kernel, Operand, PartialSum, Source, StepContext};
use crate::error::CudaError;
use graph::op::PathDrop;
use graph::random::drop_threshold;
use graph::{DType, Op, Shape};

/// Columns that a row can have: static shared memory holds it beside the sums of warps.
const COLUMNS: usize = 12_000;
/// Sums over rows that the backward pass makes: dγ and dβ.
const SUMS: usize = 2;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    if cx.input(0).shape.last() > COLUMNS {
        return Err(cx.no_kernel());
    }
    match *cx.op {
        Op::NormAdd { eps, drop, half } => forward(cx, eps, drop, half),
        Op::NormAddGrad { drop } => gradient(cx, drop),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes for the partial sums of the gradient.
pub fn parts(inputs: &[Operand]) -> usize {
    let shape = &inputs[0].shape;
    4 * norm_parts(shape) * SUMS * shape.last()
}

/// Last arguments of both kernels: header, rows of a sample, site, threshold, factor of a kept sample's norm.
fn drop_args(cx: &StepContext<'_>, drop: Option<PathDrop>, shape: &Shape) -> [Arg; 5] {
    let samples = shape.0.first().copied().unwrap_or(1).max(1);
    let sample_rows = Arg::I32((shape.rows() / samples).max(1) as i32);
    let (site, threshold, scale) = match drop {
        Some(PathDrop { rate, site }) => (site, drop_threshold(rate), (1.0 / (1.0 - rate)) as f32),
        None => (0, 0, 1.0),
    };
    [Arg::Pointer(cx.header), sample_rows, Arg::U32(site), Arg::U32(threshold), Arg::F32(scale)]
}

fn forward(
    cx: &StepContext<'_>,
    eps: f64,
    drop: Option<PathDrop>,
    half: Option<DType>,
) -> Result<Vec<Action>, CudaError> {
    let (y, shortcut, out) = (cx.input(0), cx.input(1), cx.output(0));
    let copy = if half.is_some() { cx.output(3) } else { out };
    singles(cx, &cx.inputs[2..])?;
    singles(cx, &cx.outputs[1..3])?;
    let (rows, columns) = (y.shape.rows(), y.shape.last());
    let types = [typed(cx, y)?, typed(cx, shortcut)?, typed(cx, out)?, typed(cx, copy)?].join(", ");
    let name = format!("norm_add<{types}, {columns}, {}, {}>", drop.is_some(), half.is_some());
    let mut args = Vec::from([0, 1, 2, 3].map(|i| pointer(cx.input(i))));
    args.extend([out, copy, cx.output(1), cx.output(2)].map(pointer));
    args.extend([Arg::I32(rows as i32), Arg::F32(eps as f32)]);
    args.extend(drop_args(cx, drop, &y.shape));
    let grid = [rows.div_ceil(norm_rows(columns, FORWARD)), 1, 1];
    Ok(vec![launch(Source::NormAdd, name, grid, THREADS, args)])
}

fn gradient(cx: &StepContext<'_>, drop: Option<PathDrop>) -> Result<Vec<Action>, CudaError> {
    let (y, dout, dy) = (cx.input(0), cx.input(4), cx.output(0));
    singles(cx, &cx.inputs[1..4])?;
    singles(cx, &cx.outputs[1..])?;
    if dy.dtype != y.dtype {
        return Err(cx.no_kernel());
    }
    let (rows, columns, parts) = (y.shape.rows(), y.shape.last(), norm_parts(&y.shape));
    let types = [typed(cx, y)?, typed(cx, dout)?].join(", ");
    let name = format!("norm_add_grad<{types}, {columns}, {}>", drop.is_some());
    let mut args = Vec::from([0, 1, 2, 3, 4].map(|i| pointer(cx.input(i))));
    args.extend([pointer(dy), Arg::Pointer(cx.parts), Arg::I32(rows as i32)]);
    args.extend(drop_args(cx, drop, &y.shape));
    let mut actions = vec![launch(Source::NormAdd, name, [parts, 1, 1], THREADS, args)];
    actions.extend(cx.outputs[1..].iter().enumerate().map(|(i, out)| {
        let (first, stride) = (cx.parts + 4 * (i * columns) as Address, SUMS * columns);
        Action::Sum(PartialSum { parts: first, rows: parts, stride, columns, start: None, out: out.address })
    }));
    Ok(actions)
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let names = [
        "norm_add<float, float, float, float, 96, false, false>",
        "norm_add<bf16, float, float, bf16, 1024, true, true>",
        "norm_add<f16, f16, f16, f16, 10, true, false>",
        "norm_add_grad<float, float, 96, false>",
        "norm_add_grad<bf16, float, 1024, true>",
        "norm_add_grad<f16, f16, 10, true>",
    ];
    names.into_iter().map(|name| (Kernel::new(Source::NormAdd, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn the_stream_may_be_of_another_type_and_written_twice() {
        let drop = Some(PathDrop { rate: 0.25, site: 3 });
        let op = Op::NormAdd { eps: 1e-5, drop, half: Some(DType::Bf16) };
        let inputs = ["bf16[2,8,8,96]", "bf16[2,8,8,96]", "f32[96]", "f32[96]"];
        let outputs = ["f32[2,8,8,96]", "f32[2,8,8]", "f32[2,8,8]", "bf16[2,8,8,96]"];
        let actions = step(op, &inputs, &outputs).unwrap();
        assert_eq!(names(&actions), ["norm_add<bf16, bf16, float, bf16, 96, true, true>"]);
        let args = &launches(&actions)[0].args;
        assert_eq!(args[5], Arg::Pointer((2 << 32) + (3 << 20)));
        // 64 rows a sample; a quarter of the samples left out.
        let draw = [Arg::I32(64), Arg::U32(3), Arg::U32(1 << 30), Arg::F32(1.0 / 0.75)];
        assert_eq!(args[11..], draw);
    }

    #[test]
    fn sums_of_the_gradient_lie_side_by_side() {
        let inputs = ["bf16[2,8,8,96]", "f32[2,8,8]", "f32[2,8,8]", "f32[96]", "f32[2,8,8,96]"];
        let outputs = ["bf16[2,8,8,96]", "f32[96]", "f32[96]"];
        let op = Op::NormAddGrad { drop: None };
        let actions = step(op.clone(), &inputs, &outputs).unwrap();
        let [Action::Launch(_), Action::Sum(gamma), Action::Sum(beta)] = actions[..] else { panic!() };
        assert_eq!(
            (gamma.rows, gamma.stride, gamma.columns),
            (launches(&actions)[0].grid[0] as usize, 192, 96)
        );
        assert_eq!(beta.parts, gamma.parts + 4 * 96);
        assert_eq!(parts(&operands(0, &inputs)), 4 * gamma.rows * 192);
        // The branch and its gradient are of one type.
        assert!(step(op, &inputs, &["f32[2,8,8,96]", "f32[96]", "f32[96]"]).is_err());
    }
}
