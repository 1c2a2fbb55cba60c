//! The libraries that a GPU needs, which are loaded when it is used: one binary serves machines with and without.
//!
//! cudarc looks for them where the system's loader does, and panics if it doesn't find them. So they are looked for here
//! first, in more places; what is loaded then, cudarc finds by its name.

use crate::action::Facts;
use crate::driver;
use crate::error::CudaError;
use comm::installed;
use comm::launch::environment;
use cudarc::{cublaslt, cudnn as dnn, driver as cuda, nvrtc};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

/// Oldest supported driver, and its name.
const OLDEST_DRIVER: (i32, &str) = (12020, "12.2 (driver 535)");

const OLDEST_GPU: (u32, u32) = (7, 5);

/// The oldest version of NVRTC and cuBLASLt.
const OLDEST_LIBRARY: i32 = 12;

/// Libraries by stem, each with the stems of those it loads itself and doesn't find in the same folder otherwise.
const WANTED: [(&str, &[&str]); 3] =
    [("libcuda.so", &[]), ("libnvrtc.so", &["libnvrtc-builtins.so"]), ("libcublasLt.so", &[])];

/// Tells whether a GPU can be used here: all libraries, and a driver and a GPU that are new enough.
pub fn available() -> Result<(), CudaError> {
    devices().map(drop)
}

/// The GPUs of this machine, by number.
pub fn devices() -> Result<Vec<Facts>, CudaError> {
    check()?;
    let facts = driver::devices()?;
    match facts.iter().find(|f| f.capability < OLDEST_GPU) {
        Some(old) if facts.iter().all(|f| f.capability < OLDEST_GPU) => {
            Err(CudaError::DeviceTooOld { name: old.name.clone(), capability: old.capability })
        }
        _ => Ok(facts),
    }
}

/// The facts of one GPU.
pub fn device(number: usize) -> Result<Facts, CudaError> {
    let mut all = devices()?;
    if number >= all.len() {
        return Err(CudaError::NoSuchDevice { wanted: number, there: all.len() });
    }
    let facts = all.swap_remove(number);
    if facts.capability < OLDEST_GPU {
        return Err(CudaError::DeviceTooOld { name: facts.name, capability: facts.capability });
    }
    Ok(facts)
}

/// Free and total bytes of a GPU's memory.
pub fn memory(number: usize) -> Result<(usize, usize), CudaError> {
    device(number)?;
    driver::Context::open(number)?.memory()
}

/// UUID of a GPU of this machine.
pub fn identity(number: usize) -> Result<[u8; 16], CudaError> {
    check()?;
    driver::identity(number)
}

/// Checks that all libraries are installed and fit each other, and starts the driver.
fn check() -> Result<(), CudaError> {
    preload();
    // SAFETY: asks the system's loader for a library that has no unusual constructors; so below.
    if !unsafe { cuda::sys::is_culib_present() } {
        let (purpose, install) = ("is the NVIDIA driver", "the driver (its package is called nvidia-driver)");
        return Err(CudaError::NoLibrary { library: "libcuda", purpose, install });
    }
    nvrtc_present()?;
    // SAFETY: as above.
    if !unsafe { cublaslt::sys::is_culib_present() } {
        let (purpose, install) = ("multiplies matrices", "CUDA, or the Python package nvidia-cublas");
        return Err(CudaError::NoLibrary { library: "libcublasLt", purpose, install });
    }
    let driver = driver::start()?;
    if driver < OLDEST_DRIVER.0 {
        return Err(CudaError::DriverTooOld { found: driver, needed: OLDEST_DRIVER.1 });
    }
    let nvrtc = crate::compile::nvrtc_version()?.0;
    // SAFETY: the library is there; the call takes nothing. 130001 is 13.0.1.
    let blas = (unsafe { cublaslt::sys::cublasLtGetVersion() } / 10_000) as i32;
    for (library, major) in [("libnvrtc", nvrtc), ("libcublasLt", blas)] {
        if major < OLDEST_LIBRARY {
            return Err(CudaError::LibraryTooOld { library, major });
        }
        if major > driver / 1000 {
            return Err(CudaError::LibraryTooNew { library, major, driver });
        }
    }
    Ok(())
}

