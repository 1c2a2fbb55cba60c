//! Device memory and pinned host memory.

use super::{Context, check, freed_by};
use crate::action::Address;
use crate::error::CudaError;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;

/// Allocation of device memory.
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

/// Pinned host memory, which the GPU reads and writes directly.
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
        // SAFETY: within the allocation, whose pages came from the system, zeroed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.address(offset).cast(), len) }
    }

    /// # Safety
    /// The GPU neither reads nor writes there while the slice lives.
    pub unsafe fn bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.bytes);
        // SAFETY: within the allocation, whose pages came from the system, zeroed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.address(offset).cast(), len) }
    }
}

freed_by!(Pinned, raw, sys::cuMemFreeHost);
