//! Memory is planned: what is predicted is allocated, and a step allocates nothing.

mod common;

use common::{HEADER, Setup, fill_batch};
use cpu::Which;
use graph::{Header, Recompute};
use models::vit::Vit;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use train::{Raw, Session};

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

/// The counters are global, so tests of this file take turns.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn a_step_allocates_nothing() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
    let mut session = Session::new(raw.resolve().unwrap()).unwrap();
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

#[test]
fn the_counter_counts() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let before = OURS.load(Ordering::Relaxed);
    std::hint::black_box(vec![1u8; 100]);
    assert!(OURS.load(Ordering::Relaxed) > before);
}

#[test]
fn the_arena_is_as_large_as_predicted() {
    for (name, recompute) in [("vit-nano/4", Recompute::None), ("vit-ti/8", Recompute::Full)] {
        let vit = Vit::named(name, 32, 3, 10).unwrap();
        let executor = Setup { recompute, ..Setup::new(4) }.executor::<f32>(&vit);
        let program = executor.program();
        assert_eq!(executor.allocated().0, program.arena(), "{name}");
        assert_eq!(program.arena(), program.plans().map(|p| p.arena).into_iter().max().unwrap());
        assert!(executor.allocated().1 - program.state_bytes() < 128 * program.states.len());
    }
}

#[test]
fn full_recompute_halves_the_arena() {
    let arena = |name, image, recompute| {
        let vit = Vit::named(name, image, 3, 10).unwrap();
        let program = Setup { recompute, ..Setup::new(4) }.program(&vit);
        program.arena() as f64
    };
    for (name, image) in [("vit-ti/4", 32), ("vit-b/16", 224)] {
        let ratio = arena(name, image, Recompute::Full) / arena(name, image, Recompute::None);
        println!("{name}: full recompute needs {:.1}% of the arena", 100.0 * ratio);
        assert!(ratio <= 0.5, "{name}: {ratio}");
    }
}

#[test]
fn recompute_gives_the_same_bits() {
    let vit = Vit {
        dropout: 0.1,
        attention_dropout: 0.1,
        drop_path: 0.2,
        ..Vit::named("vit-nano/4", 32, 3, 10).unwrap()
    };
    let gradients = |recompute| {
        let mut executor = Setup { recompute, ..Setup::new(4) }.executor::<f32>(&vit);
        common::fill_weights(&mut executor);
        fill_batch(&mut executor, Which::Last, 0, 10);
        executor.run(Which::Last, &Header { nominal: 4.0, ..HEADER });
        let names = executor.program().states.iter().filter(|s| s.name.ends_with(".grad"));
        names.map(|s| common::state(&executor, &s.name)).collect::<Vec<_>>()
    };
    assert_eq!(gradients(Recompute::None), gradients(Recompute::Full));
}
