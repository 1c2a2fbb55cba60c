//! Training over ranks that divide states, and what they have together.

use crate::common::ranks::among;
use crate::common::{CLASSES, Rig, dtype, settings, smoothed, with_drawn_head};
use cpu::{Float, Which};
use graph::{
    Communication, DType, Gathering, LossScaling, Mesh, Mixed, Model, Optimizer, ParamGroup, Program,
    Recompute, Role, Settings, State, StateId, Zero, compile,
};
use models::vit::{Pool, Vit};
use std::collections::BTreeMap;

/// Samples of a micro-step, of all ranks.
pub const BATCH: usize = 12;
pub const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

#[derive(Clone, Copy)]
pub struct Case {
    pub optimizer: Optimizer,
    pub mixed: Option<Mixed>,
    pub loss_scale: Option<LossScaling>,
    pub recompute: Recompute,
    pub communication: Communication,
    pub gathering: Gathering,
    /// Ranks that follow each other and divide states, if not all.
    pub among: Option<usize>,
    pub micros: usize,
    pub steps: usize,
}

impl Case {
    pub fn of(optimizer: Optimizer) -> Self {
        let communication =
            Communication { bucket: 9000, overlap: true, dtype: None, each_micro_step: false };
        let (loss_scale, recompute, gathering) = (None, Recompute::None, Gathering::default());
        let (among, micros, steps) = (None, 1, 20);
        Case { optimizer, mixed: None, loss_scale, recompute, communication, gathering, among, micros, steps }
    }
}

pub fn vit() -> Vit {
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

pub fn model(batch: usize, dtype: DType) -> Model {
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

pub fn program<T: Float>(case: &Case, zero: Zero, ranks: usize) -> Program {
    compiled(model(BATCH / ranks, dtype::<T>()), case, zero, ranks)
}

pub fn compiled(model: Model, case: &Case, zero: Zero, ranks: usize) -> Program {
    let target = cpu::Target { threads: 1 };
    let settings = Settings {
        optimizer: case.optimizer,
        group: &group,
        mixed: case.mixed,
        loss_scale: case.loss_scale,
        recompute: case.recompute,
        ema: Some(0.9),
        mesh: Mesh::of_replicas(ranks, case.among.unwrap_or(ranks)),
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
pub struct Trained {
    pub steps: Vec<Vec<f64>>,
    pub evaluation: f64,
    pub tensors: BTreeMap<String, Vec<f64>>,
}

/// One rank's tensors: which elements it holds, and what they are.
type Parts = Vec<(String, usize, std::ops::Range<usize>, Vec<f64>)>;

pub fn train<T: Float>(case: &Case, zero: Zero, ranks: usize) -> Trained {
    train_program::<T>(case, &program::<T>(case, zero, ranks), ranks)
}

pub fn train_program<T: Float>(case: &Case, program: &Program, ranks: usize) -> Trained {
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
pub fn assert_same(what: &str, one: &Trained, other: &Trained) {
    for (step, (one, other)) in one.steps.iter().zip(&other.steps).enumerate() {
        assert_eq!(one, other, "{what}: losses and norm of step {step}");
    }
    for (name, values) in &one.tensors {
        assert!(other.tensors.get(name) == Some(values), "{what}: {name} differs");
    }
    assert_eq!(one, other, "{what}");
    assert!(one.steps.iter().any(|step| step[5] == 1.0), "{what}: steps were applied");
}
