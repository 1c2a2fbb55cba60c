//! cuDNN's graph API: the older calls have fewer kernels for half precision, and none for attention.
//!
//! A graph of tensors and operations describes the computation; heuristics propose engines for it, and each proposal becomes a
//! plan, which can be run any number of times.

use crate::action::Address;
use crate::driver::{Context, Stream};
use crate::error::CudaError;
use crate::libraries;
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Kind,
    cudnnBackendDescriptorType_t as Of, cudnnBackendHeurMode_t as Heuristic, cudnnStatus_t,
};
use graph::DType;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

/// Alignment of operands' addresses in bytes.
pub const ALIGNMENT: Address = 16;

/// The library, with a handle.
pub struct Cudnn {
    pub(crate) handle: sys::cudnnHandle_t,
    /// Version number, such as 91300.
    pub version: usize,
    context: Arc<Context>,
}

// SAFETY: a handle may be used from any thread, by one at a time; it is never shared.
unsafe impl Send for Cudnn {}

impl Drop for Cudnn {
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
    Err(CudaError::Cudnn { doing: doing(), status })
}

/// A proposal that can be run.
pub struct CudnnPlan {
    plan: Descriptor,
    /// Its place among the proposals, and the engine's number.
    pub place: usize,
    pub engine: i64,
    /// Bytes of its workspace.
    pub workspace: usize,
    /// Descriptors that the plan was made from.
    _problem: Arc<CudnnGraph>,
}

/// Proposals of the heuristics, the most promising first.
pub struct Proposals {
    problem: Arc<CudnnGraph>,
    engines: Vec<Descriptor>,
}

impl Proposals {
    pub fn len(&self) -> usize {
        self.engines.len()
    }
}

/// Computation as a graph of cuDNN's operations.
pub struct CudnnGraph {
    graph: Descriptor,
    /// Descriptors of the graph.
    _parts: Vec<Descriptor>,
}

impl CudnnGraph {
    /// Operations, and the descriptors that they are made of.
    pub fn new(
        handle: sys::cudnnHandle_t,
        operations: Vec<Descriptor>,
        mut parts: Vec<Descriptor>,
    ) -> Result<Self, CudaError> {
        let graph = Descriptor::new(Of::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations.iter().collect::<Vec<_>>())?
            .with(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[handle])?
            .finished()?;
        parts.extend(operations);
        Ok(CudnnGraph { graph, _parts: parts })
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

/// Mode of the heuristics: the second also proposes engines that are slow, but support almost everything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HeuristicMode {
    Fast,
    All,
}

impl Cudnn {
    /// The caller holds [`prepare_lock`](crate::driver::prepare_lock).
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let version = libraries::cudnn()?;
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { sys::cudnnCreate(&mut handle) }, || "starting cuDNN".into())?;
        Ok(Cudnn { handle, version, context: Arc::clone(context) })
    }

    pub fn proposals(&self, problem: CudnnGraph, ask: HeuristicMode) -> Result<Proposals, CudaError> {
        let mut engines = problem.proposed(Heuristic::CUDNN_HEUR_MODE_A)?;
        if ask == HeuristicMode::All {
            engines.extend(problem.proposed(Heuristic::CUDNN_HEUR_MODE_FALLBACK)?);
        }
        Ok(Proposals { problem: Arc::new(problem), engines })
    }

    /// Makes a proposal ready to run. Refuses it if its workspace exceeds `most`, or if `is_wanted` refuses its numerical notes.
    pub fn algorithm(
        &self,
        proposals: &Proposals,
        place: usize,
        most: usize,
        is_wanted: impl Fn(&[i32]) -> bool,
    ) -> Result<CudnnPlan, CudaError> {
        let refused = |why: String| CudaError::Cudnn { doing: format!("proposal {place}"), status: why };
        let config = proposals.engines.get(place).ok_or_else(|| refused("there is none".into()))?;
        let engine = config.part(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Of::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
        let mut notes = [0i32; 16];
        let (attribute, kind) = (Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Kind::CUDNN_TYPE_NUMERICAL_NOTE);
        let count = engine.get(attribute, kind, &mut notes)?;
        let notes = &notes[..count.min(notes.len())];
        if !is_wanted(notes) {
            return Err(refused(format!("does not repeat its results, or rounds more (notes {notes:?})")));
        }
        let number = engine.number(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?;
        let plan = Descriptor::new(Of::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[self.handle])?
            .with_parts(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config])?
            .finished()?;
        let workspace = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as usize;
        if workspace > most {
            return Err(refused(format!("takes {} MiB to work in", workspace.div_ceil(1 << 20))));
        }
        let problem = Arc::clone(&proposals.problem);
        Ok(CudnnPlan { plan, place, engine: number, workspace, _problem: problem })
    }

    /// Enqueues it on a stream, with the operands' addresses by their ids; scalars lie on the host.
    pub fn run(
        &self,
        algorithm: &CudnnPlan,
        operands: &[(i64, *mut c_void)],
        stream: &Stream,
        workspace: Address,
        doing: impl Fn() -> String,
    ) -> Result<(), CudaError> {
        // SAFETY: both live.
        check(unsafe { sys::cudnnSetStream(self.handle, stream.raw.cast()) }, &doing)?;
        let (ids, addresses): (Vec<i64>, Vec<*mut c_void>) = operands.iter().copied().unzip();
        let workspace = [workspace as *mut c_void];
        let pack = Descriptor::new(Of::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, &ids)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR, &addresses)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Kind::CUDNN_TYPE_VOID_PTR, &workspace)?
            .finished()?;
        // SAFETY: the plan places operands inside of the executor's memory, the stream orders their uses, and the working
        // memory is as large as the algorithm said.
        check(unsafe { sys::cudnnBackendExecute(self.handle, algorithm.plan.raw, pack.raw) }, doing)
    }
}

