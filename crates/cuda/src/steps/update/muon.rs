//! Muon's momentum and parameters, as steps that one launch makes with others.
//!
//! A row of the kernels' table is a matrix here. Of its columns, `copy` is where a direction goes in `muon_momentum`, and `v` where it
//! comes from in `muon_apply`.

use super::{Buffer, CHUNK, Rule, THREADS, Tensor, launch, range};
use crate::action::{Action, Address, Arg, Operand, StepContext, c_type};
use crate::error::CudaError;
use graph::flat::{Flat, Stack};
use graph::{DType, Op};

/// What matrices of a buffer have in common for the kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Form {
    /// The type of directions.
    dtype: DType,
    /// Elements that a thread has at once.
    width: usize,
}

impl Form {
    /// Four at once where every matrix and its directions begin at a multiple of four.
    fn of(cx: &StepContext<'_>, stacks: &[Stack], directions: &[Operand]) -> Result<Self, CudaError> {
        let dtype = directions.first().map_or(DType::F32, |operand| operand.dtype);
        let known = matches!(dtype, DType::F32 | DType::Bf16);
        if !known || directions.len() != stacks.len() || directions.iter().any(|o| o.dtype != dtype) {
            return Err(cx.no_kernel());
        }
        let aligned = |stack: &Stack| {
            stack.count().is_multiple_of(4) && stack.starts.iter().all(|start| start.is_multiple_of(4))
        };
        Ok(Form { dtype, width: if stacks.iter().all(aligned) { 4 } else { 1 } })
    }

    fn arguments(self) -> String {
        format!("{}, {}", c_type(self.dtype).unwrap_or("float"), self.width)
    }
}

/// Every instance of the kernels here.
pub(super) fn names() -> Vec<String> {
    let mut names = vec![];
    for dtype in ["float", "bf16"] {
        names.extend(["unit_trace", "newton_schulz"].map(|kernel| format!("{kernel}<{dtype}>")));
        for width in [4, 1] {
            names.push(format!("muon_momentum<{dtype}, {width}>"));
            names.extend(["bf16", "f16"].map(|half| format!("muon_apply<{half}, {dtype}, {width}>")));
        }
    }
    names
}

/// Addresses of matrices: (tensor of the flat buffer, its elements from the first, address of its directions, stack).
fn matrices<'a>(
    cx: &StepContext<'_>,
    flat: &Flat,
    stacks: &'a [Stack],
    directions: &'a [Operand],
) -> Result<impl Iterator<Item = (usize, usize, Address, &'a Stack)>, CudaError> {
    let found = flat.matrices(stacks).map_err(|_| cx.no_kernel())?;
    Ok(found.into_iter().map(move |matrix| {
        let of = &directions[matrix.stack];
        let offset = (matrix.number * matrix.count * of.dtype.bytes()) as Address;
        (matrix.piece, matrix.start, of.address + offset, &stacks[matrix.stack])
    }))
}

/// Zeros for the directions of a rank that holds fewer matrices of a stack than another.
fn without_matrix(
    cx: &StepContext<'_>,
    flat: &Flat,
    stacks: &[Stack],
    directions: &[Operand],
) -> Result<Vec<Action>, CudaError> {
    let mut counts = vec![0; stacks.len()];
    for matrix in flat.matrices(stacks).map_err(|_| cx.no_kernel())? {
        counts[matrix.stack] += 1;
    }
    let rest = |((of, stack), count): ((&Operand, &Stack), usize)| {
        let first = offset(of.address, count * stack.count(), of.dtype.bytes());
        let end = offset(of.address, of.shape.count(), of.dtype.bytes());
        (first < end).then_some(Action::Zero { at: first, bytes: (end - first) as usize })
    };
    Ok(directions.iter().zip(stacks).zip(counts).filter_map(rest).collect())
}

fn pieces(count: usize) -> Vec<[usize; 3]> {
    (0..count).step_by(CHUNK).map(|first| [first, CHUNK.min(count - first), 0]).collect()
}

fn offset(base: Address, elements: usize, size: usize) -> Address {
    base + (elements * size) as Address
}

