//! Dense prediction: its ops alone, UPerNet as a whole, and running moments over micro-steps and skipped steps. Convolutions
//! need cuDNN.
//!
//! Legend: B batch, h and w height and width, C channels.

use super::Body;
use super::common::{self, CLASSES, Draft, EPS, Rig, Tensors, adamw};
use super::compare::{compare_all, distance_or_nan};
use super::rig::{Arithmetic, Gpu};
use cpu::Which;
use graph::build::{BatchNorm, Conv};
use graph::op::{Per, Sampling, Window};
use graph::{Builder, DType, Graph, Init, Key, Loss, Model, Op, Recompute, Role, ValueId};
use models::upernet::UperNet;

/// A body that makes images (2,h,w,C), with a loss of each pixel.
fn pixels((h, w): (usize, usize), smoothing: f64, build: impl Fn(&mut Draft) -> ValueId + 'static) -> Body {
    Box::new(move |dtype| {
        let mut draft = Draft::of_pixels(dtype, [2, h, w]);
        let x = build(&mut draft);
        let logits = draft.linear(x, CLASSES);
        draft.finish_logits(logits, smoothing)
    })
}

fn batch_norm(d: &mut Draft, x: ValueId, relu: bool) -> ValueId {
    let c = *d.shape(x).last().unwrap();
    let (gamma, beta) = (d.parameter("gamma", [c], 1.0), d.parameter("beta", [c], 0.5));
    let moments = d.one(Op::Moments, &[x]);
    d.one(Op::BatchNorm { eps: EPS, relu, running: false }, &[x, moments, gamma, beta])
}

fn convolutions(list: &mut Vec<(String, Body)>) {
    // The last two are as UPerNet has them, but for the batch.
    for (kernel, stride, pad, size, channels, bias) in [
        ([3, 3], 1, 1, (8, 8), (16, 32), false),
        ([3, 3], 1, 1, (7, 9), (8, 24), true),
        ([3, 3], 2, 1, (9, 8), (16, 16), false),
        ([3, 3], 1, 0, (6, 7), (16, 8), true),
        ([2, 2], 2, 0, (8, 6), (8, 16), false),
        ([5, 3], 1, 2, (8, 8), (16, 16), false),
        ([1, 1], 1, 0, (5, 4), (16, 24), false),
        ([1, 1], 2, 0, (5, 4), (16, 24), true),
        ([3, 3], 1, 1, (32, 32), (512, 512), false),
        ([3, 3], 1, 1, (16, 16), (3072, 512), false),
    ] {
        let [kh, kw] = kernel;
        let out = |size: usize, kernel: usize| (size + 2 * pad - kernel) / stride + 1;
        let made = (out(size.0, kh), out(size.1, kw));
        let (i, o) = channels;
        let name = format!("conv {kh}×{kw}, stride {stride}, pad {pad}, {size:?}×{i}→{o}, bias {bias}");
        let build = move |d: &mut Draft| {
            let x = d.parameter("x", [2, size.0, size.1, i], 1.0);
            let w = d.parameter("w", [o, kh, kw, i], (1.0 / (kh * kw * i) as f64).sqrt());
            let mut inputs = vec![x, w];
            if bias {
                inputs.push(d.parameter("b", [o], 0.5));
            }
            d.one(Op::Conv { window: Window { stride, pad }, bias }, &inputs)
        };
        list.push((name, pixels(made, 0.1, build)));
    }
    // Logits that are a convolution's own are f32 whatever its operands.
    let logits: Body = Box::new(|dtype| {
        let mut d = Draft::of_pixels(dtype, [2, 8, 8]);
        let (x, b) = (d.parameter("x", [2, 8, 8, 16], 1.0), d.parameter("b", [8], 0.5));
        let w = d.parameter("w", [8, 3, 3, 16], 0.1);
        let window = Window { stride: 1, pad: 1 };
        let y = d.one(Op::Conv { window, bias: true }, &[x, w, b]);
        d.finish_logits(y, 0.0)
    });
    list.push(("conv to logits".into(), logits));
}

