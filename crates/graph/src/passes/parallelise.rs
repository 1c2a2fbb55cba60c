//! Data parallelism: the sums of gradients and statistics that a rank has made become those of all ranks.
//!
//! Gradients lie in memory in the order in which they become ready, so that a bucket, a few of them side by side, is one
//! message without a copy: `all_reduce` works in the states' own memory, on the comm lane, while the backward ops go on. Where gradients
//! are sent in another type (`dtype`), a bucket is packed into a buffer of that type and unpacked over the sums.
//!
//! At stage 1 of ZeRO a bucket is reduce-scattered instead, in place too: this rank's part of it becomes the sum of all ranks.

use super::layout::Layout;
use crate::graph::{At, GRADIENT, Graph, GraphError, Node, Phase, Role, ValueId};
use crate::mesh::Group;
use crate::op::{Op, Reduction, StateId};
use crate::settings::{Communication, Zero};
use crate::types::{DType, Shape};
use std::collections::{HashMap, HashSet};

/// Adds the all-reduce of every sum (gradients and statistics) that the graph assigns. One rank needs none.
pub fn parallelise(
    mut graph: Graph,
    layout: &Layout,
    communication: &Communication,
) -> Result<Graph, GraphError> {
    let group = graph.mesh.world();
    if group.ranks() <= 1 {
        return Ok(graph);
    }
    if layout.stage == Zero::Stage1 {
        graph = super::scatter::scatter_sums(graph, layout, communication)?;
    }
    // Of what ranks divide, each has its part by then; what was reduced in each micro-step is the sum of all ranks.
    let is_own =
        |sum: &Sum| sum.role == Role::Statistic || (layout.stage == Zero::Stage0 && !layout.reduces_each);
    let sums = sums(&graph).into_iter().filter(|(_, sum)| is_own(sum)).collect();
    let buckets = buckets(sums, layout, communication);
    let assigned: HashSet<StateId> = buckets.iter().flat_map(|b| b.sums.iter().map(|s| s.state)).collect();
    let nodes = std::mem::take(&mut graph.nodes);
    let end = nodes.len();
    let mut under_way = Vec::new();
    for (index, node) in nodes.into_iter().enumerate() {
        // Assigns take the reduced values, below.
        if !matches!(node.op, Op::Assign { state } if assigned.contains(&state)) {
            graph.nodes.push(node);
        }
        let leaves =
            |bucket: &&Bucket| if communication.overlap { bucket.ready == index } else { index + 1 == end };
        for bucket in buckets.iter().filter(leaves) {
            under_way.push((bucket, bucket.start(&mut graph, group)?));
        }
    }
    for (bucket, values) in under_way {
        bucket.finish(&mut graph, values)?;
    }
    Ok(graph)
}

/// A gradient or the statistics, as this rank has summed them.
struct Sum {
    state: StateId,
    role: Role,
    value: ValueId,
    /// The node that makes it.
    ready: usize,
    /// Name of the state; of a gradient, that of its parameter.
    name: String,
    dtype: DType,
    shape: Shape,
}

/// Sums by their states.
fn sums(graph: &Graph) -> HashMap<StateId, Sum> {
    let producers = graph.producers();
    let sum = |(index, node): (usize, &Node)| {
        let Op::Assign { state } = node.op else { return None };
        let of = &graph.states[state.index()];
        let value = node.inputs[0];
        let made =
            producers[value.index()].filter(|_| matches!(of.role, Role::Gradient | Role::Statistic))?;
        // Where it is assigned: gradients of several weights that one launch makes are assigned behind all of them, and a
        // message between them would cut the launch, so that other sums had other bits with other buckets.
        let ready = made.max(index);
        let name = of.name.strip_suffix(GRADIENT).unwrap_or(&of.name).to_string();
        let (dtype, shape) = (of.ty.dtype, of.ty.shape.clone());
        Some((state, Sum { state, role: of.role, value, ready, name, dtype, shape }))
    };
    graph.nodes.iter().enumerate().filter_map(sum).collect()
}

