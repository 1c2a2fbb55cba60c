//! Matrix matmuls by cuBLASLt.
//!
//! cuBLASLt is column-major, we are row-major: a matrix of ours is the transpose of one of its own. So
//! result = left·right becomes resultᵀ = rightᵀ·leftᵀ there, and only the sides are swapped.

use crate::action::{Address, AttentionForward, Convolution, Epilogue, Matmul, Matrix};
use crate::attention;
use crate::convolution;
use crate::cudnn::{self, Cudnn};
use crate::driver::{Block, Context, Stream};
use crate::error::CudaError;
use crate::steps::hopper::Tiling;
use cudarc::cublaslt::sys::{self, cublasStatus_t};
use graph::DType;
use std::cell::OnceCell;
use std::ffi::c_void;
use std::sync::Arc;

/// Largest workspace of a matmul. cuBLASLt's authors suggest 32 MiB for Hopper.
pub const WORKSPACE: usize = 32 << 20;

/// Number of algorithms requested from cuBLASLt.
pub const CANDIDATES: usize = 16;

/// Implementation of matmuls of one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MatmulImpl {
    Library(CublasAlgorithm),
    /// Our kernel with this tiling.
    Own(Tiling),
}

/// Algorithm of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CublasAlgorithm {
    pub(crate) algo: sys::cublasLtMatmulAlgo_t,
    /// Bytes of its workspace.
    pub(crate) workspace: usize,
}

/// cuBLASLt, cuDNN if needed, and workspaces for calls that run one after the other:
/// one for the compute lane, one for the others.
pub struct MathLibraries {
    handle: sys::cublasLtHandle_t,
    cudnn: OnceCell<Cudnn>,
    workspaces: [Option<Block>; 2],
    /// Smaller workspaces, which captured graphs still use.
    outgrown: Vec<Block>,
    deterministic: bool,
    context: Arc<Context>,
}

// SAFETY: cuBLASLt's handles may be used from any thread.
unsafe impl Send for MathLibraries {}

impl Drop for MathLibraries {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: made once, freed once; streams were waited for.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

fn check(status: cublasStatus_t, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(CudaError::Matmul { doing: doing(), status: format!("{status:?}") }),
    }
}

