//! Steps that flow: whatever thread has which block, and whatever comes first of what may, results are those of one step after
//! the other, bit for bit.

mod common;

use common::{
    Rig, Tensors, adamw, compiled, compiled_model, random, small_swin, small_vit, smoothed, with_drawn_head,
};
use cpu::{Float, Which};
use graph::random::Sequence;
use graph::{DType, Model, Optimizer, Program, Recompute};
use models::Segmenter;
use models::layer_scale_vit::LayerScaleVit;
use models::upernet::UperNet;
use models::vit::{Pool, Vit};

/// Enough samples of small models for rows to be cut into blocks, with a last one that is not full.
const BATCH: usize = 203;

const LAMB: Optimizer = Optimizer::Lamb {
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-6,
    weight_decay: 0.1,
    min_coeff: 0.01,
    max_coeff: 10.0,
};
const MUON: Optimizer = Optimizer::Muon {
    momentum: 0.95,
    nesterov: true,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.01,
};
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01 };

/// What is trained, and how.
struct Case {
    name: &'static str,
    model: Model,
    optimizer: Optimizer,
}

fn vit(pool: Pool) -> Model {
    let vit = Vit { drop_path: 0.2, pool, ..small_vit(0.1) };
    with_drawn_head(vit.build(BATCH, smoothed(), DType::F32).unwrap())
}

/// Of matmuls so large that weights stay packed from block to block, and gradients of weights are cut into tiles by the threads.
fn wide_vit() -> Model {
    let vit = Vit { width: 192, mlp: 400, depth: 1, pool: Pool::Mean, ..small_vit(0.1) };
    with_drawn_head(vit.build(BATCH, smoothed(), DType::F32).unwrap())
}

fn swin() -> Model {
    with_drawn_head(small_swin(64).build(40, smoothed(), DType::F32).unwrap())
}

/// Two samples for each of a few threads: more threads share out their parts.
fn swin_of_large_samples() -> Model {
    with_drawn_head(small_swin(128).build(6, smoothed(), DType::F32).unwrap())
}

/// With registers, LayerScale and gates.
fn layer_scale() -> Model {
    let named = LayerScaleVit::named("vit_nano_patch14_reg4_dinov2", 56, 3, common::CLASSES).unwrap();
    let vit = LayerScaleVit {
        width: 12,
        depth: 2,
        mlp: 32,
        gated: true,
        scale: 0.7,
        dropout: 0.1,
        drop_path: 0.2,
        ..named
    };
    with_drawn_head(vit.build(BATCH, smoothed(), DType::F32).unwrap())
}

/// Convolutions, batch norm, resizing, and a loss of pixels.
fn upernet() -> Model {
    let heads = UperNet { classes: common::CLASSES, channels: 8, auxiliary: 6, dropout: 0.1 };
    let model = Segmenter::upernet(small_swin(64), heads);
    model.build(10, smoothed(), DType::F32).unwrap()
}

fn linear_pixels() -> Model {
    let vit = Vit { image: 32, depth: 1, ..small_vit(0.1) };
    Segmenter::linear(vit).build(30, smoothed(), DType::F32).unwrap()
}

fn cases() -> [Case; 9] {
    let case = |name, model, optimizer| Case { name, model, optimizer };
    [
        case("ViT", vit(Pool::Mean), adamw()),
        case("ViT with a class token, LAMB", vit(Pool::ClassToken), LAMB),
        case("ViT of wide layers", wide_vit(), adamw()),
        case("ViT, Muon", vit(Pool::Mean), MUON),
        case("Swin", swin(), adamw()),
        case("Swin over few large samples", swin_of_large_samples(), SGD),
        case("ViT with LayerScale", layer_scale(), adamw()),
        case("UPerNet", upernet(), SGD),
        case("a linear head for pixels", linear_pixels(), LAMB),
    ]
}

impl Case {
    fn program(&self, recompute: Recompute, threads: usize) -> Program {
        let Model { train, eval, key } = &self.model;
        let model = Model { train: train.clone(), eval: eval.clone(), key: *key };
        compiled_model(model, recompute, self.optimizer, threads)
    }
}

/// How the plans of a test run.
type Run<'a> = &'a mut dyn FnMut(&mut Rig<f32>, Which);

fn rig(program: Program, threads: usize) -> Rig<f32> {
    Rig::<f32>::new(program, threads)
}

/// All states after an optimizer step, and the loss that an evaluation finds then.
fn trained(mut rig: Rig<f32>, run: Run<'_>) -> (Tensors, f64) {
    rig.fill(Which::Last);
    run(&mut rig, Which::Last);
    run(&mut rig, Which::Update);
    // Before evaluation uses the memory that gradients lie in.
    let states = rig.tensors(|_| true);
    rig.fill(Which::Eval);
    run(&mut rig, Which::Eval);
    let loss = rig.executor.output(Which::Eval, "loss").unwrap()[0].to_f64();
    assert!(loss.is_finite());
    (states, loss)
}

/// One step of the plan after the other.
fn one_by_one(program: Program) -> (Tensors, f64) {
    trained(rig(program, 2), &mut |rig, which| {
        assert_eq!(rig.executor.run_checked(which, &rig.header).unwrap(), None);
    })
}

/// The same in a random order.
fn shuffled(rig: Rig<f32>, seed: u64) -> (Tensors, f64) {
    let mut draws = Sequence::new(seed, 9);
    // Some orders run ahead as far as they can, some lag behind, most do anything.
    let mut choose = |n: usize| match seed % 4 {
        0 => 0,
        1 => n - 1,
        _ => (draws.uniform() * n as f64) as usize,
    };
    trained(rig, &mut |rig, which| rig.executor.run_in_any_order(which, &rig.header, &mut choose).unwrap())
}

fn any_order_will_do(name: &str, program: impl Fn(Recompute) -> Program, seeds: u64) {
    for recompute in [Recompute::None, Recompute::Full] {
        let expected = one_by_one(program(recompute));
        for seed in 0..seeds {
            let found = shuffled(rig(program(recompute), 2), seed);
            assert!(found == expected, "{name}, {recompute:?}, order {seed}");
        }
    }
}

#[test]
fn any_order_gives_the_bits_of_the_plan() {
    for case in cases() {
        any_order_will_do(case.name, |recompute| case.program(recompute, 2), 4);
    }
}

#[test]
fn any_order_gives_the_bits_of_random_plans() {
    for number in 0..24 {
        let graph = random::wide_graph(number, DType::F32, 600);
        any_order_will_do(&format!("graph {number}"), |recompute| compiled(&graph, recompute, 2), 3);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for case in cases() {
        let expected = one_by_one(case.program(Recompute::None, 2));
        for threads in [1, 2, 3, 7, 16] {
            let rig = rig(case.program(Recompute::None, threads), threads);
            let found = trained(rig, &mut |rig, which| rig.run(which));
            assert!(found == expected, "{}, {threads} threads", case.name);
        }
    }
}
