//! What a program takes of the GPU's memory is what its plan says, and a constant.

use cuda::{Executor, MemoryNeeds, MemoryUse, Options, Which};
use graph::{DType, Header, Loss, Mixed, Optimizer, Program, Settings, compile};
use models::vit::Vit;

/// What the driver hands out memory by.
const GRANULE: usize = 2 << 20;

pub(super) fn program(model: &str, image: usize, batch: usize) -> Program {
    let vit = Vit::named(model, image, 3, 1000).unwrap();
    let target = cuda::Target::of(0, true);
    let settings = Settings {
        max_grad_norm: Some(1.0),
        mixed: Some(Mixed { half: DType::Bf16, residual: DType::F32 }),
        ..Settings::plain(
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 },
            &target,
        )
    };
    compile(vit.build(batch, Loss { smoothing: 0.0, mixed: false }, DType::F32).unwrap(), &settings).unwrap()
}

pub(super) fn executor(program: Program) -> Executor {
    let options = Options { device: 0, seed: 1, deterministic: false, tf32: false, comm: None };
    Executor::new(program, options).unwrap()
}

/// Bytes that a few steps took from the driver, and what the executor says of them.
fn used(keeper: &Executor, image: usize, batch: usize) -> (usize, MemoryUse) {
    let before = keeper.free_memory().unwrap().0;
    let program = program("vit-b/16", image, batch);
    let needs = MemoryNeeds::of(&program, keeper.facts(), false).unwrap();
    let mut gpu = executor(program);
    let header = Header { seed: 1, step: 0, first_sample: 0, learning_rate: 1e-4, nominal: 1.0 };
    gpu.upload_f32(Which::Last, "images", &vec![0.5; batch * 3 * image * image]).unwrap();
    gpu.upload_i32(Which::Last, "labels", &vec![0; batch]).unwrap();
    gpu.upload_f32(Which::Last, "weights", &vec![1.0; batch]).unwrap();
    for _ in 0..3 {
        gpu.run(Which::Last, &header).unwrap();
        gpu.run(Which::Update, &header).unwrap();
    }
    gpu.synchronise().unwrap();
    let taken = before - gpu.free_memory().unwrap().0;
    let memory = gpu.memory();
    assert_eq!((memory.arena, memory.states), (gpu.program().arena(), needs.states));
    assert!(memory.total() <= needs.total(), "{memory:?} against {needs:?}");
    (taken, memory)
}

/// The driver's own share doesn't depend on the batch: code of kernels and graphs, and what its granules leave.
#[test]
#[ignore = "needs a GPU"]
fn memory_is_what_the_plan_says_and_a_constant() {
    let keeper = executor(program("vit-ti/16", 32, 1));
    let mut beside = Vec::new();
    for batch in [8, 64] {
        // The first time loads what stays in the context: cuBLASLt's kernels.
        used(&keeper, 224, batch);
        let (taken, memory) = used(&keeper, 224, batch);
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        println!(
            "batch {batch}: {memory:?}, {:.1} MiB in all; the driver says {:.1}",
            mib(memory.total()),
            mib(taken)
        );
        assert!(taken + GRANULE >= memory.total());
        beside.push(taken.saturating_sub(memory.total()));
    }
    // 16,385 tokens: nothing that grows with their square.
    let (taken, memory) = used(&keeper, 2048, 1);
    println!("2048 pixels: {memory:?}; the driver says {:.1} MiB", taken as f64 / f64::from(1 << 20));
    assert!(taken + GRANULE >= memory.total());
    let apart = beside[0].abs_diff(beside[1]);
    println!("beside: {beside:?}");
    // One granule for each of the six blocks.
    assert!(apart <= 6 * GRANULE, "{beside:?}");
}
