//! The same bits at every stage.

use crate::common::optimizers::{LAMB, MUON, SGD};
use crate::common::{adamw, small_swin, smoothed, with_drawn_head};
use crate::runs::{BATCH, BF16, Case, assert_same, compiled, program, train, train_program, vit};
use graph::{Communication, DType, DynamicScale, Gathering, LossScaling, Mixed, Recompute, Zero};
use models::vit::Vit;

/// With one micro-step all stages have the same bits, whatever the optimizer and the number of ranks.
fn stages_agree(case: Case, name: &str, ranks: &[usize]) {
    for ranks in ranks {
        let plain = train::<f32>(&case, Zero::Stage0, *ranks);
        for zero in &Zero::ALL[1..] {
            assert_same(
                &format!("{name}, stage {zero}, {ranks} ranks"),
                &train::<f32>(&case, *zero, *ranks),
                &plain,
            );
        }
    }
}

#[test]
fn stages_train_alike_by_adamw() {
    stages_agree(Case::of(adamw()), "adamw", &[2, 3, 4]);
}

#[test]
fn stages_train_alike_by_sgd() {
    stages_agree(Case::of(SGD), "sgd", &[2, 3]);
}

#[test]
fn stages_train_alike_by_lamb() {
    stages_agree(Case::of(LAMB), "lamb", &[2, 3, 4]);
}

#[test]
fn stages_train_alike_by_muon() {
    stages_agree(Case { steps: 10, ..Case::of(MUON) }, "muon", &[2, 3, 4]);
}

#[test]
fn stages_train_alike_in_bf16() {
    for (name, optimizer) in [("adamw", adamw()), ("sgd", SGD), ("lamb", LAMB), ("muon", MUON)] {
        let case = Case { mixed: Some(BF16), steps: 6, ..Case::of(optimizer) };
        stages_agree(case, &format!("{name} in bf16"), &[2]);
    }
}

/// Gradients that travel in half precision are rounded alike.
#[test]
fn stages_train_alike_with_a_communication_dtype() {
    let case = Case::of(adamw());
    let communication = Communication { dtype: Some(DType::Bf16), ..case.communication };
    stages_agree(Case { communication, steps: 5, ..case }, "adamw, sent as bf16", &[2]);
    let communication = Communication { overlap: false, ..case.communication };
    stages_agree(Case { communication, steps: 5, ..case }, "adamw, without overlap", &[2]);
}

/// A step that fp16 skips leaves shards as they were, too.
#[test]
fn stages_skip_alike() {
    let dynamic = DynamicScale { window: 100, hysteresis: 1, min: 1.0 };
    let loss_scale = Some(LossScaling { initial: 2f64.powi(21), dynamic: Some(dynamic) });
    let mixed = Some(Mixed { half: DType::F16, residual: DType::F32 });
    let case = Case { mixed, loss_scale, steps: 18, ..Case::of(adamw()) };
    let skipped = train::<f32>(&case, Zero::Stage0, 2).steps.iter().filter(|step| step[5] == 0.0).count();
    assert!((1..18).contains(&skipped), "{skipped} of 18 steps were skipped");
    stages_agree(case, "adamw in fp16", &[2]);
}

#[test]
fn stages_train_alike_with_recompute() {
    let case = Case { recompute: Recompute::Full, steps: 3, ..Case::of(adamw()) };
    stages_agree(case, "adamw with recompute", &[2]);
}

/// However far ahead parameters are gathered, and whichever of them stay.
#[test]
fn stages_train_alike_however_parameters_are_gathered() {
    for gathering in [
        Gathering { ahead: Some(0), ..Gathering::default() },
        Gathering { ahead: Some(30_000), live: Some(40_000), reuse: Some(20_000), ..Gathering::default() },
        Gathering {
            whole: Some(3000),
            whole_in_all: Some(9000),
            reuse: Some(usize::MAX),
            ..Gathering::default()
        },
    ] {
        for recompute in [Recompute::None, Recompute::Full] {
            let case = Case { gathering, recompute, steps: 4, ..Case::of(adamw()) };
            stages_agree(case, &format!("adamw with {gathering:?}"), &[2]);
        }
    }
}

