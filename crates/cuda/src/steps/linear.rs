//! Linear layers: matmuls with a bias as epilogue; GELU and its gradient are separate kernels, except on Hopper.
//!
//! Legend: M rows of x, I and O the inner and outer width. Weights of more axes are seen as first axis × rest.

use super::{hopper, rows};
use crate::action::{Action, Epilogue, Matmul, Matrix, Operand, StepContext};
use crate::error::CudaError;
use graph::{DType, Op};

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match cx.op {
        Op::Linear { bias, gelu } => forward(cx, *bias, *gelu),
        Op::LinearGradX { gelu } => grad_x(cx, *gelu),
        Op::LinearGradW { accumulate, .. } => grad_w(cx, *accumulate),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes for the partial sums of an input gradient that goes through a GELU.
pub fn parts(outputs: &[Operand]) -> usize {
    let shape = &outputs[0].shape;
    rows::column_parts(shape).max(hopper::parts(shape.rows(), shape.last()))
}

/// Forward: y = x·wᵀ + b; with `gelu` pre = that, y = GELU(pre).
pub(super) fn forward(cx: &StepContext<'_>, bias: bool, gelu: bool) -> Result<Vec<Action>, CudaError> {
    let target = cx.output(usize::from(gelu));
    if gelu {
        let bias = bias.then(|| cx.input(2));
        let fused = hopper::linear_gelu(cx.input(0), cx.input(1), bias, target, cx.output(0), cx.facts);
        if let Some(actions) = fused {
            return Ok(actions);
        }
    }
    let mut matmul = matmul(cx, activations(cx.input(0)), weight(cx.input(1)), activations(target))?;
    matmul.right_transposed = true;
    if bias {
        let bias = cx.input(2);
        if bias.dtype != target.dtype {
            return Err(cx.no_kernel());
        }
        matmul.epilogue = Epilogue::Bias(bias.address);
    }
    let mut actions = vec![Action::Matmul(matmul)];
    if gelu {
        actions.push(rows::gelu(target, cx.output(0)));
    }
    Ok(actions)
}

/// Input gradient: dx = dy·w; with `gelu` then dpre = dx ∘ GELU'(pre) in place, and its column sums.
pub(super) fn grad_x(cx: &StepContext<'_>, gelu: bool) -> Result<Vec<Action>, CudaError> {
    let dx = cx.output(0);
    if gelu {
        let (dy, w, pre, sums) = (cx.input(0), cx.input(1), cx.input(2), cx.output(1).address);
        let fused = hopper::gelu_grad_matmul(dy, w, pre, dx, sums, cx.parts, cx.facts);
        if let Some(actions) = fused {
            return Ok(actions);
        }
    }
    let matmul = matmul(cx, activations(cx.input(0)), weight(cx.input(1)), activations(dx))?;
    let mut actions = vec![Action::Matmul(matmul)];
    if gelu {
        let sums = cx.output(1).address;
        actions.extend(rows::gelu_grad(cx.input(2), dx.address, dx, sums, cx.parts));
    }
    Ok(actions)
}

/// Weight gradient: dw = dyᵀ·x, or the old value plus that.
pub(super) fn grad_w(cx: &StepContext<'_>, adds: bool) -> Result<Vec<Action>, CudaError> {
    let dw = cx.output(0);
    let mut matmul = matmul(cx, activations(cx.input(0)), activations(cx.input(1)), weight(dw))?;
    matmul.left_transposed = true;
    matmul.accumulate = adds;
    let mut actions = Vec::new();
    if adds && cx.input(2).address != dw.address {
        let bytes = dw.shape.count() * dw.dtype.bytes();
        actions.push(Action::Copy { from: cx.input(2).address, to: dw.address, bytes });
    }
    actions.push(Action::Matmul(matmul));
    Ok(actions)
}

/// Matmul left·right → result, if cuBLASLt supports it: both sides of one type, and the result of the same type or f32.
fn matmul(cx: &StepContext<'_>, left: Matrix, right: Matrix, result: Matrix) -> Result<Matmul, CudaError> {
    let known = matches!(left.dtype, DType::F32 | DType::Bf16 | DType::F16);
    let fits = left.dtype == right.dtype && (result.dtype == left.dtype || result.dtype == DType::F32);
    if !known || !fits {
        return Err(cx.no_kernel());
    }
    Ok(Matmul {
        left,
        left_transposed: false,
        right,
        right_transposed: false,
        result,
        accumulate: false,
        epilogue: Epilogue::None,
        tf32: cx.tf32,
    })
}

/// Matrix of an operand (.., width): all axes but the last are rows.
fn activations(operand: &Operand) -> Matrix {
    let Operand { address, dtype, shape } = operand;
    Matrix::new(*address, *dtype, shape.rows(), shape.last())
}

/// Matrix of a weight (O, ..): the first axis, and all others as one.
fn weight(operand: &Operand) -> Matrix {
    let Operand { address, dtype, shape } = operand;
    let outer = shape.0.first().copied().unwrap_or(1);
    Matrix::new(*address, *dtype, outer, shape.count() / outer.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Facts;
    use graph::Shape;

    fn operand<const N: usize>(address: u64, dtype: DType, shape: [usize; N]) -> Operand {
        Operand { address, dtype, shape: Shape::from(shape) }
    }

    fn run(op: &Op, inputs: &[Operand], outputs: &[Operand]) -> Result<Vec<Action>, CudaError> {
        let facts = Facts::h200();
        let (layer, scratch, parts, header, tf32) = ("fc", 0x9000, 0xa000, 0x100, false);
        let facts = &facts;
        actions(&StepContext { op, layer, inputs, outputs, scratch, parts, header, tf32, facts })
    }

    fn the_matmul(actions: &[Action]) -> Matmul {
        match actions {
            [.., Action::Matmul(matmul)] => *matmul,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_layer_multiplies_by_the_transposed_weight() {
        let half = DType::Bf16;
        let inputs = [operand(256, half, [2, 5, 8]), operand(512, half, [6, 8]), operand(1024, half, [6])];
        let op = Op::Linear { bias: true, gelu: false };
        let matmul = the_matmul(&run(&op, &inputs, &[operand(2048, half, [2, 5, 6])]).unwrap());
        assert_eq!((matmul.left.rows, matmul.left.columns), (10, 8));
        assert_eq!((matmul.right.rows, matmul.right.columns, matmul.right_transposed), (6, 8, true));
        assert_eq!((matmul.result.rows, matmul.result.columns), (10, 6));
        assert_eq!(matmul.epilogue, Epilogue::Bias(1024));
    }

    #[test]
    fn an_f32_bias_of_a_bf16_result_is_refused() {
        let half = DType::Bf16;
        let inputs = [operand(256, half, [4, 8]), operand(512, half, [6, 8]), operand(1024, DType::F32, [6])];
        let op = Op::Linear { bias: true, gelu: false };
        let error = run(&op, &inputs, &[operand(2048, half, [4, 6])]).unwrap_err();
        assert_eq!(error.to_string(), "fc: the CUDA executor has no kernel for linear of bf16, bf16, f32");
    }

    #[test]
    fn weight_gradients_add_only_where_the_op_says_so() {
        let shape = Shape::from([6, 2, 2, 2]);
        let op = |accumulate| Op::LinearGradW { shape: shape.clone(), accumulate };
        let (dy, x) = (operand(256, DType::F16, [4, 6]), operand(512, DType::F16, [4, 8]));
        let dw = operand(2048, DType::F32, [6, 2, 2, 2]);
        let here = [dy.clone(), x.clone(), dw.clone()];
        let elsewhere = [dy.clone(), x.clone(), operand(4096, DType::F32, [6, 2, 2, 2])];

        let outputs = std::slice::from_ref(&dw);
        let matmul = the_matmul(&run(&op(true), &here, outputs).unwrap());
        assert!(matmul.accumulate && matmul.left_transposed);
        assert_eq!((matmul.result.rows, matmul.result.columns), (6, 8));
        assert!(!the_matmul(&run(&op(false), &[dy, x], outputs).unwrap()).accumulate);

        let moved = run(&op(true), &elsewhere, outputs).unwrap();
        assert_eq!(moved[0], Action::Copy { from: 4096, to: 2048, bytes: 6 * 8 * 4 });
        assert_eq!(moved.len(), 2);
    }

    #[test]
    fn a_gelu_is_made_from_what_lies_before_it() {
        let wide = DType::F32;
        let inputs = [operand(256, wide, [4, 8]), operand(512, wide, [6, 8])];
        let outputs = [operand(2048, wide, [4, 6]), operand(4096, wide, [4, 6])];
        let made = run(&Op::Linear { bias: false, gelu: true }, &inputs, &outputs).unwrap();
        assert_eq!(made.len(), 2);
        assert_eq!(the_matmul(&made[..1]).result.address, 4096);
    }
}
