//! Stages of ZeRO: whatever ranks divide, they train alike, in the memory that was planned.

mod common;

use common::optimizers::{LAMB, MUON, SGD};
use common::ranks::among;
use common::{CLASSES, Rig, adamw, dtype, settings, small_swin, smoothed, with_drawn_head};
use cpu::{Float, Which};
use graph::random::Sequence;
use graph::{
    Communication, DType, DynamicScale, Gathering, Held, LossScaling, Mesh, Mixed, Model, Optimizer,
    ParamGroup, Program, Recompute, Role, Settings, State, StateId, Zero, compile,
};
use models::vit::{Pool, Vit};
use std::collections::BTreeMap;

/// Samples of a micro-step, of all ranks.
const BATCH: usize = 12;
const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

#[derive(Clone, Copy)]
struct Case {
    optimizer: Optimizer,
    mixed: Option<Mixed>,
    loss_scale: Option<LossScaling>,
    recompute: Recompute,
    communication: Communication,
    gathering: Gathering,
    micros: usize,
    steps: usize,
}

impl Case {
    fn of(optimizer: Optimizer) -> Self {
        let communication = Communication { bucket: 9000, overlap: true, dtype: None };
        let (loss_scale, recompute, gathering) = (None, Recompute::None, Gathering::default());
        Case { optimizer, mixed: None, loss_scale, recompute, communication, gathering, micros: 1, steps: 20 }
    }
}

fn vit() -> Vit {
    Vit {
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
        norm_eps: 1e-6,
    }
}

fn model(batch: usize, dtype: DType) -> Model {
    with_drawn_head(vit().build(batch, smoothed(), dtype).unwrap())
}

/// Groups of all sorts: frozen, slower, without weight decay.
fn group(state: &State) -> ParamGroup {
    let lr_scale = match &state.name[..] {
        "patch_embed.proj.bias" => 0.0,
        name if name.starts_with("blocks.1.") => 0.5,
        _ => 1.0,
    };
    ParamGroup { lr_scale, decays: state.ty.shape.rank() > 1 }
}

fn program<T: Float>(case: &Case, zero: Zero, ranks: usize) -> Program {
    compiled(model(BATCH / ranks, dtype::<T>()), case, zero, ranks)
}

fn compiled(model: Model, case: &Case, zero: Zero, ranks: usize) -> Program {
    let target = cpu::Target { threads: 1 };
    let settings = Settings {
        optimizer: case.optimizer,
        group: &group,
        mixed: case.mixed,
        loss_scale: case.loss_scale,
        recompute: case.recompute,
        ema: Some(0.9),
        mesh: Mesh::of_data(ranks),
        communication: case.communication,
        zero,
        gathering: case.gathering,
        accumulates: case.micros > 1,
        ..settings(&target)
    };
    let program = compile(model, &settings).unwrap();
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
    train_program::<T>(case, &program::<T>(case, zero, ranks), ranks)
}

fn train_program<T: Float>(case: &Case, program: &Program, ranks: usize) -> Trained {
    let of_ranks = among(ranks, |comm| {
        let (rank, share) = (comm.rank(), BATCH / ranks);
        let mut rig = Rig::<T>::among(program.clone(), 1, Some(comm));
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
            // What is no number is equal to itself here.
            let number = |x: f64| if x.is_nan() { f64::MAX } else { x };
            let control = control.iter().map(|x| x.to_f64());
            steps.push(stats.into_iter().chain(control).map(number).collect::<Vec<f64>>());
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
    assert!(one.steps.iter().any(|step| step[5] == 1.0), "{what}: steps were applied");
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
        let communication = Communication { bucket, overlap: true, dtype: None };
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
