//! Convolution, batch norm, resizing and what moves channels: backward rules against finite differences, in double
//! precision.
//!
//! Legend: B batch, h and w height and width, C channels.

mod common;

use common::slopes::{ELEMENTS, check, check_elements, rig};
use common::{CLASSES, Draft, EPS, Rig};
use graph::op::{Per, Sampling, Window};
use graph::{DType, Op, ValueId};

/// An image as tokens, with which graphs end.
fn tokens(d: &mut Draft, x: ValueId) -> ValueId {
    let [_, h, w, _] = d.shape(x)[..] else { panic!("images have four axes") };
    d.one(Op::Ungrid { tokens: h * w }, &[x])
}

/// A graph of batch 2 whose body makes an image.
fn check_image(name: &str, build: impl FnOnce(&mut Draft) -> ValueId) -> Rig<f64> {
    check(name, |d| {
        let x = build(d);
        tokens(d, x)
    })
}

#[test]
fn convolution() {
    for (kernel, stride, pad, height, width, bias) in [
        ([3, 3], 1, 1, 4, 5, false),
        ([3, 3], 2, 1, 5, 4, true),
        ([3, 3], 1, 0, 3, 4, false),
        ([2, 2], 2, 0, 4, 6, true),
        ([5, 3], 3, 2, 6, 5, false),
        ([1, 1], 1, 2, 2, 3, true),
        ([1, 1], 2, 0, 5, 3, false),
    ] {
        let name = format!("conv {kernel:?}, stride {stride}, pad {pad}, {height}×{width}, bias {bias}");
        check_image(&name, |d| {
            let x = d.parameter("x", [2, height, width, 3], 1.0);
            let w = d.parameter("w", [4, kernel[0], kernel[1], 3], 0.4);
            let mut inputs = vec![x, w];
            if bias {
                inputs.push(d.parameter("b", [4], 0.5));
            }
            d.one(Op::Conv { window: Window { stride, pad }, bias }, &inputs)
        });
    }
}

/// Over several blocks of pixels, the last one shorter, and several tiles of the weight's gradient.
#[test]
fn convolution_in_several_blocks() {
    let mut d = Draft::new(DType::F64, 1);
    let x = d.parameter("x", [1, 29, 41, 6], 1.0);
    let w = d.parameter("w", [40, 3, 3, 6], 0.2);
    let y = d.one(Op::Conv { window: Window { stride: 1, pad: 1 }, bias: false }, &[x, w]);
    let y = d.one(Op::Resize { height: 3, width: 2, sampling: Sampling::Average }, &[y]);
    let y = tokens(&mut d, y);
    check_elements("conv of 1,189 pixels", &mut rig(&d.finish(y)), 24);
}

/// The gradient of the weight is cut within taps, the last range of channels shorter.
#[test]
fn convolution_of_many_channels() {
    let mut d = Draft::new(DType::F64, 1);
    let x = d.parameter("x", [1, 5, 6, 520], 1.0);
    let w = d.parameter("w", [4, 3, 3, 520], 0.05);
    let y = d.one(Op::Conv { window: Window { stride: 2, pad: 1 }, bias: false }, &[x, w]);
    let y = tokens(&mut d, y);
    check_elements("conv of 520 channels", &mut rig(&d.finish(y)), 24);
}

fn batch_norm(d: &mut Draft, x: ValueId, relu: bool) -> ValueId {
    let c = *d.shape(x).last().unwrap();
    let (gamma, beta) = (d.parameter("gamma", [c], 1.0), d.parameter("beta", [c], 0.5));
    let moments = d.one(Op::Moments, &[x]);
    d.one(Op::BatchNorm { eps: EPS, relu, running: false }, &[x, moments, gamma, beta])
}

#[test]
fn batch_norm_and_relu() {
    for (relu, height, width, c) in [(false, 3, 4, 5), (true, 3, 4, 5), (false, 1, 3, 33), (true, 2, 3, 1)] {
        let rig = check_image(&format!("batch norm {height}×{width}×{c}, ReLU {relu}"), |d| {
            let x = d.parameter("x", [2, height, width, c], 1.5);
            batch_norm(d, x, relu)
        });
        assert!(rig.has(|op| *op == Op::BatchNormGrad { eps: EPS, relu }));
    }
}

/// Over several parts of the rows.
#[test]
fn batch_norm_of_many_rows() {
    let mut d = Draft::new(DType::F64, 2);
    let x = d.parameter("x", [2, 60, 50, 3], 1.0);
    // Without a ReLU: among so many values some lie at its kink, where there is no slope.
    let y = batch_norm(&mut d, x, false);
    let y = d.one(Op::Resize { height: 4, width: 4, sampling: Sampling::Average }, &[y]);
    let y = tokens(&mut d, y);
    check_elements("batch norm of 6,000 rows", &mut rig(&d.finish(y)), 24);
}

