//! The GPU against the CPU: every op alone, random graphs, whole models, whole runs.
//!
//! Needs a GPU, so these are ignored by default: `scripts/gpu-test` runs them. Bodies are those of the CPU's own tests.

mod attention;
#[path = "../../../cpu/tests/common/mod.rs"]
mod common;
mod compare;
mod dense;
mod memory;
mod prepare;
mod rig;
mod scaling;
mod snapshot;
mod windows;

use common::arithmetic::TOLERANCES;
use common::{CLASSES, Draft, EPS, Tensors, distance, random, small_vit, smoothed, with_drawn_head};
use compare::{compare_all, compare_within, distance_or_nan, gpu_program};
use cpu::Which;
use cuda::action::Facts;
use graph::op::{AttentionDrop, Per, Pooling};
use graph::{DType, Graph, Key, Loss, Model, Op, Optimizer, Recompute, Role, ValueId};
use models::vit::{Pool, Vit};
use rig::{Arithmetic, Gpu};

/// Gradients and statistics on the CPU, in double precision.
fn reference(graph: &Graph) -> Tensors {
    let program = common::compiled(graph, Recompute::None, 4);
    common::Rig::<f64>::new(program, 4).gradients()
}

type Body = Box<dyn Fn(DType) -> Graph>;

fn body(build: impl Fn(&mut Draft) -> ValueId + 'static) -> Body {
    Box::new(move |dtype| {
        let mut draft = Draft::new(dtype, 2);
        let x = build(&mut draft);
        draft.finish(x)
    })
}

