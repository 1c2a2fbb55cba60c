//! The driver's objects as values that free themselves, and its errors with what was being done.

use crate::action::{Address, Facts};
use crate::error::CudaError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

/// An error of the driver with what was being done.
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

/// Errors after which every further call in this process fails.
fn loses_the_gpu(result: CUresult) -> bool {
    use CUresult::*;
    matches!(
        result,
        CUDA_ERROR_DEINITIALIZED
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
    let mut version: c_int = 0;
    // SAFETY: the library is there; writes one number.
    said(unsafe { sys::cuDriverGetVersion(&mut version) }, "asking for the driver's version")?;
    // SAFETY: takes no address.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(version),
        result => Err(CudaError::NoDevice(format!("{}: {}", text(result, true), text(result, false)))),
    }
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

/// The context that all users of a GPU in this process share.
pub struct Context {
    device: c_int,
    raw: sys::CUcontext,
}

// SAFETY: a context may be current in several threads at a time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The driver must have been started, and have this GPU.
    pub fn open(number: usize) -> Result<Arc<Self>, CudaError> {
        let device = number as c_int;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        said(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, "opening the GPU")?;
        let context = Arc::new(Context { device, raw });
        context.enter()?;
        Ok(context)
    }

    /// Makes this the context that this thread's calls go to.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        said(unsafe { sys::cuCtxSetCurrent(self.raw) }, "entering the GPU's context")
    }

    /// Bytes free, and bytes there are.
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

/// Frees a driver's object, in its context; errors then are of no use to anybody.
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

/// A range of the GPU's memory.
pub struct Block {
    context: Arc<Context>,
    pub address: Address,
    pub bytes: usize,
}

impl Block {
    pub fn new(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Self, CudaError> {
        context.enter()?;
        let mut address = 0;
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(256)) };
        check(result, || format!("allocating {bytes} bytes for {what}"))?;
        Ok(Block { context: Arc::clone(context), address, bytes })
    }
}

freed_by!(Block, address, sys::cuMemFree_v2);

/// Memory of the host that the GPU reads and writes by itself.
pub struct Pinned {
    context: Arc<Context>,
    raw: *mut c_void,
    bytes: usize,
}

impl Pinned {
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemHostAlloc(&mut raw, bytes.max(64), 0) };
        check(result, || format!("allocating {bytes} bytes of pinned memory"))?;
        // SAFETY: just allocated, at least this long.
        unsafe { std::ptr::write_bytes(raw.cast::<u8>(), 0, bytes.max(64)) };
        Ok(Pinned { context: Arc::clone(context), raw, bytes })
    }

    pub fn address(&self, offset: usize) -> *mut c_void {
        debug_assert!(offset <= self.bytes);
        self.raw.cast::<u8>().wrapping_add(offset).cast()
    }

    /// # Safety
    /// The GPU writes nothing there while the slice lives.
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset + len <= self.bytes);
        // SAFETY: within the allocation, which was zeroed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.address(offset).cast(), len) }
    }

    /// # Safety
    /// The GPU neither reads nor writes there while the slice lives.
    pub unsafe fn bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.bytes);
        // SAFETY: within the allocation, which was zeroed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.address(offset).cast(), len) }
    }
}

freed_by!(Pinned, raw, sys::cuMemFreeHost);

/// A queue of work.
pub struct Stream {
    context: Arc<Context>,
    pub raw: sys::CUstream,
}

