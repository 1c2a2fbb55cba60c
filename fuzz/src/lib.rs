//! What the targets share: a watch over memory, a place for files, and what is asked of every error.
//!
//! libFuzzer's own limit on allocations needs a sanitizer, so memory is counted here; which also allows bounds that depend
//! on the input.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`, which may hold `bound` bytes more at once than were held before.
pub fn within<T>(bound: usize, work: impl FnOnce() -> T) -> T {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    let used = PEAK.load(Relaxed) - before;
    assert!(used <= bound, "{used} bytes were allocated; {bound} are allowed");
    result
}

/// Any text from a file may be in an error, which is still one line of bearable length.
pub fn check_error(error: impl ToString) {
    let error = error.to_string();
    assert!(!error.contains(char::is_control) && error.len() < 1500, "{error:?}");
}

/// A folder in memory if the system has one.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(target: &str) -> Scratch {
        let memory = PathBuf::from("/dev/shm");
        let base = if memory.is_dir() { memory } else { std::env::temp_dir() };
        Scratch(base.join(format!("vitesse-fuzz-{target}-{}", std::process::id())))
    }

    /// The path of a folder that holds this file alone.
    pub fn folder(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let _ = fs::remove_dir_all(&self.0);
        fs::create_dir_all(&self.0).expect("a folder for the input");
        fs::write(self.0.join(name), bytes).expect("a file of the input");
        self.0.clone()
    }

    pub fn file(&self, bytes: &[u8]) -> PathBuf {
        self.folder("input", bytes).join("input")
    }
}