/// Every op, in shapes that models have and in odd ones.
fn bodies() -> Vec<(String, Body)> {
    let mut list: Vec<(String, Body)> = vec![];
    for (rows, inner, out) in [(3, 8, 16), (65, 192, 576), (7, 64, 8), (197, 768, 64)] {
        for bias in [true, false] {
            let one = move |d: &mut Draft| {
                let x = d.parameter("x", [2, rows, inner], 1.0);
                let w = d.parameter("w", [out, inner], (1.0 / inner as f64).sqrt());
                let b = d.parameter("b", [out], 0.5);
                let inputs = if bias { vec![x, w, b] } else { vec![x, w] };
                d.one(Op::Linear { bias, gelu: false }, &inputs)
            };
            list.push((format!("linear {rows}×{inner}→{out}, bias {bias}"), body(one)));
            let with_gelu = move |d: &mut Draft| {
                let y = one(d);
                d.one(Op::Gelu, &[y])
            };
            list.push((format!("linear + gelu {rows}×{inner}→{out}, bias {bias}"), body(with_gelu)));
        }
    }
    list.push((
        "two layers around a gelu".into(),
        body(|d| {
            let x = d.parameter("x", [2, 65, 192], 1.0);
            let y = d.linear(x, 768);
            let y = d.one(Op::Gelu, &[y]);
            d.linear(y, 192)
        }),
    ));
    list.push((
        "gelu, both tails".into(),
        body(|d| {
            let x = d.parameter("x", [2, 5, 24], 2.5);
            d.one(Op::Gelu, &[x])
        }),
    ));
    for class_token in [false, true] {
        list.push((
            format!("embed, class token {class_token}"),
            body(move |d| {
                let (n, c) = (16, 48);
                let mut inputs = vec![d.parameter("x", [2, n, c], 1.0)];
                if class_token {
                    inputs.push(d.parameter("cls", [1, 1, c], 1.0));
                }
                inputs.push(d.parameter("p", [1, n + usize::from(class_token), c], 1.0));
                d.one(Op::Embed { class_token }, &inputs)
            }),
        ));
    }
    for (patch, side) in [(4, 32), (16, 64), (2, 6), (14, 28)] {
        list.push((
            format!("patches of {patch} in {side}×{side}"),
            body(move |d| {
                let images = d.parameter("images", [2, 3, side, side], 1.0);
                d.one(Op::Patches { patch }, &[images])
            }),
        ));
    }
    list.push((
        "unpatches".into(),
        body(|d| {
            let x = d.parameter("x", [2, 6, 8], 1.0);
            let images = d.one(Op::Unpatches { patch: 2, channels: 2, height: 4, width: 6 }, &[x]);
            d.one(Op::Patches { patch: 2 }, &[images])
        }),
    ));
    for width in [8, 24, 192, 768, 1280, 37] {
        list.push((
            format!("layer_norm of {width}"),
            body(move |d| {
                let x = d.parameter("x", [2, 19, width], 1.5);
                d.layer_norm(x)
            }),
        ));
        list.push((
            format!("layer_norm + residual of {width}"),
            body(move |d| {
                let (x, r) = (d.parameter("x", [2, 19, width], 1.0), d.parameter("r", [2, 19, width], 1.0));
                let (gamma, beta) = (d.parameter("gamma", [width], 1.0), d.parameter("beta", [width], 0.5));
                let out = d.all(Op::LayerNorm { eps: EPS, add: true }, &[x, r, gamma, beta]);
                d.one(Op::Add, &[out[0], out[1]])
            }),
        ));
    }
    for (tokens, head, heads) in [
        (1, 16, 1),
        (5, 32, 3),
        (17, 64, 2),
        (64, 64, 1),
        (65, 64, 3),
        (196, 64, 2),
        (197, 64, 2),
        (257, 80, 2),
        (577, 64, 1),
    ] {
        // Behind a layer with a bias, its backward op sums too.
        for (rate, summed) in [(0.0, true), (0.3, true), (0.0, false)] {
            list.push((
                format!("attention T {tokens}, D {head}, H {heads}, drop {rate}, summed {summed}"),
                body(move |d| {
                    let (inner, width) = (16, 3 * head * heads);
                    let x = d.parameter("x", [2, tokens, if summed { inner } else { width }], 1.0);
                    let qkv = if summed { d.linear(x, width) } else { x };
                    let site = d.site();
                    let drop = (rate > 0.0).then_some(AttentionDrop { rate, site });
                    let y = d.one(Op::Attention { heads, drop }, &[qkv]);
                    d.linear(y, 16)
                }),
            ));
        }
    }
    for (width, rows) in [(8, 19), (24, 19), (192, 600), (768, 197), (1280, 19)] {
        for add in [false, true] {
            list.push((
                format!("layer_norm behind a layer of {width}, {rows} rows, residual {add}"),
                body(move |d| {
                    let x = d.parameter("x", [2, rows, 16], 1.0);
                    let y = d.linear(x, width);
                    if !add {
                        return d.layer_norm(y);
                    }
                    let r = d.parameter("r", [2, rows, width], 1.0);
                    let (gamma, beta) =
                        (d.parameter("gamma", [width], 1.0), d.parameter("beta", [width], 0.5));
                    let out = d.all(Op::LayerNorm { eps: EPS, add: true }, &[r, y, gamma, beta]);
                    d.one(Op::Add, &[out[0], out[1]])
                }),
            ));
        }
    }
    for (per, name) in [(Per::Element, "element"), (Per::Sample, "sample")] {
        list.push((
            format!("drop per {name}"),
            body(move |d| {
                let x = d.parameter("x", [2, 33, 24], 1.0);
                let site = d.site();
                d.one(Op::Drop { rate: 0.4, site, per }, &[x])
            }),
        ));
    }
    list.push((
        "add".into(),
        body(|d| {
            let (x, y) = (d.parameter("x", [2, 3, 24], 1.0), d.parameter("y", [2, 3, 24], 1.0));
            d.one(Op::Add, &[x, y])
        }),
    ));
    list.push((
        "scale".into(),
        body(|d| {
            let x = d.parameter("x", [2, 3, 24], 1.0);
            d.one(Op::Scale { factor: -1.7 }, &[x])
        }),
    ));
    for (kind, name) in [(Pooling::First, "first"), (Pooling::Mean, "mean")] {
        list.push((
            format!("pool {name}"),
            body(move |d| {
                let x = d.parameter("x", [2, 65, 24], 1.0);
                d.one(Op::Pool { kind }, &[x])
            }),
        ));
    }
    for (smoothing, mixed) in [(0.0, false), (0.1, false), (0.1, true)] {
        list.push((
            format!("cross_entropy, smoothing {smoothing}, mixed {mixed}"),
            Box::new(move |dtype| {
                let mut draft = Draft::new(dtype, 6);
                let logits = draft.parameter("logits", [6, CLASSES], 2.0);
                draft.finish_loss(logits, Loss { smoothing, mixed })
            }),
        ));
    }
    list
}

