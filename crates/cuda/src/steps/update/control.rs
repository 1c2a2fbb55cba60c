//! What decides over a step: the gradient norm, clipping, applied steps, the loss scale.

use super::{HALT, THREADS, WARPS, WIDE, all_single, launch, pointer};
use crate::action::{Action, Address, Arg, Constants, StepContext};
use crate::error::CudaError;
use graph::flat::Segment;
use graph::{DType, Op};

/// One step that is neither an optimizer nor a sum of squares.
pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let one = |kernel, args| Ok(vec![launch(kernel, 1, 1, args)]);
    match *cx.op {
        Op::Clip { .. } => Ok(vec![launch("clip", 1, WIDE, clip_args(cx)?)]),
        Op::Advance => {
            all_single(cx)?;
            one("advance", vec![pointer(cx.input(0)), pointer(cx.input(1)), pointer(cx.output(0))])
        }
        Op::LossScale { window, hysteresis, min } => {
            all_single(cx)?;
            let settings = [window as f32, hysteresis as f32, min as f32].map(Arg::F32);
            let ends = ([pointer(cx.input(0)), pointer(cx.input(1))], [pointer(cx.output(0))]);
            one("loss_scale", [&ends.0[..], &settings, &ends.1].concat())
        }
        _ => Err(cx.no_kernel()),
    }
}

/// A sum of squares, and the steps that follow it: with one launch less where they are `clip` and `advance`, and follow from each
/// other.
pub fn norm(steps: &[StepContext<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
    let Some((squares, rest)) = steps.split_first() else { return Ok(vec![]) };
    let mut made = sum_squares(squares, constants)?;
    match rest {
        [clip, advance]
            if clip.inputs.last().is_some_and(|sums| sums.address == squares.output(0).address)
                && advance.input(1).address == clip.output(0).address =>
        {
            all_single(advance)?;
            let ends = vec![pointer(advance.input(0)), pointer(advance.output(0))];
            made.push(launch("clip_advance", 1, WIDE, [clip_args(clip)?, ends].concat()));
        }
        others => {
            for other in others {
                made.extend(actions(other)?);
            }
        }
    }
    Ok(made)
}

/// Of `clip`.
fn clip_args(cx: &StepContext<'_>) -> Result<Vec<Arg>, CudaError> {
    let (Op::Clip { max_norm, scaled }, Some((sums, numbers))) = (cx.op, cx.inputs.split_last()) else {
        return Err(cx.no_kernel());
    };
    let single = numbers.iter().chain(cx.outputs).all(|operand| operand.dtype == DType::F32);
    if !single || sums.dtype != DType::F64 {
        return Err(cx.no_kernel());
    }
    Ok(vec![
        pointer(sums),
        Arg::U32(sums.shape.count() as u32),
        pointer(cx.input(0)),
        Arg::Pointer(if *scaled { cx.input(1).address } else { 0 }),
        Arg::Pointer(cx.header),
        Arg::Pointer(cx.header + HALT),
        Arg::F64(max_norm.unwrap_or(f64::INFINITY)),
        pointer(cx.output(0)),
    ])
}

/// Partial sums of squares of flat gradients. Those of other ranks are zeros.
fn sum_squares(cx: &StepContext<'_>, constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
    let Op::SumSquares { flats } = cx.op else { return Err(cx.no_kernel()) };
    let (sums, single) = (cx.output(0), cx.inputs.iter().all(|x| x.dtype == DType::F32));
    if !single || sums.dtype != DType::F64 || flats.len() != cx.inputs.len() {
        return Err(cx.no_kernel());
    }
    let (mut squares, mut chunks, mut base): (Vec<[u64; 2]>, Vec<[usize; 3]>, usize) = (vec![], vec![], 0);
    for (flat, x) in flats.iter().zip(cx.inputs) {
        let mut held: Vec<Segment> = flat.held_segments().map(|(_, segment)| segment).collect();
        held.sort_by_key(|segment| segment.start);
        for of_chunk in held.chunk_by(|a, b| a.chunk == b.chunk) {
            chunks.push([base + of_chunk[0].chunk, squares.len(), of_chunk.len()]);
            squares.extend(of_chunk.iter().map(|segment| {
                let offset = (segment.start - flat.first) * size_of::<f32>();
                [x.address + offset as Address, segment.count as u64]
            }));
        }
        base += flat.chunks();
    }
    let mut actions = vec![];
    if chunks.len() < base {
        actions.push(Action::Zero { at: sums.address, bytes: base * size_of::<f64>() });
    }
    if !chunks.is_empty() {
        let squares: Vec<u8> = squares.iter().flatten().flat_map(|n| n.to_le_bytes()).collect();
        let row = |[number, first, count]: &[usize; 3]| [*number, *first, *count, 0].map(|n| n as u32);
        let table: Vec<u8> = chunks.iter().flat_map(row).flat_map(|n| n.to_le_bytes()).collect();
        let [squares, table] = [squares, table].map(|table| Arg::Pointer(constants.put(&table)));
        let args = vec![squares, table, Arg::U32(chunks.len() as u32), pointer(sums)];
        actions.push(launch("sum_squares", chunks.len().div_ceil(WARPS), THREADS, args));
    }
    Ok(actions)
}
