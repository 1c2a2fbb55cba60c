//! The ops of Swin Transformer V2.

use super::*;
use graph::op::PathDrop;
use graph::{Shape, Windows};

/// (B,h,w,C) as tokens, which the loss can be taken of.
fn flat(d: &mut Draft, map: ValueId) -> ValueId {
    let [b, h, w, c] = d.shape(map)[..] else { panic!("maps have four axes") };
    d.one(Op::Reshape { shape: Shape::from([b, h * w, c]) }, &[map])
}

struct Case {
    map: [usize; 2],
    windows: Windows,
    heads: usize,
    channels: usize,
}

impl Case {
    fn new(map: [usize; 2], size: [usize; 2], shift: [usize; 2], heads: usize, channels: usize) -> Self {
        Case { map, windows: Windows { size, shift }, heads, channels }
    }

    fn build(&self, d: &mut Draft, scale: f64) -> ValueId {
        let Case { map: [h, w], windows, heads, channels: c } = *self;
        let t = windows.tokens();
        let qkv = d.parameter("qkv", [d.batch(), h, w, 3 * c], 1.0);
        let (q_bias, v_bias) = (d.parameter("q_bias", [c], 0.5), d.parameter("v_bias", [c], 0.5));
        let scale = d.parameter("logit_scale", [heads, 1, 1], scale);
        let bias = d.parameter("bias", [heads, t, t], 1.0);
        let inputs = [qkv, q_bias, v_bias, scale, bias];
        let y = d.one(Op::WindowAttention { heads, windows }, &inputs);
        flat(d, y)
    }

    fn name(&self) -> String {
        format!("windows {:?} of {:?}, H {}", self.windows, self.map, self.heads)
    }
}

#[test]
fn window_attention() {
    for case in [
        Case::new([4, 4], [2, 2], [0, 0], 2, 8),
        Case::new([4, 6], [2, 2], [1, 1], 1, 4),
        // Padded along one axis, along both, shifted along one only, one window, hardly a window.
        Case::new([4, 5], [4, 4], [2, 2], 2, 6),
        Case::new([5, 7], [3, 4], [1, 2], 3, 12),
        Case::new([3, 7], [3, 4], [0, 2], 1, 5),
        Case::new([4, 4], [4, 4], [0, 0], 2, 4),
        Case::new([2, 2], [1, 2], [0, 0], 1, 3),
    ] {
        check(&case.name(), |d| case.build(d, 0.5));
    }
}

/// At 576 tokens a head's queries take several blocks; many windows are several chunks. One element of so many has next to no
/// slope, so all move at once.
#[test]
fn large_windows_and_many() {
    for case in [
        Case::new([24, 24], [24, 24], [0, 0], 1, 4),
        Case::new([26, 20], [24, 18], [12, 9], 1, 4),
        Case::new([30, 22], [2, 2], [1, 1], 1, 4),
    ] {
        let mut d = Draft::new(DType::F64, 2);
        let y = case.build(&mut d, 0.5);
        let mut rig = rig(&d.finish(y));
        let worst = check_directions(&case.name(), &mut rig, 4);
        println!("{}: {worst:.1e} at worst", case.name());
    }
}

/// Logit scales beyond ln 100 count as ln 100, and have no gradient.
#[test]
fn the_logit_scale_has_a_ceiling() {
    let case = Case::new([4, 4], [2, 2], [1, 1], 2, 8);
    let mut d = Draft::new(DType::F64, 2);
    let y = case.build(&mut d, 0.5);
    let mut rig = rig(&d.finish(y));
    let scale = rig.executor.find_state("logit_scale.3").unwrap();
    let mut loss_at = |scales: [f64; 2]| {
        rig.executor.state_mut(scale).unwrap().copy_from_slice(&scales);
        let loss = rig.loss();
        let gradients = rig.gradients();
        let gradient = gradients.into_iter().find(|(name, _)| name == "logit_scale.3.grad").unwrap().1;
        (loss, gradient)
    };
    let (there, at_ceiling) = loss_at([1.0, 100f64.ln()]);
    let (beyond, no_slope) = loss_at([1.0, 7.0]);
    assert_eq!(there, beyond);
    assert!(at_ceiling[1] != 0.0 && no_slope[1] == 0.0 && no_slope[0] != 0.0);
}

