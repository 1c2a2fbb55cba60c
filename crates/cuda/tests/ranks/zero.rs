//! Stages of ZeRO among ranks that share a GPU: they train alike, in the memory that was planned.
//!
//! Ranks that are threads exchange through the host, which adds in the ranks' order: stages have the same bits there. Over NCCL, which needs
//! a process for each, they have with two ranks.

use super::common::optimizers::{ADAMW, LAMB, MUON, SGD};
use super::common::{compiled_with, settings, small_vit, smoothed, with_drawn_head};
use super::on_each;
use super::processes::among_processes;
use super::rank::{OnCpu, OnGpu, Part, Rank};
use comm::Communicator;
use graph::{
    Communication, DType, DynamicScale, Header, LossScaling, Mesh, Mixed, Optimizer, Program, Role, Settings,
    StateId, Target, Zero,
};
use models::vit::Vit;
use std::collections::BTreeMap;

/// Samples of a step, however they are divided.
const SAMPLES: usize = 16;

const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };
const F16: Mixed = Mixed { half: DType::F16, residual: DType::F32 };

/// A training, of whatever stage.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    optimizer: Optimizer,
    mixed: Option<Mixed>,
    micros: usize,
    pub ranks: usize,
    steps: usize,
}

impl Case {
    const fn new(optimizer: Optimizer, mixed: Option<Mixed>, micros: usize, ranks: usize) -> Self {
        Case { optimizer, mixed, micros, ranks, steps: 4 }
    }

    pub fn program(&self, zero: Zero, target: &dyn Target) -> Program {
        let Case { optimizer, mixed, micros, ranks, .. } = *self;
        let vit = Vit { width: 48, heads: 3, mlp: 96, ..small_vit(0.1) };
        let model = with_drawn_head(vit.build(SAMPLES / ranks / micros, smoothed(), DType::F32).unwrap());
        // The first steps are skipped.
        let dynamic = Some(DynamicScale { window: 100, hysteresis: 1, min: 1.0 });
        let loss_scale = (mixed == Some(F16)).then_some(LossScaling { initial: 2f64.powi(21), dynamic });
        let program = compiled_with(
            model,
            &Settings {
                optimizer,
                mixed,
                loss_scale,
                ema: Some(0.9),
                mesh: Mesh::of_data(ranks),
                communication: Communication {
                    bucket: 12_000,
                    overlap: true,
                    dtype: None,
                    each_micro_step: false,
                },
                zero,
                accumulates: micros > 1,
                ..settings(target)
            },
        );
        program.check().unwrap();
        program
    }

    pub fn on_gpu(&self, zero: Zero) -> Program {
        self.program(zero, &cuda::Target::of(0, self.mixed.is_some()))
    }

    fn on_cpu(&self, zero: Zero) -> Program {
        self.program(zero, &cpu::Target { threads: 1 })
    }
}

/// What a rank has after training: statistics and control of each step, the loss of the averages, its parts of all tensors that last: name,
/// elements of the whole, the first of them, and values. Numbers as their bits.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Trained {
    steps: Vec<Vec<u64>>,
    evaluation: u64,
    parts: Vec<(String, usize, usize, Vec<u64>)>,
}

fn bits(values: Vec<f64>) -> Vec<u64> {
    values.into_iter().map(f64::to_bits).collect()
}

/// Trains as a rank of this number.
pub fn trained(rank: &mut dyn Rank, number: usize, case: &Case) -> Trained {
    let planned = (rank.program().arena(), rank.program().state_bytes());
    assert_eq!(rank.allocated(), planned, "memory is as planned");
    let Case { micros, ranks, .. } = *case;
    let batch = SAMPLES / ranks / micros;
    let states = rank.program().states.clone();
    let stats = StateId(states.iter().position(|state| state.name == "stats").unwrap() as u32);
    let mut header =
        Header { seed: 5, step: 0, first_sample: 0, learning_rate: 2e-3, nominal: SAMPLES as f64 };
    let mut steps = vec![];
    for step in 0..case.steps {
        header.step = step as u64;
        for micro in 0..micros {
            let first = (step % 3) * SAMPLES + micro * ranks * batch + number * batch;
            header.first_sample = first as u64;
            rank.run(Program::micro_step(micro, micros), &header);
        }
        let stats = rank.held(stats).1;
        rank.run(Part::Update, &header);
        steps.push(bits([stats, rank.output(Part::Update, "control")].concat()));
    }
    header.first_sample = 0;
    rank.run(Part::Eval, &header);
    let evaluation = rank.output(Part::Eval, "loss")[0].to_bits();
    let lasting = states.iter().enumerate().filter(|(_, s)| s.role.lasts() || s.role == Role::Copy);
    let part = |(index, state): (usize, &graph::State)| {
        let (held, values) = rank.held(StateId(index as u32));
        (state.name.clone(), state.ty.shape.count(), held.start, bits(values))
    };
    let parts = lasting.map(part).collect();
    Trained { steps, evaluation, parts }
}

