//! Every backward rule against finite differences, in double precision: alone, then in random graphs.
//!
//! Legend: B batch, T tokens, C channels, H heads, K classes.

mod common;
#[path = "gradients/windows.rs"]
mod windows;

use common::slopes::{ELEMENTS, H, TOLERANCE, check, check_elements, rig};
use common::{CLASSES, Draft, EPS, Rig, norm, random};
use graph::op::{AttentionDrop, Per, Pooling};
use graph::random::Sequence;
use graph::{DType, Graph, Loss, Op, StateId, ValueId};
use std::collections::BTreeSet;

#[test]
fn cross_entropy() {
    for (smoothing, mixed, weights) in [
        (0.0, false, [1.0, 1.0, 1.0, 1.0]),
        (0.1, false, [1.0, 1.0, 1.0, 1.0]),
        (0.0, false, [0.5, 2.0, 0.0, 1.0]),
        (0.3, false, [0.0, 1.0, 0.25, 0.0]),
        (0.0, true, [1.0, 1.0, 1.0, 1.0]),
        (0.1, true, [0.5, 2.0, 0.0, 1.0]),
    ] {
        let mut draft = Draft::new(DType::F64, weights.len());
        let logits = draft.parameter("logits", [weights.len(), CLASSES], 2.0);
        let mut rig = rig(&draft.finish_loss(logits, Loss { smoothing, mixed }));
        rig.weights = weights.to_vec();
        rig.header.nominal = 7.0;
        let name = format!("cross_entropy, smoothing {smoothing}, mixed {mixed}, {weights:?}");
        check_elements(&name, &mut rig, ELEMENTS);
        let logits = rig.gradients().swap_remove(0).1;
        for (row, weight) in logits.chunks_exact(CLASSES).zip(weights) {
            assert_eq!(norm(row) == 0.0, weight == 0.0, "a sample counts if it has a weight");
        }
    }
}

#[test]
fn linear() {
    for (bias, inner, out) in [(true, 4, 6), (false, 4, 6), (true, 1, 1), (false, 17, 3), (true, 5, 33)] {
        check(&format!("linear {inner}→{out}, bias {bias}"), |d| {
            let x = d.parameter("x", [2, 3, inner], 1.0);
            let w = d.parameter("w", [out, inner], 0.5);
            let b = d.parameter("b", [out], 0.5);
            let inputs = if bias { vec![x, w, b] } else { vec![x, w] };
            d.one(Op::Linear { bias, gelu: false }, &inputs)
        });
    }
}

#[test]
fn linear_shaped_like_a_convolution() {
    check("linear, weight (O,ch,p,p)", |d| {
        let x = d.parameter("x", [2, 3, 12], 1.0);
        let w = d.parameter("w", [5, 3, 2, 2], 0.3);
        d.one(Op::Linear { bias: false, gelu: false }, &[x, w])
    });
}

#[test]
fn linear_with_gelu() {
    for bias in [true, false] {
        let rig = check(&format!("linear + gelu fused, bias {bias}"), |d| {
            let x = d.parameter("x", [2, 3, 5], 1.0);
            let w = d.parameter("w", [7, 5], 0.7);
            let b = d.parameter("b", [7], 0.5);
            let inputs = if bias { vec![x, w, b] } else { vec![x, w] };
            let y = d.one(Op::Linear { bias, gelu: false }, &inputs);
            d.one(Op::Gelu, &[y])
        });
        assert!(rig.has(|op| *op == Op::Linear { bias, gelu: true }), "fuse merges the two");
        assert_eq!(rig.has(|op| *op == Op::GeluGrad { bias: true }), bias, "and peephole the bias gradient");
    }
}

#[test]
fn gelu() {
    check("gelu", |d| {
        // Wide enough to reach both tails.
        let x = d.parameter("x", [2, 5, 9], 2.5);
        d.one(Op::Gelu, &[x])
    });
}

#[test]
fn layer_scale() {
    for width in [1, 4, 33] {
        let rig = check(&format!("layer_scale of {width}"), |d| {
            let x = d.parameter("x", [2, 3, width], 1.0);
            let gamma = d.parameter("gamma", [width], 0.5);
            d.one(Op::LayerScale, &[x, gamma])
        });
        assert!(rig.has(|op| *op == Op::LayerScaleGrad { sum: false }));
    }
    let rig = check("layer_scale of a branch", |d| {
        let x = d.parameter("x", [2, 3, 6], 1.0);
        let (y, gamma) = (d.linear(x, 6), d.parameter("gamma", [6], 0.5));
        let y = d.one(Op::LayerScale, &[y, gamma]);
        d.one(Op::Add, &[x, y])
    });
    assert!(rig.has(|op| *op == Op::LayerScaleGrad { sum: true }), "the bias gradient folds into it");
}