/// The first layer's weights are put where no hidden unit is near its kink, some of them off for some of the offsets.
#[test]
fn position_bias() {
    for (window, pretrained, heads, hidden) in
        [([2, 3], None, 3, 6), ([3, 2], Some([5, 3]), 1, 5), ([1, 2], None, 2, 4), ([3, 3], None, 2, 67)]
    {
        let mut d = Draft::new(DType::F64, 2);
        let (w1, b1) = (d.parameter("w1", [hidden, 2], 1.0), d.parameter("b1", [hidden], 1.0));
        let w2 = d.parameter("w2", [heads, hidden], 0.2);
        let bias = d.one(Op::PositionBias { window, pretrained }, &[w1, b1, w2]);
        let count: usize = d.shape(bias).iter().product();
        let bias = d.one(Op::Reshape { shape: Shape::from([2, 1, count / 2]) }, &[bias]);
        // Odd counts can't be halved between the samples.
        assert_eq!(count % 2, 0);
        let mut rig = rig(&d.finish(bias));
        for (name, centre) in [("w1.0", 1.0), ("b1.1", 0.4)] {
            let id = rig.executor.find_state(name).unwrap();
            for x in rig.executor.state_mut(id).unwrap() {
                *x = centre * x.signum() + 0.01 * x.clamp(-2.0, 2.0);
            }
        }
        check_elements(&format!("position_bias {window:?}, {pretrained:?}"), &mut rig, ELEMENTS);
    }
}

#[test]
fn norm_add() {
    for rate in [0.0, 0.4] {
        let mut d = Draft::new(DType::F64, 6);
        let (y, x) = (d.parameter("y", [6, 3, 7], 1.5), d.parameter("x", [6, 3, 7], 1.0));
        let (gamma, beta) = (d.parameter("gamma", [7], 1.0), d.parameter("beta", [7], 0.5));
        let site = d.site();
        let drop = (rate > 0.0).then_some(PathDrop { rate, site });
        let sum = d.one(Op::NormAdd { eps: EPS, drop, half: None }, &[y, x, gamma, beta]);
        let mut rig = rig(&d.finish(sum));
        check_elements(&format!("norm_add, drop {rate}"), &mut rig, ELEMENTS);
        let dropped = |gradient: Vec<f64>| gradient.chunks_exact(21).filter(|s| norm(s) == 0.0).count();
        let (branch, shortcut) = (rig.state("y.0.grad").unwrap(), rig.state("x.1.grad").unwrap());
        let left_out = dropped(branch);
        assert!(if rate == 0.0 { left_out == 0 } else { left_out > 0 && left_out < 6 }, "{left_out} dropped");
        assert_eq!(dropped(shortcut), 0);
    }
}

#[test]
fn merge_and_split_patches() {
    for (h, w) in [(4, 6), (3, 4), (5, 3), (1, 1)] {
        check(&format!("merge_patches of {h}×{w}"), |d| {
            let x = d.parameter("x", [2, h, w, 3], 1.0);
            let y = d.one(Op::MergePatches, &[x]);
            flat(d, y)
        });
        check(&format!("split_patches of {h}×{w}"), |d| {
            let x = d.parameter("x", [2, usize::div_ceil(h, 2), usize::div_ceil(w, 2), 12], 1.0);
            let y = d.one(Op::SplitPatches { height: h, width: w }, &[x]);
            let y = d.one(Op::Scale { factor: 1.5 }, &[y]);
            flat(d, y)
        });
    }
}

/// A parameter reshaped keeps its own memory; a value that dies there gives its memory on.
#[test]
fn reshape() {
    let rig = check("reshape", |d| {
        let x = d.parameter("x", [2, 3, 4, 5], 1.0);
        let y = d.one(Op::Scale { factor: 0.5 }, &[x]);
        d.one(Op::Reshape { shape: Shape::from([2, 12, 5]) }, &[y])
    });
    let plan = &rig.executor.program().last;
    let moved = plan.steps.iter().filter(|s| matches!(s.op, Op::Reshape { .. }));
    let places = |v: usize| plan.values[v].place;
    assert!(moved.into_iter().all(|s| places(s.inputs[0]) == places(s.outputs[0])));
}
