//! Convolutions by cuDNN, through its graph API: the older calls know fewer kernels for halves.
//!
//! A convolution is described by tensors and an operation; heuristics propose engines for it, and each proposal becomes a plan,
//! which can be run as often as one likes. cuDNN names axes (B,C,h,w) whatever their order in memory, which strides tell.

use crate::action::{Address, Convolution, Images, Made};
use crate::driver::{Context, Stream, prepare_alone};
use crate::error::CudaError;
use crate::libraries;
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Kind,
    cudnnBackendDescriptorType_t as Of, cudnnBackendHeurMode_t as Heuristic,
    cudnnBackendNumericalNote_t as Note, cudnnStatus_t,
};
use graph::DType;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

/// Working memory that a convolution may have at most. The gradient of a large weight is summed in parts of its size.
pub const WORKSPACE: usize = 128 << 20;

/// cuDNN.
pub struct Convolutions {
    handle: sys::cudnnHandle_t,
    /// Such as 91300.
    pub version: usize,
    context: Arc<Context>,
}

// SAFETY: a handle may be used from any thread, by one at a time; it is never shared.
unsafe impl Send for Convolutions {}

impl Drop for Convolutions {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: made once, freed once; streams were waited for.
        let _ = unsafe { sys::cudnnDestroy(self.handle) };
    }
}

fn check(status: cudnnStatus_t, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
    if status == cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut said = [0 as c_char; 512];
    // SAFETY: writes a C string of at most so many bytes, the zero included.
    unsafe { sys::cudnnGetLastErrorString(said.as_mut_ptr(), said.len() - 1) };
    // SAFETY: the last byte is zero whatever was written.
    let said = unsafe { CStr::from_ptr(said.as_ptr()) }.to_string_lossy();
    let status = match said.trim() {
        "" => format!("{status:?}"),
        said => format!("{status:?} ({})", said.replace('\n', " ")),
    };
    Err(CudaError::Convolution { doing: doing(), status })
}

/// A proposal that can be run.
pub struct Algorithm {
    plan: Descriptor,
    /// Its place among the proposals, and the engine's number.
    pub place: usize,
    pub engine: i64,
    /// Bytes of working memory that it takes.
    pub workspace: usize,
    /// What the plan was made from.
    _problem: Arc<Problem>,
}

/// What heuristics propose for a convolution, the most promising first.
pub struct Proposals {
    problem: Arc<Problem>,
    engines: Vec<Descriptor>,
}

impl Proposals {
    pub fn len(&self) -> usize {
        self.engines.len()
    }
}

impl Convolutions {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let version = libraries::cudnn()?;
        context.enter()?;
        let _alone = prepare_alone();
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { sys::cudnnCreate(&mut handle) }, || "starting cuDNN".into())?;
        Ok(Convolutions { handle, version, context: Arc::clone(context) })
    }

    pub fn proposals(&self, conv: &Convolution) -> Result<Proposals, CudaError> {
        let doing = |error| named(error, || format!("looking for an algorithm for {}", describe(conv)));
        let problem = Problem::new(conv, self.handle).map_err(doing)?;
        let mut engines = Vec::new();
        // The second has engines that are slow, but take almost everything.
        for mode in [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_FALLBACK] {
            engines.extend(problem.proposed(mode).map_err(doing)?);
        }
        Ok(Proposals { problem: Arc::new(problem), engines })
    }

    /// A proposal made ready. Refused if its results depend on more than its operands, are less exact than others', or if it
    /// takes more working memory than there is.
    pub fn algorithm(
        &self,
        conv: &Convolution,
        proposals: &Proposals,
        place: usize,
    ) -> Result<Algorithm, CudaError> {
        let refused =
            |why: String| CudaError::Convolution { doing: format!("proposal {place}"), status: why };
        let config = proposals.engines.get(place).ok_or_else(|| refused("there is none".into()))?;
        let engine = config.part(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Of::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
        let mut notes = [0i32; 16];
        let (attribute, kind) = (Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Kind::CUDNN_TYPE_NUMERICAL_NOTE);
        let count = engine.get(attribute, kind, &mut notes)?;
        let notes = &notes[..count.min(notes.len())];
        if !is_wanted(conv, notes) {
            return Err(refused(format!("does not repeat its results, or rounds more (notes {notes:?})")));
        }
        let number = engine.number(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?;
        let plan = Descriptor::new(Of::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[self.handle])?
            .with_parts(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config])?
            .finished()?;
        let workspace = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as usize;
        if workspace > WORKSPACE {
            return Err(refused(format!("takes {} MiB to work in", workspace >> 20)));
        }
        let problem = Arc::clone(&proposals.problem);
        Ok(Algorithm { plan, place, engine: number, workspace, _problem: problem })
    }

    /// Puts a convolution into a stream.
    pub fn run(
        &self,
        conv: &Convolution,
        algorithm: &Algorithm,
        stream: &Stream,
        workspace: Address,
    ) -> Result<(), CudaError> {
        let doing = || format!("convolving {}", describe(conv));
        // SAFETY: both live.
        check(unsafe { sys::cudnnSetStream(self.handle, stream.raw.cast()) }, doing)?;
        let at = |address: Address| address as *mut c_void;
        let operands = [conv.x.address, conv.weight, conv.y.address].map(at);
        let pack = Descriptor::new(Of::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, &[X, WEIGHT, Y])?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR, &operands)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Kind::CUDNN_TYPE_VOID_PTR, &[at(workspace)])?
            .finished()?;
        // SAFETY: the plan places operands inside of the executor's memory, the stream orders their uses, and the working
        // memory is as large as the algorithm said.
        check(unsafe { sys::cudnnBackendExecute(self.handle, algorithm.plan.raw, pack.raw) }, doing)
    }
}

