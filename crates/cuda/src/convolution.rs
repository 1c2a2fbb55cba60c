//! Convolutions by cuDNN, which names axes (B,C,h,w) whatever their order in memory; strides give that.

use crate::action::{Address, ConvOutput, Convolution, Images};
use crate::cudnn::{self, Cudnn, CudnnGraph, CudnnPlan, Descriptor, HeuristicMode, Proposals, named};
use crate::driver::Stream;
use crate::error::CudaError;
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Kind,
    cudnnBackendDescriptorType_t as Of, cudnnBackendNumericalNote_t as Note,
};
use graph::DType;
use std::ffi::c_void;

/// Largest workspace of a convolution. The gradient of a large weight is summed in parts of its size.
pub const WORKSPACE: usize = 128 << 20;

pub fn proposals(library: &Cudnn, conv: &Convolution) -> Result<Proposals, CudaError> {
    let doing = |error| named(error, || format!("looking for an algorithm for {}", describe(conv)));
    let problem = problem(library, conv).map_err(doing)?;
    library.proposals(problem, HeuristicMode::All).map_err(doing)
}

/// Makes a proposal ready to run. Refuses it if its results are not deterministic, are less exact than others', or if it
/// needs more workspace than there is.
pub fn algorithm(
    library: &Cudnn,
    conv: &Convolution,
    proposals: &Proposals,
    place: usize,
) -> Result<CudnnPlan, CudaError> {
    library.algorithm(proposals, place, WORKSPACE, |notes| is_wanted(conv, notes))
}

/// Enqueues a convolution on a stream.
pub fn run(
    library: &Cudnn,
    conv: &Convolution,
    algorithm: &CudnnPlan,
    stream: &Stream,
    workspace: Address,
) -> Result<(), CudaError> {
    let operands = [(X, conv.x.address), (WEIGHT, conv.weight), (Y, conv.y.address)];
    let operands = operands.map(|(id, address)| (id, address as *mut c_void));
    library.run(algorithm, &operands, stream, workspace, || format!("convolving {}", describe(conv)))
}

/// Tells whether an engine with these notes may be used: one that gives the same bits every time, in f32 sums of the unrounded operands.
/// Transforms (Winograd, FFT) round more.
fn is_wanted(conv: &Convolution, notes: &[i32]) -> bool {
    let single = conv.dtype == DType::F32;
    let unwanted = [
        (Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, true),
        (Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION, true),
        (Note::CUDNN_NUMERICAL_NOTE_FFT, true),
        (Note::CUDNN_NUMERICAL_NOTE_WINOGRAD, true),
        (Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS, single),
        (Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE, single && !conv.tf32),
    ];
    !unwanted.iter().any(|(note, here)| *here && notes.contains(&(*note as i32)))
}

// What operands are known by.
const X: i64 = 1;
const WEIGHT: i64 = 2;
const Y: i64 = 3;

/// Describes a convolution to cuDNN.
fn problem(library: &Cudnn, conv: &Convolution) -> Result<CudnnGraph, CudaError> {
    let [kh, kw] = conv.kernel;
    let weight = Images { address: conv.weight, axes: [conv.y.axes[3], kh, kw, conv.x.axes[3]] };
    let x = tensor(&conv.x, X, conv.dtype)?;
    let weight = tensor(&weight, WEIGHT, conv.dtype)?;
    let y = tensor(&conv.y, Y, conv.dtype)?;
    let window = window(conv)?;
    let operation = operation(conv.made, [&x, &weight, &y, &window])?;
    CudnnGraph::new(library.handle, vec![operation], vec![x, weight, y, window])
}

fn tensor(images: &Images, id: i64, dtype: DType) -> Result<Descriptor, CudaError> {
    let [b, h, w, c] = images.axes;
    cudnn::tensor(id, dtype, [b, c, h, w], [h * w * c, 1, w * c, c])?.finished()
}

fn window(conv: &Convolution) -> Result<Descriptor, CudaError> {
    let (stride, pad) = (conv.window.stride as i64, conv.window.pad as i64);
    let (sums, mode) =
        (sys::cudnnDataType_t::CUDNN_DATA_FLOAT, sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION);
    let two = Kind::CUDNN_TYPE_INT64;
    Descriptor::new(Of::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, two, &[2i64])?
        .with(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[sums])?
        .with(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, Kind::CUDNN_TYPE_CONVOLUTION_MODE, &[mode])?
        .with(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, two, &[pad, pad])?
        .with(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, two, &[pad, pad])?
        .with(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, two, &[stride, stride])?
        .with(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, two, &[1i64, 1])?
        .finished()
}

