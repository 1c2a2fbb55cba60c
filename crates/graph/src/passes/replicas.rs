//! Groups of ranks that divide states, side by side: a rank's part of the sums of its group becomes that of all groups.
//!
//! Between hosts ranks send what they hold, one part of each bucket, once per step; inside a group buckets are reduce-scattered and
//! gathered as ever.

use super::layout::{Bucket, Layout};
use crate::graph::{At, Graph, GraphError, Node, Phase, ValueId};
use crate::op::{Op, Reduction};
use crate::settings::{Communication, Zero};

/// Adds the all-reduce of every part of the gradients among the ranks that hold the same part.
pub fn replicas(
    mut graph: Graph,
    layout: &Layout,
    communication: &Communication,
) -> Result<Graph, GraphError> {
    if graph.mesh.replicas().ranks() <= 1 || layout.stage == Zero::Stage0 {
        return Ok(graph);
    }
    let assigned = |node: &Node| match node.op {
        Op::Assign { state } => layout.buckets.iter().find(|bucket| bucket.gradient == state),
        _ => None,
    };
    for mut node in std::mem::take(&mut graph.nodes) {
        if let Some(bucket) = assigned(&node) {
            node.inputs[0] = reduce(&mut graph, bucket, communication, node.inputs[0])?;
        }
        graph.nodes.push(node);
    }
    Ok(graph)
}

/// The sum of a part over all replicas, on its way in the dtype of communication.
fn reduce(
    graph: &mut Graph,
    bucket: &Bucket,
    communication: &Communication,
    part: ValueId,
) -> Result<ValueId, GraphError> {
    let own = graph.ty(part).dtype;
    let name = format!("replicas.{}", graph.states[bucket.gradient.index()].name);
    let at = |suffix: &str| At::named(&bucket.name, format!("{name}{suffix}"), Phase::Communication);
    let sent = communication.dtype.filter(|dtype| *dtype != own);
    let mut sum = part;
    if let Some(to) = sent {
        sum = graph.push(Op::Cast { to }, &[sum], &at(".sent"))?[0];
    }
    let op = Op::AllReduce { reduction: Reduction::Sum, group: graph.mesh.replicas() };
    sum = graph.push(op, &[sum], &at(""))?[0];
    match sent {
        Some(_) => Ok(graph.push(Op::Cast { to: own }, &[sum], &at(&format!(".{own}")))?[0]),
        None => Ok(sum),
    }
}
