//! Whole steps: micro-batches add up to a batch, a step of NaN is skipped, a partial batch counts for what it holds.

mod common;

use common::{Rig, Tensors, adamw, compiled_model, distance, dtype, small_vit, with_drawn_head};
use cpu::{Float, Which};
use graph::{Deferred, Graph, Lane, Op, Optimizer, Partial, Program, Recompute, Role, Settings};
use models::vit::Vit;

const THREADS: usize = 2;

/// The key bias has no gradient in exact arithmetic; `eps` is far above the rounding error that stands for it.
fn optimizers() -> [Optimizer; 3] {
    let (beta1, beta2, eps, weight_decay) = (0.9, 0.999, 1e-4, 0.05);
    [
        Optimizer::AdamW { beta1, beta2, eps, weight_decay },
        Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay },
        Optimizer::Lamb { beta1, beta2, eps, weight_decay, min_coeff: 0.01, max_coeff: 10.0 },
    ]
}

fn rig<T: Float>(vit: &Vit, batch: usize, optimizer: Optimizer) -> Rig<T> {
    let model = with_drawn_head(vit.build(batch, common::smoothed(), dtype::<T>()).unwrap());
    Rig::new(compiled_model(model, Recompute::None, optimizer, THREADS), THREADS)
}

fn is_sum(role: Role) -> bool {
    matches!(role, Role::Gradient | Role::Statistic)
}

/// Everything an update writes.
fn trained<T: Float>(rig: &Rig<T>) -> Tensors {
    rig.tensors(|s| !is_sum(s.role))
}

fn micro_batches_add_up<T: Float>(tolerance: f64) {
    let vit = small_vit(0.2);
    let mut whole = rig::<T>(&vit, 32, adamw());
    let batch = whole.gradients();

    let target = cpu::Target { threads: THREADS };
    let model = with_drawn_head(vit.build(8, common::smoothed(), dtype::<T>()).unwrap());
    let settings = Settings { accumulates: true, ..common::settings(&target) };
    let mut parts = Rig::<T>::new(common::compiled_with(model, &settings), THREADS);
    parts.header.nominal = 32.0;
    for micro in 0..4 {
        parts.header.first_sample = 8 * micro as u64;
        let which = Program::micro_step(micro, 4);
        parts.fill(which);
        parts.run(which);
    }
    let sums = parts.tensors(|s| is_sum(s.role));
    let (error, name) = distance(&sums, &batch);
    println!("4 micro-batches against a batch in {}: {error:.1e} ({name})", dtype::<T>());
    assert!(error < tolerance, "{name} differs by {error:.1e}");
    assert_eq!(parts.state("stats").unwrap()[1..], whole.state("stats").unwrap()[1..], "counts are exact");
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    micro_batches_add_up::<f64>(1e-12);
    micro_batches_add_up::<f32>(1e-5);
}

/// Were masks not drawn for the sample's number and the step's, the sums above could agree by leaving them out.
#[test]
fn masks_follow_step_and_sample() {
    let mut rig = rig::<f64>(&small_vit(0.2), 8, adamw());
    let here = rig.gradients();
    let mut run_with = |step: u64, first_sample: u64| {
        rig.header.first_sample = 0;
        rig.fill(Which::Last);
        (rig.header.step, rig.header.first_sample) = (step, first_sample);
        rig.run(Which::Last);
        distance(&rig.tensors(|s| is_sum(s.role)), &here).0
    };
    assert_eq!(run_with(3, 0), 0.0, "the same draws");
    for (step, first_sample) in [(4, 0), (3, 1), (3, 8)] {
        let change = run_with(step, first_sample);
        assert!(change > 1e-2, "step {step}, sample {first_sample}: gradients differ by {change:.1e} only");
    }
}

#[test]
fn a_step_of_nan_changes_nothing() {
    for optimizer in optimizers() {
        let (mut hit, mut spared) =
            (rig::<f32>(&small_vit(0.1), 8, optimizer), rig::<f32>(&small_vit(0.1), 8, optimizer));
        hit.step();
        spared.step();
        let before = trained(&hit);

        hit.fill(Which::Last);
        let images = hit.executor.input(Which::Last, "images").unwrap();
        images[images.len() / 2] = f32::NAN;
        hit.run(Which::Last);
        hit.run(Which::Update);
        let control = hit.executor.output(Which::Update, "control").unwrap();
        assert_eq!(control[..2], [0.0, 0.0], "{optimizer:?}: the step is skipped");
        assert_eq!(trained(&hit), before, "{optimizer:?}: and leaves no trace");
        assert_eq!(hit.state("applied").unwrap(), [1.0]);

        hit.step();
        spared.step();
        assert_eq!(hit.executor.output(Which::Update, "control").unwrap()[1], 1.0);
        assert_eq!(hit.state("applied").unwrap(), [2.0]);
        assert_eq!(trained(&hit), trained(&spared), "{optimizer:?}: the next step is as if nothing had been");
        assert_ne!(trained(&hit), before);
    }
}

/// No sample with a weight: nothing to learn from, so nothing changes.
#[test]
fn a_step_without_samples_changes_nothing() {
    let mut rig = rig::<f32>(&small_vit(0.0), 4, adamw());
    rig.step();
    let before = trained(&rig);
    rig.weights.fill(0.0);
    rig.step();
    assert_eq!(rig.executor.output(Which::Update, "control").unwrap()[1], 0.0);
    assert_eq!(trained(&rig), before);
}

