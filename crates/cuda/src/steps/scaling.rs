//! LayerScale and SwiGLU, and their gradients.
//!
//! Sums over rows are tiled as those of biases. Legend: M rows, C columns; a gated row has 2H columns.

use super::rows::{ColumnTiling, THREADS, launch, pointer, singles, typed};
use crate::action::{Action, Address, Arg, Kernel, Operand, PartialSum, Source, StepContext};
use crate::error::CudaError;
use graph::{DType, Op, Shape};

/// Vectors that a thread of LayerScale has.
const VECTORS: usize = 2;
/// Rows that a thread reads before it works on them.
const AT_ONCE: usize = 2;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::LayerScale => layer_scale(cx),
        Op::LayerScaleGrad { sum } => layer_scale_grad(cx, sum),
        Op::SwiGlu => swiglu(cx),
        Op::SwiGluGrad { sum } => swiglu_grad(cx, sum),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes for the partial sums of a step: of both parts of a SwiGLU, or of LayerScale's one or two sums.
pub fn parts(op: &Op, inputs: &[Operand]) -> usize {
    match op {
        Op::LayerScaleGrad { sum } => (1 + usize::from(*sum)) * cut_bytes(&inputs[0].shape),
        Op::SwiGluGrad { sum: true } => 2 * cut_bytes(&inputs[1].shape),
        _ => 0,
    }
}

fn cut_bytes(shape: &Shape) -> usize {
    ColumnTiling::of(shape).bytes(shape.last())
}

/// Columns that a thread has at once, of operands of these types.
fn vector(shape: &Shape, dtypes: &[DType]) -> usize {
    dtypes.iter().map(|dtype| ColumnTiling::vector(shape, *dtype)).min().unwrap_or(1)
}

fn layer_scale(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    singles(cx, &cx.inputs[1..])?;
    if x.dtype != y.dtype {
        return Err(cx.no_kernel());
    }
    let (columns, vector) = (x.shape.last(), vector(&x.shape, &[x.dtype]));
    let vectors = x.shape.count() / vector;
    let name = format!("layer_scale<{}, {columns}, {vector}>", typed(cx, x)?);
    let args = vec![pointer(x), pointer(cx.input(1)), pointer(y), Arg::I64(vectors as i64)];
    let grid = [vectors.div_ceil(VECTORS * THREADS), 1, 1];
    Ok(vec![launch(Source::Scaling, name, grid, THREADS, args)])
}

fn layer_scale_grad(cx: &StepContext<'_>, sum: bool) -> Result<Vec<Action>, CudaError> {
    let (x, dy, dx) = (cx.input(0), cx.input(2), cx.output(0));
    singles(cx, &cx.inputs[1..2])?;
    singles(cx, &cx.outputs[1..])?;
    if x.dtype != dx.dtype {
        return Err(cx.no_kernel());
    }
    let (rows, columns, cut) = (x.shape.rows(), x.shape.last(), ColumnTiling::of(&x.shape));
    let vector = vector(&x.shape, &[x.dtype, dy.dtype]);
    let types = [typed(cx, x)?, typed(cx, dy)?].join(", ");
    let name = format!("layer_scale_grad<{types}, {}, {sum}>", cut.arguments(vector, AT_ONCE));
    let sums: Vec<PartialSum> = cx.outputs[1..]
        .iter()
        .enumerate()
        .map(|(i, out)| PartialSum {
            parts: cx.parts + (i * cut.bytes(columns)) as Address,
            rows: cut.parts,
            stride: columns,
            columns,
            start: None,
            out: out.address,
        })
        .collect();
    // Where one part is all, it is the sum.
    let to = |i: usize| sums.get(i).map_or(0, |sum| if cut.parts == 1 { sum.out } else { sum.parts });
    let mut args = vec![pointer(x), pointer(cx.input(1)), pointer(dy), pointer(dx)];
    args.extend([rows, columns, cut.per].map(|n| Arg::I32(n as i32)));
    args.extend([0, 1].map(|i| Arg::Pointer(to(i))));
    let mut actions = vec![launch(Source::Scaling, name, [cut.across, cut.parts, 1], THREADS, args)];
    actions.extend(sums.into_iter().filter(|_| cut.parts > 1).map(Action::Sum));
    Ok(actions)
}

fn swiglu(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    if x.dtype != y.dtype {
        return Err(cx.no_kernel());
    }
    let (half, vector) = (y.shape.last(), vector(&y.shape, &[y.dtype]));
    let vectors = y.shape.count() / vector;
    let name = format!("swiglu<{}, {half}, {vector}>", typed(cx, x)?);
    let args = vec![pointer(x), pointer(y), Arg::I64(vectors as i64)];
    Ok(vec![launch(Source::Scaling, name, [vectors.div_ceil(THREADS), 1, 1], THREADS, args)])
}