/// Whether an engine with these notes may be taken: one that gives the same bits every time, in f32 sums of the operands as
/// they are. Transforms (Winograd, FFT) round more.
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

/// A convolution in cuDNN's terms.
struct Problem {
    graph: Descriptor,
    /// What the graph is made of.
    _parts: Vec<Descriptor>,
}

impl Problem {
    fn new(conv: &Convolution, handle: sys::cudnnHandle_t) -> Result<Self, CudaError> {
        let [kh, kw] = conv.kernel;
        let weight = Images { address: conv.weight, axes: [conv.y.axes[3], kh, kw, conv.x.axes[3]] };
        let x = tensor(&conv.x, X, conv.dtype)?;
        let weight = tensor(&weight, WEIGHT, conv.dtype)?;
        let y = tensor(&conv.y, Y, conv.dtype)?;
        let window = window(conv)?;
        let operation = operation(conv.made, [&x, &weight, &y, &window])?;
        let graph = Descriptor::new(Of::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &[&operation])?
            .with(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[handle])?
            .finished()?;
        Ok(Problem { graph, _parts: vec![x, weight, y, window, operation] })
    }

    fn proposed(&self, mode: Heuristic) -> Result<Vec<Descriptor>, CudaError> {
        let heuristic = Descriptor::new(Of::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&self.graph])?
            .with(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Kind::CUDNN_TYPE_HEUR_MODE, &[mode])?;
        // One that has nothing to propose may say so by failing.
        let Ok(heuristic) = heuristic.finished() else { return Ok(Vec::new()) };
        let (results, kind) = (Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR);
        let count = heuristic.get::<sys::cudnnBackendDescriptor_t>(results, kind, &mut [])?;
        let of = Of::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        let mut engines = (0..count).map(|_| Descriptor::new(of)).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<_> = engines.iter().map(|engine| engine.raw).collect();
        let found = heuristic.get(results, kind, &mut raw)?;
        engines.truncate(found);
        Ok(engines)
    }
}

fn tensor(images: &Images, id: i64, dtype: DType) -> Result<Descriptor, CudaError> {
    let [b, h, w, c] = images.axes.map(|n| n as i64);
    Descriptor::new(Of::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[data_type(dtype)?])?
        .with(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Kind::CUDNN_TYPE_INT64, &[b, c, h, w])?
        .with(Name::CUDNN_ATTR_TENSOR_STRIDES, Kind::CUDNN_TYPE_INT64, &[h * w * c, 1, w * c, c])?
        .with(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Kind::CUDNN_TYPE_INT64, &[id])?
        .with(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Kind::CUDNN_TYPE_INT64, &[ALIGNMENT as i64])?
        .finished()
}

/// Bytes that operands' addresses are multiples of.
pub const ALIGNMENT: Address = 16;

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

