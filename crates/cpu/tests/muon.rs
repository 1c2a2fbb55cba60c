//! Muon against a plain implementation in f64, which knows matrices by their names.

mod common;

use common::ranks::{communicators, on_each};
use common::{Rig, compiled_with, distance, settings, small_swin, small_vit, smoothed, with_drawn_head};
use cpu::{Float, Which};
use graph::{
    Communication, DType, LossScaling, Mesh, Mixed, Model, Op, Optimizer, ParamGroup, Recompute, Role,
    Settings, State,
};
use models::Segmenter;
use models::upernet::UperNet;
use models::vit::{Pool, Vit};

const STEPS: i32 = 20;
const MOMENTUM: f64 = 0.95;
const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.05;
const LR: f64 = 2e-3;

const MUON: Optimizer = Optimizer::Muon {
    momentum: MOMENTUM,
    nesterov: true,
    beta1: BETAS.0,
    beta2: BETAS.1,
    eps: EPS,
    weight_decay: DECAY,
};

/// How many matrices a parameter is for Muon, by its name: 0 if AdamW updates it.
fn matrices(name: &str) -> usize {
    let Some(layer) = name.strip_suffix(".weight") else { return 0 };
    let ends = ["patch_embed.proj", "head", "head.fc", "classifier"];
    let outside = ends.iter().any(|end| layer == *end || layer.ends_with(&format!(".{end}")));
    let owner = layer.rsplit('.').next().unwrap_or(layer);
    match owner {
        _ if outside || owner.contains("norm") || layer.contains("cpb_mlp") => 0,
        "qkv" => 3,
        _ => 1,
    }
}

/// Row-major (m,k) · (k,n).
fn matmul(a: &[f64], b: &[f64], (m, k, n): (usize, usize, usize)) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for x in 0..k {
            (0..n).for_each(|j| out[i * n + j] += a[i * k + x] * b[x * n + j]);
        }
    }
    out
}

fn transposed(a: &[f64], (m, n): (usize, usize)) -> Vec<f64> {
    (0..m * n).map(|i| a[i % m * n + i / m]).collect()
}

/// As published: the norm first, then five times X ← aX + (bA + cA²)X with A = X·Xᵀ, of the wide one of X and Xᵀ.
fn orthogonalised(x: &[f64], (rows, columns): (usize, usize)) -> Vec<f64> {
    if rows > columns {
        let wide = orthogonalised(&transposed(x, (rows, columns)), (columns, rows));
        return transposed(&wide, (columns, rows));
    }
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<f64> = x.iter().map(|x| x / norm).collect();
    for _ in 0..5 {
        let gram = matmul(&x, &transposed(&x, (rows, columns)), (rows, columns, rows));
        let square = matmul(&gram, &gram, (rows, rows, rows));
        let both: Vec<f64> = gram.iter().zip(square).map(|(a, s)| -4.7750 * a + 2.0315 * s).collect();
        let turned = matmul(&both, &x, (rows, rows, columns));
        x.iter_mut().zip(turned).for_each(|(x, t)| *x = 3.4445 * *x + t);
    }
    x
}