fn swiglu_grad(cx: &StepContext<'_>, sum: bool) -> Result<Vec<Action>, CudaError> {
    let (x, dy, dx) = (cx.input(0), cx.input(1), cx.output(0));
    singles(cx, &cx.outputs[1..])?;
    if x.dtype != dx.dtype || dy.dtype != dx.dtype {
        return Err(cx.no_kernel());
    }
    let (rows, half, cut) = (dy.shape.rows(), dy.shape.last(), ColumnTiling::of(&dy.shape));
    let vector = vector(&dy.shape, &[dy.dtype]);
    let name = format!("swiglu_grad<{}, {}, {sum}>", typed(cx, x)?, cut.arguments(vector, AT_ONCE));
    let out = cx.outputs.get(1).map_or(0, |out| out.address);
    let whole = cut.parts == 1;
    let mut args = vec![pointer(x), pointer(dy), pointer(dx)];
    args.extend([rows, half, cut.per].map(|n| Arg::I32(n as i32)));
    args.push(Arg::Pointer(if whole || !sum { out } else { cx.parts }));
    let mut actions = vec![launch(Source::Scaling, name, [cut.across, cut.parts, 1], THREADS, args)];
    if sum && !whole {
        let (parts, rows, columns) = (cx.parts, cut.parts, 2 * half);
        actions.push(Action::Sum(PartialSum { parts, rows, stride: columns, columns, start: None, out }));
    }
    Ok(actions)
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let names = [
        "layer_scale<float, 384, 4>",
        "layer_scale<bf16, 1536, 8>",
        "layer_scale<f16, 10, 1>",
        "layer_scale_grad<float, float, 4, 32, 2, true>",
        "layer_scale_grad<bf16, float, 4, 32, 2, true>",
        "layer_scale_grad<bf16, bf16, 8, 16, 2, false>",
        "layer_scale_grad<f16, f16, 1, 32, 2, true>",
        "swiglu<float, 24, 4>",
        "swiglu<bf16, 4096, 8>",
        "swiglu<f16, 10, 1>",
        "swiglu_grad<float, 4, 32, 2, true>",
        "swiglu_grad<bf16, 8, 32, 2, true>",
        "swiglu_grad<f16, 1, 8, 2, false>",
    ];
    names.into_iter().map(|name| (Kernel::new(Source::Scaling, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn sums_of_layer_scale_follow_each_other() {
        let inputs = ["bf16[128,197,384]", "f32[384]", "f32[128,197,384]"];
        let outputs = ["bf16[128,197,384]", "f32[384]", "f32[384]"];
        let op = Op::LayerScaleGrad { sum: true };
        let actions = step(op.clone(), &inputs, &outputs).unwrap();
        let [Action::Launch(_), Action::Sum(gamma), Action::Sum(sum)] = actions[..] else { panic!() };
        assert_eq!(names(&actions), ["layer_scale_grad<bf16, float, 4, 32, 2, true>"]);
        assert_eq!(sum.parts, gamma.parts + (4 * gamma.rows * 384) as Address);
        assert_eq!(parts(&op, &operands(0, &inputs)), 2 * 4 * gamma.rows * 384);
        // Few rows are one part, which is the sum itself.
        let (few, out) = (["f32[2,3,16]", "f32[16]", "f32[2,3,16]"], ["f32[2,3,16]", "f32[16]"]);
        let actions = step(Op::LayerScaleGrad { sum: false }, &few, &out).unwrap();
        assert_eq!(actions.len(), 1);
        let to = launches(&actions)[0].args[7..].to_vec();
        assert_eq!(to, [Arg::Pointer((2 << 32) + (1 << 20)), Arg::Pointer(0)]);
        // The branch and its gradient are of one type.
        assert!(step(op, &inputs, &["f32[128,197,384]", "f32[384]", "f32[384]"]).is_err());
    }

    #[test]
    fn both_parts_of_a_gate_are_summed_side_by_side() {
        let (inputs, outputs) =
            (["bf16[64,257,8192]", "bf16[64,257,4096]"], ["bf16[64,257,8192]", "f32[8192]"]);
        let op = Op::SwiGluGrad { sum: true };
        let actions = step(op.clone(), &inputs, &outputs).unwrap();
        let [Action::Launch(_), Action::Sum(sum)] = actions[..] else { panic!() };
        assert_eq!((sum.columns, sum.stride), (8192, 8192));
        assert_eq!(parts(&op, &operands(0, &inputs)), 4 * sum.rows * 8192);
        let actions = step(Op::SwiGluGrad { sum: false }, &inputs, &outputs[..1]).unwrap();
        assert_eq!((actions.len(), &launches(&actions)[0].args[6]), (1, &Arg::Pointer(0)));
        let forward = step(Op::SwiGlu, &["f32[2,3,20]"], &["f32[2,3,10]"]).unwrap();
        assert_eq!(names(&forward), ["swiglu<float, 10, 1>"]);
        assert_eq!(launches(&forward)[0].args[2], Arg::I64(60));
    }
}