fn operation(made: ConvOutput, [x, weight, y, window]: [&Descriptor; 4]) -> Result<Descriptor, CudaError> {
    let (of, alpha, beta, of_window, names) = match made {
        ConvOutput::Y => (
            Of::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
            ],
        ),
        ConvOutput::X => (
            Of::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
            ],
        ),
        ConvOutput::Weight => (
            Of::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
            ],
        ),
    };
    let mut operation = Descriptor::new(of)?
        .with(alpha, Kind::CUDNN_TYPE_FLOAT, &[1f32])?
        .with(beta, Kind::CUDNN_TYPE_FLOAT, &[0f32])?
        .with_parts(of_window, &[window])?;
    for (name, part) in names.into_iter().zip([x, weight, y]) {
        operation = operation.with_parts(name, &[part])?;
    }
    operation.finished()
}

/// Describes a convolution for messages, such as `y of (8×128×128×512 bf16) by 512×3×3, stride 1, pad 1`.
pub fn describe(conv: &Convolution) -> String {
    let made = match conv.made {
        ConvOutput::Y => "y",
        ConvOutput::X => "dx",
        ConvOutput::Weight => "dw",
    };
    let [b, h, w, c] = conv.x.axes;
    let ([kh, kw], o) = (conv.kernel, conv.y.axes[3]);
    let (dtype, stride, pad) = (conv.dtype, conv.window.stride, conv.window.pad);
    format!("{made} of ({b}×{h}×{w}×{c} {dtype}) by {o}×{kh}×{kw}, stride {stride}, pad {pad}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libraries;
    use graph::op::Window;

    fn conv(dtype: DType, tf32: bool) -> Convolution {
        let images = |c: usize| Images { address: 256, axes: [2, 8, 6, c] };
        let window = Window { stride: 1, pad: 1 };
        let (made, kernel, weight) = (ConvOutput::Weight, [3, 3], 512);
        Convolution { made, x: images(16), weight, kernel, y: images(32), window, dtype, tf32 }
    }

    #[test]
    fn results_are_known_by_what_is_made() {
        let dw = conv(DType::Bf16, false);
        assert_eq!(dw.result(), (512, 32 * 9 * 16 * 2));
        assert_eq!(dw.with_result_at(4096).result().0, 4096);
        let dx = Convolution { made: ConvOutput::X, ..dw };
        assert_eq!(dx.result(), (256, 2 * 8 * 6 * 16 * 2));
        assert_eq!(describe(&dx), "dx of (2×8×6×16 bf16) by 32×3×3, stride 1, pad 1");
    }

    #[test]
    fn engines_that_round_more_or_vary_are_left_out() {
        let wanted = |dtype, tf32, notes: &[Note]| {
            let notes: Vec<i32> = notes.iter().map(|note| *note as i32).collect();
            is_wanted(&conv(dtype, tf32), &notes)
        };
        let units = [Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE];
        assert!(wanted(DType::Bf16, false, &units) && wanted(DType::F32, true, &units));
        assert!(!wanted(DType::F32, false, &units) && wanted(DType::F32, false, &[]));
        for note in [
            Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
            Note::CUDNN_NUMERICAL_NOTE_WINOGRAD,
            Note::CUDNN_NUMERICAL_NOTE_FFT,
        ] {
            assert!(!wanted(DType::Bf16, false, &[note]));
        }
        assert!(!wanted(DType::F32, true, &[Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS]));
    }

    /// Descriptors need cuDNN, but no GPU.
    #[test]
    fn cudnn_takes_the_descriptions() {
        if let Err(error) = libraries::cudnn() {
            let text = error.to_string();
            assert!(text.contains("cuDNN 9") && !text.contains('\n'), "{text}");
            return;
        }
        for (made, dtype) in
            [(ConvOutput::Y, DType::Bf16), (ConvOutput::X, DType::F16), (ConvOutput::Weight, DType::F32)]
        {
            let conv = Convolution { made, ..conv(dtype, false) };
            let weight = Images { address: conv.weight, axes: [32, 3, 3, 16] };
            let tensors = [(&conv.x, X), (&weight, WEIGHT), (&conv.y, Y)];
            let [x, weight, y] = tensors.map(|(images, id)| tensor(images, id, dtype).unwrap());
            let window = window(&conv).unwrap();
            operation(made, [&x, &weight, &y, &window]).unwrap();
            // One that doesn't fit is refused, so that they are looked at.
            if made == ConvOutput::Y {
                assert!(operation(made, [&y, &weight, &x, &window]).is_err());
            }
        }
    }
}
