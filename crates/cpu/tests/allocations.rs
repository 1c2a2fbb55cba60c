//! A step allocates nothing, however gradients are exchanged and in whatever precision. One test, alone in its program, since the counter sees every
//! thread.

mod common;

use comm::{Activity, Communicator};
use common::{Rig, compiled_with, settings, small_vit, smoothed};
use cpu::{Executor, Which};
use graph::{Communication, DType, Mesh, Mixed, Settings};
use std::sync::Arc;
use testing::allocations::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting::apart(cpu::matmul::inside);

const SETTLING: usize = 2;
const STEPS: usize = 12;

fn rig(communication: Communication, mixed: Option<Mixed>, comm: Communicator) -> Rig<f32> {
    let target = cpu::Target { threads: 1 };
    let model = small_vit(0.1).build(4, smoothed(), DType::F32).unwrap();
    let settings =
        Settings { mesh: Mesh::of_data(2), communication, mixed, accumulates: true, ..settings(&target) };
    let program = compiled_with(model, &settings);
    Rig::among(program, 1, Some(comm))
}

fn step(rig: &mut Rig<f32>) {
    rig.fill(Which::First);
    rig.run(Which::First);
    rig.step();
}

fn trace_and_account(executor: &mut Executor<f32>, events: &mut Vec<cpu::Event>) {
    events.clear();
    executor.take_trace(events);
    assert!(executor.take_account().compute > 0.0 && !events.is_empty());
}

/// Two ranks, each a thread, with every kind of exchange; timed and traced.
#[test]
fn steps_with_an_exchange_allocate_nothing() {
    let half = Some(Mixed { half: DType::Bf16, residual: DType::Bf16 });
    for (overlap, wire, mixed) in [
        (true, None, None),
        (false, None, None),
        (true, Some(DType::Bf16), None),
        (true, Some(DType::F16), None),
        (true, None, half),
    ] {
        let communication = Communication { bucket: 5_000, overlap, dtype: wire, each_micro_step: false };
        let comms = comm::threads::group(2).into_iter();
        let comms = comms.map(|engine| Communicator::new(engine, Arc::new(Activity::new())));
        let [mut first, mut other]: [Rig<f32>; 2] =
            comms.map(|comm| rig(communication, mixed, comm)).collect::<Vec<_>>().try_into().ok().unwrap();
        first.executor.set_tracing(true);
        let mut events = Vec::with_capacity(4096);
        std::thread::scope(|scope| {
            scope.spawn(move || (0..STEPS).for_each(|_| step(&mut other)));
            let mut one = |rig: &mut Rig<f32>| {
                step(rig);
                trace_and_account(&mut rig.executor, &mut events);
            };
            (0..SETTLING).for_each(|_| one(&mut first));
            let before = allocations::count();
            assert!(before > 0, "the counter counts");
            (SETTLING..STEPS).for_each(|_| one(&mut first));
            let made = allocations::count() - before;
            assert_eq!(made, 0, "overlap {overlap}, wire {wire:?}, {mixed:?}");
        });
    }
}