/// Checks that there is a kernel for everything, without a GPU.
#[test]
fn every_op_has_its_kernels() {
    let models = vits().into_iter().map(|(name, vit, batch)| {
        let build: Body = Box::new(move |dtype| vit_graph(&vit, batch, dtype));
        (format!("vit {name}"), build)
    });
    let mut missing = vec![];
    let dense = dense::bodies().into_iter().chain(dense::rectified()).chain([dense::whole()]);
    let of_swin = windows::bodies().into_iter().chain(windows::models());
    let scaled = scaling::bodies().into_iter().chain(scaling::models());
    for (name, build) in bodies().into_iter().chain(models).chain(dense).chain(of_swin).chain(scaled) {
        for (arithmetic, _) in TOLERANCES {
            let program = gpu_program(build(DType::F32), arithmetic);
            let tf32 = arithmetic == Arithmetic::Tf32;
            if let Err(error) = cuda::kernels_of(&program, &Facts::h200(), tf32) {
                missing.push(format!("{name} in {arithmetic:?}: {error}"));
            }
        }
    }
    assert!(missing.is_empty(), "{} missing:\n{}", missing.len(), missing.join("\n"));
}

#[test]
#[ignore = "needs a GPU"]
fn every_op() {
    compare_all(bodies().into_iter(), |_| true);
}

#[test]
#[ignore = "needs a GPU"]
fn every_op_of_vits_with_layer_scale() {
    compare_all(scaling::bodies().into_iter(), |_| true);
}

#[test]
#[ignore = "needs a GPU"]
fn whole_vits_with_layer_scale() {
    compare_all(scaling::models().into_iter(), |_| true);
}

#[test]
#[ignore = "needs a GPU"]
fn every_op_of_swin() {
    compare_all(windows::bodies().into_iter(), |_| true);
}

#[test]
#[ignore = "needs a GPU"]
fn whole_swins() {
    // A head's logit scale has a gradient that is one sum over all pairs of tokens, whose terms cancel. PyTorch's autocast is off by
    // 0.09 to 0.10 there, in timm's Swin V2-Ti at 64 and 128 px with bf16.
    compare_within(1.5, windows::models().into_iter(), |_| true);
}