/// Sums that are one message.
struct Bucket {
    sums: Vec<Sum>,
    dtype: Option<DType>,
    /// The node that completes it.
    ready: usize,
}

/// Buckets as they were laid out. The statistics go with the first; where gradients are sent in half precision they go
/// beside it, since that can't count a batch.
fn buckets(mut sums: HashMap<StateId, Sum>, layout: &Layout, communication: &Communication) -> Vec<Bucket> {
    let wire_of = |bucket: &[Sum]| {
        communication.dtype.filter(|dtype| bucket.first().is_some_and(|sum| *dtype != sum.dtype))
    };
    let mut buckets: Vec<Bucket> = (layout.buckets.iter())
        .map(|bucket| bucket.gradients.iter().filter_map(|state| sums.remove(state)).collect::<Vec<_>>())
        .filter(|sums| !sums.is_empty())
        .map(|sums| Bucket::new(wire_of(&sums), sums))
        .collect();
    let statistics: Vec<Sum> = sums.remove(&layout.stats).into_iter().collect();
    match buckets.first_mut() {
        Some(first) if first.dtype.is_none() => {
            let dtype = first.dtype;
            *first = Bucket::new(dtype, statistics.into_iter().chain(first.sums.drain(..)).collect());
        }
        Some(first) => {
            let ready = first.ready;
            buckets.insert(0, Bucket { ready, ..Bucket::new(None, statistics) });
        }
        None => buckets.extend((!statistics.is_empty()).then(|| Bucket::new(None, statistics))),
    }
    buckets
}

impl Bucket {
    fn new(dtype: Option<DType>, sums: Vec<Sum>) -> Self {
        let ready = sums.iter().map(|sum| sum.ready).max().unwrap_or(0);
        Bucket { sums, dtype, ready }
    }

    /// The first and the last parameter in it.
    fn layer(&self) -> String {
        let mut names = self.sums.iter().filter(|s| s.role == Role::Gradient).map(|s| s.name.as_str());
        match (names.next(), names.next_back()) {
            (Some(first), Some(last)) => format!("{first} … {last}"),
            (one, _) => one.unwrap_or("stats").to_string(),
        }
    }

    fn values(&self) -> Vec<ValueId> {
        self.sums.iter().map(|sum| sum.value).collect()
    }

    /// Sends the bucket on its way; returns what will have come back.
    fn start(&self, graph: &mut Graph, group: Group) -> Result<Vec<ValueId>, GraphError> {
        let at = At::named(&self.layer(), format!("bucket.{}", self.sums[0].name), Phase::Communication);
        let reduce = Op::AllReduce { reduction: Reduction::Sum, group };
        if self.dtype.is_some() {
            let flat = graph.push(Op::Pack { align: 1, to: self.dtype }, &self.values(), &at)?;
            return graph.push(reduce, &flat, &At { name: format!("all.{}", at.name), ..at });
        }
        let reduced = graph.push(reduce, &self.values(), &at)?;
        self.rename(graph, &reduced);
        Ok(reduced)
    }

    /// Assigns what has come back.
    fn finish(&self, graph: &mut Graph, mut values: Vec<ValueId>) -> Result<(), GraphError> {
        if self.dtype.is_some() {
            let (shapes, to) =
                (self.sums.iter().map(|s| s.shape.clone()).collect(), Some(self.sums[0].dtype));
            let inputs: Vec<ValueId> = values.into_iter().chain(self.values()).collect();
            let at = At::new(&self.layer(), Phase::Communication);
            values = graph.push(Op::Unpack { shapes, to, over: true }, &inputs, &at)?;
            self.rename(graph, &values);
        }
        for (sum, value) in self.sums.iter().zip(values) {
            graph.assign(sum.state, value, Phase::Communication)?;
        }
        Ok(())
    }

    /// Each value is named after the sum it is the reduction of.
    fn rename(&self, graph: &mut Graph, values: &[ValueId]) {
        for (sum, value) in self.sums.iter().zip(values) {
            let name = format!("all.{}", graph.name(sum.value));
            graph.values[value.index()].name = name;
        }
    }
}
