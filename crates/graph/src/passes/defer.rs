//! Keeps running moments for later: the step that makes them may yet be skipped.

use super::layout::Layout;
use crate::graph::{Graph, PENDING, ValueId};
use crate::op::{Op, StateId};
use std::collections::HashMap;

/// Lets the graph write pending running moments where the model writes the running moments themselves: nobody knows yet
/// whether the step will be skipped. With `adds` they go on from what earlier micro-steps left pending, else from the running
/// moments.
pub fn defer(mut graph: Graph, layout: &Layout, adds: bool) -> Graph {
    let nodes = std::mem::take(&mut graph.nodes);
    let going_on = layout.running.iter().filter(|_| adds);
    let reads: HashMap<StateId, ValueId> =
        going_on.map(|running| (running.state, graph.read(running.pending))).collect();
    let state_of = |value: ValueId| {
        nodes.iter().find_map(|node| match node.op {
            Op::Read { state } if node.outputs[0] == value => Some(state),
            _ => None,
        })
    };
    let pending = nodes.iter().map(|node| match node.op {
        Op::RunningMoments { .. } => reads.get(&state_of(node.inputs[0])?).copied(),
        _ => None,
    });
    let pending: Vec<Option<ValueId>> = pending.collect();
    for (mut node, pending) in nodes.into_iter().zip(pending) {
        if let Some(pending) = pending {
            node.inputs[0] = pending;
        }
        if let Op::Assign { state } = &mut node.op
            && let Some(running) = layout.running.iter().find(|r| r.state == *state)
        {
            *state = running.pending;
            node.layer.push_str(PENDING);
        }
        graph.nodes.push(node);
    }
    graph
}
