//! A whole segmentation model with batch norms: several ranks against one, skipped steps, micro-batches, averages, any number
//! of threads.

mod common;

use comm::Communicator;
use common::ranks::{communicators, on_each};
use common::{Tensors, compiled_with, distance, dtype, settings, small_vit};
use cpu::{Executor, Float, Options, Which};
use graph::build::{BatchNorm, Conv};
use graph::op::Window;
use graph::random::Sequence;
use graph::{Builder, Communication, DType, Graph, Header, Init, Key, Loss, Mixed, Model, Op, Plan, Program};
use graph::{Mesh, Recompute, Settings, StateId, ValueId, compile};
use models::upernet::UperNet;

const SIDE: usize = 32;
const CLASSES: usize = 5;
/// Of the global batch.
const BATCH: usize = 4;

/// Four convolutions, each with half the pixels of the one before.
fn backbone(b: &mut Builder, images: ValueId) -> [ValueId; 4] {
    let mut x = images;
    [6, 8, 10, 12].map(|out| {
        x = b.scope(&format!("backbone.{out}"), |b| {
            let (window, weight) = (Window { stride: 2, pad: 1 }, Init::Normal { std: 0.3 });
            let y = b.conv(x, Conv { name: "conv", out, kernel: 3, window, weight, bias: None });
            let y = b.batch_norm(y, BatchNorm { relu: true, ..BatchNorm::named("norm") });
            b.border(y)
        });
        x
    })
}

fn graph(batch: usize, dtype: DType, training: bool) -> Graph {
    let mut b = Builder::new(dtype, training);
    let images = b.input("images", dtype, [batch, SIDE, SIDE, 3]);
    let targets = b.targets([batch, SIDE, SIDE], false);
    let stages = backbone(&mut b, images);
    let net = UperNet { classes: CLASSES, channels: 8, auxiliary: 6, dropout: 0.1 };
    let ends = net.finish(&mut b, stages, (SIDE, SIDE), targets, Loss::default());
    b.finish(&ends.values()).unwrap()
}

fn model(batch: usize, dtype: DType) -> Model {
    let key = Key { batch, height: SIDE, width: SIDE };
    Model { train: graph(batch, dtype, true), eval: graph(batch, dtype, false), key }
}

const COMMUNICATION: Communication =
    Communication { bucket: 3000, overlap: true, dtype: None, each_micro_step: false };

