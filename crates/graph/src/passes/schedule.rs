//! Orders the steps on lanes. Inside a lane, program order; across lanes, a step waits for what it needs.
//!
//! What computes beside the compute lane counts as part of it here, in the order of the program: memory is given out so, and
//! [`wait`](super::wait()) finds out what may run beside what.

use super::place::state_places;
use crate::clocks::Clocks;
use crate::graph::{Graph, Node, ValueId};
use crate::op::{Lane, Op, StateId};
use crate::plan::Place;
use crate::target::Target;
use std::collections::HashMap;

/// Nodes in the order they are issued, each with its lane and the earlier steps of other lanes it waits for. An assign
/// whose value is made in its state is no step.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Nodes of the graph, in the order in which they are issued.
    pub nodes: Vec<usize>,
    /// Lane of each.
    pub lanes: Vec<Lane>,
    /// Earlier steps of other lanes that each waits for.
    pub waits: Vec<Vec<usize>>,
    /// Flags of steps that are launched with the one before.
    pub joined: Vec<bool>,
    /// Flags of steps that may run at the same time as the one before.
    pub beside: Vec<bool>,
    /// Number of steps for which what each reads is left alone: see [`crate::Batching::stays`] and
    /// [`crate::Deferred::stays`].
    stays: Vec<usize>,
}

/// Orders a graph for a target.
pub fn schedule(graph: &Graph, target: &dyn Target) -> Schedule {
    let places = state_places(graph);
    let is_step = |node: &Node| match node.op {
        Op::Input | Op::Read { .. } => false,
        Op::Assign { state } => places.get(&node.inputs[0]) != Some(&Place::State(state)),
        _ => true,
    };
    let nodes: Vec<usize> = (0..graph.nodes.len()).filter(|i| is_step(&graph.nodes[*i])).collect();
    let ops: Vec<&Op> = nodes.iter().map(|node| &graph.nodes[*node].op).collect();
    let lanes: Vec<Lane> = ops.iter().map(|op| target.lane(op)).collect();
    let mut schedule = Schedule { joined: joined(&ops, &lanes, target), lanes, ..Schedule::default() };
    let mut clocks = Clocks::default();
    let mut makers: HashMap<ValueId, usize> = HashMap::new();
    let mut readers: Vec<(StateId, usize)> = Vec::new();
    let mut scatters: Vec<usize> = Vec::new();
    let alike = |a: StateId, b: StateId| a == b || graph.states[a.index()].overlaps(&graph.states[b.index()]);
    for (step, index) in nodes.iter().enumerate() {
        let node = &graph.nodes[*index];
        let mut needs: Vec<usize> = node.inputs.iter().filter_map(|v| makers.get(v).copied()).collect();
        // Whoever reads what lies in a state must be done before it is written.
        for state in written_states(node, &places) {
            needs.extend(readers.iter().filter(|(read, _)| alike(*read, state)).map(|(_, reader)| *reader));
        }
        let lane = in_order(schedule.lanes[step]);
        // Where a collective stands in the program is when it may leave, on every executor: without overlap, that is the end.
        if lane == Lane::Comm {
            let computes = |lane: &Lane| in_order(*lane) == Lane::Compute;
            needs.extend(schedule.lanes[..step].iter().rposition(computes));
        }
        // Of gradients that leave the arena, two messages are under way at a time: the memory of those before is free again.
        if lane == Lane::Compute {
            needs.extend(scatters.iter().rev().nth(1));
        }
        let leaves = |value: &ValueId| !places.contains_key(value);
        if matches!(node.op, Op::ReduceScatter { views: Some(_), .. }) && node.inputs.iter().all(leaves) {
            scatters.push(step);
        }
        let beside = schedule.joined[step] && node.op.runs_beside(ops[step - 1]);
        schedule.waits.push(clocks.push(lane, &needs, beside));
        schedule.beside.push(beside);
        makers.extend(node.outputs.iter().map(|v| (*v, step)));
        for place in node.inputs.iter().filter_map(|v| places.get(v)) {
            if let Place::State(state) = place {
                readers.push((*state, step));
            }
        }
    }
    let is_gathered = |step: usize| schedule.beside[step] || schedule.beside.get(step + 1) == Some(&true);
    let stays = |(step, op): (usize, &&Op)| match op {
        Op::AddUp { .. } => target.deferred().stays,
        _ if is_gathered(step) => target.batching().stays,
        _ => 0,
    };
    schedule.stays = ops.iter().enumerate().map(stays).collect();
    schedule.nodes = nodes;
    schedule
}

/// The lane in which a step counts when memory is given out.
fn in_order(lane: Lane) -> Lane {
    if lane == Lane::Side { Lane::Compute } else { lane }
}

/// Flags of steps that are launched with the one before.
fn joined(ops: &[&Op], lanes: &[Lane], target: &dyn Target) -> Vec<bool> {
    let mut joined = vec![false; ops.len()];
    let mut step = 0;
    while step < ops.len() {
        let same = lanes[step..].iter().take_while(|lane| **lane == lanes[step]).count();
        let count = target.launch(&ops[step..step + same]).clamp(1, same);
        joined[step + 1..step + count].fill(true);
        step += count;
    }
    joined
}

impl Schedule {
    /// The steps that need what a step reads: itself, and the last of those that it may go on beside.
    pub(super) fn uses(&self, step: usize) -> impl Iterator<Item = usize> {
        let last = (step + self.stays[step]).min(self.nodes.len() - 1);
        [step].into_iter().chain((last > step).then_some(last))
    }

    /// The step of the same lane that comes `steps` later, or the last before.
    pub(super) fn later(&self, step: usize, steps: usize) -> usize {
        let last = (step + steps).min(self.nodes.len() - 1);
        let same = |later: &usize| in_order(self.lanes[*later]) == in_order(self.lanes[step]);
        (step..=last).rev().find(same).unwrap_or(step)
    }

    /// Order that lanes and waits enforce, were there no side lane.
    pub fn clocks(&self) -> Clocks {
        let waits = self.waits.iter().map(Vec::as_slice);
        let steps = self.lanes.iter().zip(waits).zip(&self.beside);
        Clocks::of(steps.map(|((lane, waits), beside)| (in_order(*lane), waits, *beside)))
    }
}

/// The states a step writes: the one it assigns, or those its results are made in.
pub(super) fn written_states(node: &Node, places: &HashMap<ValueId, Place>) -> Vec<StateId> {
    if let Op::Assign { state } = node.op {
        return vec![state];
    }
    let made_in = node.outputs.iter().filter_map(|v| match places.get(v) {
        Some(Place::State(state)) => Some(*state),
        _ => None,
    });
    made_in.collect()
}
