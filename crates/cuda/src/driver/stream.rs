//! Streams, the work enqueued on them, and events between them.

use super::{Context, check, freed_by, said};
use crate::action::Address;
use crate::error::CudaError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

/// CUDA stream.
pub struct Stream {
    context: Arc<Context>,
    pub raw: sys::CUstream,
}

impl Stream {
    /// Makes a stream that doesn't wait for the default stream.
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

    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => said(result, "looking whether the GPU is done").map(|()| true),
        }
    }

    /// Makes later work on this stream wait for `event`, as it was last recorded.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        said(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, "waiting for an event")
    }

    /// Makes later work on this stream, which is under capture, wait for an event that is recorded outside: every launch of the graph waits
    /// for the event as it was last recorded before.
    pub fn wait_in_graph(&self, event: &Event) -> Result<(), CudaError> {
        let external = sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;
        // SAFETY: both live.
        said(
            unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, external) },
            "waiting for an event in a graph",
        )
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
    /// `from` stays unchanged until the stream has run the copy.
    pub unsafe fn send(&self, from: *const c_void, to: Address, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the host's side is the caller's, the GPU's as in `copy`.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, self.raw) };
        check(result, || format!("sending {bytes} bytes to the GPU"))
    }

    /// # Safety
    /// Nobody touches `to` until the stream has run the copy.
    pub unsafe fn fetch(&self, from: Address, to: *mut c_void, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the host's side is the caller's, the GPU's as in `copy`.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, self.raw) };
        check(result, || format!("fetching {bytes} bytes from the GPU"))
    }

    /// Copies bytes to the device and waits for the copy.
    pub fn send_now(&self, from: &[u8], to: Address) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream is waited for while the slice is borrowed.
        unsafe { self.send(from.as_ptr().cast(), to, from.len()) }?;
        self.synchronise(|| format!("sending {} bytes to the GPU", from.len()))
    }

    /// Copies bytes to the host after all enqueued work, and waits for the copy.
    pub fn fetch_now(&self, from: Address, to: &mut [u8]) -> Result<(), CudaError> {
        if to.is_empty() {
            return Ok(());
        }
        let bytes = to.len();
        // SAFETY: the stream is waited for while the slice is borrowed.
        unsafe { self.fetch(from, to.as_mut_ptr().cast(), bytes) }?;
        self.synchronise(|| format!("fetching {bytes} bytes from the GPU"))
    }

    /// Captures the work that `work` enqueues on this stream, and on streams that it joins to it, as a graph.
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

    /// Nodes on which the next work would depend, while the stream is being captured.
    pub fn captured_last(&self) -> Result<Vec<Node>, CudaError> {
        let (mut nodes, mut count) = (std::ptr::null(), 0);
        let (mut status, mut edges) =
            (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, std::ptr::null());
        let (id, graph) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives; writes a status, two addresses and a number; null where nothing is wanted.
        let result = unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                self.raw,
                &mut status,
                id,
                graph,
                &mut nodes,
                &mut edges,
                &mut count,
            )
        };
        said(result, "looking at a capture")?;
        if nodes.is_null() {
            return Ok(vec![]);
        }
        // SAFETY: as many nodes as were counted, which stay until the stream is used again.
        Ok(unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec())
    }

    pub fn launch(&self, graph: &Graph, name: &str) -> Result<(), CudaError> {
        // SAFETY: both live.
        check(unsafe { sys::cuGraphLaunch(graph.raw, self.raw) }, || format!("launching the graph of {name}"))
    }
}

freed_by!(Stream, raw, sys::cuStreamDestroy_v2);

/// A node of a graph that is being captured.
pub type Node = sys::CUgraphNode;

/// A captured list of work, ready to be launched.
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

freed_by!(Graph, raw, sys::cuGraphExecDestroy);

/// CUDA event: a point in a stream that others wait for, or for timing.
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

impl Event {
    /// Makes an event without timing.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// Makes an event without timing whose waiting thread sleeps.
    pub fn sleeping(context: &Arc<Context>) -> Result<Self, CudaError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        Self::with(context, flags | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32)
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

    /// Records it within a capture: every launch of the graph records it.
    pub fn record_in_graph(&self, stream: &Stream) -> Result<(), CudaError> {
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both live.
        said(
            unsafe { sys::cuEventRecordWithFlags(self.raw, stream.raw, external) },
            "recording an event in a graph",
        )
    }

    /// Waits until the GPU has reached it; returns at once if it was never recorded.
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

// SAFETY: the driver may be called with one event from several threads.
unsafe impl Sync for Event {}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// Symbol that every driver has; cudarc's bindings of CUDA 13 only have the one that came with CUDA 12.8.
fn elapsed_time() -> Result<ElapsedTime, CudaError> {
    static FOUND: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    // SAFETY: the driver is loaded, and has had this function with this signature since CUDA 2.
    let find =
        || unsafe { sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime\0") }.ok().map(|symbol| *symbol);
    let missing = || CudaError::Misuse("the NVIDIA driver has no cuEventElapsedTime".into());
    (*FOUND.get_or_init(find)).ok_or_else(missing)
}
