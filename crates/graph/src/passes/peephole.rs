//! Epilogues after `differentiate`: a bias gradient folds into the GELU's backward op, and adding to the gradient so
//! far folds into the product that makes the gradient.

use super::fuse::remove;
use crate::graph::{Graph, Node};
use crate::op::Op;
use std::collections::HashSet;

pub fn peephole(graph: Graph) -> Graph {
    accumulate(gelu_bias(graph))
}

fn gelu_bias(mut graph: Graph) -> Graph {
    let producers = graph.producers();
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::ColumnSum { accumulate: false }, inputs, outputs, .. } = &graph.nodes[i] else {
            continue;
        };
        let sum = outputs[0];
        let Some(gelu) = producers[inputs[0].index()] else { continue };
        if graph.nodes[gelu].op == (Op::GeluGrad { bias: false }) {
            graph.nodes[gelu].op = Op::GeluGrad { bias: true };
            graph.nodes[gelu].outputs.push(sum);
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
