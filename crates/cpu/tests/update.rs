//! The update as a whole: groups of parameters and moving averages, against the formulas they stand for.

mod common;

use common::{Rig, adamw, compiled_with, distance, settings, small_vit, smoothed, with_drawn_head};
use cpu::Which;
use graph::{DType, Optimizer, ParamGroup, Role, Settings, State};

const THREADS: usize = 2;
const BATCH: usize = 4;
const DECAY: f64 = 0.8;

/// A small ViT with averages or without, each parameter in its group.
fn grouped(optimizer: Optimizer, group: &dyn Fn(&State) -> ParamGroup, ema: Option<f64>) -> Rig<f64> {
    let model = with_drawn_head(small_vit(0.1).build(BATCH, smoothed(), DType::F64).unwrap());
    let target = cpu::Target { threads: THREADS };
    let settings = Settings { optimizer, group, ema, ..settings(&target) };
    Rig::new(compiled_with(model, &settings), THREADS)
}

fn rig(ema: Option<f64>) -> Rig<f64> {
    grouped(adamw(), &|_| ParamGroup { lr_scale: 1.0, decays: true }, ema)
}

fn parameters(rig: &Rig<f64>) -> Vec<(String, Vec<f64>)> {
    rig.tensors(State::is_parameter)
}

fn averages(rig: &Rig<f64>) -> Vec<(String, Vec<f64>)> {
    let averages = rig.tensors(|s| s.role == Role::Average).into_iter();
    averages.map(|(name, values)| (name.trim_end_matches(".ema").to_string(), values)).collect()
}

/// A step whose gradient is not finite.
fn skipped_step(rig: &mut Rig<f64>) {
    rig.fill(Which::Last);
    rig.executor.input(Which::Last, "images").unwrap()[7] = f64::NAN;
    rig.run(Which::Last);
    rig.run(Which::Update);
    assert_eq!(rig.executor.output(Which::Update, "control").unwrap()[1], 0.0);
}

#[test]
fn averages_start_equal_and_follow_every_applied_step() {
    let mut rig = rig(Some(DECAY));
    rig.header.learning_rate = 0.05;
    assert_eq!(averages(&rig), parameters(&rig));
    let mut expected = parameters(&rig);
    for step in 0..6 {
        rig.header.step = step;
        if step == 3 {
            let before = (averages(&rig), parameters(&rig));
            skipped_step(&mut rig);
            assert!((averages(&rig), parameters(&rig)) == before, "a skipped step leaves no trace");
            continue;
        }
        rig.step();
        for ((_, average), (_, now)) in expected.iter_mut().zip(parameters(&rig)) {
            average.iter_mut().zip(now).for_each(|(e, p)| *e = DECAY * *e + (1.0 - DECAY) * p);
        }
        let (error, name) = distance(&averages(&rig), &expected);
        assert!(error < 1e-15, "step {step}: {name} is off by {error:.1e}");
    }
    let (moved, _) = distance(&averages(&rig), &parameters(&rig));
    assert!(moved > 1e-3, "the averages lag behind: {moved:.1e}");
}

#[test]
fn averages_leave_training_alone() {
    let (mut with, mut without) = (rig(Some(DECAY)), rig(None));
    for _ in 0..3 {
        with.step();
        without.step();
    }
    assert!(with.tensors(|s| s.role != Role::Average) == without.tensors(|_| true));
}

#[test]
fn evaluation_scores_the_averages() {
    let (mut with, mut without) = (rig(Some(DECAY)), rig(None));
    with.header.learning_rate = 0.05;
    (0..3).for_each(|_| with.step());
    let set = |rig: &mut Rig<f64>, values: Vec<(String, Vec<f64>)>| {
        for (name, values) in values {
            let id = rig.executor.find_state(&name).unwrap();
            rig.executor.state_mut(id).unwrap().copy_from_slice(&values);
        }
        rig.loss()
    };
    let of_averages = set(&mut without, averages(&with));
    let of_parameters = set(&mut without, parameters(&with));
    assert_eq!(with.loss(), of_averages);
    assert_ne!(with.loss(), of_parameters);
    with.executor.reset_averages();
    assert_eq!(with.loss(), of_parameters);
    assert_eq!(averages(&with), parameters(&with));
}

