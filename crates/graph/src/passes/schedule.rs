//! Orders the steps on lanes. Inside a lane, program order; across lanes, a step waits for what it needs.

use super::place::state_places;
use crate::graph::{Graph, Node, ValueId};
use crate::op::{Lane, Op, StateId};
use crate::plan::Place;
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
    /// For so many steps after its last use, an executor wants memory left alone, if there is room: it has later steps under way
    /// by then, and they would wait.
    pub linger: usize,
}

pub fn schedule(graph: &Graph) -> Schedule {
    let places = state_places(graph);
    let is_step = |node: &Node| match node.op {
        Op::Input | Op::Read { .. } => false,
        Op::Assign { state } => places.get(&node.inputs[0]) != Some(&Place::State(state)),
        _ => true,
    };
    let nodes: Vec<usize> = (0..graph.nodes.len()).filter(|i| is_step(&graph.nodes[*i])).collect();
    let mut schedule = Schedule::default();
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

/// For so many steps, what gathered weight gradients read is left alone: an executor may make them beside those steps.
const LINGER: usize = 8;

impl Schedule {
    /// The steps that need what a step reads: itself, and the last of those that it may go on beside.
    pub(super) fn uses(&self, step: usize) -> impl Iterator<Item = usize> {
        let is_gathered = self.beside[step] || self.beside.get(step + 1) == Some(&true);
        let last = (step + LINGER).min(self.nodes.len() - 1);
        [step].into_iter().chain(is_gathered.then_some(last))
    }

    /// The step of the same lane that comes `steps` later, or the last before.
    pub(super) fn later(&self, step: usize, steps: usize) -> usize {
        let last = (step + steps).min(self.nodes.len() - 1);
        (step..=last).rev().find(|later| self.lanes[*later] == self.lanes[step]).unwrap_or(step)
    }

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

/// What each step knows to have finished before it starts: a vector clock over lanes.
#[derive(Clone, Debug, Default)]
pub struct Clocks {
    /// For each step, how many steps of each lane have finished before it starts.
    before: Vec<[usize; Lane::ALL.len()]>,
    /// Lane and place in it of each step.
    at: Vec<(usize, usize)>,
    issued: [usize; Lane::ALL.len()],
    last: [Option<usize>; Lane::ALL.len()],
}

impl Clocks {
    /// Of steps, each with its lane, what it waits for, and whether it may run at the same time as the one before.
    pub fn of<'a>(steps: impl Iterator<Item = (Lane, &'a [usize], bool)>) -> Self {
        let mut clocks = Clocks::default();
        for (lane, waits, beside) in steps {
            clocks.push(lane, waits, beside);
        }
        clocks
    }

    /// Adds a step that needs `needs` finished, and with `beside` not the step before; returns those it must wait for expressly,
    /// the rest being implied.
    pub fn push(&mut self, lane: Lane, needs: &[usize], beside: bool) -> Vec<usize> {
        let lane = Lane::ALL.iter().position(|l| *l == lane).unwrap_or(0);
        let mut clock = match self.last[lane] {
            Some(before) if beside => self.before[before],
            Some(before) => self.after(before),
            None => Default::default(),
        };
        let mut waits = Vec::new();
        let mut sorted = needs.to_vec();
        sorted.sort_unstable();
        // Latest first: waiting for a later step of a lane implies the earlier ones.
        for need in sorted.into_iter().rev() {
            let (l, place) = self.at[need];
            if clock[l] <= place {
                let theirs = self.after(need);
                clock.iter_mut().zip(theirs).for_each(|(mine, their)| *mine = (*mine).max(their));
                waits.push(need);
            }
        }
        waits.reverse();
        self.at.push((lane, self.issued[lane]));
        self.before.push(clock);
        self.last[lane] = Some(self.at.len() - 1);
        self.issued[lane] += 1;
        waits
    }

    fn after(&self, step: usize) -> [usize; Lane::ALL.len()] {
        let (lane, place) = self.at[step];
        let mut clock = self.before[step];
        clock[lane] = clock[lane].max(place + 1);
        clock
    }

    /// Whether `earlier` has finished whenever `later` starts.
    pub fn happens_before(&self, earlier: usize, later: usize) -> bool {
        let (lane, place) = self.at[earlier];
        self.before[later][lane] > place
    }
}
