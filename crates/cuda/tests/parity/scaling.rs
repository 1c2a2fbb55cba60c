//! What ViTs with LayerScale have beside plain ones, and whole models of them.

use super::common::{smoothed, with_drawn_head};
use super::{Body, body};
use graph::Op;
use models::layer_scale_vit::LayerScaleVit;
use models::vit::Pool;

pub fn bodies() -> Vec<(String, Body)> {
    let mut list: Vec<(String, Body)> = vec![];
    for (rows, width) in [(3, 8), (197, 384), (19, 37), (300, 24)] {
        list.push((
            format!("layer_scale {rows}×{width}, alone and of a branch"),
            body(move |d| {
                let x = d.parameter("x", [2, rows, width], 1.0);
                let (first, second) = (d.parameter("g1", [width], 0.7), d.parameter("g2", [width], 0.7));
                let y = d.one(Op::LayerScale, &[x, first]);
                let z = d.linear(y, width);
                let z = d.one(Op::LayerScale, &[z, second]);
                let sum = d.one(Op::Add, &[y, z]);
                d.layer_norm(sum)
            }),
        ));
        list.push((
            format!("swiglu {rows}×{width}, alone and between layers"),
            body(move |d| {
                let x = d.parameter("x", [2, rows, 2 * width], 2.0);
                let y = d.one(Op::SwiGlu, &[x]);
                let z = d.linear(y, 6 * width);
                let z = d.one(Op::SwiGlu, &[z]);
                d.linear(z, width)
            }),
        ));
    }
    for prefixes in [vec![1], vec![1, 4], vec![2, 1, 3]] {
        list.push((
            format!("prepend {prefixes:?}"),
            body(move |d| {
                let mut inputs = vec![d.parameter("x", [2, 16, 24], 1.0)];
                inputs.extend(prefixes.iter().map(|n| d.parameter("prefix", [1, *n, 24], 1.0)));
                let y = d.one(Op::Prepend, &inputs);
                d.layer_norm(y)
            }),
        ));
    }
    list
}

/// Small ones with all that they may have; and blocks as they are published.
pub fn models() -> Vec<(String, Body)> {
    let named = |name: &str, image, classes| {
        // As it starts, LayerScale would hide the branches.
        LayerScaleVit { scale: 0.7, ..LayerScaleVit::named(name, image, 3, classes).unwrap() }
    };
    let small =
        LayerScaleVit { width: 48, depth: 3, mlp: 96, ..named("vit_nano_patch14_reg4_dinov2", 56, 10) };
    let gated = LayerScaleVit { gated: true, mlp: 144, ..small.clone() };
    let dropped = LayerScaleVit { dropout: 0.1, attention_dropout: 0.1, drop_path: 0.2, ..gated.clone() };
    let mean = LayerScaleVit { pool: Pool::Mean, ..small.clone() };
    let placed = LayerScaleVit { registers: 0, class_position: true, ..small.clone() };
    let dinov2 = LayerScaleVit { depth: 2, ..named("vit_small_patch14_reg4_dinov2", 224, 1000) };
    let giant = LayerScaleVit { depth: 1, ..named("vit_giant_patch14_reg4_dinov2", 112, 1000) };
    let deit3 = LayerScaleVit { depth: 2, ..named("deit3_small_patch16_224", 224, 1000) };
    let cases = [
        ("small", small, 6),
        ("gated", gated, 6),
        ("dropped", dropped, 6),
        ("mean", mean, 6),
        ("class position", placed, 6),
        ("dinov2 small", dinov2, 4),
        ("dinov2 giant", giant, 4),
        ("deit3 small", deit3, 4),
    ];
    let model = |(name, vit, batch): (&str, LayerScaleVit, usize)| {
        let build: Body =
            Box::new(move |dtype| with_drawn_head(vit.build(batch, smoothed(), dtype).unwrap()).train);
        (format!("vit with LayerScale, {name}"), build)
    };
    cases.into_iter().map(model).collect()
}