#[test]
fn swiglu() {
    check("swiglu", |d| {
        let x = d.parameter("x", [2, 5, 18], 2.5);
        d.one(Op::SwiGlu, &[x])
    });
    let rig = check("swiglu after a layer", |d| {
        let x = d.parameter("x", [2, 3, 6], 1.0);
        let y = d.linear(x, 10);
        d.one(Op::SwiGlu, &[y])
    });
    assert!(rig.has(|op| *op == Op::SwiGluGrad { sum: true }), "the bias gradient folds into it");
}

#[test]
fn prepend() {
    for prefixes in [vec![1], vec![1, 4], vec![2, 1, 3]] {
        check(&format!("prepend {prefixes:?}"), |d| {
            let mut inputs = vec![d.parameter("x", [2, 3, 5], 1.0)];
            inputs.extend(prefixes.iter().map(|n| d.parameter("prefix", [1, *n, 5], 1.0)));
            d.one(Op::Prepend, &inputs)
        });
    }
}

#[test]
fn embed() {
    check("embed", |d| {
        let (patches, positions) = (d.parameter("x", [2, 3, 5], 1.0), d.parameter("p", [1, 3, 5], 1.0));
        d.one(Op::Embed { class_token: false }, &[patches, positions])
    });
    check("embed, class token", |d| {
        let (patches, token) = (d.parameter("x", [2, 3, 5], 1.0), d.parameter("cls", [1, 1, 5], 1.0));
        let positions = d.parameter("p", [1, 4, 5], 1.0);
        d.one(Op::Embed { class_token: true }, &[patches, token, positions])
    });
}

#[test]
fn patches() {
    for (patch, height, width) in [(2, 4, 6), (1, 2, 3), (3, 3, 3)] {
        check(&format!("patches of {patch} in {height}×{width}"), |d| {
            let images = d.parameter("images", [2, 3, height, width], 1.0);
            d.one(Op::Patches { patch }, &[images])
        });
    }
}

#[test]
fn unpatches() {
    check("unpatches", |d| {
        let x = d.parameter("x", [2, 6, 8], 1.0);
        let images = d.one(Op::Unpatches { patch: 2, channels: 2, height: 4, width: 6 }, &[x]);
        d.one(Op::Patches { patch: 1 }, &[images])
    });
}

#[test]
fn layer_norm() {
    for width in [3, 8, 37] {
        check(&format!("layer_norm of {width}"), |d| {
            let x = d.parameter("x", [2, 3, width], 1.5);
            d.layer_norm(x)
        });
    }
    check("layer_norm of (B,C)", |d| {
        let x = d.parameter("x", [2, 8], 1.5);
        d.layer_norm(x)
    });
}

/// x + r and its norm as one op; `finish` makes the rest of the graph from (sum, y).
fn check_residual_norm(used: &str, finish: impl Fn(&mut Draft, ValueId, ValueId) -> ValueId) -> Rig<f64> {
    check(&format!("layer_norm + residual, {used} used"), |d| {
        let (x, r) = (d.parameter("x", [2, 3, 6], 1.0), d.parameter("r", [2, 3, 6], 1.0));
        let (gamma, beta) = (d.parameter("gamma", [6], 1.0), d.parameter("beta", [6], 0.5));
        let outputs = d.all(Op::LayerNorm { eps: EPS, add: true }, &[x, r, gamma, beta]);
        finish(d, outputs[0], outputs[1])
    })
}

#[test]
fn layer_norm_with_residual() {
    let grad = |rig: &Rig<f64>, add| rig.has(|op| *op == Op::LayerNormGrad { add, sum: false, half: None });
    let both = check_residual_norm("both", |d, sum, y| {
        let y = d.linear(y, 6);
        d.one(Op::Add, &[sum, y])
    });
    assert!(grad(&both, true));
    let norm = check_residual_norm("y alone", |_, _, y| y);
    assert!(grad(&norm, false));
    let sum = check_residual_norm("sum alone", |_, sum, _| sum);
    assert!(!grad(&sum, true) && !grad(&sum, false));
    assert!(sum.has(|op| *op == Op::LayerNorm { eps: EPS, add: true }), "the op itself stays");
}

