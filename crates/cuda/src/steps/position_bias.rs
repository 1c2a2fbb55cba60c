//! Continuous position bias and its gradients.
//!
//! Legend: N width of the hidden layer, H heads, T tokens of a window, K offsets between them.

use super::rows::{THREADS, launch, pointer, singles};
use crate::action::{Action, Arg, Kernel, Source, StepContext};
use crate::error::CudaError;
use graph::windows::Offsets;
use graph::{Op, Type};

/// Offsets of a block, one for each warp.
const OFFSETS: usize = THREADS / 32;
/// Hidden channels of a block.
const CHANNELS: usize = 32;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    singles(cx, cx.outputs)?;
    let [heads, n] = cx.input(2).shape.0[..] else { return Err(cx.no_kernel()) };
    let (window, pretrained, backward) = match *cx.op {
        Op::PositionBias { window, pretrained } => (window, pretrained, false),
        Op::PositionBiasGrad { window, pretrained } => (window, pretrained, true),
        _ => return Err(cx.no_kernel()),
    };
    let parameters = [0, 1, 2].map(|i| pointer(cx.input(i)));
    let sides = pretrained.unwrap_or(window).map(|side| Arg::I32(side as i32));
    let launch = |name: &str, grid: [usize; 2], own: &[Arg], sizes: &[usize]| {
        let name = format!("{name}<{}, {}>", window[0], window[1]);
        let sizes = sizes.iter().map(|size| Arg::I32(*size as i32));
        let args = parameters.iter().chain(own).copied().chain(sizes).chain(sides).collect();
        launch(Source::PositionBias, name, [grid[0], grid[1], 1], THREADS, args)
    };
    if !backward {
        return Ok(vec![launch("position_bias", [heads, window[0]], &[pointer(cx.output(0))], &[n])]);
    }
    let blocks = Offsets::new(window, None).count().div_ceil(OFFSETS);
    let dtable = Arg::Pointer(cx.scratch);
    let [dw1, db1, dw2] = [0, 1, 2].map(|i| pointer(cx.output(i)));
    Ok(vec![
        launch("position_bias_grad_table", [heads, blocks], &[pointer(cx.input(3)), dtable], &[n]),
        launch(
            "position_bias_grad",
            [n.div_ceil(CHANNELS), heads + 1],
            &[dtable, dw1, db1, dw2],
            &[n, heads],
        ),
    ])
}

/// Gradient of every offset and head.
pub fn scratch(op: &Op, inputs: &[&Type]) -> usize {
    let Op::PositionBiasGrad { window, .. } = op else { return 0 };
    let heads = inputs[2].shape.0.first().copied().unwrap_or(0);
    4 * heads * Offsets::new(*window, None).count()
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let names = ["position_bias", "position_bias_grad_table", "position_bias_grad"];
    let windows = ["8, 8", "16, 16"];
    let all = names.into_iter().flat_map(|name| windows.map(|window| format!("{name}<{window}>")));
    all.map(|name| (Kernel::new(Source::PositionBias, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn a_block_has_a_row_of_queries_and_going_back_an_offset_a_warp() {
        let parameters = ["f32[512,2]", "f32[512]", "f32[4,512]"];
        let (window, pretrained) = ([6, 8], Some([12, 12]));
        let bias = step(Op::PositionBias { window, pretrained }, &parameters, &["f32[4,48,48]"]).unwrap();
        assert_eq!(names(&bias), ["position_bias<6, 8>"]);
        assert_eq!(launches(&bias)[0].grid, [4, 6, 1]);
        assert_eq!(launches(&bias)[0].args[4..], [512, 12, 12].map(Arg::I32));

        let op = Op::PositionBiasGrad { window, pretrained: None };
        let inputs = [&parameters[..], &["f32[4,48,48]"]].concat();
        let back = step(op.clone(), &inputs, &parameters).unwrap();
        assert_eq!(names(&back), ["position_bias_grad_table<6, 8>", "position_bias_grad<6, 8>"]);
        assert_eq!([launches(&back)[0].grid, launches(&back)[1].grid], [[4, 21, 1], [16, 5, 1]]);
        let types: Vec<Type> = inputs.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(scratch(&op, &types.iter().collect::<Vec<_>>()), 4 * 4 * 11 * 15);
    }

    #[test]
    fn half_precision_is_refused() {
        let inputs = ["f32[512,2]", "f32[512]", "bf16[4,512]"];
        let op = Op::PositionBias { window: [2, 2], pretrained: None };
        assert!(step(op, &inputs, &["f32[4,4,4]"]).is_err());
    }
}
