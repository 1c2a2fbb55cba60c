//! Plans in half precision on the CPU: operands are widened, every result is rounded to its type.

mod common;

use common::arithmetic::{Arithmetic, TOLERANCES};
use common::{
    Rig, Tensors, compiled_with, distance, settings, small_swin, small_vit, smoothed, with_drawn_head,
};
use cpu::reference::{self, Shown};
use cpu::{Executor, Float, Which};
use graph::{DType, Header, Model, Optimizer, Plan, Program, Role, Settings, State};
use half::{bf16, f16};

const BATCH: usize = 4;
const THREADS: usize = 2;

fn vit(dtype: DType) -> Model {
    with_drawn_head(small_vit(0.1).build(BATCH, smoothed(), dtype).unwrap())
}

fn swin(dtype: DType) -> Model {
    with_drawn_head(small_swin(32).build(BATCH, smoothed(), dtype).unwrap())
}

/// A model in a type.
type Build = fn(DType) -> Model;

const MODELS: [(&str, Build); 2] = [("ViT", vit), ("Swin V2", swin)];

fn mixed() -> impl Iterator<Item = (Arithmetic, f64)> {
    TOLERANCES.into_iter().filter(|(arithmetic, _)| arithmetic.mixed().is_some())
}

/// Momentum has what gradients have, where AdamW would make the same of all sizes.
fn program(model: Model, arithmetic: Arithmetic) -> Program {
    let target = cpu::Target { threads: THREADS };
    let optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.05 };
    let (mixed, loss_scale) = (arithmetic.mixed(), arithmetic.loss_scale());
    compiled_with(model, &Settings { optimizer, mixed, loss_scale, accumulates: true, ..settings(&target) })
}

/// Three steps of two micro-batches each; `run` has the rig with its header set and its batch filled in.
fn steps<T: Float>(rig: &mut Rig<T>, mut run: impl FnMut(&mut Executor<T>, Which, &Header)) {
    rig.header.nominal = 2.0 * BATCH as f64;
    for step in 0..3 {
        for (micro, which) in [(0, Which::First), (1, Which::Last)] {
            let first_sample = BATCH as u64 * micro;
            rig.header = Header { step, first_sample, ..rig.header };
            rig.fill(which);
            run(&mut rig.executor, which, &rig.header);
        }
        run(&mut rig.executor, Which::Update, &rig.header);
    }
}

fn kept(state: &State) -> bool {
    matches!(state.role, Role::Parameter(_) | Role::Moment | Role::Statistic)
}

fn trained<T: Float>(program: Program) -> (Rig<T>, Tensors) {
    let mut rig = Rig::<T>::new(program, THREADS);
    steps(&mut rig, |executor, which, header| executor.run(which, header).unwrap());
    let tensors = rig.tensors(kept);
    (rig, tensors)
}

/// Parameters and momentum after some steps, against double precision.
#[test]
fn mixed_plans_train_within_their_tolerances() {
    for (name, model) in MODELS {
        let want = trained::<f64>(program(model(DType::F64), Arithmetic::Fp32)).1;
        for (arithmetic, tolerance) in mixed() {
            let (rig, got) = trained::<f32>(program(model(DType::F32), arithmetic));
            let (error, worst) = distance(&got, &want);
            println!("{name} in {arithmetic:?}: {error:.1e} ({worst})");
            assert!(error < tolerance, "{name} in {arithmetic:?}: {worst} differs by {error:.1e}");
            assert!(error > tolerance / 1e4, "{name} in {arithmetic:?}: nothing was rounded");
            assert!(rig.executor.borrowed() > 0);
            // Copies in half precision are the parameters, rounded.
            let states = &rig.executor.program().states;
            let copies = states.iter().filter_map(|copy| Some((copy, rig.state(copy.copies()?)?)));
            assert!(copies.clone().count() > 4);
            for (copy, parameter) in copies {
                assert!(
                    rig.state(&copy.name).unwrap() == rounded(&parameter, copy.ty.dtype),
                    "{}",
                    copy.name
                );
            }
        }
    }
}