/// A parameter by the published formulas.
struct Reference {
    name: String,
    shape: Vec<usize>,
    group: ParamGroup,
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Reference {
    fn all<T: Float>(rig: &Rig<T>, group: &dyn Fn(&State) -> ParamGroup) -> Vec<Reference> {
        let states = rig.executor.program().states.iter().filter(|state| state.is_parameter());
        let of = |state: &State| {
            let (name, shape, group) = (state.name.clone(), state.ty.shape.0.clone(), group(state));
            let (p, zeros) = (rig.state(&name).unwrap(), vec![0.0; state.ty.shape.count()]);
            Reference { name, shape, group, p, m: zeros.clone(), v: zeros }
        };
        states.map(of).collect()
    }

    fn step(&mut self, g: &[f64], t: i32) {
        let lr = LR * self.group.lr_scale;
        let keep = 1.0 - lr * if self.group.decays { DECAY } else { 0.0 };
        let parts = matrices(&self.name);
        if parts == 0 {
            let (bias1, bias2) = (1.0 - BETAS.0.powi(t), 1.0 - BETAS.1.powi(t));
            for (((p, m), v), g) in self.p.iter_mut().zip(&mut self.m).zip(&mut self.v).zip(g) {
                *m = BETAS.0 * *m + (1.0 - BETAS.0) * g;
                *v = BETAS.1 * *v + (1.0 - BETAS.1) * g * g;
                *p = *p * keep - lr * (*m / bias1) / ((*v / bias2).sqrt() + EPS);
            }
            return;
        }
        let (rows, columns) = (self.shape[0] / parts, self.shape[1..].iter().product::<usize>());
        let step = lr * 0.2 * (rows.max(columns) as f64).sqrt();
        let count = rows * columns;
        for (number, g) in g.chunks_exact(count).enumerate() {
            let range = number * count..(number + 1) * count;
            let m = &mut self.m[range.clone()];
            m.iter_mut().zip(g).for_each(|(m, g)| *m = MOMENTUM * *m + (1.0 - MOMENTUM) * g);
            let ahead: Vec<f64> = m.iter().zip(g).map(|(m, g)| MOMENTUM * m + (1.0 - MOMENTUM) * g).collect();
            let update = orthogonalised(&ahead, (rows, columns));
            self.p[range].iter_mut().zip(update).for_each(|(p, u)| *p = *p * keep - step * u);
        }
    }
}

/// The last block learns at half the rate, the first norms and one matrix not at all; biases don't decay.
fn group(state: &State) -> ParamGroup {
    let frozen = state.name.contains("norm1") || state.name.ends_with("0.attn.proj.weight");
    let scale = if frozen { 0.0 } else { 0.5 };
    ParamGroup { lr_scale: scale, decays: state.name.ends_with(".weight") }
}

fn rig<T: Float>(model: Model, threads: usize, change: impl FnOnce(&mut Settings<'_>)) -> Rig<T> {
    let target = cpu::Target { threads };
    let mut settings = Settings { optimizer: MUON, group: &group, ..settings(&target) };
    change(&mut settings);
    let mut rig = Rig::new(compiled_with(model, &settings), threads);
    rig.header.learning_rate = LR;
    rig
}

fn parameters<T: Float>(rig: &Rig<T>) -> Vec<(String, Vec<f64>)> {
    rig.tensors(State::is_parameter)
}

/// Twenty steps, of which one is skipped, beside the plain implementation.
fn steps_as_published(model: Model, least: usize) {
    let mut rig: Rig<f64> = rig(model, 2, |_| {});
    let mut references = Reference::all(&rig, &group);
    let as_matrices = references.iter().filter(|r| matrices(&r.name) > 0).count();
    assert!(as_matrices >= least, "{as_matrices} matrices");
    let mut applied = 0;
    for step in 0..STEPS {
        rig.header.step = step as u64;
        rig.header.first_sample = 100 * step as u64;
        rig.fill(Which::Last);
        if step == 5 {
            rig.executor.input(Which::Last, "images").unwrap()[7] = f64::NAN;
        }
        rig.run(Which::Last);
        rig.run(Which::Update);
        let control = rig.executor.output(Which::Update, "control").unwrap().to_vec();
        assert_eq!(control[1] == 0.0, step == 5);
        if control[1] == 0.0 {
            continue;
        }
        applied += 1;
        for reference in &mut references {
            let gradient = rig.state(&format!("{}.grad", reference.name));
            assert_eq!(gradient.is_none(), reference.group.is_frozen(), "{}", reference.name);
            let gradient: Vec<f64> = gradient.into_iter().flatten().map(|g| control[0] * g).collect();
            if !gradient.is_empty() {
                reference.step(&gradient, applied);
            }
        }
    }
    for reference in &references {
        let end = rig.state(&reference.name).unwrap();
        let error = end.iter().zip(&reference.p).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(error < 1e-12, "{} is off by {error:.1e}", reference.name);
        let kept = |suffix: &str| rig.state(&format!("{}.{suffix}", reference.name)).is_some();
        let is_matrix = matrices(&reference.name) > 0 && !reference.group.is_frozen();
        assert_eq!(kept("momentum"), is_matrix, "{}", reference.name);
        assert_eq!(kept("v"), !is_matrix && !reference.group.is_frozen(), "{}", reference.name);
    }
}

fn vit() -> Model {
    vit_of(4, DType::F64)
}

fn vit_of(batch: usize, dtype: DType) -> Model {
    with_drawn_head(small_vit(0.1).build(batch, smoothed(), dtype).unwrap())
}

#[test]
fn a_vit_steps_as_published() {
    steps_as_published(vit(), 12);
}

#[test]
fn a_swin_steps_as_published() {
    steps_as_published(with_drawn_head(small_swin(32).build(3, smoothed(), DType::F64).unwrap()), 20);
}

/// Convolutions are matrices of output channels by what a pixel sees.
#[test]
fn convolutions_step_as_published() {
    let heads = UperNet { classes: common::CLASSES, channels: 8, auxiliary: 6, dropout: 0.1 };
    let model = Segmenter::upernet(small_swin(32), heads).build(2, smoothed(), DType::F64).unwrap();
    let is_conv = |s: &&State| s.ty.shape.rank() == 4 && matrices(&s.name) == 1;
    assert!(model.train.states.iter().filter(is_conv).count() > 4);
    steps_as_published(model, 30);
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    let run = |threads: usize| {
        let mut rig: Rig<f32> = rig(vit_of(4, DType::F32), threads, |settings| settings.ema = Some(0.9));
        (0..3).for_each(|step| {
            rig.header.step = step;
            rig.step();
        });
        rig.tensors(|_| true)
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

/// bf16 where the run is of half precision, fp16 included. Updates are those of f64 for the same gradients, but for rounding: of
/// elements by 2⁻⁹, which five iterations enlarge by at most 3.4445⁵ in directions that hardly have a gradient.
#[test]
fn half_precision_orthogonalises_in_bf16() {
    for half in [DType::Bf16, DType::F16] {
        // All tokens count, so that no gradient has a rank of four.
        let vit = Vit { pool: Pool::Mean, ..small_vit(0.1) };
        let model = with_drawn_head(vit.build(4, smoothed(), DType::F32).unwrap());
        let mut rig: Rig<f32> = rig(model, 2, |settings| {
            settings.mixed = Some(Mixed { half, residual: DType::F32 });
            let scaling = LossScaling { initial: 256.0, dynamic: None };
            settings.loss_scale = Some(scaling).filter(|_| half == DType::F16);
        });
        let update = rig.executor.program().update.clone();
        for step in update.steps.iter().filter(|s| matches!(s.op, Op::Matmul { .. })) {
            assert_eq!(update.values[step.outputs[0]].ty.dtype, DType::Bf16);
        }
        let mut references = Reference::all(&rig, &group);
        rig.step();
        let factor = f64::from(rig.executor.output(Which::Update, "control").unwrap()[0]);
        for reference in references.iter_mut().filter(|r| matrices(&r.name) > 0) {
            let Some(gradient) = rig.state(&format!("{}.grad", reference.name)) else { continue };
            let start = reference.p.clone();
            reference.step(&gradient.iter().map(|g| factor * g).collect::<Vec<_>>(), 1);
            let moved = |end: &[f64]| end.iter().zip(&start).map(|(a, b)| a - b).collect::<Vec<f64>>();
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let (ours, want) = (moved(&rig.state(&reference.name).unwrap()), moved(&reference.p));
            let (size, sized) = (dot(&ours, &ours).sqrt(), dot(&want, &want).sqrt());
            let cosine = dot(&ours, &want) / size / sized;
            println!("{half} {}: cosine {cosine:.4}, size {:.3}", reference.name, size / sized);
            assert!(cosine > 0.95, "{} in {half}: the cosine is {cosine:.3}", reference.name);
            assert!((size / sized - 1.0).abs() < 0.06, "{} in {half}: {size:.2e}", reference.name);
        }
    }
}

#[test]
fn sums_over_micro_steps_and_averages_work_as_for_others() {
    let mut rig: Rig<f64> = rig(vit(), 2, |settings| {
        (settings.accumulates, settings.ema) = (true, Some(0.8));
        settings.recompute = Recompute::Full;
    });
    let mut expected = parameters(&rig);
    for step in 0..3 {
        rig.header.step = step;
        rig.fill(Which::First);
        rig.run(Which::First);
        rig.step();
        for ((_, average), (_, now)) in expected.iter_mut().zip(parameters(&rig)) {
            average.iter_mut().zip(now).for_each(|(e, p)| *e = 0.8 * *e + 0.2 * p);
        }
    }
    let averages = rig.tensors(|s| s.role == Role::Average);
    assert!(averages.len() > 20);
    for (name, average) in averages {
        let of = name.trim_end_matches(".ema");
        let (_, want) = expected.iter().find(|(name, _)| name == of).unwrap();
        let error = average.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(error < 1e-14, "{name} is off by {error:.1e}");
    }
}

/// Ranks have the same bits, and the numbers of one rank.
#[test]
fn ranks_together_compute_what_one_does() {
    let trained = |ranks: usize, comm: Option<comm::Communicator>| {
        let target = cpu::Target { threads: 1 };
        let communication = Communication { bucket: 2000, ..Communication::default() };
        let mesh = Mesh::of_data(ranks);
        let settings = Settings { optimizer: MUON, group: &group, mesh, communication, ..settings(&target) };
        let first = comm.as_ref().map_or(0, |comm| comm.rank() * 8 / ranks);
        let program = compiled_with(vit_of(8 / ranks, DType::F64), &settings);
        let mut rig = Rig::<f64>::among(program, 1, comm);
        (rig.header.nominal, rig.header.first_sample) = (8.0, first as u64);
        (0..2).for_each(|_| rig.step());
        rig.tensors(|_| true)
    };
    let one = trained(1, None);
    for ranks in [2, 4] {
        let many = on_each(communicators(ranks), |comm| trained(ranks, Some(comm)));
        assert!(many.iter().all(|rank| *rank == many[0]), "every rank has the same bits");
        let (error, tensor) = distance(&many[0], &one);
        assert!(error < 1e-6, "{ranks} ranks: {tensor} differs by {error:.1e} after two steps");
    }
}