/// CUDA version that the driver of this machine supports, such as 12020; none without a driver.
pub fn driver_version() -> Option<i32> {
    preload();
    // SAFETY: as in `check`.
    if !unsafe { cuda::sys::is_culib_present() } {
        return None;
    }
    driver::version().ok()
}

/// Checks that kernels can be compiled, which needs no GPU.
pub fn nvrtc_present() -> Result<(), CudaError> {
    preload();
    // SAFETY: as in `check`.
    if unsafe { nvrtc::sys::is_culib_present() } {
        return Ok(());
    }
    let (purpose, install) = ("compiles kernels", "CUDA, or the Python package nvidia-cuda-nvrtc");
    Err(CudaError::NoLibrary { library: "libnvrtc", purpose, install })
}

/// Loads libraries that the system's loader would not find by itself, once.
fn preload() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| WANTED.iter().for_each(|(stem, helpers)| load(stem, helpers)));
}

fn load(stem: &str, helpers: &[&str]) {
    let program = std::env::current_exe().ok();
    if !load_from(&installed::named(&environment), stem, helpers) && !by_name(stem) {
        load_from(&installed::folders(&environment, program.as_deref()), stem, helpers);
    }
}

/// The oldest cuDNN, whose engines say what their results depend on.
const OLDEST_CUDNN: usize = 9;

/// Checks that convolutions can run, and returns the version of cuDNN, such as 91300. Loaded only where
/// something is convolved.
pub fn cudnn() -> Result<usize, CudaError> {
    static ONCE: Once = Once::new();
    preload();
    ONCE.call_once(|| load("libcudnn.so", &[]));
    // SAFETY: as in `check`.
    if !unsafe { dnn::sys::is_culib_present() } {
        let (purpose, install) =
            ("makes convolutions", "cuDNN 9, or the Python package nvidia-cudnn-cu13 (or -cu12)");
        return Err(CudaError::NoLibrary { library: "libcudnn", purpose, install });
    }
    // SAFETY: the library is there; the call takes nothing.
    let version = unsafe { dnn::sys::cudnnGetVersion() };
    if version / 10_000 < OLDEST_CUDNN {
        let found = format!("{}.{}", version / 1000, version % 1000 / 100);
        return Err(CudaError::CudnnTooOld { found });
    }
    Ok(version)
}

/// Tells whether the system's loader finds one of the names that cudarc asks for.
fn by_name(stem: &str) -> bool {
    ["", ".13", ".12", ".9", ".1"].iter().any(|suffix| open(Path::new(&format!("{stem}{suffix}"))))
}

fn load_from(folders: &[PathBuf], stem: &str, helpers: &[&str]) -> bool {
    folders.iter().any(|folder| {
        for helper in helpers {
            candidates(folder, helper).iter().any(|path| open(path));
        }
        candidates(folder, stem).iter().any(|path| open(path))
    })
}

/// Files of `stem` in a folder, the newest version first.
fn candidates(folder: &Path, stem: &str) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(stem))
    };
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).filter(is_one).collect();
    paths.sort();
    paths.reverse();
    paths
}

fn open(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a C string; the libraries named here may be loaded at any time. The handle is kept open for good.
    !unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_gpu_says_so_in_one_line() {
        if let Err(error) = available() {
            let text = error.to_string();
            assert!(!text.contains('\n') && text.len() > 20, "{text}");
        }
    }

    #[test]
    fn folders_that_are_not_there_are_passed_over() {
        assert!(candidates(Path::new("/nowhere"), "libnvrtc.so").is_empty());
        assert!(!load_from(&["/nowhere".into()], "libnvrtc.so", &["libnvrtc-builtins.so"]));
    }
}