/// What ranks have together: whole tensors, which those who hold the same agree on.
#[derive(Debug, PartialEq)]
struct Together {
    steps: Vec<Vec<u64>>,
    evaluation: u64,
    tensors: BTreeMap<String, Vec<Option<u64>>>,
}

impl Together {
    fn of(ranks: Vec<Trained>) -> Self {
        let (steps, evaluation) = (ranks[0].steps.clone(), ranks[0].evaluation);
        assert!(ranks.iter().all(|rank| rank.steps == steps), "every rank has the same losses and norms");
        assert!(ranks.iter().all(|rank| rank.evaluation == evaluation), "and evaluates the same model");
        let mut tensors: BTreeMap<String, Vec<Option<u64>>> = BTreeMap::new();
        for (name, count, first, values) in ranks.into_iter().flat_map(|rank| rank.parts) {
            let whole = tensors.entry(name.clone()).or_insert_with(|| vec![None; count]);
            for (known, value) in whole[first..].iter_mut().zip(values) {
                assert!(known.is_none_or(|known| known == value), "{name} is not the same on all ranks");
                *known = Some(value);
            }
        }
        for (name, values) in &tensors {
            assert!(values.iter().all(Option::is_some), "{name} is not whole");
        }
        Together { steps, evaluation, tensors }
    }

    /// Mean loss of each step.
    fn losses(&self) -> Vec<f64> {
        self.steps.iter().map(|step| f64::from_bits(step[0]) / SAMPLES as f64).collect()
    }

    fn assert_same(&self, other: &Together, what: &str) {
        assert_eq!(self.losses(), other.losses(), "{what}: losses");
        assert_eq!(self.steps, other.steps, "{what}: losses and norms");
        for (name, values) in &self.tensors {
            assert!(other.tensors.get(name) == Some(values), "{what}: {name} differs");
        }
        assert!(self == other, "{what}");
    }
}

fn among_threads<N: Rank>(
    case: &Case,
    program: &Program,
    rank: &(impl Fn(Program, Option<Communicator>) -> N + Sync),
) -> Together {
    let ends = on_each(case.ranks, |member| {
        let world = (case.ranks > 1).then(|| member.world.clone());
        Ok(trained(&mut rank(program.clone(), world), member.place.rank, case))
    });
    Together::of(ends.into_iter().map(Result::unwrap).collect())
}

/// Stages that add in the same order as each other: all with one micro-step, else 0 and 1, and 2 and 3. A stage 2 that has the plans of
/// stage 1 adds as that does.
fn agree(case: &Case, mut of: impl FnMut(Zero) -> (Zero, Together)) -> Together {
    let (mut sums, mut parts): (Option<Together>, Option<Together>) = (None, None);
    for zero in Zero::ALL {
        let (taken, trained) = of(zero);
        let (losses, scattered) = (trained.losses(), taken >= Zero::Stage2 && case.micros > 1);
        println!("{case:?}, stage {zero} as {taken}: {losses:?}");
        assert!(losses.iter().all(|loss| loss.is_finite()));
        assert!(trained.steps.iter().any(|step| f64::from_bits(step[5]) == 1.0), "steps were applied");
        let like = if scattered { &mut parts } else { &mut sums };
        match like {
            Some(like) => trained.assert_same(like, &format!("{case:?}, stage {zero}")),
            None => *like = Some(trained),
        }
    }
    let sums = sums.unwrap();
    // What is added in half precision depends on who adds it.
    if let Some(parts) = parts.filter(|_| case.mixed.is_none()) {
        near(&parts.losses(), &sums.losses(), &format!("{case:?}: in another order"));
    }
    sums
}

fn near(one: &[f64], other: &[f64], what: &str) {
    let worst = one.iter().zip(other).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
    println!("{what}: losses {worst:.1e} apart");
    assert!(one.len() == other.len() && worst < 2e-4, "{what}: losses {one:?} and {other:?}");
}

const THREADED: [Case; 9] = [
    Case::new(ADAMW, None, 1, 2),
    Case::new(SGD, None, 1, 4),
    Case::new(LAMB, None, 1, 4),
    Case::new(MUON, None, 1, 2),
    Case::new(ADAMW, Some(BF16), 4, 2),
    Case::new(LAMB, Some(BF16), 1, 2),
    Case::new(MUON, Some(BF16), 4, 4),
    Case::new(ADAMW, None, 4, 4),
    Case { steps: 18, ..Case::new(ADAMW, Some(F16), 1, 2) },
];

