//! Compiled kernels, loaded on the GPU.

use crate::action::{Kernel, Launch, Source};
use crate::compile::Image;
use crate::driver::{Context, check};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

/// Shared memory of a block without opt-in.
const SHARED_UNASKED: u32 = 48 << 10;

pub struct Modules {
    context: Arc<Context>,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<Kernel, Function>,
}

/// A kernel that can be launched as long as its [`Modules`] live.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub raw: sys::CUfunction,
    shared: u32,
}

// SAFETY: handles may be used from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above.
unsafe impl Send for Function {}

impl Modules {
    pub fn new(context: &Arc<Context>) -> Self {
        Modules { context: Arc::clone(context), modules: Vec::new(), functions: HashMap::new() }
    }

    #[cfg(test)]
    pub fn load(context: &Arc<Context>, images: &[(Source, Image)]) -> Result<Self, CudaError> {
        let mut loaded = Self::new(context);
        loaded.add(images)?;
        Ok(loaded)
    }

    pub fn has(&self, kernel: &Kernel) -> bool {
        self.functions.contains_key(kernel)
    }

    /// Loads more kernels.
    pub fn add(&mut self, images: &[(Source, Image)]) -> Result<(), CudaError> {
        self.context.enter()?;
        for (source, image) in images {
            let mut module = std::ptr::null_mut();
            // SAFETY: a cubin, or PTX that ends in a zero, as NVRTC made it.
            let result = unsafe { sys::cuModuleLoadData(&mut module, image.code.as_ptr().cast()) };
            check(result, || format!("loading the kernels of {}", source.file()))?;
            self.modules.push(module);
            for (name, lowered) in &image.names {
                let function = find(module, name, lowered)?;
                self.functions.insert(Kernel::new(*source, name.clone()), function);
            }
        }
        Ok(())
    }

    /// Function of a launch, set up for as much shared memory as that needs.
    pub fn function(&mut self, launch: &Launch) -> Result<Function, CudaError> {
        let Kernel { source, name } = &launch.kernel;
        let missing = || CudaError::Misuse(format!("{name} of {} was not compiled", source.file()));
        let function = self.functions.get_mut(&launch.kernel).ok_or_else(missing)?;
        if launch.shared > function.shared.max(SHARED_UNASKED) {
            use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
            // SAFETY: the function's module lives.
            let result = unsafe { sys::cuFuncSetAttribute(function.raw, SHARED, launch.shared as i32) };
            check(result, || format!("asking for {} bytes of shared memory for {name}", launch.shared))?;
            function.shared = launch.shared;
        }
        Ok(*function)
    }
}

fn find(module: sys::CUmodule, name: &str, lowered: &str) -> Result<Function, CudaError> {
    let doing = || format!("finding {name} among the compiled kernels");
    let lowered = CString::new(lowered).map_err(|_| CudaError::Misuse(doing()))?;
    let mut raw = std::ptr::null_mut();
    // SAFETY: the module was just loaded; a C string; writes one handle.
    check(unsafe { sys::cuModuleGetFunction(&mut raw, module, lowered.as_ptr()) }, doing)?;
    Ok(Function { raw, shared: 0 })
}

impl Drop for Modules {
    fn drop(&mut self) {
        let _ = self.context.enter();
        for module in &self.modules {
            // SAFETY: loaded once; the executor has waited for the streams and dropped its graphs before.
            let _ = unsafe { sys::cuModuleUnload(*module) };
        }
    }
}
