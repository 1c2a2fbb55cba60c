//! Stages of ZeRO: whatever ranks divide, they train alike, in the memory that was planned.

mod common;

use common::ranks::among;
use common::{CLASSES, Rig, adamw, dtype, settings, smoothed, with_drawn_head};
use cpu::{Float, Which};
use graph::{
    Communication, DType, Held, Mesh, Mixed, Model, Optimizer, Program, Role, Settings, StateId, Zero,
    compile,
};
use models::vit::{Pool, Vit};
use std::collections::BTreeMap;

/// Samples of a micro-step, of all ranks.
const BATCH: usize = 12;
const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01 };
const LAMB: Optimizer = Optimizer::Lamb {
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-6,
    weight_decay: 0.05,
    min_coeff: 0.01,
    max_coeff: 10.0,
};
const MUON: Optimizer = Optimizer::Muon {
    momentum: 0.95,
    nesterov: true,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.05,
};

#[derive(Clone, Copy)]
struct Case {
    optimizer: Optimizer,
    mixed: Option<Mixed>,
    communication: Communication,
    micros: usize,
    steps: usize,
}

impl Case {
    fn of(optimizer: Optimizer) -> Self {
        let communication = Communication { bucket: 9000, overlap: true, dtype: None };
        Case { optimizer, mixed: None, communication, micros: 1, steps: 20 }
    }
}

fn model(batch: usize, dtype: DType) -> Model {
    let vit = Vit {
        image: 16,
        patch: 4,
        channels: 3,
        classes: CLASSES,
        width: 32,
        depth: 4,
        heads: 2,
        mlp: 64,
        pool: Pool::ClassToken,
        dropout: 0.1,
        attention_dropout: 0.0,
        drop_path: 0.1,
    };
    with_drawn_head(vit.build(batch, smoothed(), dtype).unwrap())
}

fn program<T: Float>(case: &Case, zero: Zero, ranks: usize) -> Program {
    let target = cpu::Target { threads: 1 };
    let settings = Settings {
        optimizer: case.optimizer,
        mixed: case.mixed,
        ema: Some(0.9),
        mesh: Mesh::of_data(ranks),
        communication: case.communication,
        zero,
        accumulates: case.micros > 1,
        ..settings(&target)
    };
    let program = compile(model(BATCH / ranks, dtype::<T>()), &settings).unwrap();
    program.check().unwrap_or_else(|error| panic!("stage {zero}: {error}"));
    for plan in program.plans() {
        let text = plan.to_string();
        let parsed: graph::Plan = text.parse().unwrap_or_else(|error| panic!("{}: {error}", plan.name));
        assert_eq!(parsed.to_string(), text, "{}", plan.name);
    }
    program
}

/// What ranks have together after training: loss and norm of each step, the loss of the averages, every tensor that lasts.
#[derive(Debug, PartialEq)]
struct Trained {
    steps: Vec<Vec<f64>>,
    evaluation: f64,
    tensors: BTreeMap<String, Vec<f64>>,
}

/// One rank's tensors: which elements it holds, and what they are.
type Parts = Vec<(String, usize, std::ops::Range<usize>, Vec<f64>)>;