impl MathLibraries {
    /// Opens cuBLASLt. If deterministic, algorithms never add partial sums in the order of arrival.
    pub fn new(context: &Arc<Context>, deterministic: bool) -> Result<Self, CudaError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, || "starting cuBLASLt".into())?;
        let (cudnn, workspaces, outgrown) = (OnceCell::new(), [None, None], Vec::new());
        let context = Arc::clone(context);
        Ok(MathLibraries { handle, cudnn, workspaces, outgrown, deterministic, context })
    }

    /// cuDNN, loaded at the first call, whose caller holds [`prepare_lock`](crate::driver::prepare_lock).
    pub fn cudnn(&self) -> Result<&Cudnn, CudaError> {
        if let Some(cudnn) = self.cudnn.get() {
            return Ok(cudnn);
        }
        let cudnn = Cudnn::new(&self.context)?;
        Ok(self.cudnn.get_or_init(|| cudnn))
    }

    /// Allocates so much workspace, for the compute lane and the others.
    pub fn provide(&mut self, bytes: [usize; 2]) -> Result<(), CudaError> {
        for (bytes, workspace) in bytes.into_iter().zip(&mut self.workspaces) {
            if bytes > workspace.as_ref().map_or(0, |block| block.bytes) {
                let larger = Block::new(&self.context, bytes, "the matmuls' workspace")?;
                self.outgrown.extend(workspace.replace(larger));
            }
        }
        Ok(())
    }

    /// Bytes of allocated workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.workspaces.iter().flatten().chain(&self.outgrown).map(|block| block.bytes).sum()
    }

    /// Version number of cuBLASLt.
    pub fn version() -> usize {
        // SAFETY: takes nothing.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Algorithms for a matmul, the most promising first.
    pub(crate) fn candidates(&self, matmul: &Matmul, most: usize) -> Result<Vec<CublasAlgorithm>, CudaError> {
        let problem = MatmulDescriptor::new(matmul)?;
        let preference = Preference::new(matmul, self.deterministic)?;
        // SAFETY: plain numbers, all of which may be zero.
        let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = vec![unsafe { std::mem::zeroed() }; most];
        let mut count = 0;
        let MatmulDescriptor { operation, a, b, c } = &problem;
        // SAFETY: all descriptors live; writes at most as many results as there is room for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference.0,
                most as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        let doing = || format!("looking for an algorithm for {}", describe(matmul));
        if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && count == 0 {
            check(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED, doing)?;
        }
        check(status, doing)?;
        found.truncate(count.max(0) as usize);
        let usable = found.into_iter().filter(|r| r.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(usable
            .map(|r| CublasAlgorithm { algo: r.algo, workspace: r.workspaceSize })
            .filter(|found| found.workspace <= WORKSPACE)
            .collect())
    }

    /// Accepts a recorded algorithm, if it fits this matmul here.
    pub(crate) fn accept(&self, matmul: &Matmul, data: [u64; 8]) -> Option<CublasAlgorithm> {
        let MatmulDescriptor { operation, a, b, c } = &MatmulDescriptor::new(matmul).ok()?;
        let algo = sys::cublasLtMatmulAlgo_t { data };
        // SAFETY: plain numbers.
        let mut result: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors live; writes one result.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(self.handle, operation.0, a.0, b.0, c.0, c.0, &algo, &mut result)
        };
        let fits = status == cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && result.workspaceSize <= WORKSPACE;
        fits.then_some(CublasAlgorithm { algo, workspace: result.workspaceSize })
    }

    /// Enqueues a matmul on a stream; `aside` if that is not the compute lane's.
    pub fn run(
        &self,
        matmul: &Matmul,
        algorithm: &CublasAlgorithm,
        stream: &Stream,
        aside: bool,
    ) -> Result<(), CudaError> {
        let there = self.workspaces[usize::from(aside)].as_ref();
        if algorithm.workspace > there.map_or(0, |block| block.bytes) {
            return Err(CudaError::Misuse(format!("no workspace was provided for {}", describe(matmul))));
        }
        self.enqueue(matmul, algorithm, stream, there.map_or(0, |block| block.address))
    }

    /// Enqueues a convolution on a stream; `aside` as in [`Self::run`].
    pub fn convolve(
        &self,
        conv: &Convolution,
        algorithm: &cudnn::CudnnPlan,
        stream: &Stream,
        aside: bool,
    ) -> Result<(), CudaError> {
        let workspace = self.workspace(algorithm, aside, || convolution::describe(conv))?;
        convolution::run(self.cudnn()?, conv, algorithm, stream, workspace)
    }

    /// Enqueues attention on a stream; `aside` as in [`Self::run`].
    pub fn attend(
        &self,
        attended: &AttentionForward,
        algorithm: &cudnn::CudnnPlan,
        stream: &Stream,
        aside: bool,
    ) -> Result<(), CudaError> {
        let workspace = self.workspace(algorithm, aside, || attention::describe(attended))?;
        attention::run(self.cudnn()?, attended, algorithm, stream, workspace)
    }

    /// Workspace of one of cuDNN's plans.
    fn workspace(
        &self,
        algorithm: &cudnn::CudnnPlan,
        aside: bool,
        what: impl FnOnce() -> String,
    ) -> Result<Address, CudaError> {
        let there = self.workspaces[usize::from(aside)].as_ref();
        if algorithm.workspace > there.map_or(0, |block| block.bytes) {
            return Err(CudaError::Misuse(format!("no workspace was provided for {}", what())));
        }
        Ok(there.map_or(0, |block| block.address))
    }

    /// Runs a matmul with a workspace of its own, of [`WORKSPACE`] bytes.
    pub fn run_in(
        &self,
        matmul: &Matmul,
        algorithm: &CublasAlgorithm,
        stream: &Stream,
        workspace: &Block,
    ) -> Result<(), CudaError> {
        self.enqueue(matmul, algorithm, stream, workspace.address)
    }

    fn enqueue(
        &self,
        matmul: &Matmul,
        algorithm: &CublasAlgorithm,
        stream: &Stream,
        workspace: Address,
    ) -> Result<(), CudaError> {
        let MatmulDescriptor { operation, a, b, c } = &MatmulDescriptor::new(matmul)?;
        let (alpha, beta) = (1f32, if matmul.accumulate { 1f32 } else { 0f32 });
        let at = |address: Address| address as *mut c_void;
        // SAFETY: the plan places operands inside of the executor's memory, the stream orders their uses, and the scalars
        // are read before the call returns.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                operation.0,
                (&raw const alpha).cast(),
                at(matmul.right.address),
                a.0,
                at(matmul.left.address),
                b.0,
                (&raw const beta).cast(),
                at(matmul.result.address),
                c.0,
                at(matmul.result.address),
                c.0,
                &algorithm.algo,
                at(workspace),
                algorithm.workspace,
                stream.raw.cast(),
            )
        };
        check(status, || format!("matmul {}", describe(matmul)))
    }
}

macro_rules! descriptor {
    ($name:ident, $raw:ty, $free:path) => {
        struct $name($raw);
        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made once, freed once.
                let _ = unsafe { $free(self.0) };
            }
        }
    };
}

descriptor!(Operation, sys::cublasLtMatmulDesc_t, sys::cublasLtMatmulDescDestroy);
descriptor!(Layout, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayoutDestroy);
descriptor!(Preference, sys::cublasLtMatmulPreference_t, sys::cublasLtMatmulPreferenceDestroy);

/// cuBLASLt's descriptors of a matmul.
struct MatmulDescriptor {
    operation: Operation,
    a: Layout,
    b: Layout,
    c: Layout,
}

impl MatmulDescriptor {
    fn new(matmul: &Matmul) -> Result<Self, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        let Matmul { left, right, result, .. } = matmul;
        let operation = Operation::new(matmul)?;
        operation.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(matmul.right_transposed))?;
        operation.set(A::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(matmul.left_transposed))?;
        if let Epilogue::Bias(address) = matmul.epilogue {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            operation.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            operation.set(A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address)?;
        }
        let (a, b, c) = (Layout::new(right)?, Layout::new(left)?, Layout::new(result)?);
        Ok(MatmulDescriptor { operation, a, b, c })
    }
}