#[test]
fn layer_norm_of_a_value_added_to_itself() {
    let rig = check("layer_norm + residual, x + x", |d| {
        let x = d.parameter("x", [2, 3, 6], 1.0);
        let sum = d.one(Op::Add, &[x, x]);
        let y = d.layer_norm(sum);
        d.one(Op::Add, &[sum, y])
    });
    assert!(rig.has(|op| *op == Op::LayerNorm { eps: EPS, add: true }), "fuse merges the two");
}

fn attention_graph(tokens: usize, width: usize, heads: usize, rate: f64) -> Graph {
    let mut d = Draft::new(DType::F64, if tokens > 100 { 1 } else { 2 });
    let batch = d.batch();
    let qkv = d.parameter("qkv", [batch, tokens, 3 * width], 1.0);
    let site = d.site();
    let drop = (rate > 0.0).then_some(AttentionDrop { rate, site });
    let y = d.one(Op::Attention { heads, drop }, &[qkv]);
    d.finish(y)
}

#[test]
fn attention() {
    for (tokens, width, heads) in [(1, 4, 1), (2, 6, 3), (7, 8, 2), (17, 12, 4), (33, 5, 1)] {
        for rate in [0.0, 0.4] {
            let mut rig = rig(&attention_graph(tokens, width, heads, rate));
            check_elements(&format!("attention T {tokens}, H {heads}, drop {rate}"), &mut rig, ELEMENTS);
        }
    }
}

/// At 600 tokens a head's queries take three blocks, the last one shorter.
#[test]
fn attention_in_several_blocks() {
    for rate in [0.0, 0.2] {
        let name = format!("attention T 600, H 1, drop {rate}");
        let mut rig = rig(&attention_graph(600, 4, 1, rate));
        check_elements(&name, &mut rig, 12);
        check_directions(&name, &mut rig, 4);
    }
}

#[test]
fn drop() {
    for (per, name) in [(Per::Element, "element"), (Per::Sample, "sample")] {
        let mut d = Draft::new(DType::F64, 6);
        let x = d.parameter("x", [6, 3, 5], 1.0);
        let site = d.site();
        let y = d.one(Op::Drop { rate: 0.4, site, per }, &[x]);
        let mut rig = rig(&d.finish(y));
        check_elements(&format!("drop per {name}"), &mut rig, ELEMENTS);
        let gradient = rig.state("x.0.grad").unwrap();
        let dropped = gradient.iter().filter(|g| **g == 0.0).count();
        assert!(dropped > 0 && dropped < gradient.len(), "some are dropped, some not: {dropped}");
    }
}

#[test]
fn add_and_scale() {
    check("add", |d| {
        let (x, y) = (d.parameter("x", [2, 3, 4], 1.0), d.parameter("y", [2, 3, 4], 1.0));
        d.one(Op::Add, &[x, y])
    });
    check("add, x + x", |d| {
        let x = d.parameter("x", [2, 3, 4], 1.0);
        d.one(Op::Add, &[x, x])
    });
    check("scale", |d| {
        let x = d.parameter("x", [2, 3, 4], 1.0);
        d.one(Op::Scale { factor: -1.7 }, &[x])
    });
}

#[test]
fn pool() {
    for (kind, name) in [(Pooling::First, "first"), (Pooling::Mean, "mean")] {
        check(&format!("pool {name}"), |d| {
            let x = d.parameter("x", [2, 3, 4], 1.0);
            d.one(Op::Pool { kind }, &[x])
        });
    }
}

/// A random direction in the space of some parameters.
fn direction(parameters: &[(StateId, &Vec<f64>)], random: &mut Sequence) -> Vec<(StateId, Vec<f64>)> {
    let mut draw = |g: &Vec<f64>| g.iter().map(|_| random.normal()).collect();
    parameters.iter().map(|(id, g)| (*id, draw(g))).collect()
}