/// Buckets that grow from both ends of the backward pass, so that stages cut them otherwise than stage 0.
#[test]
fn stages_train_alike_with_buckets_of_many_sizes() {
    let vit = Vit { width: 64, mlp: 256, ..vit() };
    let model = with_drawn_head(vit.build(BATCH / 2, smoothed(), DType::F32).unwrap());
    for (name, optimizer, mixed) in [("adamw", adamw(), None), ("lamb", LAMB, Some(BF16))] {
        let case = Case { mixed, steps: 4, ..Case::of(optimizer) };
        let case = Case { communication: Communication { bucket: 1 << 20, ..case.communication }, ..case };
        let of = |zero: Zero| compiled(model.clone(), &case, zero, 2);
        let elements = |zero: Zero| {
            let program = of(zero);
            let whole = |index: usize| {
                let name = format!("bucket.{index}.m");
                program.states.iter().find(|state| state.name == name).map(|state| state.ty.shape.count())
            };
            (0..).map_while(whole).collect::<Vec<usize>>()
        };
        let (first, second) = (elements(Zero::Stage0), elements(Zero::Stage1));
        let largest = second.iter().max().unwrap();
        assert!(first.len() == 1 && second.len() > 4, "{first:?} {second:?}");
        assert!(second[0] * 2 < *largest && second.last().unwrap() * 2 < *largest, "{second:?}");
        let plain = train_program::<f32>(&case, &of(Zero::Stage0), 2);
        for zero in &Zero::ALL[1..] {
            let what = format!("{name}, stage {zero}");
            assert_same(&what, &train_program::<f32>(&case, &of(*zero), 2), &plain);
        }
    }
}

/// A model of another kind: windows, position biases, merged patches.
#[test]
fn stages_train_a_swin_alike() {
    for mixed in [None, Some(BF16)] {
        let case = Case { mixed, steps: 3, ..Case::of(adamw()) };
        let model = with_drawn_head(small_swin(32).build(BATCH / 2, smoothed(), DType::F32).unwrap());
        let of = |zero: Zero| train_program::<f32>(&case, &compiled(model.clone(), &case, zero, 2), 2);
        let plain = of(Zero::Stage0);
        for zero in &Zero::ALL[1..] {
            assert_same(&format!("swin, stage {zero}"), &of(*zero), &plain);
        }
    }
}

/// With several micro-steps, stages 2 and 3 add in another order than 0 and 1.
#[test]
fn stages_train_alike_with_accumulation() {
    for (name, optimizer) in [("adamw", adamw()), ("lamb", LAMB), ("muon", MUON)] {
        let case = Case { micros: 4, steps: 6, ..Case::of(optimizer) };
        let of = |zero: Zero| train::<f32>(&case, zero, 2);
        let (sums, parts) = (of(Zero::Stage0), of(Zero::Stage3));
        assert_same(&format!("{name}, stages 0 and 1"), &of(Zero::Stage1), &sums);
        // Where stage 2 is better off with the plans of stage 1, it has their bits.
        let taken = program::<f32>(&case, Zero::Stage2, 2).zero;
        assert!(taken == Zero::Stage2 || optimizer == MUON, "{name} takes stage {taken}");
        let like = if taken == Zero::Stage2 { &parts } else { &sums };
        assert_same(&format!("{name}, stage 2 as {taken}"), &of(Zero::Stage2), like);
        for (sums, parts) in sums.steps.iter().zip(&parts.steps) {
            assert!(
                (sums[0] / parts[0] - 1.0).abs() < 1e-4,
                "{name}: a loss of {} and of {}",
                sums[0],
                parts[0]
            );
        }
    }
}

/// Where gradients are reduced in every micro-step, all stages add in one order.
#[test]
fn stages_train_alike_where_every_micro_step_is_reduced() {
    for (name, optimizer) in [("adamw", adamw()), ("sgd", SGD), ("lamb", LAMB), ("muon", MUON)] {
        let case = Case { micros: 4, steps: 6, ..Case::of(optimizer) };
        for (dtype, overlap) in [(None, true), (None, false), (Some(DType::Bf16), true)] {
            let communication = Communication { dtype, overlap, each_micro_step: true, ..case.communication };
            let ranks: &[usize] = if overlap && dtype.is_none() { &[2, 3] } else { &[2] };
            stages_agree(Case { communication, ..case }, &format!("{name}, {communication:?}"), ranks);
        }
        // Sums of the same gradients in another order: not the same bits, but the same training.
        let communication = Communication { each_micro_step: true, ..case.communication };
        let (each, once) = (Case { communication, ..case }, case);
        let losses = |case: &Case| train::<f32>(case, Zero::Stage0, 2).steps;
        for (each, once) in losses(&each).iter().zip(&losses(&once)) {
            assert!(
                (each[0] / once[0] - 1.0).abs() < 1e-4,
                "{name}: a loss of {} and of {}",
                each[0],
                once[0]
            );
        }
    }
}

/// Every stage against one rank that holds everything, in double precision.
#[test]
fn stages_train_as_one_rank_does() {
    for (name, optimizer) in [("adamw", adamw()), ("sgd", SGD), ("lamb", LAMB), ("muon", MUON)] {
        for micros in [1, 4] {
            let case = Case { micros, steps: 6, ..Case::of(optimizer) };
            let one = train::<f64>(&case, Zero::Stage3, 1);
            for zero in Zero::ALL {
                let many = train::<f64>(&case, zero, 3);
                for (one, many) in one.steps.iter().zip(&many.steps) {
                    let off = (one[0] / many[0] - 1.0).abs().max((one[6] / many[6] - 1.0).abs());
                    assert!(off < 1e-9, "{name}, stage {zero}, {micros} micro-steps: off by {off:.1e}");
                }
            }
        }
    }
}
