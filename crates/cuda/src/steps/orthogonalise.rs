//! What orthogonalises matrices: matmuls, and polynomials of their results.
//!
//! Legend: B matrices of one shape, which lie one after the other.

use super::update;
use crate::action::{Action, Address, Arg, Epilogue, Matmul, Matrix, Operand, StepContext, c_type};
use crate::error::CudaError;
use graph::{DType, Op};

/// Blocks for each matrix at most: a thread has some elements each.
const BLOCKS: usize = 128;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::Matmul { left_transposed, right_transposed } => matmul(cx, left_transposed, right_transposed),
        Op::UnitTrace { eps } => {
            let (gram, out, norm) = (cx.input(0), cx.output(0), cx.output(1));
            let args = vec![pointer(gram), pointer(out), pointer(norm)];
            elementwise(cx, "unit_trace", args, vec![Arg::F64(eps)])
        }
        Op::NewtonSchulz { coefficients } => {
            let norm = cx.inputs.get(2).map_or(Arg::Pointer(0), pointer);
            let args = vec![pointer(cx.input(0)), pointer(cx.input(1)), norm, pointer(cx.output(0))];
            elementwise(cx, "newton_schulz", args, coefficients.map(Arg::F64).to_vec())
        }
        _ => Err(cx.no_kernel()),
    }
}

fn pointer(operand: &Operand) -> Arg {
    Arg::Pointer(operand.address)
}

/// A matmul for each of the B.
fn matmul(
    cx: &StepContext<'_>,
    left_transposed: bool,
    right_transposed: bool,
) -> Result<Vec<Action>, CudaError> {
    let (left, right, result) = (cx.input(0), cx.input(1), cx.output(0));
    let known = matches!(left.dtype, DType::F32 | DType::Bf16 | DType::F16);
    if !known || left.dtype != right.dtype || left.dtype != result.dtype {
        return Err(cx.no_kernel());
    }
    let matrix = |operand: &Operand, number: usize| match operand.shape.0[..] {
        [_, rows, columns] => {
            let offset = (number * rows * columns * operand.dtype.bytes()) as Address;
            Ok(Matrix::new(operand.address + offset, operand.dtype, rows, columns))
        }
        _ => Err(cx.no_kernel()),
    };
    let one = |number: usize| {
        Ok(Action::Matmul(Matmul {
            left: matrix(left, number)?,
            left_transposed,
            right: matrix(right, number)?,
            right_transposed,
            result: matrix(result, number)?,
            accumulate: false,
            epilogue: Epilogue::None,
            tf32: cx.tf32,
        }))
    };
    (0..result.shape.0.first().copied().unwrap_or(0)).map(one).collect()
}

/// A launch over B matrices of N rows and columns.
fn elementwise(
    cx: &StepContext<'_>,
    kernel: &str,
    mut args: Vec<Arg>,
    numbers: Vec<Arg>,
) -> Result<Vec<Action>, CudaError> {
    let gram = cx.input(0);
    let ([b, n, _], Some(dtype)) = (&gram.shape.0[..], c_type(gram.dtype)) else {
        return Err(cx.no_kernel());
    };
    let alike = cx.output(0).dtype == gram.dtype && gram.dtype != DType::F16;
    let norms = cx.outputs.get(1).or(cx.inputs.get(2));
    if !alike || norms.is_some_and(|norms| norms.dtype != DType::F32) {
        return Err(cx.no_kernel());
    }
    args.push(Arg::U32(*n as u32));
    args.extend(numbers);
    let blocks = (n * n).div_ceil(4 * update::THREADS as usize).clamp(1, BLOCKS);
    Ok(vec![update::launch_many(&format!("{kernel}<{dtype}>"), [blocks, *b], args)])
}