#[test]
fn resizing() {
    for sampling in [Sampling::Bilinear, Sampling::Average] {
        for (from, to) in [
            ((3, 4), (6, 8)),
            ((3, 4), (5, 9)),
            ((7, 5), (3, 2)),
            ((1, 1), (4, 3)),
            ((2, 3), (6, 6)),
            ((5, 6), (1, 1)),
            ((5, 6), (5, 6)),
        ] {
            check_image(&format!("{sampling:?} {from:?} → {to:?}"), |d| {
                let x = d.parameter("x", [2, from.0, from.1, 3], 1.0);
                d.one(Op::Resize { height: to.0, width: to.1, sampling }, &[x])
            });
        }
    }
}

#[test]
fn channels_side_by_side() {
    check_image("concat of three, one of them twice", |d| {
        let (x, y) = (d.parameter("x", [2, 2, 3, 4], 1.0), d.parameter("y", [2, 2, 3, 1], 1.0));
        d.one(Op::Concat, &[x, y, x])
    });
}

#[test]
fn tokens_to_an_image_and_back() {
    for class_token in [0, 1] {
        check_image(&format!("grid of tokens, {class_token} before them"), |d| {
            let x = d.parameter("x", [2, 6 + class_token, 4], 1.0);
            d.one(Op::Grid { height: 2, width: 3 }, &[x])
        });
    }
}

#[test]
fn dropped_channels() {
    let mut d = Draft::new(DType::F64, 4);
    let x = d.parameter("x", [4, 2, 3, 6], 1.0);
    let site = d.site();
    let y = d.one(Op::Drop { rate: 0.4, site, per: Per::Channel }, &[x]);
    let y = tokens(&mut d, y);
    let mut rig = rig(&d.finish(y));
    check_elements("drop per channel", &mut rig, ELEMENTS);
    rig.gradients();
    let gradient = rig.state("x.0.grad").unwrap();
    let mut dropped = 0;
    for sample in gradient.chunks_exact(2 * 3 * 6) {
        for c in 0..6 {
            let pixels: Vec<bool> = sample.iter().skip(c).step_by(6).map(|g| *g == 0.0).collect();
            assert!(pixels.iter().all(|zero| *zero == pixels[0]), "a channel is dropped as a whole");
            dropped += usize::from(pixels[0]);
        }
    }
    assert!((1..24).contains(&dropped), "some are dropped, some not: {dropped}");
}

const PIXELS: [([usize; 3], usize, usize, f64); 4] =
    [([2, 7, 9], 3, 4, 0.0), ([1, 37, 6], 19, 2, 0.1), ([2, 5, 5], 5, 5, 0.1), ([2, 6, 8], 1, 1, 0.0)];

#[test]
fn a_loss_that_resizes() {
    let smaller = ([2, 3, 4], 8, 5, 0.1);
    for (labels, h, w, smoothing) in PIXELS.into_iter().chain([smaller]) {
        let mut d = Draft::of_pixels(DType::F64, labels);
        let logits = d.parameter("logits", [labels[0], h, w, CLASSES], 2.0);
        let mut rig = rig(&d.finish_resized(logits, smoothing));
        rig.weights[3] = 0.0;
        check_elements(&format!("loss of {h}×{w} resized to {labels:?}"), &mut rig, ELEMENTS);
    }
}

/// Losses of resized logits resize by themselves, with the same result, unless someone asks for those logits.
#[test]
fn logits_of_pixels_are_nowhere() {
    for (labels, h, w, smoothing) in PIXELS {
        let mut d = Draft::of_pixels(DType::F64, labels);
        let small = d.parameter("logits", [labels[0], h, w, CLASSES], 2.0);
        let (height, width, sampling) = (labels[1], labels[2], Sampling::Bilinear);
        let logits = d.one(Op::Resize { height, width, sampling }, &[small]);
        let graph = d.finish_logits(logits, smoothing);
        let apart = Rig::<f64>::new(common::by_hand(&graph, false, false, 2), 2).gradients();
        let mut rig = rig(&graph);
        let (error, tensor) = common::distance(&rig.gradients(), &apart);
        assert!(error < 1e-12, "{tensor} is off by {error:.1e}");
        let has = |plan: &graph::Plan, op: &dyn Fn(&Op) -> bool| plan.steps.iter().any(|step| op(&step.op));
        let resizes = |op: &Op| matches!(op, Op::Resize { .. } | Op::ResizeGrad { .. });
        let program = rig.executor.program();
        assert!(has(&program.last, &|op| *op == Op::ResizedCrossEntropy { smoothing }));
        assert!(!has(&program.last, &resizes) && !has(&program.eval, &resizes));
        let mut asked = graph.clone();
        asked.outputs.push(logits);
        assert!(has(&common::compiled(&asked, graph::Recompute::None, 2).eval, &resizes));
    }
}
