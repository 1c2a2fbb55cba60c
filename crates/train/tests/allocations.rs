//! A step allocates nothing. One test, alone in its program, since the counters see every thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use train::{Facts, Raw, Session};

/// Counts allocations, those made inside the `gemm` crate apart.
struct Counting;

static OURS: AtomicU64 = AtomicU64::new(0);
static INSIDE_GEMM: AtomicU64 = AtomicU64::new(0);

fn note() {
    let counter = if cpu::product::inside() { &INSIDE_GEMM } else { &OURS };
    counter.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(ptr, layout) };
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: passed on to the caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let raw = Raw {
        model: Some("vit-nano/4".into()),
        batch_size: Some(8),
        accumulate: Some(2),
        threads: Some(2),
        dropout: Some(0.1),
        attention_dropout: Some(0.1),
        drop_path: Some(0.1),
        train_samples: Some(100),
        ..Raw::default()
    };
    let facts = Facts::synthetic(&raw).unwrap();
    let mut session = Session::new(raw.resolve(&facts, 1).unwrap()).unwrap();
    assert!(OURS.load(Ordering::Relaxed) > 0, "the counter counts");
    for step in 0..2 {
        session.step(step).unwrap();
    }
    let (ours, inside) = (OURS.load(Ordering::Relaxed), INSIDE_GEMM.load(Ordering::Relaxed));
    for step in 2..12 {
        session.step(step).unwrap();
    }
    let ours = OURS.load(Ordering::Relaxed) - ours;
    let inside = INSIDE_GEMM.load(Ordering::Relaxed) - inside;
    println!("10 steps: {ours} allocations by vitesse, {inside} inside gemm");
    assert_eq!(ours, 0, "allocations in ten steps");
}
