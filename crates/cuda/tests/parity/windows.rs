//! The ops of Swin Transformer V2, and whole models of it.

use super::common::{Draft, EPS, smoothed, with_drawn_head};
use super::{Body, body};
use graph::op::PathDrop;
use graph::{DType, Graph, Init, Op, Role, Shape, ValueId, Windows};
use models::swin::Swin;

/// (B,h,w,C) as tokens, which the loss can be taken of.
fn flat(d: &mut Draft, map: ValueId) -> ValueId {
    let [b, h, w, c] = d.shape(map)[..] else { panic!("maps have four axes") };
    d.one(Op::Reshape { shape: Shape::from([b, h * w, c]) }, &[map])
}

/// Map, window, shift, heads, head size.
type Case = ([usize; 2], [usize; 2], [usize; 2], usize, usize);

/// Whole windows, shifted and padded ones, wide ones, odd ones; so many that a block has several.
const ATTENTIONS: [Case; 14] = [
    ([16, 16], [8, 8], [0, 0], 3, 32),
    ([16, 24], [8, 8], [4, 4], 2, 32),
    ([50, 76], [8, 8], [4, 4], 2, 32),
    ([64, 64], [8, 8], [4, 4], 4, 32),
    ([32, 32], [16, 16], [8, 8], 2, 32),
    ([50, 76], [16, 16], [8, 8], 1, 32),
    ([24, 24], [12, 12], [6, 6], 1, 32),
    ([7, 10], [6, 8], [0, 4], 2, 32),
    ([13, 19], [7, 7], [3, 3], 1, 64),
    ([5, 7], [3, 5], [1, 2], 3, 16),
    ([8, 8], [4, 4], [2, 2], 6, 24),
    ([24, 24], [24, 24], [0, 0], 1, 32),
    ([96, 96], [12, 12], [6, 6], 4, 32),
    ([96, 96], [9, 9], [4, 4], 3, 32),
];

fn attention(d: &mut Draft, number: usize) -> ValueId {
    let ([h, w], size, shift, heads, head) = ATTENTIONS[number];
    let (windows, c) = (Windows { size, shift }, heads * head);
    let t = windows.tokens();
    let x = d.parameter("x", [d.batch(), h, w, 16], 1.0);
    let weight = d.parameter("weight", [3 * c, 16], 0.25);
    let qkv = d.one(Op::Linear { bias: false, gelu: false }, &[x, weight]);
    let (q_bias, v_bias) = (d.parameter("q_bias", [c], 0.5), d.parameter("v_bias", [c], 0.5));
    let scale = d.parameter("logit_scale", [heads, 1, 1], 1.5);
    let bias = d.parameter("bias", [heads, t, t], 1.0);
    let y = d.one(Op::WindowAttention { heads, windows }, &[qkv, q_bias, v_bias, scale, bias]);
    flat(d, y)
}

fn position_bias(d: &mut Draft, window: [usize; 2], pretrained: Option<[usize; 2]>, heads: usize) -> ValueId {
    let (w1, b1) = (d.parameter("w1", [512, 2], 1.0), d.parameter("b1", [512], 0.5));
    let w2 = d.parameter("w2", [heads, 512], 0.1);
    let bias = d.one(Op::PositionBias { window, pretrained }, &[w1, b1, w2]);
    let count: usize = d.shape(bias).iter().product();
    d.one(Op::Reshape { shape: Shape::from([2, 1, count / 2]) }, &[bias])
}

fn norm_add(d: &mut Draft, width: usize, rate: f64) -> ValueId {
    let x = d.parameter("x", [d.batch(), 5, 7, 16], 1.0);
    let y = d.linear(x, width);
    let shortcut = d.parameter("shortcut", [d.batch(), 5, 7, width], 1.0);
    let (gamma, beta) = (d.parameter("gamma", [width], 1.0), d.parameter("beta", [width], 0.5));
    let site = d.site();
    let drop = (rate > 0.0).then_some(PathDrop { rate, site });
    let sum = d.one(Op::NormAdd { eps: EPS, drop, half: None }, &[y, shortcut, gamma, beta]);
    // Used as the stream and as what a matmul reads.
    let branch = d.linear(sum, width);
    let (gamma, beta) = (d.parameter("gamma", [width], 1.0), d.parameter("beta", [width], 0.5));
    let sum = d.one(Op::NormAdd { eps: EPS, drop: None, half: None }, &[branch, sum, gamma, beta]);
    flat(d, sum)
}