fn train<T: Float>(case: &Case, zero: Zero, ranks: usize) -> Trained {
    let of_ranks = among(ranks, |comm| {
        let (rank, share) = (comm.rank(), BATCH / ranks);
        let mut rig = Rig::<T>::among(program::<T>(case, zero, ranks), 1, Some(comm));
        let planned = (rig.executor.program().arena(), rig.executor.program().state_bytes());
        assert_eq!(rig.executor.allocated(), planned, "memory is as planned");
        rig.header.nominal = (BATCH * case.micros) as f64;
        rig.header.learning_rate = 2e-3;
        let mut steps = vec![];
        for step in 0..case.steps {
            rig.header.step = step as u64;
            for micro in 0..case.micros {
                let which = Program::micro_step(micro, case.micros);
                rig.header.first_sample = ((step % 3 * case.micros + micro) * BATCH + rank * share) as u64;
                rig.fill(which);
                rig.run(which);
            }
            let stats = rig.state("stats").unwrap();
            rig.run(Which::Update);
            let control = rig.executor.output(Which::Update, "control").unwrap();
            steps.push(stats.into_iter().chain(control.iter().map(|x| x.to_f64())).collect::<Vec<f64>>());
        }
        rig.header.first_sample = 0;
        rig.fill(Which::Eval);
        rig.run(Which::Eval);
        let evaluation = rig.executor.output(Which::Eval, "loss").unwrap()[0].to_f64();
        rig.header.first_sample = 1;
        (steps, evaluation, parts(&rig))
    });
    let steps = of_ranks[0].0.clone();
    assert!(of_ranks.iter().all(|rank| rank.0 == steps), "every rank has the same losses and norms");
    assert!(of_ranks.iter().all(|rank| rank.1 == of_ranks[0].1), "every rank evaluates the same model");
    let mut tensors: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (name, count, ..) in &of_ranks[0].2 {
        tensors.insert(name.clone(), vec![f64::NAN; *count]);
    }
    for (name, _, range, values) in of_ranks.iter().flat_map(|rank| &rank.2) {
        let whole = &mut tensors.get_mut(name).unwrap()[range.clone()];
        let known = whole.iter().zip(values).all(|(known, value)| known.is_nan() || known == value);
        assert!(known, "{name} is not the same on all ranks");
        whole.copy_from_slice(values);
    }
    for (name, values) in &tensors {
        assert!(values.iter().all(|x| x.is_finite()), "{name} is not whole");
    }
    Trained { steps, evaluation: of_ranks[0].1, tensors }
}

fn parts<T: Float>(rig: &Rig<T>) -> Parts {
    let states = &rig.executor.program().states;
    let lasting = states.iter().enumerate().filter(|(_, s)| s.role.lasts() || s.role == Role::Copy);
    let part = |(index, state): (usize, &graph::State)| {
        let id = StateId(index as u32);
        let values: Vec<f64> = rig.executor.state(id).iter().map(|x| x.to_f64()).collect();
        (state.name.clone(), state.ty.shape.count(), rig.executor.held(id), values)
    };
    lasting.map(part).collect()
}

/// Asserts that two runs have the same bits.
fn assert_same(what: &str, one: &Trained, other: &Trained) {
    for (step, (one, other)) in one.steps.iter().zip(&other.steps).enumerate() {
        assert_eq!(one, other, "{what}: losses and norm of step {step}");
    }
    for (name, values) in &one.tensors {
        assert!(other.tensors.get(name) == Some(values), "{what}: {name} differs");
    }
    assert_eq!(one, other, "{what}");
    assert!(
        one.steps.iter().all(|step| step.iter().all(|x| x.is_finite()) && step[5] == 1.0),
        "{what}: applied"
    );
}

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

/// With several micro-steps, stages 2 and 3 add in another order than 0 and 1.
#[test]
fn stages_train_alike_with_accumulation() {
    for (name, optimizer) in [("adamw", adamw()), ("lamb", LAMB), ("muon", MUON)] {
        let case = Case { micros: 4, steps: 6, ..Case::of(optimizer) };
        let of = |zero: Zero| train::<f32>(&case, zero, 2);
        let (sums, parts) = (of(Zero::Stage0), of(Zero::Stage2));
        assert_same(&format!("{name}, stages 0 and 1"), &of(Zero::Stage1), &sums);
        assert_same(&format!("{name}, stages 2 and 3"), &of(Zero::Stage3), &parts);
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
                    // Of one micro-step, stage 2 may be better off with the plans of stage 1.
                    let stages = all.each_ref().map(|(_, program)| program.zero);
                    let takes = |zero: Zero| zero == stages[2];
                    assert!(
                        takes(Zero::Stage2) || (takes(Zero::Stage1) && micros == 1),
                        "{what}: {stages:?}"
                    );
                    let counts =
                        all.each_ref().map(|(_, p)| (shards(p, Role::Moment), shards(p, Role::Gradient)));
                    assert!(counts[0] == (0, 0) && counts[1].0 > 0 && counts[1].1 == 0, "{what}: {counts:?}");
                    assert!(counts[3].0 > 0 && counts[3].1 > 0, "{what}: {counts:?}");
                }
            }
        }
    }
}
