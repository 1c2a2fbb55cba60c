//! Groups of ranks that divide states, side by side.

use crate::common::adamw;
use crate::common::optimizers::{LAMB, MUON, SGD};
use crate::runs::{BF16, Case, Trained, assert_same, program, train};
use graph::{Communication, DType, Op, Recompute, Zero};

/// Stages of groups with one micro-step have the same bits: they add within a group first, then over the groups.
fn groups_agree(case: Case, name: &str, ranks: usize) {
    let of = |zero: Zero| train::<f32>(&case, zero, ranks);
    let (first, plain) = (of(Zero::Stage1), of(Zero::Stage0));
    for zero in [Zero::Stage2, Zero::Stage3] {
        assert_same(
            &format!("{name}, stage {zero}, {ranks} ranks among {:?}", case.among),
            &of(zero),
            &first,
        );
    }
    near(&plain, &first, 1e-4, name);
}

/// Losses of two runs that add in other orders.
fn near(one: &Trained, other: &Trained, most: f64, name: &str) {
    for (one, other) in one.steps.iter().zip(&other.steps) {
        let off = (one[0] / other[0] - 1.0).abs();
        assert!(off < most, "{name}: losses are off by {off:.1e}");
    }
}

#[test]
fn groups_train_alike_at_every_stage() {
    for (ranks, among) in [(4, 2), (6, 3), (6, 2)] {
        for (name, optimizer) in [("adamw", adamw()), ("sgd", SGD), ("lamb", LAMB), ("muon", MUON)] {
            let steps = if ranks == 4 { 8 } else { 3 };
            groups_agree(Case { among: Some(among), steps, ..Case::of(optimizer) }, name, ranks);
        }
    }
    let case =
        Case { among: Some(2), mixed: Some(BF16), recompute: Recompute::Full, steps: 4, ..Case::of(adamw()) };
    let of = |zero: Zero| train::<f32>(&case, zero, 4);
    assert_same("bf16", &of(Zero::Stage3), &of(Zero::Stage1));
}

/// What travels between groups has the dtype of communication too, with overlap and without.
#[test]
fn groups_send_in_the_dtype_of_communication() {
    for overlap in [true, false] {
        let case = Case { among: Some(2), steps: 4, ..Case::of(adamw()) };
        let communication = Communication { dtype: Some(DType::Bf16), overlap, ..case.communication };
        let case = Case { communication, ..case };
        let of = |zero: Zero| train::<f32>(&case, zero, 4);
        assert_same("sent as bf16", &of(Zero::Stage2), &of(Zero::Stage1));
        let last = &program::<f32>(&case, Zero::Stage2, 4).last;
        let sent = last
            .steps
            .iter()
            .filter(|step| matches!(&step.op, Op::AllReduce { group, .. } if group.ranks() == 2));
        let dtypes: Vec<DType> = sent.map(|step| last.values[step.inputs[0]].ty.dtype).collect();
        assert!(!dtypes.is_empty() && dtypes.iter().all(|dtype| *dtype == DType::Bf16), "{dtypes:?}");
    }
}

/// With several micro-steps the groups meet once per step, and train as one rank does.
#[test]
fn groups_meet_once_per_step() {
    for (name, optimizer) in [("adamw", adamw()), ("sgd", SGD), ("lamb", LAMB), ("muon", MUON)] {
        for micros in [1, 4] {
            let case = Case { micros, steps: 5, among: Some(2), ..Case::of(optimizer) };
            let one = train::<f64>(&Case { among: None, ..case }, Zero::Stage3, 1);
            for zero in &Zero::ALL[1..] {
                let many = train::<f64>(&case, *zero, 4);
                near(&one, &many, 1e-9, &format!("{name}, stage {zero}, {micros} micro-steps"));
                let program = program::<f64>(&case, *zero, 4);
                let between = |op: &Op| matches!(op, Op::AllReduce { group, .. } if *group == program.last.mesh.replicas());
                let count = |plan: &graph::Plan| plan.steps.iter().filter(|step| between(&step.op)).count();
                assert!(count(&program.last) > 1);
                assert_eq!([count(&program.first), count(&program.micro), count(&program.update)], [0; 3]);
            }
        }
    }
}

/// A group takes the memory of as many ranks alone.
#[test]
fn groups_take_the_memory_of_their_ranks() {
    for optimizer in [adamw(), LAMB, MUON] {
        for (micros, mixed) in [(1, None), (4, Some(BF16))] {
            // Of 12 samples 4 ranks have 3 each; 2 ranks alone that have 3 as well take the same.
            let case = Case { micros, mixed, ..Case::of(optimizer) };
            for zero in &Zero::ALL[1..] {
                let groups = program::<f32>(&Case { among: Some(2), ..case }, *zero, 4);
                let alone = crate::runs::compiled(crate::runs::model(3, DType::F32), &case, *zero, 2);
                assert_eq!(groups.state_bytes(), alone.state_bytes(), "{optimizer:?}, stage {zero}");
                assert_eq!(groups.arena(), alone.arena(), "{optimizer:?}, stage {zero}");
            }
        }
    }
}
