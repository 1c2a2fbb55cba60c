//! Several ranks compute what one does, however their gradients are exchanged; and what can't be is refused by name.

mod common;

use comm::Communicator;
use common::ranks::{Together, communicators, on_each};
use common::{Rig, Tensors, compiled_with, distance, dtype, settings, small_vit, smoothed, with_drawn_head};
use cpu::{CpuError, Executor, Float, Options, Origin, Which};
use graph::graph::Phase;
use graph::{Communication, DType, Mesh, Program, Recompute, Settings};

const PLAIN: Communication =
    Communication { bucket: 2000, overlap: true, dtype: None, each_micro_step: false };
const BATCH: usize = 8;

fn program<T: Float>(
    batch: usize,
    ranks: usize,
    communication: Communication,
    recompute: Recompute,
) -> Program {
    let model = with_drawn_head(small_vit(0.1).build(batch, smoothed(), dtype::<T>()).unwrap());
    let target = cpu::Target { threads: 1 };
    compiled_with(
        model,
        &Settings { mesh: Mesh::of_data(ranks), communication, recompute, ..settings(&target) },
    )
}

/// A rank's share of a batch of 8: samples are drawn by their number, so together they have what one rank would.
fn rank<T: Float>(
    comm: &Communicator,
    batch: usize,
    communication: Communication,
    recompute: Recompute,
) -> Rig<T> {
    let program = program::<T>(batch, comm.size(), communication, recompute);
    let mut rig = Rig::among(program, 1, Some(comm.clone()));
    rig.header.nominal = BATCH as f64;
    rig.header.first_sample = (comm.rank() * BATCH / comm.size()) as u64;
    rig
}

/// Gradients, and everything after two steps, of each rank.
fn trained<T: Float>(
    ranks: usize,
    communication: Communication,
    recompute: Recompute,
) -> Vec<(Tensors, Tensors)> {
    on_each(communicators(ranks), |comm| {
        let mut rig = rank::<T>(&comm, BATCH / ranks, communication, recompute);
        let gradients = rig.gradients();
        rig.run(Which::Update);
        rig.step();
        (gradients, rig.tensors(|_| true))
    })
}

fn alone<T: Float>(recompute: Recompute) -> (Tensors, Tensors) {
    let mut rig = Rig::<T>::new(program::<T>(BATCH, 1, PLAIN, recompute), 1);
    let gradients = rig.gradients();
    rig.run(Which::Update);
    rig.step();
    (gradients, rig.tensors(|_| true))
}

#[test]
fn ranks_together_compute_what_one_does() {
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
        let one = alone::<f64>(recompute);
        for ranks in [2, 4] {
            let many = trained::<f64>(ranks, PLAIN, recompute);
            assert!(many.iter().all(|rank| *rank == many[0]), "every rank has the same bits");
            let (error, tensor) = distance(&many[0].0, &one.0);
            assert!(error < 1e-12, "{ranks} ranks: {tensor} differs by {error:.1e}");
            // Adam divides by the root of squared gradients, so that rounding of the smallest grows.
            let (error, tensor) = distance(&many[0].1, &one.1);
            assert!(error < 1e-6, "{ranks} ranks: {tensor} differs by {error:.1e} after two steps");
        }
    }
}

#[test]
fn buckets_and_overlap_change_no_bit() {
    let plain = trained::<f32>(2, PLAIN, Recompute::None);
    for bucket in [1, 700, usize::MAX] {
        for overlap in [true, false] {
            let other = trained::<f32>(2, Communication { bucket, overlap, ..PLAIN }, Recompute::None);
            assert!(other == plain, "buckets of {bucket}, overlap {overlap}");
        }
    }
}

#[test]
fn halves_on_the_wire_are_close_and_equal_on_all_ranks() {
    let plain = trained::<f32>(2, PLAIN, Recompute::None);
    for (wire, tolerance) in [(DType::Bf16, 6e-3), (DType::F16, 1e-3)] {
        for overlap in [true, false] {
            let communication = Communication { dtype: Some(wire), overlap, ..PLAIN };
            let halves = trained::<f32>(2, communication, Recompute::None);
            assert!(halves[0] == halves[1], "{wire}");
            let (error, tensor) = distance(&halves[0].0, &plain[0].0);
            assert!(error < tolerance, "{wire}: {tensor} differs by {error:.1e}");
            assert!(halves[0].0 != plain[0].0, "{wire} was used");
            let stats =
                |tensors: &Tensors| tensors.iter().find(|(name, _)| name == "stats").unwrap().1.clone();
            assert_eq!(stats(&halves[0].0), stats(&plain[0].0), "statistics are not rounded");
        }
    }
    let double = trained::<f64>(2, Communication { dtype: Some(DType::Bf16), ..PLAIN }, Recompute::None);
    let (error, _) = distance(&double[0].0, &plain[0].0);
    assert!(error < 6e-3);
}

