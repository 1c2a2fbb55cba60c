//! Sums over rows that steps leave in parts: one step adds up those of many.
//!
//! Gradients of biases and norms are sums over all rows of a batch. On some devices the kernels that make them leave a row of
//! partial sums a block (see [`Target::partial`]), and nobody needs the sums before the update, or their all-reduce. So they wait until
//! someone does, or until their parts fill the memory there is for them.

use crate::graph::{Graph, GraphError, Node, Phase, ValueId};
use crate::op::Op;
use crate::target::Target;
use std::collections::{HashMap, HashSet};

/// A sum that is yet to be made.
struct Sum {
    /// Value that holds the partial sums.
    parts: ValueId,
    /// The sum that it goes on from.
    start: Option<ValueId>,
    out: ValueId,
}

/// Lets steps that leave partial sums give those, and adds the steps that make sums of them.
pub fn sums(mut graph: Graph, target: &dyn Target) -> Result<Graph, GraphError> {
    let PartialSums { bytes, mut sums, merged } = left(&mut graph, target);
    if sums.is_empty() {
        return Ok(graph);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut waiting = Waiting { graph: &mut graph, sums: vec![], assigns: vec![], held: 0 };
    for (index, node) in nodes.into_iter().enumerate().filter(|(index, _)| !merged.contains(index)) {
        let needs = waiting.makes_any(&node.inputs);
        if needs && matches!(node.op, Op::Assign { .. }) {
            waiting.assigns.push(node);
            continue;
        }
        let bytes = bytes.get(&index).copied().unwrap_or(0);
        if needs || waiting.held + bytes > target.deferred().most {
            waiting.add_up()?;
        }
        waiting.graph.nodes.push(node);
        waiting.sums.extend(sums.remove(&index).unwrap_or_default());
        waiting.held += if waiting.sums.is_empty() { 0 } else { bytes };
    }
    waiting.add_up()?;
    Ok(graph)
}

/// Partial sums that steps leave, by their number.
#[derive(Default)]
struct PartialSums {
    bytes: HashMap<usize, usize>,
    sums: HashMap<usize, Vec<Sum>>,
    /// Nodes that only added a sum to the one so far.
    merged: HashSet<usize>,
}

fn left(graph: &mut Graph, target: &dyn Target) -> PartialSums {
    let consumers = graph.consumers();
    let mut left = PartialSums::default();
    for index in 0..graph.nodes.len() {
        let Some(partial) = target.partial(graph, index) else { continue };
        left.bytes.insert(index, partial.bytes);
        // A column sum that goes on from one leaves that to whoever adds up its parts.
        let node = &mut graph.nodes[index];
        let mut so_far = None;
        if let Op::ColumnSum { accumulate: accumulate @ true } = &mut node.op {
            *accumulate = false;
            so_far = node.inputs.pop();
        }
        for (output, _) in partial.results {
            let value = graph.nodes[index].outputs[output];
            let users = &consumers[value.index()];
            if users.is_empty() && !graph.outputs.contains(&value) {
                continue;
            }
            let (mut start, mut out) = (so_far, value);
            if let [user] = users[..]
                && let Node { op: Op::Accumulate, inputs, outputs, .. } = &graph.nodes[user]
                && inputs[1] == value
                && start.is_none()
                && !graph.outputs.contains(&value)
            {
                (start, out) = (Some(inputs[0]), outputs[0]);
                left.merged.insert(user);
            }
            let (name, ty) = (format!("{}.parts", graph.name(value)), graph.ty(value).clone());
            let parts = graph.add_value(&name, ty);
            graph.nodes[index].outputs[output] = parts;
            left.sums.entry(index).or_default().push(Sum { parts, start, out });
        }
    }
    left
}

/// The sums that wait, with what puts them into states.
struct Waiting<'a> {
    graph: &'a mut Graph,
    sums: Vec<Sum>,
    assigns: Vec<Node>,
    /// Bytes of their parts.
    held: usize,
}

impl Waiting<'_> {
    fn makes_any(&self, values: &[ValueId]) -> bool {
        self.sums.iter().any(|sum| values.contains(&sum.out))
    }

    /// Makes all that wait.
    fn add_up(&mut self) -> Result<(), GraphError> {
        self.held = 0;
        if self.sums.is_empty() {
            return Ok(());
        }
        let sums = std::mem::take(&mut self.sums);
        let starts = sums.iter().enumerate().filter(|(_, sum)| sum.start.is_some());
        let op = Op::AddUp { starts: starts.map(|(index, _)| index).collect() };
        let inputs =
            sums.iter().map(|sum| sum.parts).chain(sums.iter().filter_map(|sum| sum.start)).collect();
        let outputs = sums.iter().map(|sum| sum.out).collect();
        let (layer, phase) = ("sums".to_string(), Phase::Backward);
        self.graph.nodes.push(Node { op, inputs, outputs, layer, phase });
        self.graph.nodes.append(&mut self.assigns);
        Ok(())
    }
}
