//! Conversion of bytes to normalized images.
//!
//! Legend: B batch, S side of an image.

use super::rows::{THREADS, launch, pointer, singles};
use crate::action::{Action, Arg, Kernel, Source, StepContext};
use crate::error::CudaError;
use graph::op::CHOICES;
use graph::{DType, Op};

/// Approximate number of pixels of a block.
const PIXELS: usize = 12 << 10;
/// Shared memory of a block without opt-in, less the table of converted bytes.
const SHARED: usize = (48 << 10) - 1024;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let Op::Prepare { size } = *cx.op else { return Err(cx.no_kernel()) };
    let (pixels, choices, levels, images) = (cx.input(0), cx.input(1), cx.input(2), cx.output(0));
    let ([_, height, width, channels], [batch, numbers]) = (&pixels.shape.0[..], &choices.shape.0[..]) else {
        return Err(cx.no_kernel());
    };
    let taps = cx.inputs.get(3);
    let whole = taps.is_none_or(|taps| taps.dtype == DType::I32) && choices.dtype == DType::I32;
    if pixels.dtype != DType::U8 || !whole || *numbers != CHOICES {
        return Err(cx.no_kernel());
    }
    singles(cx, std::slice::from_ref(levels))?;
    singles(cx, cx.outputs)?;
    let row = taps.map_or(0, |taps| taps.shape.last());
    // Rows resized and columns not yet, of a sample and of its partner.
    let shared = if row > 0 { 2 * height * size.next_multiple_of(4) } else { 0 };
    if shared > SHARED {
        return Err(cx.no_kernel());
    }
    let bands = (size * size).div_ceil(PIXELS).clamp(1, size);
    let band = size.div_ceil(bands);
    let grid = [*channels, size.div_ceil(band), *batch];
    let taps = Arg::Pointer(taps.map_or(0, |taps| taps.address));
    let args = vec![
        pointer(pixels),
        pointer(choices),
        pointer(levels),
        taps,
        pointer(images),
        Arg::I32(band as i32),
    ];
    let mut action =
        launch(Source::Prepare, name(*channels, size, *height, *width, row), grid, THREADS, args);
    if let Action::Launch(launch) = &mut action {
        launch.shared = shared as u32;
    }
    Ok(vec![action])
}

fn name(channels: usize, size: usize, height: usize, width: usize, row: usize) -> String {
    format!("prepare<{channels}, {size}, {height}, {width}, {row}>")
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let shapes = [(3, 224, 32, 32, 5), (3, 224, 224, 224, 0), (1, 30, 28, 31, 7), (3, 13, 13, 13, 0)];
    let kernel = |(c, s, h, w, row)| (Kernel::new(Source::Prepare, name(c, s, h, w, row)), 75);
    shapes.into_iter().map(kernel).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn every_row_has_its_block() {
        let inputs = ["u8[258,32,32,3]", "i32[256,34]", "f32[3,256]", "i32[448,5]"];
        let op = Op::Prepare { size: 224 };
        let actions = step(op.clone(), &inputs, &["f32[256,3,224,224]"]).unwrap();
        assert_eq!(names(&actions), ["prepare<3, 224, 32, 32, 5>"]);
        let launch = launches(&actions)[0];
        assert_eq!((launch.grid, launch.shared), ([3, 5, 256], 2 * 32 * 224));
        assert_eq!(launch.args[5], Arg::I32(45));
        let inputs = ["u8[64,224,224,3]", "i32[64,34]", "f32[3,256]"];
        let actions = step(op.clone(), &inputs, &["f32[64,3,224,224]"]).unwrap();
        assert_eq!(names(&actions), ["prepare<3, 224, 224, 224, 0>"]);
        assert_eq!((launches(&actions)[0].shared, launches(&actions)[0].args[3]), (0, Arg::Pointer(0)));
        let large = ["u8[64,224,224,3]", "i32[64,34]", "f32[3,256]", "i32[448,5]"];
        assert!(step(op, &large, &["f32[64,3,224,224]"]).is_err());
    }
}
