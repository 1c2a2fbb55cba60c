//! Parameters that an optimizer may treat as matrices: the weights of hidden layers.

use crate::graph::{Graph, ValueId};
use crate::op::{Op, StateId};
use std::collections::HashMap;

/// The weights of hidden linear layers and convolutions, each with the number of matrices that lie one above the other in it: three
/// where queries, keys and values come from one weight, two where a gate and what it opens do, else one.
///
/// Left out are the layers that read images or patches and those that make logits: their inputs or outputs are one-hot or nearly so,
/// and practice treats them element by element, as it does vectors, positions and tables.
pub fn matrices(graph: &Graph) -> HashMap<StateId, usize> {
    let ends = Ends { graph, producers: graph.producers(), consumers: graph.consumers() };
    let mut found: HashMap<StateId, usize> = HashMap::new();
    for node in &graph.nodes {
        if !matches!(node.op, Op::Linear { .. } | Op::Conv { .. }) {
            continue;
        }
        let [x, weight, ..] = node.inputs[..] else { continue };
        let Some(Op::Read { state }) = ends.maker(weight) else { continue };
        let shape = &graph.state_type(*state).shape;
        let parts = match ends.reads_images(x) {
            true => 0,
            false => ends.parts(node.outputs[0]),
        };
        if shape.rank() > 1 {
            let parts = if parts > 0 && shape.0[0].is_multiple_of(parts) { parts } else { parts.min(1) };
            // A weight that two layers share is what the less hidden of them says.
            found.entry(*state).and_modify(|before| *before = parts.min(*before)).or_insert(parts);
        }
    }
    found.retain(|_, parts| *parts > 0);
    found
}

struct Ends<'a> {
    graph: &'a Graph,
    producers: Vec<Option<usize>>,
    consumers: Vec<Vec<usize>>,
}

impl Ends<'_> {
    fn maker(&self, value: ValueId) -> Option<&Op> {
        self.producers[value.index()].map(|node| &self.graph.nodes[node].op)
    }

    fn reads_images(&self, x: ValueId) -> bool {
        matches!(self.maker(x), Some(Op::Input | Op::Prepare { .. } | Op::Patches { .. }))
    }

    /// The matrices in the weight that made a value: 0 for logits.
    fn parts(&self, y: ValueId) -> usize {
        let (mut parts, mut left) = (1, vec![y]);
        while let Some(value) = left.pop() {
            for node in self.consumers[value.index()].iter().map(|node| &self.graph.nodes[*node]) {
                match node.op {
                    Op::CrossEntropy { .. } | Op::ResizedCrossEntropy { .. } if node.inputs[0] == value => {
                        return 0;
                    }
                    Op::Attention { .. } | Op::WindowAttention { .. } if node.inputs[0] == value => parts = 3,
                    Op::SwiGlu => parts = 2,
                    Op::Reshape { .. }
                    | Op::Resize { .. }
                    | Op::Grid { .. }
                    | Op::Ungrid { .. }
                    | Op::Cast { .. } => left.push(node.outputs[0]),
                    _ => {}
                }
            }
        }
        parts
    }
}
