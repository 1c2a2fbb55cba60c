//! Class weights against PyTorch's definition, `cross_entropy(logits, labels, weight=w)` with its mean: Σ w[yᵢ]·lossᵢ / Σ w[yᵢ], worked
//! out here in f64 from the logits.

use config::sets::{self, Sets};
use config::{ClassWeights, Device, Form, Precision, Raw, Span, Task};
use data::segment::IGNORED;
use std::sync::Arc;
use train::Session;

const CLASSES: usize = 4;
const WEIGHTS: [f32; CLASSES] = [0.25, 3.0, 1.0, 0.0];

/// One step of plain gradient descent over the whole set, in double precision.
fn raw(weights: Option<[f32; CLASSES]>) -> Raw {
    Raw {
        classes: Some(CLASSES),
        train_samples: Some(24),
        test_samples: Some(8),
        batch_size: Some(12),
        accumulate: Some(2),
        steps: Some(1),
        threads: Some(2),
        device: Some(Device::Cpu),
        precision: Some(Precision::Fp64),
        optimizer: Some("sgd".into()),
        momentum: Some(0.0),
        weight_decay: Some(0.0),
        clip: Some(0.0),
        lr: Some(1.0),
        schedule: Some(Form::Constant),
        warmup_steps: Some(Span::Steps(0)),
        class_weights: weights.map(|weights| ClassWeights::Each(weights.to_vec())),
        ..Raw::default()
    }
}

/// A session that starts where a step without weights leads: a new head says the same of every class.
fn session(raw: &Raw) -> Session<f64> {
    let new = |raw: &Raw| {
        let (run, sets) = sets::resolve(raw, 1).unwrap();
        // What is evaluated is what is trained on.
        let sets = Sets { test: Arc::clone(&sets.train), train: sets.train };
        Session::<f64>::new(run, sets).unwrap()
    };
    let mut first = new(&Raw { class_weights: None, ..raw.clone() });
    first.step(0).unwrap();
    first.result().unwrap().unwrap();
    let mut session = new(raw);
    session.load_weights(&first.weights().unwrap()).unwrap();
    session
}

/// What PyTorch's loss is, and its gradient by the bias of the head.
fn reference(samples: &[(usize, Vec<f64>)], weights: [f32; CLASSES]) -> (f64, [f64; CLASSES]) {
    let (mut loss, mut gradient, mut total) = (0.0, [0.0; CLASSES], 0.0);
    for (label, logits) in samples {
        let weight = f64::from(weights[*label]);
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        loss += weight * (lse - logits[*label]);
        total += weight;
        for class in 0..CLASSES {
            let target = f64::from(u8::from(class == *label));
            gradient[class] += weight * ((logits[class] - lse).exp() - target);
        }
    }
    (loss / total, gradient.map(|sum| sum / total))
}

#[test]
fn images_weigh_as_pytorch_weighs_them() {
    for weights in [WEIGHTS, [1.0; CLASSES]] {
        let raw = Raw { model: Some("vit-nano/8".into()), ..raw(Some(weights)) };
        let mut session = session(&raw);
        let mut samples: Vec<(usize, Vec<f64>)> = vec![];
        let evaluated = session.evaluate(|batch, logits| {
            let rows = batch.labels[..batch.request.count].iter().zip(logits.chunks_exact(CLASSES));
            samples.extend(rows.map(|(label, row)| (*label as usize, row.to_vec())));
        });
        assert_eq!(samples.len(), 24);
        let (plain, _) = reference(&samples, [1.0; CLASSES]);
        assert!((evaluated.unwrap().loss - plain).abs() < 1e-9, "an evaluation weighs all images alike");

        let bias = |session: &mut Session<f64>| session.weights().unwrap()["head.bias"].data.clone();
        let before = bias(&mut session);
        session.step(0).unwrap();
        let result = session.result().unwrap().unwrap().result;
        let (loss, gradient) = reference(&samples, weights);
        assert!((result.score.loss - loss).abs() < 1e-9, "{} instead of {loss}", result.score.loss);
        assert_eq!(result.images, 24.0, "images are counted, not their weights");
        assert_eq!((loss - plain).abs() > 1e-3, weights == WEIGHTS, "the weights matter");
        for (class, (before, after)) in before.iter().zip(bias(&mut session)).enumerate() {
            let found = f64::from(before - after);
            assert!(
                (found - gradient[class]).abs() < 1e-6,
                "class {class}: {found} is not {}",
                gradient[class]
            );
        }
    }
}

/// With all weight on one class, the loss is the mean over its pixels; any other weights combine those.
#[test]
fn pixels_weigh_as_pytorch_weighs_them() {
    let raw = |weights| Raw {
        task: Some(Task::Segment),
        model: Some("vit-nano/8+linear".into()),
        image_size: Some(32),
        ..raw(weights)
    };
    let loss = |weights: Option<[f32; CLASSES]>| {
        let mut session = session(&raw(weights));
        session.step(0).unwrap();
        session.result().unwrap().unwrap().result.score.loss
    };
    let (_, sets) = sets::resolve(&raw(None), 1).unwrap();
    let (mut pixels, mut sample) = ([0.0; CLASSES], data::Sample::default());
    for index in 0..sets.train.len() {
        sets.train.read(index, &mut sample).unwrap();
        sample
            .mask
            .iter()
            .filter(|mask| **mask != IGNORED)
            .for_each(|mask| pixels[usize::from(*mask)] += 1.0);
    }
    let only = |class: usize| std::array::from_fn(|other| f32::from(u8::from(other == class)));
    let of_class: Vec<f64> = (0..CLASSES).map(|class| loss(Some(only(class)))).collect();
    let mean = |weights: [f32; CLASSES]| {
        let weight = |class: usize| f64::from(weights[class]) * pixels[class];
        let sum: f64 = (0..CLASSES).map(|class| weight(class) * of_class[class]).sum();
        sum / (0..CLASSES).map(weight).sum::<f64>()
    };
    let (plain, weighted) = (loss(None), loss(Some(WEIGHTS)));
    assert!((plain - mean([1.0; CLASSES])).abs() < 1e-9, "{plain} is not {}", mean([1.0; CLASSES]));
    assert!((weighted - mean(WEIGHTS)).abs() < 1e-9, "{weighted} is not {}", mean(WEIGHTS));
    assert!((plain - weighted).abs() > 1e-3, "the weights matter");
}
