//! Steps that flow: whatever thread has which block, and whatever comes first of what may, results are those of one step after
//! the other, bit for bit.

mod common;

use common::{Rig, Tensors, compiled, random, small_swin, small_vit, smoothed, with_drawn_head};
use cpu::Which;
use graph::random::Sequence;
use graph::{DType, Graph, Recompute};
use models::layer_scale_vit::LayerScaleVit;
use models::vit::{Pool, Vit};

/// Enough samples of small models for rows to be cut into blocks, with a last one that is not full.
const BATCH: usize = 203;

fn vit_graph(pool: Pool) -> Graph {
    let vit = Vit { drop_path: 0.2, pool, ..small_vit(0.1) };
    with_drawn_head(vit.build(BATCH, smoothed(), DType::F32).unwrap()).train
}

fn swin_graph() -> Graph {
    with_drawn_head(small_swin(64).build(40, smoothed(), DType::F32).unwrap()).train
}

/// With registers, LayerScale and gates.
fn layer_scale_graph() -> Graph {
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
    with_drawn_head(vit.build(BATCH, smoothed(), DType::F32).unwrap()).train
}

fn rig(graph: &Graph, recompute: Recompute, threads: usize) -> Rig<f32> {
    let mut rig = Rig::<f32>::new(compiled(graph, recompute, threads), threads);
    rig.fill(Which::Last);
    rig
}

/// All states after an optimizer step: one step of the plan after the other.
fn one_by_one(graph: &Graph, recompute: Recompute) -> Tensors {
    let mut rig = rig(graph, recompute, 2);
    for which in [Which::Last, Which::Update] {
        assert_eq!(rig.executor.run_checked(which, &rig.header).unwrap(), None);
    }
    rig.tensors(|_| true)
}

/// The same in a random order.
fn shuffled(mut rig: Rig<f32>, seed: u64) -> Tensors {
    let mut draws = Sequence::new(seed, 9);
    // Some orders run ahead as far as they can, some lag behind, most do anything.
    let mut choose = |n: usize| match seed % 4 {
        0 => 0,
        1 => n - 1,
        _ => (draws.uniform() * n as f64) as usize,
    };
    for which in [Which::Last, Which::Update] {
        rig.executor.run_in_any_order(which, &rig.header, &mut choose).unwrap();
    }
    rig.tensors(|_| true)
}

fn any_order_will_do(name: &str, graph: &Graph, seeds: u64) {
    for recompute in [Recompute::None, Recompute::Full] {
        let expected = one_by_one(graph, recompute);
        for seed in 0..seeds {
            let found = shuffled(rig(graph, recompute, 2), seed);
            assert!(found == expected, "{name}, {recompute:?}, order {seed}");
        }
    }
}

#[test]
fn any_order_gives_the_bits_of_the_plan() {
    any_order_will_do("ViT", &vit_graph(Pool::Mean), 8);
    any_order_will_do("ViT with a class token", &vit_graph(Pool::ClassToken), 4);
    any_order_will_do("Swin", &swin_graph(), 8);
    any_order_will_do("ViT with LayerScale", &layer_scale_graph(), 4);
}

#[test]
fn any_order_gives_the_bits_of_random_plans() {
    for number in 0..24 {
        any_order_will_do(&format!("graph {number}"), &random::wide_graph(number, DType::F32, 600), 3);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (name, graph) in [
        ("ViT", vit_graph(Pool::ClassToken)),
        ("Swin", swin_graph()),
        ("ViT with LayerScale", layer_scale_graph()),
    ] {
        let expected = one_by_one(&graph, Recompute::None);
        for threads in [1, 2, 3, 7, 16] {
            let mut rig = rig(&graph, Recompute::None, threads);
            rig.run(Which::Last);
            rig.run(Which::Update);
            assert!(rig.tensors(|_| true) == expected, "{name}, {threads} threads");
        }
    }
}
