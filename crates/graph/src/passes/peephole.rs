//! Epilogues after `differentiate`: a bias gradient folds into the op that makes what it sums (the backward op of a GELU, a norm
//! or attention), a GELU's backward op into the product before it, the gradient that passes a norm by into the norm's, and adding to
//! the gradient so far into the product that makes the gradient.

use super::fuse::remove;
use crate::graph::{Graph, Node};
use crate::op::Op;
use std::collections::HashSet;

/// Merges what can be merged around backward ops.
pub fn peephole(graph: Graph) -> Graph {
    accumulate(gelu_product(bias(residual(graph))))
}

/// What is normalised and goes on beside its norm, as a first block's input does, has a gradient of two parts; the norm's backward op adds
/// the other to its own.
fn residual(mut graph: Graph) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::Add, inputs, outputs, .. } = &graph.nodes[i] else { continue };
        let sum = outputs[0];
        for (dx, other) in [(inputs[0], inputs[1]), (inputs[1], inputs[0])] {
            let only_here = consumers[dx.index()] == [i] && !graph.outputs.contains(&dx);
            let Some(norm) = producers[dx.index()].filter(|_| only_here && dx != other) else { continue };
            let is_there = producers[other.index()].is_some_and(|maker| maker < norm);
            let node = &mut graph.nodes[norm];
            if let Op::LayerNormGrad { add: add @ false, .. } = &mut node.op
                && is_there
                && node.outputs[0] == dx
            {
                *add = true;
                node.inputs.push(other);
                node.outputs[0] = sum;
                merged.insert(i);
                break;
            }
        }
    }
    remove(graph, &merged)
}

/// Whoever makes a gradient has it at hand, and sums its columns for less than a step that reads it again.
fn bias(mut graph: Graph) -> Graph {
    let producers = graph.producers();
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::ColumnSum { accumulate: false }, inputs, outputs, .. } = &graph.nodes[i] else {
            continue;
        };
        let (summed, sum) = (inputs[0], outputs[0]);
        let Some(maker) = producers[summed.index()] else { continue };
        let maker = &mut graph.nodes[maker];
        if maker.outputs[0] == summed && ask_for_sums(&mut maker.op) {
            maker.outputs.push(sum);
            merged.insert(i);
        }
    }
    remove(graph, &merged)
}

/// Lets an op give the column sums of its first output too, as the last of its outputs; false if it can't or does already.
fn ask_for_sums(op: &mut Op) -> bool {
    let sums = match op {
        Op::GeluGrad { bias } => bias,
        Op::SwiGluGrad { sum } | Op::LayerScaleGrad { sum } => sum,
        Op::LayerNormGrad { sum, half: None, .. } => sum,
        Op::AttentionGrad { sum, .. } => sum,
        _ => return false,
    };
    !std::mem::replace(sums, true)
}

/// The gradient before the GELU is made where the one after it is, which then is never stored.
fn gelu_product(mut graph: Graph) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::GeluGrad { bias: true }, inputs, outputs, .. } = &graph.nodes[i] else { continue };
        let (pre, dy, outputs) = (inputs[0], inputs[1], outputs.clone());
        let only_here = consumers[dy.index()] == [i] && !graph.outputs.contains(&dy);
        let Some(product) = producers[dy.index()].filter(|_| only_here) else { continue };
        if graph.nodes[product].op == (Op::LinearGradX { gelu: false }) {
            let node = &mut graph.nodes[product];
            node.op = Op::LinearGradX { gelu: true };
            node.inputs.push(pre);
            node.outputs = outputs;
            merged.insert(i);
        }
    }
    remove(graph, &merged)
}

fn accumulate(mut graph: Graph) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::Accumulate, inputs, outputs, .. } = &graph.nodes[i] else { continue };
        let (so_far, gradient, sum) = (inputs[0], inputs[1], outputs[0]);
        let only_here = consumers[gradient.index()] == [i] && !graph.outputs.contains(&gradient);
        let Some(maker) = producers[gradient.index()].filter(|_| only_here) else { continue };
        if producers[so_far.index()].is_none_or(|p| p > maker) {
            continue;
        }
        let op = match &graph.nodes[maker].op {
            Op::LinearGradW { shape, accumulate: false } => {
                Op::LinearGradW { shape: shape.clone(), accumulate: true }
            }
            Op::ColumnSum { accumulate: false } => Op::ColumnSum { accumulate: true },
            Op::ConvGradW { window, shape, accumulate: false } => {
                Op::ConvGradW { window: *window, shape: shape.clone(), accumulate: true }
            }
            _ => continue,
        };
        let node = &mut graph.nodes[maker];
        node.op = op;
        node.inputs.push(so_far);
        node.outputs = vec![sum];
        merged.insert(i);
    }
    remove(graph, &merged)
}