/// Five samples in a batch of eight, the rest rubbish without a weight, against a batch of five.
#[test]
fn a_partial_batch_updates_like_a_smaller_one() {
    for optimizer in optimizers() {
        let mut partial = rig::<f64>(&small_vit(0.2), 8, optimizer);
        let mut small = rig::<f64>(&small_vit(0.2), 5, optimizer);
        for step in 0..3 {
            partial.header.step = step;
            small.header.step = step;
            small.step();

            partial.weights[5..].fill(0.0);
            partial.fill(Which::Last);
            let images = partial.executor.input(Which::Last, "images").unwrap();
            let size = images.len() / 8;
            images[5 * size..].iter_mut().enumerate().for_each(|(i, x)| *x = 1e3 * (i as f64).sin());
            partial.executor.labels(Which::Last).unwrap()[5..].fill(-1);
            partial.run(Which::Last);
            partial.run(Which::Update);
        }
        let (error, name) = distance(&trained(&partial), &trained(&small));
        println!("{optimizer:?}: {error:.1e} ({name})");
        assert!(error < 1e-12, "{optimizer:?}: {name} differs by {error:.1e}");
        let norm = |rig: &Rig<f64>| rig.executor.output(Which::Update, "control").unwrap()[2];
        assert!((norm(&partial) / norm(&small) - 1.0).abs() < 1e-12, "one gradient norm");
    }
}

/// Gradients that lie in the arena, where activations were, are the same bits, and so is what they train; whatever is evaluated
/// between steps, and with what batch.
#[test]
fn gradients_in_the_arena_are_the_same() {
    let compiled = |batch: usize, accumulates: bool, recompute: Recompute| {
        let target = cpu::Target { threads: THREADS };
        let model = with_drawn_head(small_vit(0.2).build(batch, common::smoothed(), dtype::<f32>()).unwrap());
        common::compiled_with(model, &Settings { accumulates, recompute, ..common::settings(&target) })
    };
    let train = |accumulates: bool, recompute: Recompute| {
        let mut rig = Rig::<f32>::new(compiled(8, accumulates, recompute), THREADS);
        rig.only = if accumulates { Which::First } else { Which::Last };
        let mut found = vec![rig.gradients()];
        for step in 0..6 {
            if step == 3 {
                rig.executor.rebind(compiled(16, accumulates, recompute)).unwrap();
                (rig.weights, rig.header.nominal) = (vec![1.0; 16], 16.0);
            }
            rig.header.step = step;
            rig.step();
            found.push(rig.tensors(|s| is_sum(s.role)));
            rig.loss();
        }
        found.push(trained(&rig));
        (found, rig)
    };
    for recompute in [Recompute::None, Recompute::Full] {
        let ((kept, apart), (lodged, mut rig)) = (train(true, recompute), train(false, recompute));
        assert!(kept == lodged, "{recompute:?}");
        let bytes = |rig: &Rig<f32>| rig.executor.allocated().0 + rig.executor.allocated().1;
        assert!(bytes(&rig) < bytes(&apart), "{} against {}", bytes(&rig), bytes(&apart));
        let refused = rig.executor.run(Which::Micro, &rig.header);
        assert!(matches!(refused, Err(cpu::CpuError::OneMicroStep)));
    }
}

/// A device that leaves sums of norms in parts, computes weight gradients beside the chain and launches steps together.
struct Wide(cpu::Target);

impl graph::Target for Wide {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        self.0.scratch(graph, node)
    }

    fn lane(&self, op: &Op) -> Lane {
        if matches!(op, Op::LinearGradW { .. } | Op::AddUp { .. }) { Lane::Side } else { op.lane() }
    }

    fn partial(&self, graph: &Graph, node: usize) -> Option<Partial> {
        let node = &graph.nodes[node];
        let Op::LayerNormGrad { .. } = node.op else { return None };
        let bytes = graph.ty(node.outputs[1]).bytes();
        Some(Partial { bytes: 7 * 2 * bytes, results: vec![(1, 0), (2, bytes)] })
    }

    fn deferred(&self) -> Deferred {
        Deferred { most: 20_000, stays: 3 }
    }
}

/// Plans of such a device, here: what is left is whole, and is added to what earlier micro-steps left.
#[test]
fn sums_left_in_parts_are_the_same() {
    let trained = |target: &dyn graph::Target, threads: usize| {
        let model = with_drawn_head(small_vit(0.2).build(8, common::smoothed(), dtype::<f32>()).unwrap());
        let settings = Settings { accumulates: true, ..common::settings(target) };
        let mut rig = Rig::<f32>::new(common::compiled_with(model, &settings), threads);
        for step in 0..3 {
            for micro in 0..3 {
                let which = Program::micro_step(micro, 3);
                (rig.header.step, rig.header.first_sample) = (step, 8 * micro as u64);
                rig.fill(which);
                rig.run(which);
            }
            rig.run(Which::Update);
        }
        (rig.has(|op| matches!(op, Op::AddUp { starts } if !starts.is_empty())), rig.tensors(|_| true))
    };
    let (none, plain) = trained(&cpu::Target { threads: 1 }, 1);
    assert!(!none);
    for threads in [1, 2, 3] {
        let (some, wide) = trained(&Wide(cpu::Target { threads }), threads);
        assert!(some && wide == plain, "{threads} threads");
    }
}