/// Micro-steps add up on each rank, and only their sums are exchanged.
#[test]
fn accumulated_gradients_are_exchanged_once() {
    let one = alone::<f64>(Recompute::None).0;
    let many = on_each(communicators(2), |comm| {
        let model = with_drawn_head(small_vit(0.1).build(BATCH / 4, smoothed(), DType::F64).unwrap());
        let (target, mesh) = (cpu::Target { threads: 1 }, Mesh::of_data(2));
        let settings = Settings { mesh, communication: PLAIN, accumulates: true, ..settings(&target) };
        let mut rig = Rig::<f64>::among(compiled_with(model, &settings), 1, Some(comm.clone()));
        rig.header.nominal = BATCH as f64;
        rig.header.first_sample = (comm.rank() * BATCH / 2) as u64;
        rig.fill(Which::First);
        rig.run(Which::First);
        assert_eq!(comm.activity().snapshot().entered, 0, "nothing is exchanged in a micro-step");
        rig.header.first_sample += BATCH as u64 / 4;
        rig.gradients()
    });
    assert_eq!(many[0], many[1]);
    let (error, tensor) = distance(&many[0], &one);
    assert!(error < 1e-12, "{tensor} differs by {error:.1e}");
}

/// Whatever the number of samples on each rank, the mean is over all of them.
#[test]
fn unequal_ranks_weigh_by_their_samples() {
    let mut one = Rig::<f64>::new(program::<f64>(BATCH, 1, PLAIN, Recompute::None), 1);
    one.weights[5..].fill(0.0);
    one.step();
    let many = on_each(communicators(2), |comm| {
        let mut rig = rank::<f64>(&comm, BATCH / 2, PLAIN, Recompute::None);
        if comm.rank() == 1 {
            rig.weights[1..].fill(0.0);
        }
        rig.step();
        rig.tensors(|_| true)
    });
    let (error, tensor) = distance(&many[0], &one.tensors(|_| true));
    assert!(error < 1e-6, "{tensor} differs by {error:.1e}");
    assert_eq!(many[0], many[1]);
}

fn refused(program: Program, comm: Option<Communicator>) -> String {
    match Executor::<f32>::new(program, Options { threads: 1, seed: 1, comm }) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it was bound"),
    }
}

#[test]
fn a_plan_for_other_ranks_is_refused() {
    let two = || program::<f32>(4, 2, PLAIN, Recompute::None);
    let bucket = "head.weight … blocks.2.mlp.fc2.bias: all_reduce is among 2 ranks";
    assert_eq!(refused(two(), None), format!("{bucket}, but there is no communicator"));
    assert_eq!(refused(two(), Some(Communicator::solo())), format!("{bucket}, but there is one"));
    let three = communicators(3).remove(0);
    assert_eq!(refused(two(), Some(three)), format!("{bucket}, but there are 3"));
}

#[test]
fn values_that_dont_lie_side_by_side_are_refused() {
    let mut program = program::<f32>(4, 2, PLAIN, Recompute::None);
    let step = program.last.steps.iter_mut().find(|s| s.op.group().is_some()).unwrap();
    step.inputs.swap(1, 2);
    step.outputs.swap(1, 2);
    let error = refused(program, Some(communicators(2).remove(0)));
    let why = "all_reduce takes values that lie side by side, but d.head.bias doesn't follow loss.stats";
    assert!(error.contains(why), "{error}");
}

