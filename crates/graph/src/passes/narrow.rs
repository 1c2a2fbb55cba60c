//! Computation of the first token alone, where only the first token is read.
//!
//! A class-token ViT reads one row of its last block. Taking that row commutes with every op that treats rows alone,
//! so the selection moves up through the MLP, norm and projection of the last block, and their work shrinks from T
//! tokens to one. The result is the same number for number; a step of ViT-B/16 has 6% fewer operations.

use crate::graph::{At, Graph, GraphError, Node, ValueId};
use crate::op::{Op, Pooling};
use std::collections::HashMap;

const FIRST: Op = Op::Pool { kind: Pooling::First };

/// Moves the selection of the first token up as far as it goes.
pub fn narrow(mut graph: Graph) -> Result<Graph, GraphError> {
    while let Some(pool) = movable(&graph) {
        graph = lift(graph, pool)?;
    }
    graph.prune();
    Ok(graph)
}

/// A selection whose input comes from a row-wise op that nobody else reads but other selections.
fn movable(graph: &Graph) -> Option<usize> {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    graph.nodes.iter().position(|node| {
        let from = |value: ValueId| producers[value.index()].map(|p| &graph.nodes[p]);
        let selected = |value: ValueId| {
            consumers[value.index()].iter().all(|c| graph.nodes[*c].op == FIRST)
                && !graph.outputs.contains(&value)
        };
        node.op == FIRST
            && selected(node.inputs[0])
            && from(node.inputs[0])
                .is_some_and(|p| p.op.row_operands(p.inputs.len()) > 0 && p.outputs[0] == node.inputs[0])
    })
}

/// pool(f(x)) → f(pool(x)).
fn lift(mut graph: Graph, pool: usize) -> Result<Graph, GraphError> {
    let target = graph.nodes[pool].inputs[0];
    let nodes = std::mem::take(&mut graph.nodes);
    let mut first_of_target = None;
    // Selections of the wide value, each replaced by the narrow one.
    let mut replaced: HashMap<ValueId, ValueId> = HashMap::new();
    for mut node in nodes {
        let selects_target = node.op == FIRST && node.inputs[0] == target;
        if let Some(narrow) = first_of_target.filter(|_| selects_target) {
            replaced.insert(node.outputs[0], narrow);
            replace_output(&mut graph, node.outputs[0], narrow);
            continue;
        }
        for input in &mut node.inputs {
            *input = replaced.get(input).copied().unwrap_or(*input);
        }
        if node.outputs.first() == Some(&target) {
            first_of_target = Some(narrowed(&mut graph, node)?);
        } else {
            graph.nodes.push(node);
        }
    }
    Ok(graph)
}

fn replace_output(graph: &mut Graph, old: ValueId, new: ValueId) {
    for output in graph.outputs.iter_mut().filter(|v| **v == old) {
        *output = new;
    }
}

fn narrowed(graph: &mut Graph, node: Node) -> Result<ValueId, GraphError> {
    let at = At::named(&node.layer, format!("{}.first", node.layer), node.phase);
    let mut inputs = node.inputs.clone();
    for input in &mut inputs[..node.op.row_operands(node.inputs.len())] {
        let existing = graph.nodes.iter().find(|n| n.op == FIRST && n.inputs[0] == *input);
        *input = match existing {
            Some(pool) => pool.outputs[0],
            None => graph.push(FIRST, &[*input], &at)?[0],
        };
    }
    Ok(graph.push(node.op, &inputs, &at)?[0])
}
