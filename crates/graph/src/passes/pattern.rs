//! Rewriting rules for passes that merge neighbours: a rule looks at one node and those around it, and either leaves it
//! (`None`) or rewrites it.

use crate::graph::{Graph, Node, ValueId};
use crate::op::Op;
use std::collections::HashSet;

/// A graph whose nodes are being merged. Who makes and who uses a value is as it was when the rule began.
pub(super) struct Rewriter {
    pub graph: Graph,
    producers: Vec<Option<usize>>,
    consumers: Vec<Vec<usize>>,
    gone: HashSet<usize>,
}

/// Tries a rule on every node, in order.
pub(super) fn rewrite(graph: Graph, rule: impl Fn(&mut Rewriter, usize) -> Option<()>) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut rewriter = Rewriter { graph, producers, consumers, gone: HashSet::new() };
    for node in 0..rewriter.graph.nodes.len() {
        let _ = rule(&mut rewriter, node);
    }
    let Rewriter { mut graph, gone, .. } = rewriter;
    let nodes = std::mem::take(&mut graph.nodes).into_iter().enumerate();
    graph.nodes = nodes.filter(|(node, _)| !gone.contains(node)).map(|(_, node)| node).collect();
    graph
}

impl Rewriter {
    pub fn node(&self, node: usize) -> &Node {
        &self.graph.nodes[node]
    }

    pub fn op(&self, node: usize) -> &Op {
        &self.graph.nodes[node].op
    }

    /// Node that makes a value.
    pub fn maker(&self, value: ValueId) -> Option<usize> {
        self.producers[value.index()]
    }

    /// Node that makes a value that `node` alone uses.
    pub fn own_maker(&self, value: ValueId, node: usize) -> Option<usize> {
        let only_here = self.consumers[value.index()] == [node] && !self.graph.outputs.contains(&value);
        self.maker(value).filter(|_| only_here)
    }

    /// Checks whether a value exists before a node: an input, a state, or made earlier.
    pub fn is_before(&self, value: ValueId, node: usize) -> bool {
        self.maker(value).is_some_and(|maker| maker < node)
    }

    /// Checks that no earlier node uses a value.
    pub fn is_first_use(&self, value: ValueId, node: usize) -> bool {
        self.consumers[value.index()].iter().all(|user| *user >= node)
    }

    /// Makes a node another.
    pub fn replace(&mut self, node: usize, op: Op, inputs: Vec<ValueId>, outputs: Vec<ValueId>) {
        let node = &mut self.graph.nodes[node];
        (node.op, node.inputs, node.outputs) = (op, inputs, outputs);
    }

    /// Takes a node away, which another does the work of; `None` if that was done before.
    pub fn merge(&mut self, node: usize) -> Option<()> {
        self.gone.insert(node).then_some(())
    }
}
