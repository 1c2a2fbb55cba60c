//! Samples with two labels, as mixup and cutmix make them, in a whole model.

mod common;

use common::{CLASSES, Rig, Tensors, adamw, compiled_model, dtype, norm_of_all, small_vit, with_drawn_head};
use cpu::{Float, Which};
use graph::{Loss, Recompute};

const THREADS: usize = 2;
const BATCH: usize = 6;

fn rig<T: Float>(mixed: bool) -> Rig<T> {
    let loss = Loss { smoothing: 0.1, mixed };
    let model = with_drawn_head(small_vit(0.1).build(BATCH, loss, dtype::<T>()).unwrap());
    Rig::new(compiled_model(model, Recompute::None, adamw(), THREADS), THREADS)
}

/// Statistics and gradients of a mixed batch: what `fill` puts in, then changed.
fn gradients(rig: &mut Rig<f64>, change: impl Fn(&mut [i32], &mut [i32], &mut [f64])) -> Tensors {
    rig.fill(Which::Last);
    let batch = rig.executor.batch(Which::Last).unwrap();
    change(batch.labels, batch.partners.unwrap(), batch.mix.unwrap());
    rig.run(Which::Last);
    rig.tensors(|s| matches!(s.role, graph::Role::Gradient | graph::Role::Statistic))
}

#[test]
fn a_whole_share_is_a_plain_label_bit_for_bit() {
    let plain = rig::<f64>(false).gradients();
    assert!(norm_of_all(&plain) > 0.0);
    let whole = gradients(&mut rig(true), |_, _, mix| mix.fill(1.0));
    assert!(whole == plain);
    let none = gradients(&mut rig(true), |labels, partners, mix| {
        labels.swap_with_slice(partners);
        mix.fill(0.0);
    });
    assert!(none == plain);
}

#[test]
fn label_and_partner_may_change_places() {
    let one = gradients(&mut rig(true), |_, _, mix| mix.fill(0.25));
    let other = gradients(&mut rig(true), |labels, partners, mix| {
        labels.swap_with_slice(partners);
        mix.fill(0.75);
    });
    let (error, name) = common::distance(&one, &other);
    assert!(error < 1e-13, "{name} differs by {error:.1e}");
}

/// Gradients are linear in the target, so those of a mixed batch are the mix of two plain ones.
#[test]
fn gradients_mix_as_the_labels_do() {
    let of = |share: f64| gradients(&mut rig(true), |_, _, mix| mix.fill(share));
    let (label, partner, both) = (of(1.0), of(0.0), of(0.3));
    let mixed = label
        .iter()
        .zip(&partner)
        .map(|((name, a), (_, b))| (name.clone(), a.iter().zip(b).map(|(a, b)| 0.3 * a + 0.7 * b).collect()));
    // Hits are counted, not mixed.
    let but_stats = |tensors: Tensors| tensors.into_iter().filter(|(name, _)| name != "stats").collect();
    let (error, name) = common::distance(&but_stats(both), &but_stats(mixed.collect()));
    println!("mixed gradients: {error:.1e} ({name})");
    assert!(error < 1e-13, "{name} differs by {error:.1e}");
}

#[test]
fn hits_count_against_the_larger_share() {
    let mut rig = rig::<f64>(true);
    rig.fill(Which::Eval);
    rig.run(Which::Eval);
    let logits = rig.executor.output(Which::Eval, "head").unwrap().to_vec();
    // Without dropout, training predicts what evaluation does.
    let best = |row: &[f64]| (0..CLASSES).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as i32;
    let best: Vec<i32> = logits.chunks_exact(CLASSES).map(best).collect();
    let loss = Loss { smoothing: 0.0, mixed: true };
    let model = with_drawn_head(small_vit(0.0).build(BATCH, loss, dtype::<f64>()).unwrap());
    rig = Rig::new(compiled_model(model, Recompute::None, adamw(), THREADS), THREADS);
    let hits = |rig: &mut Rig<f64>, share: f64| {
        let stats = gradients(rig, |labels, partners, mix| {
            labels.copy_from_slice(&best);
            partners.iter_mut().zip(&best).for_each(|(p, best)| *p = (best + 1) % CLASSES as i32);
            mix.fill(share);
        });
        stats.iter().find(|(name, _)| name == "stats").unwrap().1[2]
    };
    assert_eq!([0.9, 0.5, 0.4].map(|share| hits(&mut rig, share)), [6.0, 6.0, 0.0]);
}

/// Rows without a weight may hold any label, second ones too.
#[test]
fn padding_needs_no_partners() {
    let mut rig = rig::<f64>(true);
    rig.weights[4..].fill(0.0);
    let padded = gradients(&mut rig, |labels, partners, mix| {
        labels[4..].fill(-1);
        partners[4..].fill(i32::MAX);
        mix[4..].fill(f64::NAN);
    });
    assert!(padded == gradients(&mut rig, |_, _, _| {}));
}