/// One of the two steps, if it is one.
pub(super) fn buffer(cx: &StepContext<'_>) -> Result<Option<Buffer>, CudaError> {
    match cx.op {
        Op::MuonMomentum { momentum, nesterov, stacks, flat, .. } => {
            let directions = &cx.outputs[1..];
            let form = Form::of(cx, stacks, directions)?;
            let rule = Rule::MuonMomentum { momentum: *momentum, nesterov: *nesterov, form };
            let (g, m) = (cx.input(0).address, cx.output(0).address);
            let row = |(_, start, direction, stack): (usize, usize, Address, &Stack)| Tensor {
                g: offset(g, start, size_of::<f32>()),
                m: offset(m, start, size_of::<f32>()),
                copy: direction,
                pieces: pieces(stack.count()),
                ..Tensor::default()
            };
            let tensors = matrices(cx, flat, stacks, directions)?.map(row).collect();
            let mut ranges = vec![range(cx.input(0), false)];
            ranges.extend(directions.iter().map(|operand| range(operand, true)));
            let mut made = made(cx, rule, tensors, (2, 3), ranges)?;
            made.before.extend(without_matrix(cx, flat, stacks, directions)?);
            Ok(Some(made))
        }
        Op::MuonApply { rms, stacks, flat } => {
            let usual = 2 + stacks.len();
            let directions = cx.inputs.get(2..usual).ok_or_else(|| cx.no_kernel())?;
            let rule = Rule::MuonApply { form: Form::of(cx, stacks, directions)? };
            let copy =
                cx.inputs.get(usual).and_then(|operand| Some((cx.outputs.last()?.address, operand.dtype)));
            let w = cx.output(0).address;
            let row = |(piece, start, direction, stack): (usize, usize, Address, &Stack)| {
                let of = &flat.pieces[piece];
                // The kernel takes both from the learning rate: the step as a factor of it, and the decay as one of the step.
                let scale = rms * (stack.rows.max(stack.columns) as f64).sqrt();
                Tensor {
                    w: offset(w, start, size_of::<f32>()),
                    v: direction,
                    copy: copy.map_or(0, |(copy, dtype)| offset(copy, start, dtype.bytes())),
                    lr_scale: of.lr_scale * scale,
                    weight_decay: of.weight_decay / scale,
                    pieces: pieces(stack.count()),
                    ..Tensor::default()
                }
            };
            let tensors = matrices(cx, flat, stacks, directions)?.map(row).collect();
            let ranges = directions.iter().map(|operand| range(operand, false)).collect();
            let mut made = made(cx, rule, tensors, (1, 1), ranges)?;
            made.half = copy.map(|(_, dtype)| dtype);
            if made.half.is_some_and(|dtype| !dtype.is_half()) {
                return Err(cx.no_kernel());
            }
            Ok(Some(made))
        }
        _ => Ok(None),
    }
}

/// A step over these rows. `control` is an operand's number, and as many operands before `single` are f32.
fn made(
    cx: &StepContext<'_>,
    rule: Rule,
    tensors: Vec<Tensor>,
    (control, single): (usize, usize),
    ranges: Vec<(Address, Address, bool)>,
) -> Result<Buffer, CudaError> {
    let numbers = cx.inputs[..single].iter().chain([cx.input(control), cx.output(0)]);
    if !numbers.clone().all(|operand| operand.dtype == DType::F32) {
        return Err(cx.no_kernel());
    }
    let mut buffer = Buffer {
        tensors,
        rule,
        w: cx.output(0).address,
        half: None,
        decay: None,
        header: cx.header,
        control: cx.input(control).address,
        applied: 0,
        before: vec![],
        ranges,
    };
    buffer.work_in_place(cx);
    Ok(buffer)
}

/// Launches of the momenta of some buffers.
pub(super) fn momentum(
    tables: [Arg; 2],
    blocks: usize,
    control: Arg,
    (momentum, nesterov, form): (f64, bool, Form),
) -> Action {
    let numbers = vec![control, Arg::F64(momentum), Arg::U32(nesterov.into())];
    let name = format!("muon_momentum<{}>", form.arguments());
    launch(&name, blocks, THREADS, [tables.to_vec(), numbers].concat())
}

/// Launches of the parameters of some buffers.
pub(super) fn apply(
    tables: [Arg; 2],
    blocks: usize,
    [header, control, take]: [Arg; 3],
    half: &str,
    form: Form,
) -> Action {
    let name = format!("muon_apply<{half}, {}>", form.arguments());
    launch(&name, blocks, THREADS, [tables.to_vec(), vec![header, control, take]].concat())
}