/// The slope along random directions, over all parameters and over each alone, against the gradient. Its norm is what
/// the slope along a random direction comes to, so errors are relative to that; a parameter whose gradient is next to
/// nothing is held against a millionth of the whole norm, as differences of the loss have no more digits.
fn check_directions(name: &str, rig: &mut Rig<f64>, directions: usize) -> f64 {
    let gradients = rig.parameter_gradients();
    let known: Vec<(StateId, &Vec<f64>)> =
        gradients.iter().filter_map(|(_, id, g)| Some((*id, g.as_ref()?))).collect();
    let norm_of =
        |some: &[(StateId, &Vec<f64>)]| some.iter().map(|(_, g)| norm(g).powi(2)).sum::<f64>().sqrt();
    let whole = norm_of(&known);
    let mut random = Sequence::new(9, 4);
    let mut worst: f64 = 0.0;
    let alone = known.chunks(1).collect::<Vec<_>>();
    for some in std::iter::repeat_n(&known[..], directions).chain(alone) {
        let along = direction(some, &mut random);
        let dot = |g: &[f64], a: &[f64]| g.iter().zip(a).map(|(g, a)| g * a).sum::<f64>();
        let analytic: f64 = some.iter().zip(&along).map(|((_, g), (_, a))| dot(g, a)).sum();
        // The step is H for the whole move, however many parameters share in it.
        let length = along.iter().map(|(_, a)| norm(a).powi(2)).sum::<f64>().sqrt();
        let numeric = rig.slope(&along, H / length);
        let error = (analytic - numeric).abs() / norm_of(some).max(1e-6 * whole);
        worst = worst.max(error);
        let what = &gradients[some[0].0.index()].0.name;
        assert!(error < TOLERANCE, "{name}: off by {error:.1e} along {} from {what}", some.len());
    }
    worst
}

/// Large enough for every way an op is cut into pieces: tall tiles of a product, partial sums over rows, runs of
/// elements.
#[test]
fn large_arrays() {
    let mut d = Draft::new(DType::F64, 3);
    let x = d.parameter("x", [3, 700, 16], 1.0);
    let y = d.layer_norm(x);
    let y = d.linear(y, 20);
    let y = d.one(Op::Gelu, &[y]);
    let y = d.linear(y, 16);
    let y = d.one(Op::SwiGlu, &[y]);
    let y = d.linear(y, 16);
    let gamma = d.parameter("gamma", [16], 0.5);
    let y = d.one(Op::LayerScale, &[y, gamma]);
    let site = d.site();
    let y = d.one(Op::Drop { rate: 0.2, site, per: Per::Element }, &[y]);
    let sum = d.one(Op::Add, &[x, y]);
    let y = d.layer_norm(sum);
    let y = d.one(Op::Scale { factor: 0.5 }, &[y]);
    let y = d.one(Op::Add, &[sum, y]);
    let mut rig = rig(&d.finish(y));
    let worst = check_directions("large arrays", &mut rig, 4);
    println!("large arrays: {worst:.1e} at worst");
}

const GRAPHS: u64 = 80;

#[test]
fn random_graphs() {
    let mut ops = BTreeSet::new();
    let (mut worst, mut most): (f64, usize) = (0.0, 0);
    for number in 0..GRAPHS {
        let graph = random::graph(number, DType::F64);
        let mut rig = rig(&graph);
        worst = worst.max(check_directions(&format!("graph {number}"), &mut rig, 4));
        most = most.max(graph.nodes.len());
        ops.extend(rig.executor.program().last.steps.iter().map(|s| kind(&s.op)));
        let total = rig.state("stats").unwrap()[0] / rig.header.nominal;
        assert_eq!(total, rig.loss(), "graph {number}: training and evaluation have one loss");
    }
    println!("{GRAPHS} graphs of up to {most} nodes: {worst:.1e} at worst");
    for kind in [
        "patches",
        "unpatches",
        "linear",
        "linear gelu",
        "gelu",
        "gelu_grad bias",
        "embed",
        "embed class",
        "layer_norm",
        "layer_norm add",
        "layer_norm_grad add",
        "attention",
        "attention drop",
        "drop element",
        "drop sample",
        "add",
        "scale",
        "pool first",
        "pool mean",
        "pool_grad first",
        "cross_entropy",
        "cross_entropy mixed",
        "cross_entropy_grad mixed",
    ] {
        assert!(ops.contains(kind), "no graph has {kind}");
    }
}

/// The op and the variant of it that its backward rule tells apart.
fn kind(op: &Op) -> String {
    let variant = match op {
        Op::Linear { gelu: true, .. } => " gelu",
        Op::GeluGrad { bias: true } => " bias",
        Op::Embed { class_token: true } => " class",
        Op::LayerNorm { add: true, .. } | Op::LayerNormGrad { add: true, .. } => " add",
        Op::Attention { drop: Some(_), .. } => " drop",
        Op::Drop { per: Per::Element, .. } => " element",
        Op::Drop { per: Per::Sample, .. } => " sample",
        Op::Pool { kind: Pooling::First } | Op::PoolGrad { kind: Pooling::First, .. } => " first",
        Op::Pool { kind: Pooling::Mean } => " mean",
        Op::CrossEntropy { mixed: true, .. } | Op::CrossEntropyGrad { mixed: true, .. } => " mixed",
        _ => "",
    };
    op.name() + variant
}