impl Operation {
    fn new(matmul: &Matmul) -> Result<Self, CudaError> {
        use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
        let rounds = matmul.tf32 && matmul.left.dtype == DType::F32;
        let compute = if rounds { CUBLAS_COMPUTE_32F_FAST_TF32 } else { CUBLAS_COMPUTE_32F };
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status =
            unsafe { sys::cublasLtMatmulDescCreate(&mut raw, compute, sys::cudaDataType_t::CUDA_R_32F) };
        check(status, || format!("describing {}", describe(matmul)))?;
        Ok(Operation(raw))
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        let from = std::ptr::from_ref(value).cast();
        // SAFETY: reads a value of this size; each attribute is given its own type above.
        let status = unsafe { sys::cublasLtMatmulDescSetAttribute(self.0, attribute, from, size_of::<T>()) };
        check(status, || format!("setting {attribute:?}"))
    }
}

impl Layout {
    fn new(matrix: &Matrix) -> Result<Self, CudaError> {
        let dtype = data_type(matrix.dtype)?;
        let (rows, columns) = (matrix.columns as u64, matrix.rows as u64);
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status =
            unsafe { sys::cublasLtMatrixLayoutCreate(&mut raw, dtype, rows, columns, matrix.stride as i64) };
        check(status, || format!("describing a matrix of {} × {}", matrix.rows, matrix.columns))?;
        Ok(Layout(raw))
    }
}

impl Preference {
    fn new(matmul: &Matmul, deterministic: bool) -> Result<Self, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as A;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) };
        check(status, || "describing what to look for".into())?;
        let preference = Preference(raw);
        preference.set(A::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
        preference.set(A::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions(matmul, deterministic))?;
        let Matmul { left, right, result, .. } = matmul;
        for (attribute, matrix) in [
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result),
        ] {
            preference.set(attribute, &alignment(matrix.address))?;
        }
        Ok(preference)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), CudaError> {
        let from = std::ptr::from_ref(value).cast();
        // SAFETY: reads a value of this size; each attribute is given its own type above.
        let status =
            unsafe { sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, from, size_of::<T>()) };
        check(status, || format!("setting {attribute:?}"))
    }
}

/// Allowed reduction schemes: never in half precision, and not in the result itself if that must not depend on the order of
/// arrival.
fn reductions(matmul: &Matmul, deterministic: bool) -> u32 {
    use sys::cublasLtReductionScheme_t as R;
    let wide = R::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    if deterministic || matmul.result.dtype.is_half() {
        wide
    } else {
        R::CUBLASLT_REDUCTION_SCHEME_MASK as u32
    }
}

/// The largest power of two up to 256 that divides an address.
pub(crate) fn alignment(address: Address) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType_t, CudaError> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::Bf16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        other => Err(CudaError::Misuse(format!("the CUDA executor has no matmuls of {other}"))),
    }
}

/// Describes a matmul for messages, such as `(50432×768 bf16)·(2304×768 bf16)ᵀ + bias → bf16`.
pub fn describe(matmul: &Matmul) -> String {
    let side = |m: &Matrix, transposed: bool| {
        format!("({}×{} {}){}", m.rows, m.columns, m.dtype, if transposed { "ᵀ" } else { "" })
    };
    let Matmul { left, right, result, .. } = matmul;
    let (left, right) = (side(left, matmul.left_transposed), side(right, matmul.right_transposed));
    let bias = match matmul.epilogue {
        Epilogue::None => "",
        Epilogue::Bias(_) => " + bias",
    };
    let old = if matmul.accumulate { " + result" } else { "" };
    format!("{left}·{right}{bias}{old} → {}", result.dtype)
}

/// M, N and the inner width K of a matmul.
pub fn sizes(matmul: &Matmul) -> (usize, usize, usize) {
    let Matmul { left, result, .. } = matmul;
    (result.rows, result.columns, if matmul.left_transposed { left.rows } else { left.columns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two_up_to_256() {
        assert_eq!((alignment(0x1000), alignment(128), alignment(20), alignment(0)), (256, 128, 4, 256));
    }

    #[test]
    fn results_in_half_precision_are_never_summed_in_it() {
        let matrix = |dtype| Matrix::new(0, dtype, 4, 4);
        let matmul = |dtype| Matmul {
            left: matrix(DType::Bf16),
            left_transposed: true,
            right: matrix(DType::Bf16),
            right_transposed: false,
            result: matrix(dtype),
            accumulate: false,
            epilogue: Epilogue::None,
            tf32: false,
        };
        assert_eq!(reductions(&matmul(DType::Bf16), false), 2);
        assert_eq!(reductions(&matmul(DType::F32), false), 7);
        assert_eq!(reductions(&matmul(DType::F32), true), 2);
        assert_eq!(describe(&matmul(DType::F32)), "(4×4 bf16)ᵀ·(4×4 bf16) → f32");
    }
}
