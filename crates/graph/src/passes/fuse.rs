//! Merges neighbouring forward ops into one, before anything else looks: linear + GELU, residual + norm.

use crate::graph::{Graph, Node};
use crate::op::Op;
use std::collections::HashSet;

/// Merges every pair that nobody looks between.
pub fn fuse(graph: Graph) -> Graph {
    residual_norm(linear_gelu(graph))
}

/// linear → GELU becomes one op that also keeps the value before the GELU, which the backward op needs.
fn linear_gelu(mut graph: Graph) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::Gelu, inputs, outputs, .. } = &graph.nodes[i] else { continue };
        let (pre, y) = (inputs[0], outputs[0]);
        let only_here = consumers[pre.index()] == [i] && !graph.outputs.contains(&pre);
        let Some(linear) = producers[pre.index()].filter(|_| only_here) else { continue };
        if let Op::Linear { bias, gelu: false } = graph.nodes[linear].op {
            graph.nodes[linear].op = Op::Linear { bias, gelu: true };
            graph.nodes[linear].outputs = vec![y, pre];
            merged.insert(i);
        }
    }
    remove(graph, &merged)
}

/// add → layer norm becomes one op that gives both the sum and its norm.
fn residual_norm(mut graph: Graph) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut merged = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Node { op: Op::LayerNorm { eps, add: false }, inputs, outputs, .. } = &graph.nodes[i] else {
            continue;
        };
        let (eps, sum) = (*eps, inputs[0]);
        let Some(add) = producers[sum.index()].filter(|p| graph.nodes[*p].op == Op::Add) else { continue };
        // The sum is defined where the norm stands now, so its other users must come later.
        if merged.contains(&add) || consumers[sum.index()].iter().any(|c| *c < i) {
            continue;
        }
        let inputs = [&graph.nodes[add].inputs[..], &inputs[1..]].concat();
        let outputs = [&[sum], &outputs[..]].concat();
        graph.nodes[i].op = Op::LayerNorm { eps, add: true };
        (graph.nodes[i].inputs, graph.nodes[i].outputs) = (inputs, outputs);
        merged.insert(add);
    }
    remove(graph, &merged)
}

pub(super) fn remove(mut graph: Graph, gone: &HashSet<usize>) -> Graph {
    let nodes = std::mem::take(&mut graph.nodes).into_iter().enumerate();
    graph.nodes = nodes.filter(|(i, _)| !gone.contains(i)).map(|(_, node)| node).collect();
    graph
}
