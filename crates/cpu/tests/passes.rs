//! Passes and threads never change a result: rounding apart where a pass regroups sums, bit for bit elsewhere.

mod common;

use common::{
    Draft, Rig, Tensors, adamw, by_hand, compiled, compiled_model, distance, dtype, random, small_vit,
};
use cpu::Float;
use graph::graph::Phase;
use graph::op::AttentionDrop;
use graph::{DType, Graph, Op, Recompute};
use models::vit::{Pool, Vit};

/// Relative to the norm of each gradient.
const DOUBLE: f64 = 1e-12;
const SINGLE: f64 = 1e-5;

const GRAPHS: u64 = 80;

fn vit(pool: Pool) -> Vit {
    Vit { pool, drop_path: 0.2, ..small_vit(0.1) }
}

/// The graph of a ViT in training.
fn vit_graph(vit: &Vit, batch: usize, dtype: DType) -> Graph {
    common::with_drawn_head(vit.build(batch, common::smoothed(), dtype).unwrap()).train
}

fn gradients<T: Float>(program: graph::Program, threads: usize) -> Tensors {
    Rig::<T>::new(program, threads).gradients()
}

/// Runs the graph through every choice of passes and returns the largest differences: of `narrow` and `fuse`, and
/// with them of the rest of `compile`. Recompute must change nothing at all.
fn compare_passes<T: Float>(name: &str, graph: &Graph, tolerance: f64) -> f64 {
    let plain = gradients::<T>(by_hand(graph, false, false, 1), 1);
    let mut worst: f64 = 0.0;
    let mut compare = |what: &str, other: &Tensors| {
        let (error, tensor) = distance(other, &plain);
        assert!(error < tolerance, "{name}: {what} changes {tensor} by {error:.1e}");
        worst = worst.max(error);
    };
    for (narrowed, fused, what) in [(false, true, "fuse"), (true, false, "narrow"), (true, true, "both")] {
        compare(what, &gradients::<T>(by_hand(graph, narrowed, fused, 1), 1));
    }
    let kept = gradients::<T>(compiled(graph, Recompute::None, 1), 1);
    compare("compile", &kept);
    for policy in [Recompute::Gelu, Recompute::Full] {
        let again = gradients::<T>(compiled(graph, policy, 1), 1);
        assert_eq!(again, kept, "{name}: recompute ({policy:?}) changes a result");
    }
    worst
}

/// How many steps a program repeats in its backward pass.
fn repeated(graph: &Graph) -> usize {
    let program = compiled(graph, Recompute::Full, 1);
    program.last.steps.iter().filter(|s| s.phase == Phase::Recompute).count()
}

fn random_graphs<T: Float>(tolerance: f64) {
    let mut worst: f64 = 0.0;
    let (mut narrower, mut recomputed) = (0, 0);
    for number in 0..GRAPHS {
        let graph = random::graph(number, dtype::<T>());
        worst = worst.max(compare_passes::<T>(&format!("graph {number}"), &graph, tolerance));
        let flops = |narrowed: bool| by_hand(&graph, narrowed, false, 1).last.cost().flops;
        narrower += usize::from(flops(true) < flops(false));
        recomputed += usize::from(repeated(&graph) > 0);
    }
    println!("{GRAPHS} graphs in {}: {worst:.1e} at worst", dtype::<T>());
    println!("{narrower} were narrowed, {recomputed} computed something again");
    assert!(narrower > 10 && recomputed > 10, "too few graphs have what the passes look for");
}

#[test]
fn passes_keep_the_gradients_of_random_graphs() {
    random_graphs::<f64>(DOUBLE);
}

#[test]
fn passes_keep_the_gradients_of_random_graphs_in_single_precision() {
    random_graphs::<f32>(SINGLE);
}

#[test]
fn passes_keep_the_gradients_of_a_vit() {
    for pool in [Pool::ClassToken, Pool::Mean] {
        let name = format!("ViT, {pool:?}");
        let graph = vit_graph(&vit(pool), 4, DType::F64);
        assert!(repeated(&graph) > 0);
        let double = compare_passes::<f64>(&name, &graph, DOUBLE);
        let single = compare_passes::<f32>(&name, &vit_graph(&vit(pool), 4, DType::F32), SINGLE);
        println!("{name}: {double:.1e} in f64, {single:.1e} in f32");
    }
}

fn same_with_any_threads<T: Float>(name: &str, graph: &Graph) {
    let run = |threads: usize| {
        let mut rig = Rig::<T>::new(compiled(graph, Recompute::None, threads), threads);
        (rig.loss(), rig.gradients(), rig.gradients())
    };
    let (loss, one, again) = run(1);
    assert!(common::norm_of_all(&one) > 0.0);
    assert_eq!(one, again, "{name}: a second run differs");
    for threads in [2, 3] {
        let (other_loss, first, second) = run(threads);
        assert_eq!(loss, other_loss, "{name}: {threads} threads change the loss");
        assert!(one == first && one == second, "{name}: {threads} threads change a gradient");
    }
}

/// Wide and long enough for every kind of cut: tall tiles, column shares, partial sums, blocks of rows.
#[test]
fn threads_keep_the_bits_of_a_vit() {
    let wide = Vit { image: 32, width: 96, mlp: 384, depth: 2, ..vit(Pool::ClassToken) };
    for batch in [3, 32] {
        same_with_any_threads::<f32>(&format!("ViT, batch {batch}"), &vit_graph(&wide, batch, DType::F32));
    }
    let narrow = vit_graph(&vit(Pool::Mean), 5, DType::F64);
    same_with_any_threads::<f64>("ViT in f64", &narrow);
}

/// Attention of several blocks of queries, each thread in its own scratch.
#[test]
fn threads_keep_the_bits_of_long_attention() {
    let mut d = Draft::new(DType::F32, 2);
    let qkv = d.parameter("qkv", [2, 600, 3 * 24], 1.0);
    let drop = Some(AttentionDrop { rate: 0.2, site: d.site() });
    let y = d.one(Op::Attention { heads: 3, drop }, &[qkv]);
    same_with_any_threads::<f32>("attention T 600", &d.finish(y));
}

#[test]
fn threads_keep_the_bits_of_random_graphs() {
    for number in 0..GRAPHS / 4 {
        same_with_any_threads::<f32>(&format!("graph {number}"), &random::graph(number, DType::F32));
    }
}

/// The parameters after three optimizer steps, too.
#[test]
fn threads_keep_the_bits_of_updates() {
    let wide = Vit { image: 32, width: 96, mlp: 384, depth: 1, ..vit(Pool::ClassToken) };
    let run = |threads: usize| {
        let model = common::with_drawn_head(wide.build(3, common::smoothed(), DType::F32).unwrap());
        let mut rig = Rig::<f32>::new(compiled_model(model, Recompute::None, adamw(), threads), threads);
        (0..3).for_each(|_| rig.step());
        rig.tensors(|_| true)
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3), "the number of threads changes an update");
}