fn norm(relu: bool, h: usize, w: usize, c: usize) -> (String, Body) {
    let build = move |d: &mut Draft| {
        let x = d.parameter("x", [2, h, w, c], 1.5);
        batch_norm(d, x, relu)
    };
    (format!("batch norm of {h}×{w}×{c}, ReLU {relu}"), pixels((h, w), 0.1, build))
}

/// Behind a ReLU, what is rounded to a half may be on the other side of 0, with another gradient: singles alone.
pub fn rectified() -> Vec<(String, Body)> {
    [(3, 4, 5), (16, 16, 512), (32, 32, 64), (2, 2, 40)].map(|(h, w, c)| norm(true, h, w, c)).into()
}

type Size = (usize, usize);

/// Losses of resized logits: from, to, smoothing, classes.
const RESIZED: [(Size, Size, f64, usize); 14] = [
    // As the heads of UPerNet have them, but for fewer pixels; as cityscapes has its classes.
    ((24, 36), (96, 144), 0.0, 150),
    ((6, 9), (96, 144), 0.0, 150),
    ((19, 23), (38, 46), 0.0, 19),
    ((8, 8), (32, 16), 0.0, 150),
    // Odd ratios; many rows of cells; hardly larger; as large.
    ((5, 3), (32, 16), 0.1, 7),
    ((7, 11), (33, 75), 0.1, 21),
    ((33, 20), (70, 64), 0.0, 150),
    ((9, 40), (10, 41), 0.1, 19),
    ((9, 17), (9, 17), 0.0, 40),
    // One pixel; one row; more classes.
    ((1, 1), (32, 16), 0.1, 40),
    ((1, 30), (50, 120), 0.0, 10),
    ((8, 8), (64, 64), 0.1, 256),
    // These go the plain way: smaller, and too many classes.
    ((16, 12), (5, 9), 0.1, 24),
    ((8, 8), (32, 32), 0.0, 300),
];

fn resized(dtype: DType, (h, w): Size, (height, width): Size, smoothing: f64, classes: usize) -> Graph {
    let mut d = Draft::of_pixels(dtype, [2, height, width]);
    let logits = d.parameter("logits", [2, h, w, classes], 2.0);
    d.finish_resized(logits, smoothing)
}

/// The ops of dense prediction, in shapes that models have and in odd ones.
pub fn bodies() -> Vec<(String, Body)> {
    let mut list: Vec<(String, Body)> = vec![];
    convolutions(&mut list);
    for (h, w, c) in [(3, 4, 5), (16, 16, 512), (32, 32, 64), (2, 2, 40)] {
        list.push(norm(false, h, w, c));
    }
    for (sampling, from, to, c) in [
        (Sampling::Bilinear, (4, 4), (16, 16), 64),
        (Sampling::Bilinear, (5, 7), (12, 9), 5),
        (Sampling::Bilinear, (16, 12), (4, 5), 24),
        (Sampling::Bilinear, (1, 1), (6, 7), 8),
        (Sampling::Average, (16, 16), (6, 6), 64),
        (Sampling::Average, (16, 16), (1, 1), 8),
        (Sampling::Average, (5, 7), (3, 2), 5),
    ] {
        let build = move |d: &mut Draft| {
            let x = d.parameter("x", [2, from.0, from.1, c], 1.0);
            d.one(Op::Resize { height: to.0, width: to.1, sampling }, &[x])
        };
        list.push((format!("resize {from:?}→{to:?} of {c}, {sampling:?}"), pixels(to, 0.1, build)));
    }
    for parts in [vec![8, 16, 24], vec![3, 5, 1], vec![512, 64]] {
        let name = format!("concat {parts:?}");
        let build = move |d: &mut Draft| {
            let parts: Vec<ValueId> = parts.iter().map(|c| d.parameter("x", [2, 5, 4, *c], 1.0)).collect();
            d.one(Op::Concat, &parts)
        };
        list.push((name, pixels((5, 4), 0.1, build)));
    }
    for c in [24, 5, 512] {
        let build = move |d: &mut Draft| {
            let x = d.parameter("x", [2, 9, 7, c], 1.0);
            let site = d.site();
            d.one(Op::Drop { rate: 0.4, site, per: Per::Channel }, &[x])
        };
        list.push((format!("drop per channel of {c}"), pixels((9, 7), 0.1, build)));
    }
    for (size, to, smoothing, classes) in RESIZED {
        let build: Body = Box::new(move |dtype| resized(dtype, size, to, smoothing, classes));
        let name = format!("loss of {size:?}×{classes} resized to {to:?}, smoothing {smoothing}");
        list.push((name, build));
    }
    for smoothing in [0.0, 0.1] {
        let build: Body = Box::new(move |dtype| {
            let mut d = Draft::of_pixels(dtype, [2, 33, 17]);
            let logits = d.parameter("logits", [2, 33, 17, 150], 2.0);
            d.finish_logits(logits, smoothing)
        });
        list.push((format!("cross entropy of pixels, smoothing {smoothing}"), build));
    }
    list
}

