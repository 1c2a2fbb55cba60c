//! Makes large values late.
//!
//! The gradient of a selected token is all zeros but for a row: much larger than what it is made of, and made in no time. A class
//! token's is wanted at the end of a block's backward pass, and would lie there at the peak of a step's memory until then.

use crate::graph::Graph;
use crate::op::Op;

/// Moves every such node to just before the first that reads it.
pub fn late(mut graph: Graph) -> Graph {
    // Last first, so that those that come later are in their place already.
    for index in (0..graph.nodes.len()).rev() {
        if !matches!(graph.nodes[index].op, Op::PoolGrad { .. }) {
            continue;
        }
        let outputs = graph.nodes[index].outputs.clone();
        let reads = |at: &usize| graph.nodes[*at].inputs.iter().any(|value| outputs.contains(value));
        if let Some(first) = (index + 1..graph.nodes.len()).find(reads) {
            graph.nodes[index..first].rotate_left(1);
        }
    }
    graph
}
