//! Finds and loads NCCL at run time, so that the same binary runs where there is none.

use super::ffi::{Functions, IN_PROGRESS, SUCCESS};
use crate::engine::CommError;
use crate::installed;
use crate::launch::{Lookup, environment};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Environment variable with the path of the library.
pub const VARIABLE: &str = "VITESSE_NCCL";
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Oldest supported version: the first with averages and bf16.
const OLDEST: c_int = 21_000;

/// Makes an error of NCCL.
pub(super) fn fault(why: impl Into<String>) -> CommError {
    CommError::Engine { engine: "NCCL", why: why.into() }
}

/// The loaded NCCL library. It stays until the process ends.
pub struct Library {
    path: String,
    version: c_int,
    pub(super) functions: Functions,
}

/// Libraries loaded so far: each file once, shared by the ranks of this process.
static LOADED: Mutex<Vec<Arc<Library>>> = Mutex::new(Vec::new());

impl Library {
    /// Loads the file that `VITESSE_NCCL` names, or else the NCCL that is installed.
    pub fn find() -> Result<Arc<Self>, CommError> {
        find(&environment)
    }

    /// Loads a file, or a name that the system's loader knows.
    pub fn open(path: &str) -> Result<Arc<Self>, CommError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = loaded.iter().find(|library| library.path == path) {
            return Ok(Arc::clone(library));
        }
        let library = load(path).map_err(|error| fault(error.line(path)))?;
        loaded.push(Arc::clone(&library));
        Ok(library)
    }

    /// Version number, as `ncclGetVersion` gives it.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Name and version, such as "NCCL 2.27.3".
    pub fn name(&self) -> String {
        format!("NCCL {}", spelled(self.version))
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// Turns the result of a call into an error with NCCL's last message, which mostly is its reason.
    pub(super) fn checked(&self, what: &str, code: c_int) -> Result<(), CommError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: known for every code; a text that stays.
        let mut why = format!("{what}: {}", text(unsafe { (self.functions.get_error_string)(code) }));
        if code == IN_PROGRESS {
            why += "; calls must not return before they are queued: unset NCCL_COMM_BLOCKING";
        }
        // SAFETY: the group is not looked at. NCCL keeps one text for the process, always ended by a zero; another rank's
        // failure at the same moment may get into it, which is all that can happen.
        let last = self.functions.get_last_error.map(|last| text(unsafe { last(std::ptr::null_mut()) }));
        if let Some(last) = last.filter(|last| !last.is_empty()) {
            why += &format!(" ({last})");
        }
        Err(fault(why))
    }
}

/// Formats a version number: 23007 is 2.30.7; before 2.9 it was 2804 for 2.8.4.
pub(super) fn spelled(version: i32) -> String {
    let (major, rest) = if version < 10_000 {
        (version / 1000, version % 1000)
    } else {
        (version / 10_000, version % 10_000)
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// Converts a C string to text without line breaks.
fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: texts of C end with a zero.
    let text = unsafe { CStr::from_ptr(from) }.to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Reason why a file was not loaded.
enum Unloaded {
    NotThere,
    Other(String),
}

impl Unloaded {
    fn line(self, path: &str) -> String {
        match self {
            Unloaded::NotThere => format!("there is no {path}"),
            Unloaded::Other(line) => line,
        }
    }
}

fn find(var: Lookup) -> Result<Arc<Library>, CommError> {
    if let Some(path) = var(VARIABLE).filter(|path| !path.is_empty()) {
        return Library::open(&path).map_err(|error| match error {
            CommError::Engine { why, .. } => fault(format!("{why} ({VARIABLE} names it)")),
            other => other,
        });
    }
    let program = std::env::current_exe().ok();
    let (named, known) = (installed::named(var), installed::folders(var, program.as_deref()));
    let within = |folders: Vec<PathBuf>| {
        folders.into_iter().flat_map(|folder| NAMES.map(|name| folder.join(name).display().to_string()))
    };
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    for path in within(named).chain(NAMES.map(str::to_string)).chain(within(known)) {
        if let Some(library) = loaded.iter().find(|library| library.path == path) {
            return Ok(Arc::clone(library));
        }
        match load(&path) {
            Ok(library) => {
                loaded.push(Arc::clone(&library));
                return Ok(library);
            }
            Err(Unloaded::NotThere) => {}
            // One that exists and doesn't load is reported to the user.
            Err(Unloaded::Other(line)) => return Err(fault(line)),
        }
    }
    Err(fault(format!(
        "there is no {} on this machine: Debian's libnccl2 or PyPI's nvidia-nccl-cu13 has it, and {VARIABLE} may name the file",
        NAMES[0]
    )))
}

fn load(path: &str) -> Result<Arc<Library>, Unloaded> {
    let other = |line: String| Unloaded::Other(line);
    if path.contains('/') && !Path::new(path).exists() {
        return Err(Unloaded::NotThere);
    }
    let name = CString::new(path).map_err(|_| other(format!("{path:?} is not a file name")))?;
    // SAFETY: loads a library, whose initializers run. That is what the user asked for.
    let (handle, error) = unsafe {
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        (handle, if handle.is_null() { text(libc::dlerror()) } else { String::new() })
    };
    if handle.is_null() {
        // The loader says the same of a library that this one needs, with that one's name.
        let missing = error.starts_with(&format!("{path}: cannot open shared object file: No such file"));
        return Err(if missing { Unloaded::NotThere } else { other(format!("can't load {path}: {error}")) });
    }
    let look_up = |symbol: &CStr| -> *mut c_void {
        // SAFETY: a library that was opened and is never closed.
        unsafe { libc::dlsym(handle, symbol.as_ptr()) }
    };
    // SAFETY: a library with all of these functions is NCCL, or what the user takes for it.
    let functions = unsafe { Functions::load(look_up) }.map_err(|missing| {
        other(format!("{path} has no {missing}: NCCL {} or newer is needed", spelled(OLDEST)))
    })?;
    let mut version = 0;
    // SAFETY: writes the number it is given.
    if unsafe { (functions.get_version)(&mut version) } != SUCCESS {
        return Err(other(format!("{path} gives no version")));
    }
    if version < OLDEST {
        let line = format!("{path} is NCCL {}; {} or newer is needed", spelled(version), spelled(OLDEST));
        return Err(other(line));
    }
    Ok(Arc::new(Library { path: path.to_string(), version, functions }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_spelled_as_nccl_does() {
        assert_eq!([2804, 21_003, 21_805, 23_007].map(spelled), ["2.8.4", "2.10.3", "2.18.5", "2.30.7"]);
    }

    #[test]
    fn a_file_that_the_user_names_is_the_only_one_tried() {
        let named = |path: &'static str| {
            find(&move |name| (name == VARIABLE).then(|| path.to_string()))
                .map(|_| ())
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            named("/nowhere/libnccl.so.2"),
            "NCCL: there is no /nowhere/libnccl.so.2 (VITESSE_NCCL names it)"
        );
        let broken = named("/proc/self/environ");
        assert!(broken.starts_with("NCCL: can't load /proc/self/environ: "), "{broken}");
        // A library, but another one.
        let other = named("libc.so.6");
        assert_eq!(
            other,
            "NCCL: libc.so.6 has no ncclGetVersion: NCCL 2.10.0 or newer is needed (VITESSE_NCCL names it)"
        );
    }
}
