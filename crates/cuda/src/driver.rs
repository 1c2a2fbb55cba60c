//! RAII wrappers of the driver's objects, and its errors with what was being done.

mod memory;
mod stream;

pub use memory::{Block, Pinned};
pub use stream::{Event, Graph, Node, Stream};

use crate::action::Facts;
use crate::error::CudaError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lock held while memory is allocated or freed, kernels are loaded, or work is captured: cuBLASLt's calls fail in a capture while another
/// thread of the process does one of these (seen with 13.1).
static PREPARING: Mutex<()> = Mutex::new(());

pub fn prepare_lock() -> MutexGuard<'static, ()> {
    PREPARING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns a driver's status into an error with what was being done.
pub fn check(result: CUresult, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let (doing, name, meaning) = (doing(), text(result, true), text(result, false));
    if loses_the_gpu(result) {
        return Err(CudaError::Lost { doing, name, meaning });
    }
    Err(CudaError::Driver { doing, name, meaning })
}

fn said(result: CUresult, doing: &'static str) -> Result<(), CudaError> {
    check(result, || doing.to_string())
}

fn text(result: CUresult, name: bool) -> String {
    let mut found: *const c_char = std::ptr::null();
    // SAFETY: the driver writes the address of a static string, or nothing.
    let _ = unsafe {
        if name { sys::cuGetErrorName(result, &mut found) } else { sys::cuGetErrorString(result, &mut found) }
    };
    if found.is_null() {
        return format!("error {}", result as u32);
    }
    // SAFETY: a static C string, as the driver says.
    unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned()
}

/// Sticky errors, after which every further call in this process fails.
fn loses_the_gpu(result: CUresult) -> bool {
    use CUresult::*;
    matches!(
        result,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_UNKNOWN
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
    )
}

/// Starts the driver; returns the CUDA version it supports, such as 12020.
pub fn start() -> Result<i32, CudaError> {
    let version = version()?;
    // SAFETY: takes no address.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(version),
        result => Err(CudaError::NoDevice(format!("{}: {}", text(result, true), text(result, false)))),
    }
}

/// CUDA version that the driver supports; needs no GPU.
pub fn version() -> Result<i32, CudaError> {
    let mut version: c_int = 0;
    // SAFETY: the library is there; writes one number.
    said(unsafe { sys::cuDriverGetVersion(&mut version) }, "asking for the driver's version")?;
    Ok(version)
}

/// All GPUs. The driver must have been started.
pub fn devices() -> Result<Vec<Facts>, CudaError> {
    let mut count: c_int = 0;
    // SAFETY: writes one number.
    said(unsafe { sys::cuDeviceGetCount(&mut count) }, "counting GPUs")?;
    if count == 0 {
        return Err(CudaError::NoDevice("the driver sees none".into()));
    }
    (0..count).map(facts).collect()
}

fn facts(number: c_int) -> Result<Facts, CudaError> {
    use sys::CUdevice_attribute_enum as A;
    let mut name = [0 as c_char; 256];
    // SAFETY: writes a C string of at most 256 bytes.
    said(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, number) }, "asking for a GPU's name")?;
    // SAFETY: a C string that ends within the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let attribute = |which| {
        let mut value: c_int = 0;
        // SAFETY: writes one number.
        let result = unsafe { sys::cuDeviceGetAttribute(&mut value, which, number) };
        said(result, "asking for a GPU's properties").map(|()| value as u32)
    };
    Ok(Facts {
        name,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        processors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}

/// UUID of a GPU. The driver must have been started.
pub fn identity(number: usize) -> Result<[u8; 16], CudaError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: writes one identity.
    said(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, number as c_int) }, "asking for a GPU's identity")?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Primary context of a GPU, shared by all its users in this process.
pub struct Context {
    device: c_int,
    raw: sys::CUcontext,
}

// SAFETY: a context may be current in several threads at a time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The libraries must be there, and the driver have this GPU.
    pub fn open(number: usize) -> Result<Arc<Self>, CudaError> {
        start()?;
        let device = number as c_int;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        said(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, "opening the GPU")?;
        let context = Arc::new(Context { device, raw });
        context.enter()?;
        Ok(context)
    }

    /// Makes this the current context of the thread.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        said(unsafe { sys::cuCtxSetCurrent(self.raw) }, "entering the GPU's context")
    }

    /// Free and total bytes of the GPU's memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        self.enter()?;
        // SAFETY: writes two numbers.
        said(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "asking for free memory")?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; everything in it holds an `Arc` and is gone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Frees a driver's object in its context, ignoring errors.
macro_rules! freed_by {
    ($type:ty, $field:ident, $free:path) => {
        // SAFETY: handles may be used from any thread; `&mut self` or the stream's order keeps uses apart.
        unsafe impl Send for $type {}

        impl Drop for $type {
            fn drop(&mut self) {
                let _ = self.context.enter();
                // SAFETY: made once, freed once, and whoever used it was waited for.
                let _ = unsafe { $free(self.$field) };
            }
        }
    };
}
use freed_by;
