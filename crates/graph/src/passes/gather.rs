//! Puts small weight gradients next to each other.
//!
//! One of them may have too few elements for a device, however long its sums are. Those of a block can be made at once, if each waits for
//! the last: what they read stays that much longer. Steps that follow each other so may run at the same time
//! (see [`Op::runs_beside`]).

use crate::graph::{Graph, Node, ValueId};
use crate::op::Op;
use crate::target::Batching;
use std::collections::HashSet;

/// Moves small weight gradients that follow each other, whatever lies between, to the last of them.
///
/// All of a group are assigned behind its last, those too that are too long to be launched with others. Messages leave where gradients are
/// assigned, and that must not depend on the batch: ranks may have batches of different sizes.
pub fn gather(mut graph: Graph, batching: &Batching) -> Graph {
    let groups = groups(&graph, batching);
    let assigns: Vec<Vec<usize>> = groups.iter().map(|group| assigns(&graph, group)).collect();
    let is_long = |at: &usize| {
        let node = &graph.nodes[*at];
        let rows = graph.ty(node.inputs[0]).shape.rows();
        rows * graph.ty(node.outputs[0]).shape.count() > batching.short
    };
    let launches: Vec<&[usize]> = groups.iter().flat_map(|group| group.split(is_long)).collect();
    let moved: HashSet<usize> =
        launches.iter().copied().chain(assigns.iter().map(|a| &a[..])).flatten().copied().collect();
    let mut order = Vec::with_capacity(graph.nodes.len());
    for index in 0..graph.nodes.len() {
        if !moved.contains(&index) {
            order.push(index);
        }
        if let Some(launch) = launches.iter().find(|launch| launch.last() == Some(&index)) {
            order.extend_from_slice(launch);
        }
        if let Some(at) = groups.iter().position(|group| group.last() == Some(&index)) {
            order.extend_from_slice(&assigns[at]);
        }
    }
    graph.nodes = order.into_iter().map(|index| graph.nodes[index].clone()).collect();
    graph
}

/// The nodes of each group, two or more: the same for every batch.
fn groups(graph: &Graph, batching: &Batching) -> Vec<Vec<usize>> {
    let consumers = graph.consumers();
    let mut groups: Vec<Vec<usize>> = vec![vec![]];
    for (index, node) in graph.nodes.iter().enumerate() {
        let Node { op: Op::LinearGradW { shape, .. }, inputs, .. } = node else { continue };
        let elements = |at: &usize| graph.ty(graph.nodes[*at].outputs[0]).shape.count();
        let rows = |value: ValueId| graph.ty(value).shape.rows();
        let in_units = |value: &ValueId| graph.ty(*value).shape.last().is_multiple_of(batching.unit);
        let joins = |group: &Vec<usize>| {
            let Some(first) = group.first() else { return true };
            let sum: usize = group.iter().map(elements).sum();
            // Nobody may want what a member makes before the new last one is there.
            let unused = |at: &usize| {
                let outputs = &graph.nodes[*at].outputs;
                let mut uses = outputs.iter().flat_map(|value| &consumers[value.index()]);
                uses.all(|user| *user > index || matches!(graph.nodes[*user].op, Op::Assign { .. }))
            };
            group.len() < batching.most
                && sum + shape.count() <= batching.together
                && rows(graph.nodes[*first].inputs[0]) == rows(inputs[0])
                && group.iter().all(unused)
        };
        if shape.count() > batching.small || !inputs[..2].iter().all(in_units) {
            groups.push(vec![]);
        } else if groups.last().is_some_and(joins) {
            groups.last_mut().into_iter().for_each(|group| group.push(index));
        } else {
            groups.push(vec![index]);
        }
    }
    groups.retain(|group| group.len() > 1);
    groups
}

/// The nodes that put what some others make into states.
fn assigns(graph: &Graph, makers: &[usize]) -> Vec<usize> {
    let made = |value: &ValueId| makers.iter().any(|maker| graph.nodes[*maker].outputs.contains(value));
    let is = |node: &Node| matches!(node.op, Op::Assign { .. }) && node.inputs.iter().any(made);
    (0..graph.nodes.len()).filter(|index| is(&graph.nodes[*index])).collect()
}
