//! Gradients that are reduced in every micro-step. Where ranks divide them, a bucket is reduce-scattered as soon as it is complete, and a
//! rank adds up its part; else it is all-reduced.
//!
//! A bucket's gradients are made where they are sent from, a range of the arena that is free again once they have left. While one bucket is
//! under way the next is made; what comes back is added when the next one leaves, so that nobody waits for it.

use super::layout::{Bucket, Layout};
use crate::graph::{At, Graph, GraphError, Node, Phase, State, ValueId};
use crate::op::{Op, Reduction, StateId};
use crate::settings::{Communication, Zero};
use crate::types::Shape;
use std::collections::{HashMap, HashSet};

/// Adds the reduce-scatter of every bucket from stage 2 on, or the all-reduce at stage 0 where each micro-step is to have it; with `adds`
/// adds what comes back to what earlier micro-steps have left.
pub fn scatter(
    graph: Graph,
    layout: &Layout,
    communication: &Communication,
    adds: bool,
) -> Result<Graph, GraphError> {
    if !layout.reduces_each {
        return Ok(graph);
    }
    Scatter { layout, communication, in_states: false, adds }.run(graph)
}

/// Adds the reduce-scatter of the sums of a step, which stay in their states: this rank's part of them becomes the sum of all ranks.
pub(super) fn scatter_sums(
    graph: Graph,
    layout: &Layout,
    communication: &Communication,
) -> Result<Graph, GraphError> {
    Scatter { layout, communication, in_states: true, adds: false }.run(graph)
}

struct Scatter<'a> {
    layout: &'a Layout,
    communication: &'a Communication,
    /// Flag: gradients are sent from their states.
    in_states: bool,
    adds: bool,
}

impl Scatter<'_> {
    fn run(&self, mut graph: Graph) -> Result<Graph, GraphError> {
        let buckets = &self.layout.buckets;
        let states: HashSet<StateId> = buckets.iter().flat_map(|b| b.gradients.iter().copied()).collect();
        let nodes = std::mem::take(&mut graph.nodes);
        let assigned = |node: &Node| match node.op {
            Op::Assign { state } => Some(state).filter(|state| states.contains(state)),
            _ => None,
        };
        let with_state = |(index, node): (usize, &Node)| Some((assigned(node)?, (node.inputs[0], index)));
        let made: HashMap<StateId, (ValueId, usize)> =
            nodes.iter().enumerate().filter_map(with_state).collect();
        // Of each bucket, its gradients and the node that completes it.
        let of = |bucket: &Bucket| -> (Vec<ValueId>, Option<usize>) {
            let made: Vec<_> = bucket.gradients.iter().filter_map(|gradient| made.get(gradient)).collect();
            (made.iter().map(|(value, _)| *value).collect(), made.iter().map(|(_, at)| *at).max())
        };
        let complete: Vec<_> = buckets.iter().map(of).collect();
        let end = nodes.len();
        let mut under_way: Option<(&Bucket, ValueId)> = None;
        let mut sent: HashSet<ValueId> = HashSet::new();
        for (index, node) in nodes.into_iter().enumerate() {
            if self.in_states || assigned(&node).is_none() {
                graph.nodes.push(node);
            }
            for (bucket, (values, complete)) in buckets.iter().zip(&complete) {
                let leaves = if self.communication.overlap { *complete } else { Some(end - 1) };
                if leaves != Some(index) {
                    continue;
                }
                let part = self.send(&mut graph, bucket, values, &mut sent)?;
                if let Some((before, part)) = under_way.replace((bucket, part)) {
                    self.keep(&mut graph, before, part)?;
                }
            }
        }
        if let Some((bucket, part)) = under_way {
            self.keep(&mut graph, bucket, part)?;
        }
        Ok(graph)
    }

    /// Sends a bucket's gradients on their way; returns what will have come back: this rank's part of their sums, or all of them.
    fn send(
        &self,
        graph: &mut Graph,
        bucket: &Bucket,
        values: &[ValueId],
        sent: &mut HashSet<ValueId>,
    ) -> Result<ValueId, GraphError> {
        let state = &graph.states[bucket.gradient.index()];
        if self.layout.stage == Zero::Stage0 {
            let at =
                |kind: &str| At::named(&bucket.name, format!("{kind}.{}", state.name), Phase::Communication);
            let (packed, reduced) = (at("sent"), at("all"));
            let flat = graph.push(Op::Pack { align: 1, to: self.communication.dtype }, values, &packed)?;
            let op = Op::AllReduce { reduction: Reduction::Sum, group: graph.mesh.world() };
            return Ok(graph.push(op, &flat, &reduced)?[0]);
        }
        let to = self.communication.dtype.filter(|dtype| *dtype != state.ty.dtype);
        let at = At::named(&bucket.name, format!("all.{}", state.name), Phase::Communication);
        let mut tensors = vec![];
        for value in values {
            // A value lies in one message alone: what is the gradient of two parameters is sent as a copy, too.
            let op = match (to, sent.insert(*value)) {
                (Some(to), _) => Op::Cast { to },
                (None, false) => Op::Reshape { shape: graph.ty(*value).shape.clone() },
                (None, true) => {
                    tensors.push(*value);
                    continue;
                }
            };
            let named = At { name: format!("{}.sent", graph.name(*value)), ..at.clone() };
            tensors.push(graph.push(op, &[*value], &named)?[0]);
        }
        let shapes: Vec<Shape> = tensors.iter().map(|value| graph.ty(*value).shape.clone()).collect();
        let views = Some(bucket.views(shapes));
        let op = Op::ReduceScatter { reduction: Reduction::Sum, group: graph.mesh.shards(), views };
        Ok(graph.push(op, &tensors, &at)?[0])
    }

    /// Keeps what has come back.
    fn keep(&self, graph: &mut Graph, bucket: &Bucket, part: ValueId) -> Result<(), GraphError> {
        let State { name, ty, .. } = graph.states[bucket.gradient.index()].clone();
        let at = At::named(&bucket.name, format!("{name}.{}", ty.dtype), Phase::Communication);
        if self.layout.stage == Zero::Stage0 {
            let of = |gradient: &StateId| graph.state_type(*gradient).shape.clone();
            let shapes = bucket.gradients.iter().map(of).collect();
            let unpack = Op::Unpack { shapes, to: Some(ty.dtype), over: false };
            let sums = graph.push(unpack, &[part], &at)?;
            let mut kept = bucket.gradients.iter().zip(sums);
            return kept.try_for_each(|(gradient, sum)| self.add(graph, bucket, *gradient, sum));
        }
        let mut sum = part;
        if graph.ty(part).dtype != ty.dtype {
            sum = graph.push(Op::Cast { to: ty.dtype }, &[part], &at)?[0];
        }
        self.add(graph, bucket, bucket.gradient, sum)
    }

    /// Adds a sum of all ranks to those of earlier micro-steps.
    fn add(
        &self,
        graph: &mut Graph,
        bucket: &Bucket,
        state: StateId,
        mut sum: ValueId,
    ) -> Result<(), GraphError> {
        if self.adds {
            let at = At::named(
                &bucket.name,
                format!("sum.{}", graph.states[state.index()].name),
                Phase::Communication,
            );
            let so_far = graph.read(state);
            sum = graph.push(Op::Accumulate, &[so_far, sum], &at)?[0];
        }
        graph.assign(state, sum, Phase::Communication)
    }
}