fn program<T: Float>(batch: usize, threads: usize, change: impl Fn(&mut Settings<'_>)) -> Program {
    let target = cpu::Target { threads };
    let mut settings = settings(&target);
    change(&mut settings);
    compiled_with(model(batch, dtype::<T>()), &settings)
}

/// A program with a batch that depends on the samples' numbers alone.
struct Run<T: Float> {
    executor: Executor<T>,
    header: Header,
    batch: usize,
}

impl<T: Float> Run<T> {
    fn new(program: Program, threads: usize, comm: Option<Communicator>) -> Self {
        let batch = program.last.key.batch;
        let nominal = (BATCH * SIDE * SIDE) as f64;
        let header = Header { seed: 5, step: 0, first_sample: 0, learning_rate: 3e-3, nominal };
        let executor = Executor::new(program, Options { threads, seed: 3, comm }).unwrap();
        Run { executor, header, batch }
    }

    fn alone(program: Program) -> Self {
        Self::new(program, 1, None)
    }

    /// Images drawn by their number; labels follow a threshold, so that there is something to learn; one pixel in eight is
    /// ignored.
    fn fill(&mut self, which: Which) {
        let (first, size) = (self.header.first_sample, SIDE * SIDE);
        for b in 0..self.batch {
            let mut draws = Sequence::new(100 * self.header.step + first + b as u64, 7);
            let image: Vec<f64> = (0..size * 3).map(|_| draws.normal()).collect();
            let ignored: Vec<bool> = (0..size).map(|_| draws.uniform() < 0.125).collect();
            let label = |p: usize| ((image[3 * p] + 2.5).clamp(0.0, 4.9)) as i32;
            let labels = self.executor.labels(which).unwrap();
            labels[b * size..][..size].iter_mut().enumerate().for_each(|(p, l)| *l = label(p));
            let weights = self.executor.input(which, "weights").unwrap();
            let weights = weights[b * size..][..size].iter_mut().zip(&ignored);
            weights.for_each(|(w, ignored)| *w = if *ignored { T::ZERO } else { T::ONE });
            let images = self.executor.input(which, "images").unwrap();
            let pixels = images[b * size * 3..][..size * 3].iter_mut().zip(&image);
            pixels.for_each(|(x, value)| *x = T::from_f64(*value));
        }
    }

    fn run(&mut self, which: Which) {
        self.fill(which);
        self.executor.run(which, &self.header).unwrap();
    }

    /// One optimizer step of one batch; returns its loss.
    fn step(&mut self) -> f64 {
        self.run(Which::Last);
        self.update()
    }

    fn update(&mut self) -> f64 {
        self.executor.run(Which::Update, &self.header).unwrap();
        self.header.step += 1;
        let stats = self.state("stats");
        stats[0] / stats[1]
    }

    fn state(&self, name: &str) -> Vec<f64> {
        let id = self.executor.find_state(name).unwrap_or_else(|| panic!("no state {name}"));
        self.executor.state(id).iter().map(|x| x.to_f64()).collect()
    }

    /// What the next step depends on.
    fn lasting(&self) -> Tensors {
        let states = self.executor.program().states.iter().enumerate().filter(|(_, s)| s.role.lasts());
        let values = |i: usize| self.executor.state(StateId(i as u32)).iter().map(|x| x.to_f64()).collect();
        states.map(|(i, s)| (s.name.clone(), values(i))).collect()
    }
}

fn among<T: Float>(ranks: usize, recompute: Recompute, steps: usize) -> Vec<(Vec<f64>, Tensors)> {
    on_each(communicators(ranks), |comm| {
        let program = program::<T>(BATCH / ranks, 1, |settings| {
            (settings.mesh, settings.communication) = (Mesh::of_data(ranks), COMMUNICATION);
            settings.recompute = recompute;
        });
        let rank = comm.rank();
        let mut run = Run::<T>::new(program, 1, Some(comm));
        run.header.first_sample = (rank * BATCH / ranks) as u64;
        let losses = (0..steps).map(|_| run.step()).collect();
        (losses, run.lasting())
    })
}

fn alone<T: Float>(steps: usize) -> (Vec<f64>, Tensors) {
    let mut run = Run::<T>::alone(program::<T>(BATCH, 1, |_| ()));
    let losses = (0..steps).map(|_| run.step()).collect();
    (losses, run.lasting())
}

#[test]
fn ranks_together_train_as_one() {
    let (one, one_single) = (alone::<f64>(20), alone::<f32>(20));
    assert!(one.0[19] < 0.95 * one.0[0], "it learns: {:?}", one.0);
    for ranks in [2, 4] {
        let many = among::<f64>(ranks, Recompute::None, 20);
        assert!(many.iter().all(|rank| *rank == many[0]), "every rank has the same bits");
        let weights = |tensors: &Tensors| -> Tensors {
            let moment = |name: &str| name.ends_with(".m") || name.ends_with(".v");
            tensors.iter().filter(|(name, _)| !moment(name)).cloned().collect()
        };
        let (error, tensor) = distance(&weights(&many[0].1), &weights(&one.1));
        println!("{ranks} ranks, f64: {error:.1e} after 20 steps ({tensor})");
        assert!(error < 1e-9, "{ranks} ranks: {tensor} differs by {error:.1e}");
        let single = among::<f32>(ranks, Recompute::None, 20);
        let off = single[0].0.iter().zip(&one_single.0).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
        println!("{ranks} ranks, f32: losses differ by {off:.1e}");
        assert!(off < 1e-4, "{ranks} ranks: a loss differs by {off:.1e}");
    }
}

type PlanOf = fn(&Program) -> &Plan;

/// What is made again uses the moments as they were: no exchange is repeated, and no bit changes.
#[test]
fn recompute_keeps_the_moments() {
    let plain = among::<f32>(2, Recompute::None, 2);
    assert!(among::<f32>(2, Recompute::Full, 2) == plain);
    let count = |recompute, which: PlanOf, is: &dyn Fn(&Op) -> bool| {
        let program = program::<f32>(2, 1, |settings| {
            (settings.mesh, settings.communication) = (Mesh::of_data(2), COMMUNICATION);
            (settings.recompute, settings.accumulates) = (recompute, true);
        });
        which(&program).steps.iter().filter(|s| is(&s.op)).count()
    };
    let gathers = |op: &Op| matches!(op, Op::AllGather { .. });
    let (micro, last): (PlanOf, PlanOf) = (|p| &p.micro, |p| &p.last);
    for recompute in [Recompute::None, Recompute::Full] {
        assert_eq!(count(recompute, last, &gathers), 4 + 13);
        assert_eq!(
            count(recompute, micro, &gathers),
            4 + 13,
            "micro-batches are normalised over all ranks too"
        );
    }
    let convolutions = |op: &Op| matches!(op, Op::Conv { .. });
    assert!(count(Recompute::Full, last, &convolutions) > count(Recompute::None, last, &convolutions));
}

#[test]
fn a_skipped_step_leaves_everything_as_it_was() {
    let new = || Run::<f32>::alone(program::<f32>(BATCH, 1, |settings| settings.ema = Some(0.9)));
    let mut run = new();
    run.step();
    let before = run.lasting();
    run.fill(Which::Last);
    run.executor.input(Which::Last, "images").unwrap()[77] = f32::NAN;
    run.executor.run(Which::Last, &run.header).unwrap();
    let pending = run.state("backbone.6.norm.running.pending");
    assert!(pending.iter().any(|x| x.is_nan()), "the step has met the bad pixel");
    run.executor.run(Which::Update, &run.header).unwrap();
    assert_eq!(run.lasting(), before);
    run.step();
    let mut other = new();
    other.step();
    other.step();
    assert_eq!(run.lasting(), other.lasting(), "and the next step goes on as if it had not been");
}

/// Two micro-batches move the running moments twice, as two steps do.
#[test]
fn every_micro_batch_counts() {
    let program = |several| program::<f64>(BATCH / 2, 1, |settings| settings.accumulates = several);
    let [mut together, mut apart] = [true, false].map(program).map(Run::<f64>::alone);
    for run in [&mut together, &mut apart] {
        run.header.learning_rate = 0.0;
    }
    together.run(Which::First);
    together.header.first_sample = 2;
    together.run(Which::Last);
    together.update();
    apart.run(Which::Last);
    apart.executor.run(Which::Update, &apart.header.clone()).unwrap();
    apart.header.first_sample = 2;
    apart.step();
    for norm in ["backbone.6.norm", "decode_head.psp_modules.0.1.batch_norm"] {
        let name = format!("{norm}.running");
        let running = together.state(&name);
        assert_eq!(running, apart.state(&name), "{name}");
        assert!(running[running.len() * 2 / 3..].iter().all(|count| *count == 2.0), "{name}");
    }
}

/// Averages follow running moments as they follow parameters, and evaluation reads them.
#[test]
fn running_moments_are_averaged() {
    let mut run = Run::<f64>::alone(program::<f64>(BATCH, 1, |settings| settings.ema = Some(0.75)));
    let name = "backbone.6.norm.running";
    let mut average = run.state(name);
    assert_eq!(average, [[0.0; 6], [1.0; 6], [0.0; 6]].concat(), "mean 0, variance 1");
    for _ in 0..3 {
        run.step();
        average.iter_mut().zip(run.state(name)).for_each(|(a, now)| *a = 0.75 * *a + 0.25 * now);
    }
    let kept = run.state(&format!("{name}.ema"));
    assert!(kept.iter().zip(&average).all(|(a, b)| (a - b).abs() < 1e-12), "{kept:?} and {average:?}");
    let mut logits = |change: Option<&str>| {
        if let Some(id) = change.and_then(|name| run.executor.find_state(name)) {
            run.executor.state_mut(id).unwrap().iter_mut().for_each(|x| *x *= 1.5);
        }
        run.run(Which::Eval);
        run.executor.output(Which::Eval, "head").unwrap().to_vec()
    };
    let before = logits(None);
    assert!(logits(Some(name)) == before, "evaluation does not read the running moments themselves");
    assert!(logits(Some(&format!("{name}.ema"))) != before, "but their averages");
}

#[test]
fn threads_change_no_bit() {
    let trained = |threads| {
        let mut run = Run::<f32>::new(program::<f32>(BATCH, threads, |_| ()), threads, None);
        run.step();
        run.step();
        run.lasting()
    };
    let one = trained(1);
    assert!((2..4).all(|threads| trained(threads) == one));
}

#[test]
fn a_batch_norm_of_one_value_is_refused() {
    let build = |training| {
        let mut b = Builder::new(DType::F32, training);
        let x = b.input("images", DType::F32, [1, 1, 1, 3]);
        let targets = b.targets([1, 1, 1], false);
        let (window, weight, bias) = (Window { stride: 1, pad: 0 }, Init::Ones, None);
        let y = b.conv(x, Conv { name: "conv", out: 4, kernel: 1, window, weight, bias });
        let y = b.batch_norm(y, BatchNorm::named("norm"));
        let (loss, stats) = b.weighted_losses(y, &[], targets, 0.0);
        b.finish(&[loss, stats, y]).unwrap()
    };
    let model = || Model { train: build(true), eval: build(false), key: Key::default() };
    let target = cpu::Target { threads: 1 };
    let error = compile(model(), &settings(&target)).unwrap_err().to_string();
    let needs =
        "norm: batch norm needs more than 1 value a channel to train with: take a larger batch or image";
    assert_eq!(error, needs);
    // Among two ranks there are two.
    assert!(compile(model(), &Settings { mesh: Mesh::of_data(2), ..settings(&target) }).is_ok());
}

/// In mixed precision the same model is a sound plan: what a GPU will run.
#[test]
fn halves_have_a_plan() {
    for residual in [DType::F32, DType::Bf16] {
        let program = program::<f32>(2, 1, |settings| {
            settings.mixed = Some(Mixed { half: DType::Bf16, residual });
            (settings.mesh, settings.communication) = (Mesh::of_data(2), COMMUNICATION);
        });
        let ty = |name: &str| {
            let values = &program.last.values;
            values.iter().find(|v| v.name == name).unwrap_or_else(|| panic!("no {name}")).ty.dtype
        };
        for half in ["decode_head.bottleneck.conv", "decode_head.bottleneck.batch_norm", "decode_head.fpn"] {
            assert_eq!(ty(half), DType::Bf16, "{half}");
        }
        for single in ["head", "loss", "auxiliary.loss.lse", "decode_head.bottleneck.batch_norm.moments"] {
            assert_eq!(ty(single), DType::F32, "{single}");
        }
    }
}

/// A ViT with a linear head over its tokens, resized to pixels.
#[test]
fn a_vit_learns_to_segment() {
    let vit = small_vit(0.0);
    let segmenter = models::Segmenter::linear(vit.clone());
    let model = segmenter.build(2, Loss::default(), DType::F32).unwrap();
    assert_eq!(model.train.ty(model.train.find("logits").unwrap()).shape.0, [2, 16, 16, vit.classes]);
    let target = cpu::Target { threads: 1 };
    let mut executor =
        Executor::<f32>::new(compiled_with(model, &settings(&target)), Options::alone(1, 1)).unwrap();
    let nominal = 512.0;
    let header = Header { seed: 1, step: 0, first_sample: 0, learning_rate: 1e-2, nominal };
    let mut losses = vec![];
    for _ in 0..30 {
        // The left half of each image is bright and of class 1, the right one dark and of class 3.
        let left = |p: usize| p % 16 < 8;
        let images = executor.input(Which::Last, "images").unwrap().iter_mut().enumerate();
        images.for_each(|(i, x)| *x = if left(i) { 1.0 } else { -1.0 });
        let labels = executor.labels(Which::Last).unwrap().iter_mut().enumerate();
        labels.for_each(|(i, label)| *label = if left(i) { 1 } else { 3 });
        executor.input(Which::Last, "weights").unwrap().fill(1.0);
        executor.run(Which::Last, &header).unwrap();
        executor.run(Which::Update, &header).unwrap();
        let stats = executor.state(executor.find_state("stats").unwrap());
        losses.push(stats[0] / stats[1]);
    }
    assert!((losses[0] - (vit.classes as f32).ln()).abs() < 1e-5, "the head starts at zero");
    assert!(losses[29] < 0.3, "{losses:?}");
}