/// Plans in the executor's own type need nothing beside their memory.
#[test]
fn plans_in_one_precision_borrow_nothing() {
    let plain = Rig::<f32>::new(program(vit(DType::F32), Arithmetic::Fp32), THREADS);
    assert_eq!(plain.executor.borrowed(), 0);
    let doubles = Rig::<f64>::new(program(vit(DType::F64), Arithmetic::Fp32), THREADS);
    assert_eq!(doubles.executor.borrowed(), 0);
}

/// By the `half` crate, not by the executor's kernels.
fn rounded(values: &[f64], dtype: DType) -> Vec<f64> {
    let round = |x: f64| match dtype {
        DType::Bf16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        _ => x,
    };
    values.iter().map(|x| round(*x)).collect()
}

/// The plan with f32 where it has half precision.
fn in_f32(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.values.iter_mut().filter(|v| v.ty.dtype.is_half()).for_each(|v| v.ty.dtype = DType::F32);
    plan
}

/// Every value of every step, bit for bit: the step in f32 by itself, of what it found, then rounded.
#[test]
fn every_result_is_that_of_f32_rounded_to_its_type() {
    for (name, model) in MODELS {
        for (arithmetic, _) in mixed() {
            let mut rig = Rig::<f32>::new(program(model(DType::F32), arithmetic), THREADS);
            let mut halves = 0;
            steps(&mut rig, |executor, which, header| {
                let mut check = |plan: &Plan, shown: Shown| {
                    let step = &plan.steps[shown.step];
                    let wide = reference::step::<f32>(&in_f32(plan), shown.step, &shown.operands, header);
                    for ((value, got), wide) in step.outputs.iter().zip(&shown.results).zip(wide.unwrap()) {
                        let value = &plan.values[*value];
                        let want = rounded(&wide, value.ty.dtype);
                        halves += usize::from(value.ty.dtype.is_half());
                        assert!(
                            *got == want,
                            "{name}, {arithmetic:?}, {}: {} ({})",
                            plan.name,
                            value.name,
                            step.op.name()
                        );
                    }
                };
                executor.run_shown(which, header, &mut check).unwrap();
            });
            assert!(halves > 100, "{name} in {arithmetic:?}: {halves} values of half precision");
        }
    }
}

/// A plan of f32 and half precision on an executor that computes in doubles: the reference for kernels that keep their sums in
/// f32. What differs is the rounding of f32 sums, and of half-precision results that lie close to the border of two.
#[test]
fn doubles_compute_any_plan() {
    let arithmetic = Arithmetic::Bf16;
    let program = program(vit(DType::F32), arithmetic);
    let (rig, _) = trained::<f64>(program.clone());
    let floats = rig.tensors(|state| state.ty.dtype == DType::F32);
    assert!(!floats.is_empty());
    for (name, values) in floats {
        assert!(values.iter().all(|x| f64::from(*x as f32) == *x), "{name} is not rounded to f32");
    }
    let mut rig = Rig::<f32>::new(program, THREADS);
    let mut worst = (0.0, String::new());
    steps(&mut rig, |executor, which, header| {
        let mut check = |plan: &Plan, shown: Shown| {
            let step = &plan.steps[shown.step];
            let want = reference::step::<f64>(plan, shown.step, &shown.operands, header).unwrap();
            for ((value, got), want) in step.outputs.iter().zip(&shown.results).zip(want) {
                let apart: Vec<f64> = got.iter().zip(&want).map(|(a, b)| a - b).collect();
                let unit = if plan.values[*value].ty.dtype.is_half() { 0.5f64.powi(8) } else { 1e-4 };
                let error = common::norm(&apart) / common::norm(&want).max(1e-6) / unit;
                if error > worst.0 {
                    worst = (error, format!("{} ({})", plan.values[*value].name, step.op.name()));
                }
            }
        };
        executor.run_shown(which, header, &mut check).unwrap();
    });
    println!("at most {:.1e} of the tolerance: {}", worst.0, worst.1);
    assert!(worst.0 < 1.0, "{} is {:.1e} times as far off as it may be", worst.1, worst.0);
}