/// The same numbers, bit for bit, in two runs.
#[test]
#[ignore = "needs a GPU"]
fn swins_repeat() {
    for (name, build) in windows::models() {
        for arithmetic in [Arithmetic::Fp32, Arithmetic::Bf16] {
            let gradients = || Gpu::of_graph(&build(DType::F32), arithmetic).unwrap().gradients().unwrap();
            assert!(gradients() == gradients(), "{name} in {arithmetic:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn random_graphs() {
    let graphs = (0..80).map(|number| {
        let build: Body = Box::new(move |dtype| random::graph(number, dtype));
        (format!("graph {number}"), build)
    });
    compare_all(graphs, |arithmetic| arithmetic == Arithmetic::Fp32);
}

fn vits() -> Vec<(&'static str, Vit, usize)> {
    let small = Vit { width: 48, heads: 3, mlp: 96, ..small_vit(0.0) };
    let dropped = Vit { dropout: 0.1, attention_dropout: 0.1, drop_path: 0.2, ..small.clone() };
    let mean = Vit { pool: Pool::Mean, ..dropped.clone() };
    let ti = Vit { depth: 4, ..Vit::named("vit-ti/4", 32, 3, 10).unwrap() };
    let b = Vit { depth: 2, ..Vit::named("vit-b/16", 224, 3, 1000).unwrap() };
    vec![("small", small, 6), ("dropped", dropped, 6), ("mean", mean, 6), ("ti/4", ti, 8), ("b/16", b, 4)]
}

fn vit_graph(vit: &Vit, batch: usize, dtype: DType) -> Graph {
    with_drawn_head(vit.build(batch, smoothed(), dtype).unwrap()).train
}

#[test]
#[ignore = "needs a GPU"]
fn whole_models() {
    let cases = vits().into_iter().map(|(name, vit, batch)| {
        let build: Body = Box::new(move |dtype| vit_graph(&vit, batch, dtype));
        (format!("vit {name}"), build)
    });
    compare_all(cases, |_| true);
}

fn optimizers() -> [Optimizer; 4] {
    let (beta1, beta2, eps, weight_decay) = (0.9, 0.999, 1e-4, 0.05);
    [
        Optimizer::AdamW { beta1, beta2, eps, weight_decay },
        Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay },
        Optimizer::Lamb { beta1, beta2, eps, weight_decay, min_coeff: 0.01, max_coeff: 10.0 },
        Optimizer::Muon { momentum: 0.95, nesterov: true, beta1, beta2, eps, weight_decay },
    ]
}

/// All that an update writes, after three steps of two micro-batches.
#[test]
#[ignore = "needs a GPU"]
fn updates() {
    let vit = Vit { width: 48, heads: 3, mlp: 96, ..small_vit(0.1) };
    for optimizer in optimizers() {
        for (arithmetic, tolerance) in
            TOLERANCES.into_iter().filter(|t| !matches!(t.0, Arithmetic::Fp16Residual))
        {
            let (got, want) =
                (rig::trained_on_gpu(&vit, optimizer, arithmetic), rig::trained_on_cpu(&vit, optimizer));
            let (error, tensor) = distance_or_nan(&got, &want);
            println!("{optimizer:?} in {arithmetic:?}: {error:.1e} ({tensor})");
            assert!(
                error < 3.0 * tolerance,
                "{optimizer:?} in {arithmetic:?}: {tensor} is off by {error:.1e}"
            );
        }
    }
}

/// A hundred steps over ten batches follow the CPU's losses.
#[test]
#[ignore = "needs a GPU"]
fn a_hundred_steps() {
    let vit = Vit { depth: 4, ..Vit::named("vit-nano/4", 32, 3, CLASSES).unwrap() };
    let want = rig::losses_on_cpu::<f64>(&vit, 16, 100);
    let apart = |losses: &[f64]| {
        losses.iter().zip(&want).map(|(a, b)| (a - b).abs() / b.max(0.5)).fold(0.0, f64::max)
    };
    println!("the CPU in f32: {:.1e} from f64 at most", apart(&rig::losses_on_cpu::<f32>(&vit, 16, 100)));
    for (arithmetic, tolerance) in [
        (Arithmetic::Fp32, 1e-3),
        (Arithmetic::Tf32, 1e-2),
        (Arithmetic::Bf16, 5e-2),
        (Arithmetic::Bf16Residual, 5e-2),
        (Arithmetic::Fp16, 1e-2),
    ] {
        let got = rig::losses_on_gpu(&vit, 16, 100, arithmetic);
        let worst = apart(&got);
        let (first, last) = (got[0], got[99]);
        println!(
            "{arithmetic:?}: losses {first:.4} → {last:.4}, the CPU's {:.4} → {:.4}; {worst:.1e} apart at most",
            want[0], want[99]
        );
        assert!(worst < tolerance, "{arithmetic:?}: losses are {worst:.1e} apart");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn nan_in_one_layer_is_named() {
    for arithmetic in [Arithmetic::Fp32, Arithmetic::Bf16] {
        let vit = Vit { width: 48, heads: 3, mlp: 96, ..small_vit(0.0) };
        let mut gpu = Gpu::of_graph(&vit_graph(&vit, 4, DType::F32), arithmetic).unwrap();
        let id = gpu.executor.find_state("blocks.1.mlp.fc1.weight").unwrap();
        let mut values = gpu.state(id);
        values[5] = f32::NAN;
        gpu.executor.set_state_f32(id, &values).unwrap();
        gpu.fill(Which::First).unwrap();
        let bad = gpu.executor.run_checked(Which::First, &gpu.header).unwrap().unwrap().to_string();
        println!("{arithmetic:?}: {bad}");
        assert!(bad.contains("blocks.1.mlp.fc1"), "{bad}");
    }
}

/// The same numbers, bit for bit, in two runs; and recompute changes nothing.
#[test]
#[ignore = "needs a GPU"]
fn runs_repeat() {
    let (_, vit, batch) = vits().swap_remove(3);
    for arithmetic in [Arithmetic::Fp32, Arithmetic::Bf16] {
        let graph = vit_graph(&vit, batch, DType::F32);
        let once = Gpu::of_graph(&graph, arithmetic).unwrap().gradients().unwrap();
        let again = Gpu::of_graph(&graph, arithmetic).unwrap().gradients().unwrap();
        assert!(once == again, "{arithmetic:?}");
        let mut gpu = Gpu::recomputing(&graph, arithmetic).unwrap();
        let recomputed = gpu.gradients().unwrap();
        let (error, tensor) = distance(&recomputed, &once);
        println!("{arithmetic:?}: recompute changes {tensor} by {error:.1e}");
        assert!(error < 1e-6);
        assert!(gpu.executor.program().states.iter().any(|s| matches!(s.role, Role::Gradient)));
    }
}

/// Gradients that lie where activations were are the same, bit for bit, and so is what they train.
#[test]
#[ignore = "needs a GPU"]
fn gradients_in_the_arena_are_the_same() {
    let train = |gpu: &mut Gpu, only: Which| {
        gpu.fill(only).unwrap();
        gpu.run(only).unwrap();
        let first = gpu.tensors(|s| matches!(s.role, Role::Gradient | Role::Statistic));
        for step in 0..3 {
            gpu.header.step = step;
            gpu.fill(only).unwrap();
            gpu.run(only).unwrap();
            gpu.run(Which::Update).unwrap();
            gpu.fill(Which::Eval).unwrap();
            gpu.run(Which::Eval).unwrap();
        }
        (
            first,
            gpu.tensors(|state| matches!(state.role, Role::Parameter(_) | Role::Moment | Role::Statistic)),
        )
    };
    for (name, vit, batch) in vits() {
        let graph = vit_graph(&vit, batch, DType::F32);
        for arithmetic in [Arithmetic::Fp32, Arithmetic::Bf16, Arithmetic::Fp16] {
            for recompute in [Recompute::None, Recompute::Full] {
                let model = Model { train: graph.clone(), eval: graph.clone(), key: Key::default() };
                let mut kept =
                    Gpu::accumulating(model.clone(), arithmetic, common::adamw(), recompute).unwrap();
                let mut lodged = Gpu::new(model, arithmetic, common::adamw(), recompute).unwrap();
                let memory = |gpu: &Gpu| gpu.executor.memory().arena + gpu.executor.memory().states;
                println!(
                    "{name}, {arithmetic:?}, {recompute:?}: {} of {} bytes",
                    memory(&lodged),
                    memory(&kept)
                );
                let same = train(&mut lodged, Which::Last) == train(&mut kept, Which::First);
                assert!(same, "{name}, {arithmetic:?}, {recompute:?}");
                assert!(lodged.executor.run(Which::Micro, &lodged.header).is_err());
            }
        }
    }
}