/// Every op, in shapes that models have and in odd ones.
pub fn bodies() -> Vec<(String, Body)> {
    let mut list: Vec<(String, Body)> = vec![];
    for (number, case) in ATTENTIONS.iter().enumerate() {
        list.push((format!("window_attention {case:?}"), body(move |d| attention(d, number))));
    }
    for (window, pretrained, heads) in
        [([8, 8], None, 4), ([16, 16], None, 2), ([6, 8], Some([12, 12]), 3), ([1, 2], None, 2)]
    {
        let name = format!("position_bias {window:?}, {pretrained:?}");
        list.push((name, body(move |d| position_bias(d, window, pretrained, heads))));
    }
    for (width, rate) in [(96, 0.0), (128, 0.4), (1024, 0.4), (40, 0.0)] {
        let build: Body = Box::new(move |dtype| {
            let mut draft = Draft::new(dtype, 6);
            let x = norm_add(&mut draft, width, rate);
            draft.finish(x)
        });
        list.push((format!("norm_add of {width}, drop {rate}"), build));
    }
    for (h, w, c) in [(4, 6, 32), (5, 3, 32), (5, 7, 6)] {
        let merge = move |d: &mut Draft| {
            let x = d.parameter("x", [2, h, w, c], 1.0);
            let y = d.one(Op::MergePatches, &[x]);
            flat(d, y)
        };
        list.push((format!("merge_patches of {h}×{w}×{c}"), body(merge)));
        let grid = move |d: &mut Draft| {
            let x = d.parameter("x", [2, h * w + 1, c], 1.0);
            let y = d.one(Op::Grid { height: h, width: w }, &[x]);
            let y = d.one(Op::Ungrid { tokens: h * w + 2 }, &[y]);
            d.one(Op::Scale { factor: 1.5 }, &[y])
        };
        list.push((format!("grid of {h}×{w}×{c}"), body(grid)));
    }
    list
}

/// A Swin whose blocks don't start as the identity.
fn graph(swin: &Swin, batch: usize, dtype: DType) -> Graph {
    let mut graph = with_drawn_head(swin.build(batch, smoothed(), dtype).unwrap()).train;
    for state in &mut graph.states {
        if state.name.ends_with("norm1.weight") || state.name.ends_with("norm2.weight") {
            state.role = Role::Parameter(Init::Normal { std: 0.5 });
        }
    }
    graph
}

/// Whole models: narrow ones in odd sizes, with all that drops, and the first blocks of a published one.
pub fn models() -> Vec<(String, Body)> {
    let narrow = |image, window| {
        let (channels, classes, width, pretrained) = (3, 10, 32, None);
        let (depths, heads, dropout, drop_path) = ([2, 1, 2, 1], [1, 2, 4, 8], 0.0, 0.0);
        Swin {
            image,
            channels,
            classes,
            width,
            depths,
            heads,
            window,
            pretrained,
            trained: None,
            dropout,
            drop_path,
        }
    };
    let dropped = Swin { dropout: 0.1, drop_path: 0.2, ..narrow([96, 152], 8) };
    let ti = Swin { depths: [2, 2, 2, 2], ..Swin::named("swinv2-ti/w8", [128, 128], 3, 10).unwrap() };
    let cases = [
        ("whole windows", narrow([128, 128], 8), 2),
        ("dropped, padded", dropped, 4),
        ("windows of 16", narrow([200, 136], 16), 2),
        ("ti", ti, 2),
    ];
    let model = |(name, swin, batch): (&str, Swin, usize)| {
        let build: Body = Box::new(move |dtype| graph(&swin, batch, dtype));
        (format!("swin {name}"), build)
    };
    cases.into_iter().map(model).collect()
}
