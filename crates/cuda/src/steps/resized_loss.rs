//! Cross-entropy of pixels whose logits are resized on the way. Legend: results are the pixels that have labels.

use super::loss::summed;
use super::rows::{launch, pointer, singles, typed};
use crate::action::{Action, Arg, Context, Kernel, Source};
use crate::error::CudaError;
use graph::{DType, Op, Type};

/// As in resized_loss.cu.
const THREADS: usize = 128;
/// Blocks of the forward pass at most, each with four partial sums: sixteen for each processor of an H200.
const PARTS: usize = 2112;
/// Classes that a warp has in registers, and a block in threads.
const CLASSES: usize = 1024;

pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::ResizedCrossEntropy { smoothing } => forward(cx, smoothing),
        Op::ResizedCrossEntropyGrad { smoothing } => backward(cx, smoothing),
        _ => Err(cx.no_kernel()),
    }
}

pub fn scratch(op: &Op, inputs: &[&Type]) -> usize {
    match op {
        Op::ResizedCrossEntropy { .. } => 8 * 4 * parts(inputs[1].shape.count()),
        _ => 0,
    }
}

fn parts(results: usize) -> usize {
    results.div_ceil(THREADS / 32).clamp(1, PARTS)
}

/// height, width, those of the results, classes, smoothing.
fn sizes(cx: &Context<'_>, smoothing: f64) -> Result<[Arg; 6], CudaError> {
    let (logits, labels) = (cx.input(0), cx.input(1));
    let ([_, h, w, classes], [_, height, width]) = (&logits.shape.0[..], &labels.shape.0[..]) else {
        return Err(cx.no_kernel());
    };
    let fits =
        labels.dtype == DType::I32 && *classes <= CLASSES && i32::try_from(labels.shape.count()).is_ok();
    if !fits {
        return Err(cx.no_kernel());
    }
    let [h, w, height, width, classes] = [h, w, height, width, classes].map(|n| Arg::I32(*n as i32));
    Ok([h, w, height, width, classes, Arg::F32(smoothing as f32)])
}

fn forward(cx: &Context<'_>, smoothing: f64) -> Result<Vec<Action>, CudaError> {
    let (logits, labels) = (cx.input(0), cx.input(1));
    singles(cx, &cx.inputs[2..])?;
    singles(cx, cx.outputs)?;
    let (samples, parts) = (logits.shape.0[0], parts(labels.shape.count()));
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.extend([pointer(cx.output(2)), Arg::Pointer(cx.scratch), Arg::I32(samples as i32)]);
    args.extend(sizes(cx, smoothing)?);
    let name = format!("resized_loss<{}, {}>", typed(cx, logits)?, logits.shape.last().div_ceil(32));
    Ok(vec![launch(Source::ResizedLoss, name, [parts, 1, 1], THREADS, args), summed(cx, parts)])
}

fn backward(cx: &Context<'_>, smoothing: f64) -> Result<Vec<Action>, CudaError> {
    let (logits, dlogits) = (cx.input(0), cx.output(0));
    singles(cx, &cx.inputs[2..])?;
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.extend([Arg::Pointer(cx.header), pointer(dlogits)]);
    args.extend(sizes(cx, smoothing)?);
    let name = format!("resized_loss_grad<{}, {}>", typed(cx, logits)?, typed(cx, dlogits)?);
    let (pixels, block) = (logits.shape.rows(), logits.shape.last().next_multiple_of(32));
    Ok(vec![launch(Source::ResizedLoss, name, [pixels, 1, 1], block, args)])
}

/// Instances that stand for all, and the compute capability that each needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let names = [
        "resized_loss<float, 5>",
        "resized_loss<bf16, 32>",
        "resized_loss_grad<float, float>",
        "resized_loss_grad<float, bf16>",
        "resized_loss_grad<float, f16>",
    ];
    names.map(|name| (Kernel::new(Source::ResizedLoss, name), 75)).into()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn nothing_is_as_large_as_the_resized_logits() {
        let inputs = ["f32[8,128,128,150]", "i32[8,512,512]", "f32[8,512,512]"];
        let outputs = ["f32[]", "f32[4]", "f32[8,512,512]"];
        let op = Op::ResizedCrossEntropy { smoothing: 0.0 };
        let actions = step(op.clone(), &inputs, &outputs, false).unwrap();
        assert_eq!(names(&actions), ["resized_loss<float, 5>", "cross_entropy_sums"]);
        assert_eq!(launches(&actions)[0].args[3], Arg::Pointer((2 << 32) + (2 << 20)));
        let types = inputs.map(|t| t.parse::<Type>().unwrap());
        assert_eq!(scratch(&op, &types.iter().collect::<Vec<_>>()), 2112 * 4 * 8);
        let inputs = [&inputs[..], &["f32[8,512,512]", "f32[]"]].concat();
        let op = Op::ResizedCrossEntropyGrad { smoothing: 0.0 };
        let actions = step(op, &inputs, &["bf16[8,128,128,150]"], false).unwrap();
        assert_eq!(names(&actions), ["resized_loss_grad<float, bf16>"]);
        assert_eq!((launches(&actions)[0].grid, launches(&actions)[0].block), ([131_072, 1, 1], 160));
    }

    #[test]
    fn too_many_classes_are_refused() {
        let inputs = ["f32[1,2,2,1025]", "i32[1,4,4]", "f32[1,4,4]"];
        let op = Op::ResizedCrossEntropy { smoothing: 0.0 };
        assert!(step(op, &inputs, &["f32[]", "f32[4]", "f32[1,4,4]"], false).is_err());
    }
}
