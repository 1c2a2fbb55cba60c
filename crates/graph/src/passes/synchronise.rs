//! Batch norm over the batches of all ranks: their moments are joined before the norm, the sums of its gradient before
//! the gradient of x.
//!
//! Moments are not additive (the mean differs from rank to rank), so ranks gather each other's and join them in the
//! order of the ranks: all have the same bits, and no large sum of squares loses what the mean leaves. The sums of the
//! gradient do add up. Beside the all-reduce of gradients, which is in `last` alone, this is in every plan that trains.

use crate::graph::{At, Graph, GraphError, Phase, ValueId};
use crate::op::{Op, Reduction};
use std::collections::HashMap;

/// Adds what batch norms of the ranks of the graph's mesh have to know of each other.
pub fn synchronise(mut graph: Graph) -> Result<Graph, GraphError> {
    let group = graph.mesh.world();
    check_counts(&graph, group.ranks())?;
    if group.ranks() <= 1 {
        return Ok(graph);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    // What each rank has, and what all have together.
    let mut together: HashMap<ValueId, ValueId> = HashMap::new();
    for mut node in nodes {
        // The gradients of γ and β are a rank's own sums, which `unpack` takes.
        if !matches!(node.op, Op::Unpack { .. }) {
            for input in &mut node.inputs {
                *input = together.get(input).copied().unwrap_or(*input);
            }
        }
        let (op, layer, outputs) = (node.op.clone(), node.layer.clone(), node.outputs.clone());
        graph.nodes.push(node);
        let own = graph.name(*outputs.first().unwrap_or(&ValueId(0))).to_string();
        match op {
            Op::Moments => {
                let at = At::named(&layer, format!("{own}.ranks"), Phase::Communication);
                let gathered = graph.push(Op::AllGather { group, views: None }, &outputs, &at)?;
                let joined = graph.push(Op::JoinMoments, &gathered, &At::new(&layer, Phase::Forward))?;
                together.insert(outputs[0], joined[0]);
            }
            Op::BatchNormSums { .. } => {
                let at = At::named(&layer, format!("{own}.all"), Phase::Communication);
                let reduce = Op::AllReduce { reduction: Reduction::Sum, group };
                together.insert(outputs[0], graph.push(reduce, &outputs, &at)?[0]);
            }
            _ => {}
        }
    }
    Ok(graph)
}

/// The unbiased variance of one value is none; torch refuses it too.
fn check_counts(graph: &Graph, ranks: usize) -> Result<(), GraphError> {
    let mut moments = graph.nodes.iter().filter(|node| node.op == Op::Moments);
    match moments.find(|node| graph.ty(node.inputs[0]).shape.rows() * ranks < 2) {
        Some(node) => {
            let values = graph.ty(node.inputs[0]).shape.rows() * ranks;
            Err(GraphError::NoMoments { layer: node.layer.clone(), values })
        }
        None => Ok(()),
    }
}
