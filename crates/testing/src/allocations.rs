//! An allocator that counts. A test program that wants it says so:
//!
//! ```
//! use testing::allocations::Counting;
//!
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting::new();
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Allocator that counts allocations of the process, and bytes that each thread holds.
pub struct Counting {
    is_apart: fn() -> bool,
}

impl Counting {
    #[allow(clippy::new_without_default, reason = "a static can't call it")]
    pub const fn new() -> Counting {
        Counting { is_apart: || false }
    }

    /// Counts allocations apart where `is_apart`, such as inside another crate.
    pub const fn apart(is_apart: fn() -> bool) -> Counting {
        Counting { is_apart }
    }

    fn note(&self, bytes: isize) {
        let counter = if (self.is_apart)() { &APART } else { &COUNT };
        counter.fetch_add(1, Ordering::Relaxed);
        hold(bytes);
    }
}

static COUNT: AtomicU64 = AtomicU64::new(0);
static APART: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn hold(change: isize) {
    // A thread that ends frees its own counters too; by then nobody looks.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.note(layout.size() as isize);
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        hold(-(layout.size() as isize));
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(ptr, layout) };
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new may be there at once.
        self.note(size as isize);
        hold(-(layout.size() as isize));
        // SAFETY: passed on to the caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// Allocations of all threads so far, without those apart.
pub fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Allocations of all threads so far that are counted apart.
pub fn count_apart() -> u64 {
    APART.load(Ordering::Relaxed)
}

/// The most bytes that this thread held at once while `work` ran, beyond what it held before.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}
