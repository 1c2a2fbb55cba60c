//! Memory that each stage takes.

use crate::common::optimizers::{LAMB, MUON, SGD};
use crate::common::{adamw, settings, smoothed};
use crate::runs::{BF16, Case, compiled, program, vit};
use graph::random::Sequence;
use graph::{Communication, DType, Held, Mesh, Program, Role, Settings, State, Zero, compile};
use models::vit::Vit;

/// Each stage takes at most the memory of the one before, and what it divides is divided.
#[test]
fn each_stage_takes_less_memory() {
    for optimizer in [adamw(), SGD, LAMB, MUON] {
        for mixed in [None, Some(BF16)] {
            for micros in [1, 4] {
                for ranks in [2, 4] {
                    let case = Case { micros, mixed, ..Case::of(optimizer) };
                    let bytes = |zero: Zero| {
                        let program = program::<f32>(&case, zero, ranks);
                        (program.bytes(), program)
                    };
                    let all = Zero::ALL.map(bytes);
                    let what =
                        format!("{}, {mixed:?}, {micros} micro-steps, {ranks} ranks", optimizer.name());
                    for (stage, pair) in all[..3].windows(2).enumerate() {
                        let (before, after) = (pair[0].0, pair[1].0);
                        assert!(
                            after <= before,
                            "{what}: stage {} takes {after}, {stage} {before}",
                            stage + 1
                        );
                    }
                    let shards = |program: &Program, role: Role| {
                        let of = program.states.iter().filter(|state| state.role == role);
                        of.filter(|state| matches!(state.held, Held::Of { .. })).count()
                    };
                    let stages = all.each_ref().map(|(_, program)| program.zero);
                    assert!(stages[2] == Zero::Stage2 || all[2].0 == all[1].0, "{what}: {stages:?}");
                    let counts =
                        all.each_ref().map(|(_, p)| (shards(p, Role::Moment), shards(p, Role::Gradient)));
                    assert!(counts[0] == (0, 0) && counts[1].0 > 0 && counts[1].1 == 0, "{what}: {counts:?}");
                    assert!(counts[3].0 > 0 && counts[3].1 > 0, "{what}: {counts:?}");
                }
            }
        }
    }
}

/// Models, batches and micro-steps at random: no stage up to the second takes more memory than the one before.
#[test]
fn stages_of_any_model_take_less_memory() {
    let mut random = Sequence::new(24, 0);
    let mut pick = |from: &[usize]| from[(random.uniform() * from.len() as f64) as usize];
    for _ in 0..12 {
        let (width, depth, image) = (pick(&[32, 64, 96]), pick(&[1, 3, 6]), pick(&[16, 32]));
        let (batch, ranks, micros) = (pick(&[1, 4, 16]), pick(&[2, 3, 4, 8]), pick(&[1, 4]));
        let (bucket, optimizer) =
            (pick(&[5_000, 50_000, 1 << 20]), [adamw(), SGD, LAMB, MUON][pick(&[0, 1, 2, 3])]);
        let communication = Communication { bucket, overlap: true, dtype: None, each_micro_step: false };
        let mixed = [None, Some(BF16)][pick(&[0, 1])];
        let case = Case { micros, mixed, communication, ..Case::of(optimizer) };
        let vit = Vit { width, depth, image, mlp: 4 * width, ..vit() };
        let model = vit.build(batch, smoothed(), DType::F32).unwrap();
        let bytes = Zero::ALL.map(|zero| compiled(model.clone(), &case, zero, ranks).bytes());
        let what = format!(
            "{}, {mixed:?}, width {width}, depth {depth}, {image} px, batch {batch}, {micros} micro-steps, {ranks} ranks, \
            buckets of {bucket}",
            optimizer.name()
        );
        assert!(bytes[1] <= bytes[0] && bytes[2] <= bytes[1], "{what}: {bytes:?}");
    }
}

/// Bytes of states for each parameter, beside what the division comes to: parameters, gradients, moments, copies. Padding and small
/// parameters take the rest.
#[test]
fn states_take_what_the_stages_promise() {
    let vit = Vit { width: 256, depth: 8, mlp: 1024, heads: 4, ..vit() };
    let model = vit.build(2, smoothed(), DType::F32).unwrap();
    for (mixed, copies) in [(None, 0.0), (Some(BF16), 2.0)] {
        for ranks in [2, 4, 8, 64] {
            let case =
                Case { micros: 4, mixed, communication: Communication::default(), ..Case::of(adamw()) };
            let of = |zero: Zero| {
                let target = cpu::Target { threads: 1 };
                let (mesh, communication) = (Mesh::of_data(ranks), case.communication);
                let settings =
                    Settings { mixed, mesh, communication, zero, accumulates: true, ..settings(&target) };
                let program = compile(model.clone(), &settings).unwrap();
                let trained = program.states.iter().filter(|state| state.is_parameter());
                let elements: usize = trained.map(|state| state.ty.shape.count()).sum();
                let flats = program.update.steps.iter().find_map(|step| match &step.op {
                    graph::Op::SumSquares { flats } => {
                        Some(flats.iter().map(|flat| flat.elements).sum::<usize>())
                    }
                    _ => None,
                });
                assert_eq!(program.zero, zero);
                let padded = flats.unwrap() as f64 / elements as f64;
                assert!(padded < 1.25, "{ranks} ranks: {padded}");
                // At stage 3, what is not worth gathering is whole.
                let whole = program.states.iter().filter(|s| matches!(s.held, Held::Within(_)));
                let small = whole.map(State::extent).sum::<usize>() * usize::from(zero == Zero::Stage3);
                let each = |bytes: usize| bytes as f64 / elements as f64 / padded;
                (each(program.state_bytes()), each(small))
            };
            let n = ranks as f64;
            // What layers read: parameters, or copies beside f32 parameters that are divided from stage 1 on.
            let (read, masters) = if mixed.is_some() { (copies, 4.0) } else { (4.0, 0.0) };
            let promised = [
                read + masters + 4.0 + 8.0,
                read + 4.0 + (masters + 8.0) / n,
                read + (masters + 4.0 + 8.0) / n,
                (read + masters + 4.0 + 8.0) / n,
            ];
            for (zero, promised) in Zero::ALL.into_iter().zip(promised) {
                let (bytes, small) = of(zero);
                let more = bytes - promised;
                assert!(
                    more.abs() < 0.02 * promised + small,
                    "stage {zero} on {ranks} ranks: {bytes:.3} bytes for each parameter, {promised:.3} promised"
                );
            }
        }
    }
}