#[test]
fn a_lost_rank_ends_the_run_with_its_error() {
    let communication = Communication { bucket: 1, ..PLAIN };
    let mut ranks = Together::ranks(2);
    ranks.iter_mut().for_each(|rank| rank.fails_at = Some(7));
    let ends = on_each(ranks.into_iter().map(Together::communicator).collect(), |comm| {
        let mut rig = rank::<f32>(&comm, BATCH / 2, communication, Recompute::None);
        rig.fill(Which::Last);
        let first = rig.executor.run(Which::Last, &rig.header);
        rig.fill(Which::Last);
        let again = rig.executor.run(Which::Last, &rig.header);
        (first, again)
    });
    for (first, again) in ends {
        for end in [first, again] {
            assert!(matches!(end, Err(CpuError::Comm(_))));
            assert_eq!(end.unwrap_err().to_string(), "lost rank 1 (the test says so)");
        }
    }
}

/// The rank that has the bad value names it; the others see it come with the exchange, and nobody is left waiting.
#[test]
fn checks_go_on_for_the_other_ranks() {
    let found = on_each(communicators(2), |comm| {
        let mut rig = rank::<f32>(&comm, BATCH / 2, PLAIN, Recompute::None);
        rig.fill(Which::Last);
        if comm.rank() == 1 {
            rig.executor.input(Which::Last, "images").unwrap()[5] = f32::NAN;
        }
        rig.executor.run_checked(Which::Last, &rig.header).unwrap().unwrap()
    });
    assert_eq!(found[1].to_string(), "input images holds NaN (element 5)");
    let Origin::Step { op, phase, .. } = &found[0].origin else { panic!("{}", found[0]) };
    assert_eq!((op.as_str(), *phase), ("all_reduce", Phase::Communication));
    assert!(found[0].value.starts_with("all."), "{}", found[0]);
}

#[test]
fn checked_or_not_the_bits_are_the_same() {
    let plain = trained::<f32>(2, PLAIN, Recompute::None);
    let checked = on_each(communicators(2), |comm| {
        let mut rig = rank::<f32>(&comm, BATCH / 2, PLAIN, Recompute::None);
        rig.fill(Which::Last);
        assert_eq!(rig.executor.run_checked(Which::Last, &rig.header).unwrap(), None);
        rig.tensors(|s| matches!(s.role, graph::Role::Gradient | graph::Role::Statistic))
    });
    assert!(checked[0] == plain[0].0);
}

#[test]
fn the_pulse_says_what_a_rank_does() {
    let comm = Communicator::solo();
    let mut rig = Rig::<f32>::among(program::<f32>(4, 1, PLAIN, Recompute::None), 1, Some(comm.clone()));
    rig.fill(Which::Last);
    rig.run(Which::Last);
    let (doing, before) = (comm.activity().snapshot().doing, comm.activity().snapshot().progress);
    assert_eq!(&*doing, "backward of patch_embed.proj (column_sum)");
    rig.run(Which::Update);
    let after = comm.activity().snapshot();
    assert!(after.doing.starts_with("update of "), "{}", after.doing);
    // Once for each step, or for each part of one.
    assert!(after.progress - before >= rig.executor.program().update.steps.len() as u64);
}

/// A smaller micro-batch in the middle of a run: the same states under other plans.
#[test]
fn other_plans_go_on_with_the_states() {
    let run = |rebinds: bool| {
        let mut rig = Rig::<f32>::new(program::<f32>(BATCH, 1, PLAIN, Recompute::None), 1);
        rig.step();
        if rebinds {
            rig.executor.rebind(program::<f32>(BATCH / 2, 1, PLAIN, Recompute::Full)).unwrap();
            assert!(rig.executor.allocated().0 < program::<f32>(BATCH, 1, PLAIN, Recompute::None).arena());
            rig.executor.rebind(program::<f32>(BATCH, 1, PLAIN, Recompute::None)).unwrap();
        }
        rig.step();
        rig.tensors(|_| true)
    };
    assert!(run(true) == run(false));

    let mut rig = Rig::<f32>::new(program::<f32>(4, 1, PLAIN, Recompute::None), 1);
    let mut other = program::<f32>(4, 1, PLAIN, Recompute::None);
    other.states[3].name = "another".into();
    let error = rig.executor.rebind(other).unwrap_err();
    assert_eq!(error.to_string(), "the new plans have other states: another");
    rig.step();
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let mut program = program::<f32>(4, 1, PLAIN, Recompute::None);
    program.last.arena = 1 << 60;
    let error = refused(program, None);
    assert_eq!(error, "out of memory: can't get 1152921504.6 GB for activations");
}