impl Stream {
    /// One that doesn't wait for the default stream.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        said(unsafe { sys::cuStreamCreate(&mut raw, flags) }, "making a stream")?;
        Ok(Stream { context: Arc::clone(context), raw })
    }

    pub fn synchronise(&self, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, doing)
    }

    /// What is put here from now on starts after `event`, as it was last recorded.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        said(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, "waiting for an event")
    }

    pub fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: plans place their values inside of what the executor allocated; streams order the uses.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) };
        check(result, || format!("copying {bytes} bytes on the GPU"))
    }

    pub fn zero(&self, at: Address, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as in `copy`.
        let result = unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.raw) };
        check(result, || format!("zeroing {bytes} bytes on the GPU"))
    }

    /// # Safety
    /// `from` stays as it is until the stream has come past this.
    pub unsafe fn send(&self, from: *const c_void, to: Address, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the host's side is the caller's, the GPU's as in `copy`.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, self.raw) };
        check(result, || format!("sending {bytes} bytes to the GPU"))
    }

    /// # Safety
    /// Nobody touches `to` until the stream has come past this.
    pub unsafe fn fetch(&self, from: Address, to: *mut c_void, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the host's side is the caller's, the GPU's as in `copy`.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, self.raw) };
        check(result, || format!("fetching {bytes} bytes from the GPU"))
    }

    /// Sends bytes and waits until they are there.
    pub fn send_now(&self, from: &[u8], to: Address) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream is waited for while the slice is borrowed.
        unsafe { self.send(from.as_ptr().cast(), to, from.len()) }?;
        self.synchronise(|| format!("sending {} bytes to the GPU", from.len()))
    }

    /// Fetches bytes as they are when all that was put here is done.
    pub fn fetch_now(&self, from: Address, to: &mut [u8]) -> Result<(), CudaError> {
        if to.is_empty() {
            return Ok(());
        }
        let bytes = to.len();
        // SAFETY: the stream is waited for while the slice is borrowed.
        unsafe { self.fetch(from, to.as_mut_ptr().cast(), bytes) }?;
        self.synchronise(|| format!("fetching {bytes} bytes from the GPU"))
    }

    /// Records what `work` puts here, and into streams that it joins to this one, as a graph.
    pub fn capture(
        &self,
        work: impl FnOnce() -> Result<(), CudaError>,
        name: &str,
    ) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives and is not being captured, since this function ends every capture.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }, || format!("capturing {name}"))?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle, null if the capture failed.
        let ended = unsafe { sys::cuStreamEndCapture(self.raw, &mut graph) };
        let made = worked.and_then(|()| {
            check(ended, || format!("ending the capture of {name}"))?;
            let mut raw = std::ptr::null_mut();
            // SAFETY: the graph was just made; writes one handle.
            let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0) };
            check(result, || format!("instantiating the graph of {name}"))?;
            Ok(Graph { context: Arc::clone(&self.context), raw })
        });
        if !graph.is_null() {
            // SAFETY: made above, used no more: the instance is independent of it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made
    }

    pub fn launch(&self, graph: &Graph, name: &str) -> Result<(), CudaError> {
        // SAFETY: both live.
        check(unsafe { sys::cuGraphLaunch(graph.raw, self.raw) }, || format!("launching the graph of {name}"))
    }
}

freed_by!(Stream, raw, sys::cuStreamDestroy_v2);

/// A captured list of work, ready to be launched.
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

freed_by!(Graph, raw, sys::cuGraphExecDestroy);

/// A point in a stream that others wait for, or that time is measured from.
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

impl Event {
    /// For order alone.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    pub fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with(context: &Arc<Context>, flags: u32) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        said(unsafe { sys::cuEventCreate(&mut raw, flags) }, "making an event")?;
        Ok(Event { context: Arc::clone(context), raw })
    }

    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        said(unsafe { sys::cuEventRecord(self.raw, stream.raw) }, "recording an event")
    }

    /// Waits until the GPU has come past it; at once if it was never recorded.
    pub fn synchronise(&self, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        check(unsafe { sys::cuEventSynchronize(self.raw) }, doing)
    }

    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => said(result, "looking whether the GPU is done").map(|()| true),
        }
    }

    /// Seconds from `start` to this; both must be done.
    pub fn seconds_since(&self, start: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both live; writes one number.
        let result = unsafe { elapsed_time()?(&mut milliseconds, start.raw, self.raw) };
        said(result, "reading the GPU's clock")?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

freed_by!(Event, raw, sys::cuEventDestroy_v2);

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// The name that every driver has; cudarc's bindings of CUDA 13 know only the one that came with CUDA 12.8.
fn elapsed_time() -> Result<ElapsedTime, CudaError> {
    static FOUND: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    // SAFETY: the driver is loaded, and has had this function with this signature since CUDA 2.
    let find =
        || unsafe { sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime\0") }.ok().map(|symbol| *symbol);
    let missing = || CudaError::Misuse("the NVIDIA driver has no cuEventElapsedTime".into());
    (*FOUND.get_or_init(find)).ok_or_else(missing)
}
