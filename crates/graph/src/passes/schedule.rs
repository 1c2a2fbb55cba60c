//! Orders the steps on lanes. Inside a lane, program order; across lanes, a step waits for what it needs.

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
    pub nodes: Vec<usize>,
    pub lanes: Vec<Lane>,
    pub waits: Vec<Vec<usize>>,
    /// Whether each may run at the same time as the one before.
    pub beside: Vec<bool>,
    /// For so many steps what a batch of weight gradients reads is left alone: see [`crate::Batching::stays`].
    stays: usize,
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
    let mut schedule = Schedule { stays: target.batching().stays, ..Schedule::default() };
    let mut clocks = Clocks::default();
    let mut makers: HashMap<ValueId, usize> = HashMap::new();
    let mut readers: HashMap<StateId, Vec<usize>> = HashMap::new();
    for (step, index) in nodes.iter().enumerate() {
        let node = &graph.nodes[*index];
        let mut needs: Vec<usize> = node.inputs.iter().filter_map(|v| makers.get(v).copied()).collect();
        // Whoever reads what lies in a state must be done before it is written.
        for state in written_states(node, &places) {
            needs.extend(readers.get(&state).into_iter().flatten());
        }
        let lane = node.op.lane();
        // Where a collective stands in the program is when it may leave, on every executor: without overlap, that is the end.
        if lane == Lane::Comm {
            needs.extend(schedule.lanes.iter().rposition(|before| *before == Lane::Compute));
        }
        let beside = step > 0 && node.op.runs_beside(&graph.nodes[nodes[step - 1]].op);
        schedule.waits.push(clocks.push(lane, &needs, beside));
        schedule.lanes.push(lane);
        schedule.beside.push(beside);
        makers.extend(node.outputs.iter().map(|v| (*v, step)));
        for place in node.inputs.iter().filter_map(|v| places.get(v)) {
            if let Place::State(state) = place {
                readers.entry(*state).or_default().push(step);
            }
        }
    }
    schedule.nodes = nodes;
    schedule
}

impl Schedule {
    /// The steps that need what a step reads: itself, and the last of those that it may go on beside.
    pub(super) fn uses(&self, step: usize) -> impl Iterator<Item = usize> {
        let is_gathered = self.beside[step] || self.beside.get(step + 1) == Some(&true);
        let last = (step + self.stays).min(self.nodes.len() - 1);
        [step].into_iter().chain(is_gathered.then_some(last))
    }

    /// The step of the same lane that comes `steps` later, or the last before.
    pub(super) fn later(&self, step: usize, steps: usize) -> usize {
        let last = (step + steps).min(self.nodes.len() - 1);
        (step..=last).rev().find(|later| self.lanes[*later] == self.lanes[step]).unwrap_or(step)
    }

    /// What lanes and waits order.
    pub fn clocks(&self) -> Clocks {
        let waits = self.waits.iter().map(Vec::as_slice);
        let steps = self.lanes.iter().zip(waits).zip(&self.beside);
        Clocks::of(steps.map(|((lane, waits), beside)| (*lane, waits, *beside)))
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