const SIDE: usize = 32;
const BATCH: usize = 4;

/// UPerNet over four convolutions, each with half the pixels of the one before.
fn graph(dtype: DType, training: bool) -> Graph {
    let mut b = Builder::new(dtype, training);
    let images = b.input("images", dtype, [BATCH, SIDE, SIDE, 8]);
    let targets = b.targets([BATCH, SIDE, SIDE], false);
    let mut x = images;
    let stages = [16, 24, 32, 40].map(|out| {
        x = b.scope(&format!("backbone.{out}"), |b| {
            let (window, weight) = (Window { stride: 2, pad: 1 }, Init::Normal { std: 0.2 });
            let y = b.conv(x, Conv { name: "conv", out, kernel: 3, window, weight, bias: None });
            let y = b.batch_norm(y, BatchNorm { relu: true, ..BatchNorm::named("norm") });
            b.border(y)
        });
        x
    });
    let net = UperNet { classes: CLASSES, channels: 16, auxiliary: 8, dropout: 0.1 };
    let ends = net.finish(&mut b, stages, (SIDE, SIDE), targets, Loss::default());
    b.finish(&ends.values()).unwrap()
}

fn model(dtype: DType) -> Model {
    let key = Key { batch: BATCH, height: SIDE, width: SIDE };
    Model { train: graph(dtype, true), eval: graph(dtype, false), key }
}

pub fn whole() -> (String, Body) {
    ("upernet".into(), Box::new(|dtype| graph(dtype, true)))
}

#[test]
#[ignore = "needs a GPU"]
fn every_op_of_dense_prediction() {
    compare_all(bodies().into_iter(), |_| true);
    compare_all(rectified().into_iter(), |a| matches!(a, Arithmetic::Fp32 | Arithmetic::Tf32));
}

/// In f32 alone: a batch norm over few pixels amplifies the rounding of halves.
#[test]
#[ignore = "needs a GPU"]
fn a_whole_upernet() {
    compare_all([whole()].into_iter(), |arithmetic| arithmetic == Arithmetic::Fp32);
}

/// With labels of every class. Pixels without weight add nothing, whole rows of them and those between others; and two runs have the
/// same bits.
#[test]
#[ignore = "needs a GPU"]
fn resized_losses_leave_out_what_has_no_weight() {
    for (size, to, smoothing, classes) in RESIZED {
        let program =
            common::compiled(&resized(DType::F64, size, to, smoothing, classes), Recompute::None, 4);
        let mut cpu = Rig::<f64>::new(program, 4);
        let weights = (0..2 * to.0 * to.1).map(|i| {
            let (row, pixel) = (i / to.1, i % to.1);
            if row % 8 < 3 || pixel % 5 == 1 { 0.0 } else { 0.5 + (i % 3) as f64 }
        });
        (cpu.weights, cpu.classes) = (weights.collect(), classes);
        let graph = resized(DType::F32, size, to, smoothing, classes);
        let gradients = || {
            let mut gpu = Gpu::of_graph(&graph, Arithmetic::Fp32).unwrap();
            (gpu.weights, gpu.classes) = (cpu.weights.iter().map(|w| *w as f32).collect(), classes);
            gpu.gradients().unwrap()
        };
        let (got, again) = (gradients(), gradients());
        assert!(got == again, "{size:?} to {to:?}");
        let (error, tensor) = distance_or_nan(&got, &cpu.gradients());
        assert!(error < 1e-4, "{size:?}×{classes} to {to:?}: {tensor} is off by {error:.1e}");
    }
}

