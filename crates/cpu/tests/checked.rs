//! A run with checks computes what a plain run does, and names the first value that is not finite.

mod common;

use common::{Rig, adamw, compiled_model, compiled_with, settings, small_vit, smoothed, with_drawn_head};
use cpu::{BadValue, Origin, Which};
use graph::graph::Phase;
use graph::{DType, Recompute, Role, Settings};

fn rig(recompute: Recompute) -> Rig<f32> {
    let model = with_drawn_head(small_vit(0.1).build(4, smoothed(), DType::F32).unwrap());
    Rig::new(compiled_model(model, recompute, adamw(), 2), 2)
}

fn set(rig: &mut Rig<f32>, state: &str, change: impl Fn(&mut [f32])) {
    let id = rig.executor.find_state(state).unwrap();
    change(rig.executor.state_mut(id).unwrap());
}

fn checked(rig: &mut Rig<f32>, which: Which) -> Option<BadValue> {
    if which != Which::Update {
        rig.fill(which);
    }
    rig.executor.run_checked(which, &rig.header).unwrap()
}

fn made_in(bad: &BadValue) -> (&str, &str, Phase) {
    match &bad.origin {
        Origin::Step { layer, op, phase } => (layer, op, *phase),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_good_step_gives_the_same_bits_checked_or_not() {
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
        let (mut plain, mut looked_at) = (rig(recompute), rig(recompute));
        for _ in 0..2 {
            plain.step();
            assert_eq!(checked(&mut looked_at, Which::Last), None);
            assert_eq!(checked(&mut looked_at, Which::Update), None);
        }
        assert!(plain.tensors(|_| true) == looked_at.tensors(|_| true));
        assert_eq!(checked(&mut looked_at, Which::Eval), None);
    }
}

#[test]
fn a_poisoned_parameter_is_named_before_it_spreads() {
    let mut rig = rig(Recompute::None);
    set(&mut rig, "blocks.1.mlp.fc1.weight", |w| w[11] = f32::NAN);
    for which in [Which::Last, Which::Eval] {
        let bad = checked(&mut rig, which).unwrap();
        assert!(matches!(bad.origin, Origin::State(Role::Parameter(_))));
        let text = "parameter blocks.1.mlp.fc1.weight holds NaN before the step (element 11)";
        assert_eq!(bad.to_string(), text);
    }
}

#[test]
fn a_bad_image_is_named() {
    let mut rig = rig(Recompute::None);
    rig.fill(Which::Last);
    rig.executor.input(Which::Last, "images").unwrap()[5] = f32::NEG_INFINITY;
    let bad = rig.executor.run_checked(Which::Last, &rig.header).unwrap().unwrap();
    assert_eq!(bad.to_string(), "input images holds -inf (element 5)");
}

#[test]
fn an_overflow_is_found_in_the_layer_that_makes_it() {
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
        let mut rig = rig(recompute);
        // Each alone is harmless: their product is not.
        set(&mut rig, "blocks.1.mlp.fc1.weight", |w| w.iter_mut().for_each(|w| *w *= 1e25));
        set(&mut rig, "blocks.1.mlp.fc2.weight", |w| w.iter_mut().for_each(|w| *w *= 1e25));
        let bad = checked(&mut rig, Which::Last).unwrap();
        assert_eq!(made_in(&bad), ("blocks.1.mlp.fc2", "linear", Phase::Forward));
        assert!(!bad.found.is_finite());
        let text = bad.to_string();
        assert!(
            text.starts_with("first bad value in blocks.1.mlp.fc2 (forward, linear): element "),
            "{text}"
        );
    }
}

#[test]
fn an_overflow_of_a_gradient_is_backward() {
    let mut rig = rig(Recompute::None);
    rig.header.nominal = 5e-38;
    let bad = checked(&mut rig, Which::Last).unwrap();
    assert_eq!(made_in(&bad).2, Phase::Backward, "{bad}");
}

/// After a failed step sums are full of NaN. The next one starts anew and is not to blame; one that adds to them is.
#[test]
fn sums_count_only_where_they_are_added_to() {
    let target = cpu::Target { threads: 2 };
    let model = with_drawn_head(small_vit(0.1).build(4, smoothed(), DType::F32).unwrap());
    let settings = Settings { accumulates: true, ..settings(&target) };
    let mut rig = Rig::<f32>::new(compiled_with(model, &settings), 2);
    set(&mut rig, "blocks.2.attn.proj.weight.grad", |g| g.fill(f32::NAN));
    set(&mut rig, "stats", |s| s.fill(f32::NAN));
    let of_update = checked(&mut rig, Which::Update).unwrap();
    let text = "gradient blocks.2.attn.proj.weight.grad holds NaN before the step (element 0)";
    assert_eq!(of_update.to_string(), text);
    for adding in [Which::Micro, Which::Last] {
        assert!(matches!(checked(&mut rig, adding).unwrap().origin, Origin::State(_)));
    }
    assert_eq!(checked(&mut rig, Which::First), None);
    assert_eq!(checked(&mut rig, Which::Update), None);
}