/// Descriptor of a tensor with cuDNN's axes and their strides in elements.
pub fn tensor(id: i64, dtype: DType, axes: [usize; 4], strides: [usize; 4]) -> Result<Descriptor, CudaError> {
    let [axes, strides] = [axes, strides].map(|list| list.map(|n| n as i64));
    Descriptor::new(Of::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[data_type(dtype)?])?
        .with(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Kind::CUDNN_TYPE_INT64, &axes)?
        .with(Name::CUDNN_ATTR_TENSOR_STRIDES, Kind::CUDNN_TYPE_INT64, &strides)?
        .with(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Kind::CUDNN_TYPE_INT64, &[id])?
        .with(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Kind::CUDNN_TYPE_INT64, &[ALIGNMENT as i64])
}

fn data_type(dtype: DType) -> Result<sys::cudnnDataType_t, CudaError> {
    match dtype {
        DType::F32 => Ok(sys::cudnnDataType_t::CUDNN_DATA_FLOAT),
        DType::Bf16 => Ok(sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16),
        DType::F16 => Ok(sys::cudnnDataType_t::CUDNN_DATA_HALF),
        other => Err(CudaError::Misuse(format!("cuDNN is given no tensors of {other}"))),
    }
}

/// One of cuDNN's objects, which has attributes until it is finished.
pub struct Descriptor {
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
    pub fn new(of: Of) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { sys::cudnnBackendCreateDescriptor(of, &mut raw) };
        check(status, || format!("making {of:?}"))?;
        Ok(Descriptor { raw })
    }

    /// Sets an attribute, whose values must be of the type named.
    pub fn with<T>(self, name: Name, kind: Kind, values: &[T]) -> Result<Self, CudaError> {
        let (count, from) = (values.len() as i64, values.as_ptr().cast());
        // SAFETY: reads so many values, which live through the call.
        let status = unsafe { sys::cudnnBackendSetAttribute(self.raw, name, kind, count, from) };
        check(status, || format!("setting {name:?}"))?;
        Ok(self)
    }

    pub fn with_parts(self, name: Name, parts: &[&Descriptor]) -> Result<Self, CudaError> {
        let raw: Vec<_> = parts.iter().map(|part| part.raw).collect();
        self.with(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw)
    }

    pub fn finished(self) -> Result<Self, CudaError> {
        // SAFETY: it lives.
        let status = unsafe { sys::cudnnBackendFinalize(self.raw) };
        check(status, || "finishing a description".into())?;
        Ok(self)
    }

    /// Reads an attribute as far as the slice is long. Returns the number of its values.
    pub fn get<T>(&self, name: Name, kind: Kind, to: &mut [T]) -> Result<usize, CudaError> {
        let mut count = 0;
        let room = to.len() as i64;
        // Asked for the count alone, it wants no address.
        let at = if to.is_empty() { std::ptr::null_mut() } else { to.as_mut_ptr().cast() };
        // SAFETY: writes at most as many values as there is room for, of the kind that is named.
        let status = unsafe { sys::cudnnBackendGetAttribute(self.raw, name, kind, room, &mut count, at) };
        check(status, || format!("reading {name:?}"))?;
        Ok(count.max(0) as usize)
    }

    pub fn number(&self, name: Name) -> Result<i64, CudaError> {
        let mut number = [0i64];
        self.get(name, Kind::CUDNN_TYPE_INT64, &mut number)?;
        Ok(number[0])
    }

    /// Reads an attribute that is a descriptor itself.
    pub fn part(&self, name: Name, of: Of) -> Result<Descriptor, CudaError> {
        let part = Descriptor::new(of)?;
        self.get(name, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut [part.raw])?;
        Ok(part)
    }
}

/// Prefixes an error with what was being done.
pub fn named(error: CudaError, what: impl FnOnce() -> String) -> CudaError {
    match error {
        CudaError::Cudnn { doing, status } => {
            CudaError::Cudnn { doing: format!("{}: {doing}", what()), status }
        }
        other => other,
    }
}