fn running(tensors: Tensors) -> Tensors {
    tensors.into_iter().filter(|(name, _)| name.ends_with(".running")).collect()
}

/// Two micro-batches move running moments twice, and those of a skipped step leave no trace.
#[test]
#[ignore = "needs a GPU"]
fn running_moments_follow_the_cpu() {
    let pixels = (BATCH * SIDE * SIDE) as f64;
    let target = cpu::Target { threads: 4 };
    let settings = graph::Settings { accumulates: true, ..common::settings(&target) };
    let mut cpu = Rig::<f64>::new(common::compiled_with(model(DType::F64), &settings), 4);
    let mut gpu = Gpu::accumulating(model(DType::F32), Arithmetic::Fp32, adamw(), Recompute::None).unwrap();
    (cpu.header.nominal, gpu.header.nominal) = (2.0 * pixels, 2.0 * pixels);
    for (micro, which) in [(0, Which::First), (1, Which::Last)] {
        let first_sample = micro * BATCH as u64;
        (cpu.header.first_sample, gpu.header.first_sample) = (first_sample, first_sample);
        cpu.fill(which);
        cpu.run(which);
        gpu.fill(which).unwrap();
        gpu.run(which).unwrap();
    }
    cpu.run(Which::Update);
    gpu.run(Which::Update).unwrap();
    let is_running = |state: &graph::State| state.role == Role::Running;
    let (got, want) = (running(gpu.tensors(is_running)), running(cpu.tensors(is_running)));
    let (error, tensor) = distance_or_nan(&got, &want);
    println!("running moments: {error:.1e} ({tensor})");
    assert!(got.len() > 10 && error < 1e-4, "{tensor} is off by {error:.1e}");

    // A weight that is no number makes moments and gradients so, and the step is skipped.
    let id = gpu.executor.find_state("backbone.16.conv.weight").unwrap();
    let mut values = gpu.state(id);
    values[5] = f32::NAN;
    gpu.executor.set_state_f32(id, &values).unwrap();
    gpu.header.first_sample = 0;
    for which in [Which::First, Which::Last] {
        gpu.fill(which).unwrap();
        gpu.run(which).unwrap();
    }
    gpu.run(Which::Update).unwrap();
    let pending = gpu.tensors(|state| state.role == Role::Pending);
    assert!(
        pending.iter().any(|(_, values)| values.iter().any(|x| x.is_nan())),
        "the step has met the bad weight"
    );
    assert_eq!(running(gpu.tensors(is_running)), got);
}

/// The same bits in two runs, whatever cuDNN offers; and moments that are kept when the rest is made again.
#[test]
#[ignore = "needs a GPU"]
fn convolutions_repeat() {
    for arithmetic in [Arithmetic::Fp32, Arithmetic::Bf16, Arithmetic::Fp16] {
        let gradients = || Gpu::of_graph(&graph(DType::F32, true), arithmetic).unwrap().gradients().unwrap();
        assert!(gradients() == gradients(), "{arithmetic:?}");
        let again = Gpu::recomputing(&graph(DType::F32, true), arithmetic).unwrap().gradients().unwrap();
        let (error, tensor) = distance_or_nan(&again, &gradients());
        // What is made again as halves may have been rounded elsewhere the first time.
        let most = if arithmetic == Arithmetic::Fp32 { 1e-6 } else { 1e-4 };
        assert!(error < most, "{arithmetic:?}: recompute changes {tensor} by {error:.1e}");
    }
}
