//! Activation checkpointing: instead of keeping an activation from forward to backward, compute it again.

use crate::graph::{At, Graph, GraphError, Node, Phase, ValueId};
use crate::op::Op;
use crate::settings::Recompute;
use std::collections::{HashMap, HashSet};

/// Rewrites the backward ops to use fresh copies of the forward ops. Random ops keep their site, so that a copy draws
/// what the original drew.
pub fn recompute(mut graph: Graph, policy: Recompute) -> Result<Graph, GraphError> {
    if policy == Recompute::None {
        return Ok(graph);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let first_backward = nodes.iter().position(|n| n.phase == Phase::Backward).unwrap_or(nodes.len());
    let forward = &nodes[..first_backward];
    let makers: HashMap<ValueId, usize> =
        forward.iter().enumerate().flat_map(|(i, n)| n.outputs.iter().map(move |v| (*v, i))).collect();

    graph.nodes = forward.to_vec();
    let kept = match policy {
        Recompute::Gelu => all_but_gelus(forward),
        _ => kept_values(&graph, forward),
    };
    let mut again = Again { forward, makers, kept, copies: HashMap::new() };
    for node in &nodes[first_backward..] {
        let mut node = node.clone();
        for input in &mut node.inputs {
            *input = again.copy_of(&mut graph, *input)?;
        }
        graph.nodes.push(node);
    }
    graph.prune();
    Ok(graph)
}

fn all_but_gelus(forward: &[Node]) -> HashSet<ValueId> {
    let kept = |n: &Node| match n.op {
        Op::Linear { gelu: true, .. } => n.outputs[1..].to_vec(),
        _ => n.outputs.clone(),
    };
    forward.iter().flat_map(kept).collect()
}

/// Borders, inputs, parameters, and everything outside the blocks: what follows the last border (a norm fused with it,
/// head and loss) is needed at once, and what comes before the first (the embedding) is cheap to keep.
fn kept_values(graph: &Graph, forward: &[Node]) -> HashSet<ValueId> {
    let is_border = |n: &Node| n.outputs.iter().any(|v| graph.borders.contains(v));
    let first = forward.iter().position(is_border).unwrap_or(0);
    let last = forward.iter().rposition(is_border).unwrap_or(0);
    let mut kept = graph.borders.clone();
    for (i, node) in forward.iter().enumerate() {
        // Moments are few numbers, and making them again would repeat their all-gather.
        let at_hand = matches!(node.op, Op::Input | Op::Read { .. } | Op::Moments);
        if i < first || i >= last || at_hand {
            kept.extend(node.outputs.iter().copied());
        }
    }
    kept
}

struct Again<'a> {
    forward: &'a [Node],
    makers: HashMap<ValueId, usize>,
    kept: HashSet<ValueId>,
    copies: HashMap<ValueId, ValueId>,
}

impl Again<'_> {
    /// The value a backward op should use for `value`; makes it again on first use.
    fn copy_of(&mut self, graph: &mut Graph, value: ValueId) -> Result<ValueId, GraphError> {
        let Some(maker) = self.makers.get(&value).filter(|_| !self.kept.contains(&value)) else {
            return Ok(value);
        };
        if let Some(copy) = self.copies.get(&value) {
            return Ok(*copy);
        }
        let (op, inputs, outputs) = self.cheapest(&self.forward[*maker]);
        let layer = &self.forward[*maker].layer;
        let mut fresh = Vec::with_capacity(inputs.len());
        for input in inputs {
            fresh.push(self.copy_of(graph, input)?);
        }
        let at = At::named(layer, format!("again.{layer}"), Phase::Recompute);
        let copies = graph.push(op, &fresh, &at)?;
        for (old, new) in outputs.into_iter().zip(copies) {
            self.copies.entry(old).or_insert(new);
        }
        Ok(self.copies[&value])
    }

    /// Cheapest op that makes a node's results again: of a fused residual + norm whose sum is kept only the norm, of a
    /// matmul with a GELU whose input is kept only the GELU.
    fn cheapest(&self, node: &Node) -> (Op, Vec<ValueId>, Vec<ValueId>) {
        match node.op {
            Op::LayerNorm { eps, add: true } if self.kept.contains(&node.outputs[0]) => {
                let inputs = vec![node.outputs[0], node.inputs[2], node.inputs[3]];
                (Op::LayerNorm { eps, add: false }, inputs, node.outputs[1..].to_vec())
            }
            Op::Linear { gelu: true, .. } if self.kept.contains(&node.outputs[1]) => {
                (Op::Gelu, vec![node.outputs[1]], vec![node.outputs[0]])
            }
            _ => (node.op.clone(), node.inputs.clone(), node.outputs.clone()),
        }
    }
}
