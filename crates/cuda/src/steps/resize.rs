//! Resizing and pooling of images, and their gradients. A thread has some channels of one pixel.

use super::rows::{THREADS, launch, pointer, typed, vector_of};
use crate::action::{Action, Arg, Kernel, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::Op;
use graph::op::Sampling;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    match *cx.op {
        Op::Resize { sampling, .. } => resize(cx, "resize", (x, y), sampling),
        Op::ResizeGrad { sampling, .. } => resize(cx, "resize_grad", (y, x), sampling),
        _ => Err(cx.no_kernel()),
    }
}

/// Launch between an image and its resized form, whichever is the input.
fn resize(
    cx: &StepContext<'_>,
    kernel: &str,
    (image, resized): (&Operand, &Operand),
    sampling: Sampling,
) -> Result<Vec<Action>, CudaError> {
    let ([_, height, width, columns], [_, out_height, out_width, _]) = (axes(cx, image)?, axes(cx, resized)?);
    let (x, y) = (cx.input(0), cx.output(0));
    let [batch, rows, pixels, _] = axes(cx, y)?;
    let most = vector_of(&[x.dtype, y.dtype]);
    let vector = if columns.is_multiple_of(most) { most } else { 1 };
    let average = i32::from(sampling == Sampling::Average);
    let sizes = [height, width, out_height, out_width, columns].map(|n| Arg::I32(n as i32));
    let args = [&[pointer(x), pointer(y)], &sizes[..], &[Arg::I32(average)]].concat();
    let grid = [batch * rows, (pixels * columns / vector).div_ceil(THREADS), 1];
    let name = format!("{kernel}<{}, {}, {vector}>", typed(cx, x)?, typed(cx, y)?);
    Ok(vec![launch(Source::Resize, name, grid, THREADS, args)])
}

fn axes(cx: &StepContext<'_>, images: &Operand) -> Result<[usize; 4], CudaError> {
    images.shape.0[..].try_into().map_err(|_| cx.no_kernel())
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let types = ["float, float, 4", "bf16, bf16, 8", "f16, f16, 8", "bf16, float, 1"];
    let both = |types: &str| ["resize", "resize_grad"].map(|kernel| format!("{kernel}<{types}>"));
    let names = types.into_iter().flat_map(both);
    names.map(|name| (Kernel::new(Source::Resize, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn both_directions_know_image_and_resized_form() {
        let (small, large) = ("bf16[8,32,32,512]", "bf16[8,128,128,512]");
        let sampling = Sampling::Bilinear;
        let up = Op::Resize { height: 128, width: 128, sampling };
        let actions = step(up, &[small], &[large]).unwrap();
        assert_eq!(names(&actions), ["resize<bf16, bf16, 8>"]);
        let sizes = [32, 32, 128, 128, 512, 0].map(Arg::I32);
        let launch = launches(&actions)[0];
        assert_eq!((launch.grid, &launch.args[2..]), ([8 * 128, 128 * 64 / 256, 1], &sizes[..]));
        let back = Op::ResizeGrad { height: 32, width: 32, sampling };
        let actions = step(back, &[large], &[small]).unwrap();
        let launch = launches(&actions)[0];
        assert_eq!((launch.grid, &launch.args[2..]), ([8 * 32, 32 * 64 / 256, 1], &sizes[..]));
    }

    #[test]
    fn logits_may_be_wider_and_of_any_number() {
        let op = Op::Resize { height: 6, width: 6, sampling: Sampling::Average };
        let actions = step(op, &["bf16[2,16,16,150]"], &["f32[2,6,6,150]"]).unwrap();
        assert_eq!(names(&actions), ["resize<bf16, float, 1>"]);
        assert_eq!(launches(&actions)[0].grid, [12, 4, 1]);
    }
}
