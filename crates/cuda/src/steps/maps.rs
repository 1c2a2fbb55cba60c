//! Ops that only move tokens of channels-last maps (B,h,w,C).

use super::rows::{THREADS, launch, pointer, typed};
use crate::action::{Action, Arg, Kernel, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::Op;

/// Channels that a thread moves at once.
fn vector_of(channels: usize) -> usize {
    if channels.is_multiple_of(8) { 8 } else { 1 }
}

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let axes = |operand: &Operand| match operand.shape.0[..] {
        [batch, height, width, channels] => Ok([batch, height, width, channels]),
        _ => Err(cx.no_kernel()),
    };
    // What the kernels take of a map with some tokens before it.
    let among = |operand: &Operand, tokens: usize| {
        axes(operand).map(|[batch, height, width, channels]| [batch, tokens, height * width, channels])
    };
    let (name, sizes) = match *cx.op {
        Op::MergePatches => ("merge_patches", axes(x)?),
        Op::SplitPatches { .. } => ("split_patches", axes(y)?),
        Op::Grid { .. } => ("grid", among(y, x.shape.0.get(1).copied().unwrap_or(0))?),
        Op::Ungrid { tokens } => ("ungrid", among(x, tokens)?),
        _ => return Err(cx.no_kernel()),
    };
    let vector = vector_of(sizes[3]);
    let name = format!("{name}<{}, {}, {vector}>", typed(cx, x)?, typed(cx, y)?);
    let mut args = vec![pointer(x), pointer(y)];
    args.extend(sizes.map(|n| Arg::I32(n as i32)));
    let grid = [y.shape.count().div_ceil(vector * THREADS), 1, 1];
    Ok(vec![launch(Source::Maps, name, grid, THREADS, args)])
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut names = Vec::new();
    for name in ["merge_patches", "split_patches", "grid", "ungrid"] {
        for types in ["float, float", "bf16, bf16", "float, f16", "bf16, float"] {
            names.extend([1, 8].map(|vector| format!("{name}<{types}, {vector}>")));
        }
    }
    names.into_iter().map(|name| (Kernel::new(Source::Maps, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn maps_of_odd_size_are_merged_with_zeros_and_split_without() {
        let merged = step(Op::MergePatches, &["f32[2,5,7,16]"], &["bf16[2,3,4,64]"]).unwrap();
        assert_eq!(names(&merged), ["merge_patches<float, bf16, 8>"]);
        assert_eq!(launches(&merged)[0].grid, [1, 1, 1]);
        let split = Op::SplitPatches { height: 5, width: 7 };
        let split = step(split, &["bf16[2,3,4,40]"], &["f32[2,5,7,10]"]).unwrap();
        assert_eq!(names(&split), ["split_patches<bf16, float, 1>"]);
        assert_eq!(launches(&split)[0].args[2..], [2, 5, 7, 10].map(Arg::I32));
        assert_eq!(launches(&split)[0].grid, [3, 1, 1]);
    }

    #[test]
    fn a_class_token_stays_out_of_the_map() {
        let grid = step(Op::Grid { height: 3, width: 4 }, &["f32[2,13,24]"], &["bf16[2,3,4,24]"]).unwrap();
        assert_eq!(names(&grid), ["grid<float, bf16, 8>"]);
        let ungrid = step(Op::Ungrid { tokens: 13 }, &["bf16[2,3,4,24]"], &["bf16[2,13,24]"]).unwrap();
        assert_eq!(names(&ungrid), ["ungrid<bf16, bf16, 8>"]);
        for actions in [grid, ungrid] {
            assert_eq!(launches(&actions)[0].args[2..], [2, 13, 12, 24].map(Arg::I32));
        }
    }

    #[test]
    fn a_reshape_in_place_is_nothing() {
        let op = Op::Reshape { shape: graph::Shape::from([2, 12]) };
        let moved = step(op.clone(), &["bf16[2,3,4]"], &["bf16[2,12]"]).unwrap();
        assert_eq!(moved, [Action::Copy { from: 1 << 32, to: 2 << 32, bytes: 48 }]);
        let inputs = operands(1 << 32, &["bf16[2,3,4]"]);
        let outputs: Vec<Operand> = operands(1 << 32, &["bf16[2,12]"]);
        assert_eq!(step_on(op, &inputs, &outputs).unwrap(), []);
    }
}
