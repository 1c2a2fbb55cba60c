//! Puts small weight gradients next to each other.
//!
//! One of them may have too few elements for a device, however long its sums are. Those of a block can be made at once, if each waits for
//! the last: what they read stays that much longer. Steps that follow each other so may run at the same time
//! (see [`Op::runs_beside`]).

use crate::graph::{Graph, Node, ValueId};
use crate::op::Op;
use crate::target::Batching;

/// Moves small weight gradients that follow each other, whatever lies between, to the last of them.
pub fn gather(mut graph: Graph, batching: &Batching) -> Graph {
    let groups = groups(&graph, batching);
    let assigns: Vec<Vec<usize>> = groups.iter().map(|group| assigns(&graph, group)).collect();
    let moved: Vec<usize> = groups.iter().chain(&assigns).flatten().copied().collect();
    let mut order = Vec::with_capacity(graph.nodes.len());
    for index in 0..graph.nodes.len() {
        if !moved.contains(&index) {
            order.push(index);
        }
        let ends = |(group, _): &(&Vec<usize>, &Vec<usize>)| group.last() == Some(&index);
        if let Some((group, assigns)) = groups.iter().zip(&assigns).find(ends) {
            order.extend(group.iter().chain(assigns));
        }
    }
    graph.nodes = order.into_iter().map(|index| graph.nodes[index].clone()).collect();
    graph
}

/// The nodes of each group, two or more.
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
        let is_large = shape.count() > batching.small || rows(inputs[0]) * shape.count() > batching.short;
        if is_large || !inputs[..2].iter().all(in_units) {
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