fn stages_among_threads<N: Rank>(
    cases: &[Case],
    program: impl Fn(&Case, Zero) -> Program,
    rank: impl Fn(Program, Option<Communicator>) -> N + Sync,
) {
    for case in cases {
        let of = |zero: Zero| {
            let program = program(case, zero);
            (program.zero, among_threads(case, &program, &rank))
        };
        let sums = agree(case, of);
        let skipped = sums.steps.iter().filter(|step| f64::from_bits(step[5]) == 0.0).count();
        assert_eq!(skipped > 0, case.mixed == Some(F16), "{case:?}: {skipped} steps are skipped");
        if case.mixed.is_none() {
            let one = Case { ranks: 1, ..*case };
            let alone = among_threads(&one, &program(&one, Zero::Stage3), &rank);
            near(&sums.losses(), &alone.losses(), &format!("{case:?}: one rank"));
        }
    }
}

#[test]
fn stages_train_alike_on_the_cpu() {
    stages_among_threads(&[THREADED[0], THREADED[3], THREADED[7]], Case::on_cpu, OnCpu::new);
}

#[test]
#[ignore = "needs a GPU"]
fn stages_train_alike_through_the_host() {
    stages_among_threads(&THREADED, Case::on_gpu, OnGpu::new);
}

/// What a step with looks at every value does, and one action by action, is what the graphs do: also with what an update leaves.
#[test]
#[ignore = "needs a GPU"]
fn stages_look_at_every_value() {
    for zero in Zero::ALL {
        let case = THREADED[0];
        let program = case.on_gpu(zero);
        let ends = on_each(case.ranks, |member| {
            let mut rank = OnGpu::new(program.clone(), Some(member.world.clone()));
            let mut losses = vec![];
            for step in 0..3 {
                let header =
                    Header { seed: 5, step, first_sample: 0, learning_rate: 2e-3, nominal: SAMPLES as f64 };
                rank.fill(Part::Last, member.place.rank as u64);
                for part in [Part::Last, Part::Update] {
                    match step {
                        0 => rank.executor.run(part, &header).unwrap(),
                        1 => assert_eq!(rank.executor.run_checked(part, &header).unwrap(), None),
                        _ => rank.executor.run_eagerly(part, &header).unwrap(),
                    }
                }
                losses.push(rank.tensors(&|state| state.name == "stats")[0].1[0]);
            }
            Ok(losses)
        });
        let losses: Vec<Vec<f64>> = ends.into_iter().map(Result::unwrap).collect();
        println!("stage {zero}: {losses:?}");
        assert!(losses[0] == losses[1] && losses[0][2] < losses[0][0]);
    }
}

/// The trainings that so many processes do over NCCL, one after the other.
pub fn over_nccl(ranks: usize) -> Vec<(Case, Zero)> {
    let cases: &[Case] = match ranks {
        2 => &[
            Case::new(ADAMW, None, 1, 2),
            Case::new(ADAMW, Some(BF16), 4, 2),
            Case::new(LAMB, None, 1, 2),
            Case::new(MUON, Some(BF16), 1, 2),
        ],
        _ => &[Case::new(ADAMW, None, 4, 4)],
    };
    cases.iter().flat_map(|case| Zero::ALL.map(|zero| (*case, zero))).collect()
}

/// Two ranks: a sum of two numbers has one order.
#[test]
#[ignore = "needs a GPU and NCCL"]
fn two_processes_train_alike_over_nccl() {
    let mut trained = among_processes(2).into_iter();
    for stages in over_nccl(2).chunks(Zero::ALL.len()) {
        let case = stages[0].0;
        agree(&case, |zero| (case.on_gpu(zero).zero, Together::of(trained.next().unwrap())));
    }
}

/// Four: NCCL chooses the order of sums, so that losses are near those of one rank.
#[test]
#[ignore = "needs a GPU and NCCL"]
fn four_processes_train_as_one_does_over_nccl() {
    let trained = among_processes(4);
    for ((case, zero), ranks) in over_nccl(4).into_iter().zip(trained) {
        let one = Case { ranks: 1, ..case };
        let alone = among_threads(&one, &one.on_gpu(Zero::Stage0), &OnGpu::new);
        near(&Together::of(ranks).losses(), &alone.losses(), &format!("{case:?}, stage {zero}"));
    }
}