/// The head learns ten times as fast and is not decayed, positions and norms stand still, the rest is as usual.
fn group(state: &State) -> ParamGroup {
    match &state.name {
        name if name.starts_with("head.") => ParamGroup { lr_scale: 10.0, decays: false },
        name if name == "pos_embed" || name.contains("norm") => ParamGroup { lr_scale: 0.0, decays: true },
        _ => ParamGroup { lr_scale: 0.5, decays: true },
    }
}

/// One parameter by PyTorch's formulas, with the group's learning rate and weight decay.
struct Reference {
    name: String,
    group: ParamGroup,
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Reference {
    fn adamw(&mut self, gradient: &[f64], base: f64, t: i32) {
        let (beta1, beta2, eps, decay) = (0.9, 0.999, 1e-8, if self.group.decays { 0.05 } else { 0.0 });
        let lr = base * self.group.lr_scale;
        let state = self.p.iter_mut().zip(&mut self.m).zip(&mut self.v).zip(gradient);
        for (((p, m), v), g) in state {
            *p -= lr * decay * *p;
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            let (m, v) = (*m / (1.0 - f64::powi(beta1, t)), *v / (1.0 - f64::powi(beta2, t)));
            *p -= lr * m / (v.sqrt() + eps);
        }
    }

    fn sgd(&mut self, gradient: &[f64], base: f64, t: i32) {
        let (momentum, decay) = (0.9, if self.group.decays { 0.05 } else { 0.0 });
        for ((p, m), g) in self.p.iter_mut().zip(&mut self.m).zip(gradient) {
            let g = g + decay * *p;
            *m = if t == 1 { g } else { momentum * *m + g };
            *p -= base * self.group.lr_scale * (g + momentum * *m);
        }
    }
}

fn groups_step_as_torch_does(optimizer: Optimizer, step: impl Fn(&mut Reference, &[f64], f64, i32)) {
    let mut rig = grouped(optimizer, &group, None);
    rig.header.learning_rate = 0.01;
    let states = rig.executor.program().states.clone();
    let mut references: Vec<Reference> = parameters(&rig)
        .into_iter()
        .map(|(name, p)| {
            let group = group(states.iter().find(|s| s.name == name).unwrap());
            let (m, v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
            Reference { name, group, p, m, v }
        })
        .collect();
    for t in 1..=4 {
        rig.header.step = t as u64;
        rig.step();
        let factor = rig.executor.output(Which::Update, "control").unwrap()[0];
        for reference in &mut references {
            let gradient = rig.state(&format!("{}.grad", reference.name));
            assert_eq!(gradient.is_none(), reference.group.is_frozen(), "{}", reference.name);
            let gradient: Vec<f64> = gradient.into_iter().flatten().map(|g| factor * g).collect();
            step(reference, &gradient, 0.01, t);
        }
    }
    let (start, end) = (parameters(&self::rig(None)), parameters(&rig));
    for ((reference, (name, start)), (_, end)) in references.iter().zip(start).zip(end) {
        assert_eq!(start == end, reference.group.is_frozen(), "{name} moves unless it is frozen");
        let error = end.iter().zip(&reference.p).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(error < 1e-14, "{name} is off by {error:.1e}");
    }
}

#[test]
fn groups_step_as_torch_adamw_does() {
    groups_step_as_torch_does(adamw(), |reference, gradient, lr, t| reference.adamw(gradient, lr, t));
}

#[test]
fn groups_step_as_torch_sgd_does() {
    let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.05 };
    groups_step_as_torch_does(sgd, |reference, gradient, lr, t| reference.sgd(gradient, lr, t));
}

/// Freezing leaves out work, not accuracy: what is still trained has the gradients it had.
#[test]
fn freezing_keeps_the_other_gradients() {
    let frozen = |s: &State| !s.name.starts_with("blocks.2.") && !s.name.starts_with("head.");
    let group = |s: &State| ParamGroup { lr_scale: if frozen(s) { 0.0 } else { 1.0 }, decays: true };
    let (some, mut all) = (grouped(adamw(), &group, None).gradients(), rig(None).gradients());
    all.retain(|(name, _)| some.iter().any(|(kept, _)| kept == name));
    assert!(some.len() > 10 && some == all);
}