fn operation(made: Made, [x, weight, y, window]: [&Descriptor; 4]) -> Result<Descriptor, CudaError> {
    let (of, alpha, beta, of_window, names) = match made {
        Made::Y => (
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
        Made::X => (
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
        Made::Weight => (
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

fn data_type(dtype: DType) -> Result<sys::cudnnDataType_t, CudaError> {
    match dtype {
        DType::F32 => Ok(sys::cudnnDataType_t::CUDNN_DATA_FLOAT),
        DType::Bf16 => Ok(sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16),
        DType::F16 => Ok(sys::cudnnDataType_t::CUDNN_DATA_HALF),
        other => Err(CudaError::Misuse(format!("the CUDA executor has no convolutions of {other}"))),
    }
}

/// One of cuDNN's objects, which has attributes until it is finished.
struct Descriptor {
    raw: sys::cudnnBackendDescriptor_t,
}

// SAFETY: a finished one is only read; others are never shared.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made once, freed once.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}

impl Descriptor {
    fn new(of: Of) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { sys::cudnnBackendCreateDescriptor(of, &mut raw) };
        check(status, || format!("making {of:?}"))?;
        Ok(Descriptor { raw })
    }

    /// With an attribute, whose values must be of the kind that is named.
    fn with<T>(self, name: Name, kind: Kind, values: &[T]) -> Result<Self, CudaError> {
        let (count, from) = (values.len() as i64, values.as_ptr().cast());
        // SAFETY: reads so many values, which live through the call.
        let status = unsafe { sys::cudnnBackendSetAttribute(self.raw, name, kind, count, from) };
        check(status, || format!("setting {name:?}"))?;
        Ok(self)
    }

    fn with_parts(self, name: Name, parts: &[&Descriptor]) -> Result<Self, CudaError> {
        let raw: Vec<_> = parts.iter().map(|part| part.raw).collect();
        self.with(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw)
    }

    fn finished(self) -> Result<Self, CudaError> {
        // SAFETY: it lives.
        let status = unsafe { sys::cudnnBackendFinalize(self.raw) };
        check(status, || "finishing a description".into())?;
        Ok(self)
    }

    /// Reads an attribute as far as there is room for it. Returns how many values it has.
    fn get<T>(&self, name: Name, kind: Kind, to: &mut [T]) -> Result<usize, CudaError> {
        let mut count = 0;
        let room = to.len() as i64;
        // Asked for the count alone, it wants no address.
        let at = if to.is_empty() { std::ptr::null_mut() } else { to.as_mut_ptr().cast() };
        // SAFETY: writes at most as many values as there is room for, of the kind that is named.
        let status = unsafe { sys::cudnnBackendGetAttribute(self.raw, name, kind, room, &mut count, at) };
        check(status, || format!("reading {name:?}"))?;
        Ok(count.max(0) as usize)
    }

    fn number(&self, name: Name) -> Result<i64, CudaError> {
        let mut number = [0i64];
        self.get(name, Kind::CUDNN_TYPE_INT64, &mut number)?;
        Ok(number[0])
    }

    /// An attribute that is a description itself.
    fn part(&self, name: Name, of: Of) -> Result<Descriptor, CudaError> {
        let part = Descriptor::new(of)?;
        self.get(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut [part.raw])?;
        Ok(part)
    }
}

fn named(error: CudaError, what: impl FnOnce() -> String) -> CudaError {
    match error {
        CudaError::Convolution { doing, status } => {
            CudaError::Convolution { doing: format!("{}: {doing}", what()), status }
        }
        other => other,
    }
}

/// Such as `y of (8×128×128×512 bf16) by 512×3×3, stride 1, pad 1`.
pub fn describe(conv: &Convolution) -> String {
    let made = match conv.made {
        Made::Y => "y",
        Made::X => "dx",
        Made::Weight => "dw",
    };
    let [b, h, w, c] = conv.x.axes;
    let ([kh, kw], o) = (conv.kernel, conv.y.axes[3]);
    let (dtype, stride, pad) = (conv.dtype, conv.window.stride, conv.window.pad);
    format!("{made} of ({b}×{h}×{w}×{c} {dtype}) by {o}×{kh}×{kw}, stride {stride}, pad {pad}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::op::Window;

    fn conv(dtype: DType, tf32: bool) -> Convolution {
        let images = |c: usize| Images { address: 256, axes: [2, 8, 6, c] };
        let window = Window { stride: 1, pad: 1 };
        let (made, kernel, weight) = (Made::Weight, [3, 3], 512);
        Convolution { made, x: images(16), weight, kernel, y: images(32), window, dtype, tf32 }
    }

    #[test]
    fn results_are_known_by_what_is_made() {
        let dw = conv(DType::Bf16, false);
        assert_eq!(dw.result(), (512, 32 * 9 * 16 * 2));
        assert_eq!(dw.with_result_at(4096).result().0, 4096);
        let dx = Convolution { made: Made::X, ..dw };
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

    /// Descriptions need no GPU, where there is cuDNN.
    #[test]
    fn cudnn_takes_the_descriptions() {
        if let Err(error) = libraries::cudnn() {
            let text = error.to_string();
            assert!(text.contains("cuDNN 9") && !text.contains('\n'), "{text}");
            return;
        }
        for (made, dtype) in [(Made::Y, DType::Bf16), (Made::X, DType::F16), (Made::Weight, DType::F32)] {
            let conv = Convolution { made, ..conv(dtype, false) };
            let weight = Images { address: conv.weight, axes: [32, 3, 3, 16] };
            let tensors = [(&conv.x, X), (&weight, WEIGHT), (&conv.y, Y)];
            let [x, weight, y] = tensors.map(|(images, id)| tensor(images, id, dtype).unwrap());
            let window = window(&conv).unwrap();
            operation(made, [&x, &weight, &y, &window]).unwrap();
            // One that doesn't fit is refused, so that they are looked at.
            if made == Made::Y {
                assert!(operation(made, [&y, &weight, &x, &window]).is_err());
            }
        }
    }
}
