//! Gives every value its memory: a state's own, or a range of one arena. A range is reused only when its last use on
//! every lane happens before the new writer.

use super::schedule::{Schedule, written_states};
use crate::clocks::Clocks;
use crate::flat::UNIT;
use crate::graph::{Graph, Home, Node, Role, Value, ValueId, settle};
use crate::op::{Op, StateId};
use crate::plan::{ALIGN, Key, Place, Plan, PlanValue, ScratchRange, Step};
use crate::target::{Partial, Target};
use std::collections::HashMap;

/// An arena may be 4.5% larger for memory to be left alone for a while: see [`Target::linger`].
const ROOM: f64 = 1.045;

/// The plan of a graph in the order of its schedule.
pub fn place(graph: &Graph, schedule: &Schedule, name: &str, key: Key, target: &dyn Target) -> Plan {
    place_beside(graph, schedule, name, key, target, 0)
}

/// Places values like [`place`], in an arena that other plans use in turn: this one may use all that they need anyway.
pub fn place_beside(
    graph: &Graph,
    schedule: &Schedule,
    name: &str,
    key: Key,
    target: &dyn Target,
    others: usize,
) -> Plan {
    let within = |linger: usize| placed(graph, schedule, linger, name, key, target);
    let tight = within(0);
    let fits = |plan: &Plan| plan.arena <= others || plan.arena as f64 <= ROOM * tight.arena as f64;
    (1..=target.linger()).rev().map(within).find(fits).unwrap_or(tight)
}

fn placed(
    graph: &Graph,
    schedule: &Schedule,
    linger: usize,
    name: &str,
    key: Key,
    target: &dyn Target,
) -> Plan {
    let clocks = schedule.clocks();
    let step_of: HashMap<usize, usize> = schedule.nodes.iter().enumerate().map(|(s, n)| (*n, s)).collect();
    let mut places = state_places(graph);
    let partial: Vec<Option<Partial>> =
        schedule.nodes.iter().map(|node| target.partial(graph, *node)).collect();
    let mut buffers = Buffers::new(graph, &clocks);
    let steps = schedule.nodes.iter().zip(&partial).enumerate();
    let parts: Vec<_> = steps.map(|(step, (node, partial))| buffers.parts(step, *node, partial)).collect();
    buffers.add_messages(&step_of, &places);
    buffers.add_values(schedule, &step_of, &places);
    buffers.hold_states(&schedule.nodes, &places);
    let needs: Vec<usize> = schedule.nodes.iter().map(|node| target.scratch(graph, *node)).collect();
    let scratches: Vec<_> = needs.iter().enumerate().map(|(s, bytes)| buffers.scratch(s, *bytes)).collect();
    buffers.linger(schedule, linger);
    let arena = buffers.pack();
    for (value, (buffer, offset)) in &buffers.of_value {
        places.insert(*value, Place::Arena(buffers.list[*buffer].offset + offset));
    }
    let range = |(buffer, bytes): (&Option<usize>, usize)| {
        buffer.map(|b| ScratchRange { offset: buffers.list[b].offset, bytes })
    };
    let scratches = scratches.iter().zip(needs).map(range).collect();
    let bytes = partial.iter().map(|partial| partial.as_ref().map_or(0, |partial| partial.bytes));
    let parts = parts.iter().zip(bytes).map(range).collect();
    let places = Places { places, scratches, parts };
    let mut plan = Plan { name: name.to_string(), key, arena, ..assemble(graph, schedule, &places) };
    super::wait(&mut plan);
    leave_gathers(&mut plan);
    plan
}

/// What is gathered from states into states may be under way still when the plan has ended: whoever reads it next waits for it.
fn leave_gathers(plan: &mut Plan) {
    let (values, states) = (&plan.values, &plan.states);
    let is_own = |value: &usize| match values[*value].place {
        Place::State(state) => matches!(states[state.index()].home, Home::Own(_)),
        Place::Arena(_) => false,
    };
    for step in plan.steps.iter_mut().filter(|step| matches!(step.op, Op::AllGather { .. })) {
        step.left = step.inputs.iter().chain(&step.outputs).all(is_own);
    }
}

/// Reads live in their state. So does an assigned value that comes from the read by steps that may each work in place,
/// with all that lies between, if nobody needs what is overwritten any more; and one that is made anew, if the state is not
/// read at all.
pub(super) fn state_places(graph: &Graph) -> HashMap<ValueId, Place> {
    let chains = Chains { graph, producers: graph.producers(), consumers: graph.consumers() };
    let mut places = HashMap::new();
    let mut read = HashMap::new();
    for node in &graph.nodes {
        if let Op::Read { state } = node.op {
            places.insert(node.outputs[0], Place::State(state));
            read.insert(state, node.outputs[0]);
        }
    }
    for node in &graph.nodes {
        let Op::Assign { state } = node.op else { continue };
        let chain = match read.get(&state) {
            Some(old) => chains.between(*old, node.inputs[0]),
            None => chains.made_anew(node.inputs[0]),
        };
        // What is assigned to two states lies in the first.
        if let Some(chain) = chain.filter(|chain| !chain.iter().any(|value| places.contains_key(value))) {
            places.extend(chain.into_iter().map(|value| (value, Place::State(state))));
        }
    }
    places
}

struct Chains<'a> {
    graph: &'a Graph,
    producers: Vec<Option<usize>>,
    consumers: Vec<Vec<usize>>,
}

impl Chains<'_> {
    /// The values from `old`, left out, to `value`, each of which may be written over the one before.
    fn between(&self, old: ValueId, value: ValueId) -> Option<Vec<ValueId>> {
        let mut chain = vec![];
        let mut at = value;
        while at != old {
            chain.push(at);
            at = self
                .overwritten(at)
                .filter(|before| *before == old || self.is_sum_to_complete(*before, at))?;
        }
        Some(chain)
    }

    /// The values up to `value`, each written over the one before, from one that a step makes.
    fn made_anew(&self, value: ValueId) -> Option<Vec<ValueId>> {
        let mut chain = vec![value];
        let mut at = value;
        while let Some(before) = self.overwritten(at).filter(|before| self.is_sum_to_complete(*before, at)) {
            chain.push(before);
            at = before;
        }
        let maker = self.producers[at.index()].map(|maker| &self.graph.nodes[maker].op);
        maker.is_some_and(|op| !matches!(op, Op::Input | Op::Read { .. })).then_some(chain)
    }

    fn is_sum_to_complete(&self, before: ValueId, value: ValueId) -> bool {
        let completes = |maker: usize| self.graph.nodes[maker].op.completes_sums();
        self.producers[value.index()].is_some_and(completes) && !self.graph.outputs.contains(&before)
    }

    /// The value that the maker of `value` may write it over: one that nobody uses later.
    fn overwritten(&self, value: ValueId) -> Option<ValueId> {
        let maker = self.producers[value.index()]?;
        let Node { op, inputs, outputs, .. } = &self.graph.nodes[maker];
        let output = outputs.iter().position(|v| *v == value)?;
        let before = inputs[op.overwritten_by(inputs.len(), output)?];
        let done = self.consumers[before.index()].iter().all(|c| *c <= maker);
        let once = inputs.iter().filter(|v| **v == before).count() == 1;
        (done && once).then_some(before)
    }
}

#[derive(Debug, Default)]
struct Buffer {
    bytes: usize,
    /// The step that first writes it; none for an input, which is there from the start.
    writer: Option<usize>,
    uses: Vec<usize>,
    /// Steps until which it is left alone, beyond its last use.
    lingers: Vec<usize>,
    to_the_end: bool,
    offset: usize,
    /// Flag: the offset was fixed before anything was packed.
    fixed: bool,
    /// Flag: it lies behind all others, and shares memory only with buffers of its kind.
    apart: bool,
}

/// Everything that is placed in the arena. Offsets are found for whole buffers; values that share one by working in
/// place share its index.
struct Buffers<'a> {
    graph: &'a Graph,
    clocks: &'a Clocks,
    list: Vec<Buffer>,
    /// Buffer of each value, with the offset in it.
    of_value: HashMap<ValueId, (usize, usize)>,
}

impl<'a> Buffers<'a> {
    fn new(graph: &'a Graph, clocks: &'a Clocks) -> Self {
        Buffers { graph, clocks, list: Vec::new(), of_value: HashMap::new() }
    }

    /// Memory for the partial sums that a step leaves.
    fn parts(&mut self, step: usize, node: usize, partial: &Option<Partial>) -> Option<usize> {
        let Partial { bytes, results } = partial.as_ref()?;
        let buffer = self.push(*bytes, Some(step));
        // Where a step leaves its parts, others were added up long ago: it waits for nobody who still reads what else was there.
        self.list[buffer].apart = true;
        let outputs = &self.graph.nodes[node].outputs;
        self.of_value.extend(results.iter().map(|(result, offset)| (outputs[*result], (buffer, *offset))));
        Some(buffer)
    }

    /// Memory for messages whose tensors lie in them: one buffer for each, from the step that makes the first of them on.
    fn add_messages(&mut self, step_of: &HashMap<usize, usize>, places: &HashMap<ValueId, Place>) {
        let (graph, producers) = (self.graph, self.graph.producers());
        for (index, node) in graph.nodes.iter().enumerate() {
            let Some(views) = node.op.views() else { continue };
            let gathers = matches!(node.op, Op::AllGather { .. });
            let values = if gathers { &node.outputs } else { &node.inputs };
            if values.iter().any(|value| places.contains_key(value) || self.of_value.contains_key(value)) {
                continue;
            }
            let maker = |value: &ValueId| {
                let first = first_of(graph, producers[value.index()]?, *value, &producers)?;
                step_of.get(&first).copied()
            };
            let writers: Vec<usize> = match gathers {
                true => step_of.get(&index).copied().into_iter().collect(),
                false => values.iter().filter_map(maker).collect(),
            };
            let size = values.first().map_or(0, |value| graph.ty(*value).dtype.bytes());
            let buffer = self.push(views.elements * size, writers.iter().min().copied());
            self.list[buffer].uses.extend(writers);
            let at = values.iter().zip(&views.starts).map(|(value, start)| (*value, (buffer, start * size)));
            self.of_value.extend(at);
        }
    }

    /// Memory for every value that has no place yet.
    fn add_values(
        &mut self,
        schedule: &Schedule,
        step_of: &HashMap<usize, usize>,
        places: &HashMap<ValueId, Place>,
    ) {
        let (graph, consumers) = (self.graph, self.graph.consumers());
        let producers = graph.producers();
        for (index, node) in graph.nodes.iter().enumerate() {
            for value in node.outputs.iter().filter(|v| !places.contains_key(v)) {
                let writer =
                    first_of(graph, index, *value, &producers).and_then(|first| step_of.get(&first).copied());
                let shared = || writer.and_then(|step| self.shareable(node, *value, step));
                let place = self.of_value.get(value).copied().or_else(shared);
                let (buffer, offset) =
                    place.unwrap_or_else(|| (self.push(graph.ty(*value).bytes(), writer), 0));
                let uses = consumers[value.index()].iter().flat_map(|c| schedule.uses(step_of[c]));
                self.list[buffer].uses.extend(uses);
                self.list[buffer].to_the_end |= graph.outputs.contains(value);
                self.of_value.insert(*value, (buffer, offset));
            }
        }
    }

    fn push(&mut self, bytes: usize, writer: Option<usize>) -> usize {
        let bytes = bytes.next_multiple_of(ALIGN);
        let uses = writer.into_iter().collect();
        self.list.push(Buffer { bytes, writer, uses, ..Buffer::default() });
        self.list.len() - 1
    }

    /// Keeps the memory of states that lie in the arena: from the step that first writes one to the end, or, where it is only
    /// read, from the start. Statistics, which the host reads when it likes, are always kept.
    fn hold_states(&mut self, nodes: &[usize], places: &HashMap<ValueId, Place>) {
        let state_of = |value: &ValueId| match places.get(value) {
            Some(Place::State(state)) => Some(*state),
            _ => None,
        };
        // The steps that have to do with each state, and whether the first makes it anew.
        let mut touched: HashMap<StateId, (Vec<usize>, bool)> = HashMap::new();
        let producers = self.graph.producers();
        for (step, index) in nodes.iter().enumerate() {
            let node = &self.graph.nodes[*index];
            let read: Vec<StateId> = node.inputs.iter().filter_map(state_of).collect();
            for state in written_states(node, places) {
                let made = node.outputs.iter().find(|value| state_of(value) == Some(state));
                let first = made.and_then(|value| first_of(self.graph, *index, *value, &producers));
                let first = first.and_then(|first| nodes.binary_search(&first).ok()).unwrap_or(step);
                let steps = [first, step];
                touched.entry(state).or_insert_with(|| (vec![], !read.contains(&state))).0.extend(steps);
            }
            for state in read {
                touched.entry(state).or_default().0.push(step);
            }
        }
        for state in self.graph.outputs.iter().filter_map(state_of) {
            touched.entry(state).or_default();
        }
        for (index, state) in self.graph.states.iter().enumerate() {
            let Home::Arena(offset) = state.home else { continue };
            let always = state.role == Role::Statistic;
            let found = touched.remove(&StateId(index as u32)).or_else(|| always.then(Default::default));
            let Some((uses, anew)) = found else { continue };
            let writer = uses.first().copied().filter(|_| anew && !always);
            // With the padding behind it, which collectives take along.
            let bytes = state.extent().next_multiple_of(UNIT * state.ty.dtype.bytes());
            let (to_the_end, fixed) = (true, true);
            self.list.push(Buffer { bytes, writer, uses, to_the_end, offset, fixed, ..Buffer::default() });
        }
    }

    /// The buffer of the input that `value` may overwrite, if every other use of it is over by then.
    fn shareable(&self, node: &Node, value: ValueId, step: usize) -> Option<(usize, usize)> {
        let output = node.outputs.iter().position(|v| *v == value)?;
        let input = node.op.overwritten_by(node.inputs.len(), output)?;
        let (buffer, offset) = *self.of_value.get(&node.inputs[input])?;
        let old = &self.list[buffer];
        let over = old.uses.iter().all(|s| *s == step || self.clocks.happens_before(*s, step));
        let once = node.inputs.iter().filter(|v| **v == node.inputs[input]).count() == 1;
        let fits = old.bytes == self.graph.ty(value).bytes().next_multiple_of(ALIGN);
        (over && once && fits && offset == 0 && !old.to_the_end).then_some((buffer, 0))
    }

    /// Leaves every buffer alone for `steps` after its last use.
    fn linger(&mut self, schedule: &Schedule, steps: usize) {
        for buffer in self.list.iter_mut().filter(|_| steps > 0) {
            buffer.lingers = buffer.uses.iter().map(|step| schedule.later(*step, steps)).collect();
        }
    }

    fn scratch(&mut self, step: usize, bytes: usize) -> Option<usize> {
        (bytes > 0).then(|| self.push(bytes, Some(step)))
    }

    /// Checks that every use of `a` is over before `b` is first written.
    fn precedes(&self, a: &Buffer, b: &Buffer) -> bool {
        let Some(writer) = b.writer else { return false };
        let before = |step: &usize| self.clocks.happens_before(*step, writer);
        !a.to_the_end && a.uses.iter().chain(&a.lingers).all(before)
    }

    /// Packs buffers, those that lie apart behind the others; returns the arena's size.
    fn pack(&mut self) -> usize {
        let (fixed, free): (Vec<usize>, Vec<usize>) = (0..self.list.len()).partition(|i| self.list[*i].fixed);
        let (apart, free): (Vec<usize>, Vec<usize>) = free.into_iter().partition(|i| self.list[*i].apart);
        let arena = fixed.iter().map(|i| self.list[*i].offset + self.list[*i].bytes).max().unwrap_or(0);
        let arena = arena.max(self.pack_from(0, fixed, free));
        arena.max(self.pack_from(arena, vec![], apart))
    }

    /// Largest first, each at the lowest offset from `base` on where no buffer alive at the same time lies. Returns the end of all.
    fn pack_from(&mut self, base: usize, mut placed: Vec<usize>, mut order: Vec<usize>) -> usize {
        order.sort_by_key(|i| (std::cmp::Reverse(self.list[*i].bytes), *i));
        let mut arena = base;
        for index in order {
            let buffer = &self.list[index];
            let mut taken: Vec<(usize, usize)> = placed
                .iter()
                .map(|p| &self.list[*p])
                .filter(|other| !self.precedes(buffer, other) && !self.precedes(other, buffer))
                .map(|other| (other.offset, other.offset + other.bytes))
                .collect();
            taken.sort_unstable();
            let mut offset = base;
            for (start, end) in taken {
                if offset + buffer.bytes <= start {
                    break;
                }
                offset = offset.max(end);
            }
            arena = arena.max(offset + buffer.bytes);
            self.list[index].offset = offset;
            placed.push(index);
        }
        arena
    }
}

/// The node from which on the memory of a node's result is kept for it: of a sum of parts, the one that leaves the parts. Else
/// whoever had that memory before would hold up the sum.
fn first_of(graph: &Graph, node: usize, result: ValueId, producers: &[Option<usize>]) -> Option<usize> {
    let Node { op: Op::AddUp { .. }, inputs, outputs, .. } = &graph.nodes[node] else { return Some(node) };
    let parts = inputs[outputs.iter().position(|value| *value == result)?];
    producers[parts.index()]
}

/// Places of values, and of steps' scratch and partial sums.
struct Places {
    places: HashMap<ValueId, Place>,
    scratches: Vec<Option<ScratchRange>>,
    parts: Vec<Option<ScratchRange>>,
}

/// Renumbers values into a plan.
fn assemble(graph: &Graph, schedule: &Schedule, places: &Places) -> Plan {
    let mut plan = Plan { states: graph.states.clone(), mesh: graph.mesh, ..Plan::default() };
    settle(&mut plan.states);
    let mut numbers: HashMap<ValueId, usize> = HashMap::new();
    let mut number = |plan: &mut Plan, value: ValueId| {
        *numbers.entry(value).or_insert_with(|| {
            let Value { name, ty } = graph.values[value.index()].clone();
            plan.values.push(PlanValue { name, ty, place: places.places[&value] });
            plan.values.len() - 1
        })
    };
    for node in graph.nodes.iter().filter(|n| n.op == Op::Input) {
        let value = number(&mut plan, node.outputs[0]);
        plan.inputs.push(value);
    }
    for (step, index) in schedule.nodes.iter().enumerate() {
        let Node { op, inputs, outputs, layer, phase } = graph.nodes[*index].clone();
        let inputs = inputs.into_iter().map(|v| number(&mut plan, v)).collect();
        let outputs = outputs.into_iter().map(|v| number(&mut plan, v)).collect();
        let (scratch, parts) = (places.scratches[step], places.parts[step]);
        let joined = schedule.joined[step];
        let step = Step::new(op, inputs, outputs, schedule.lanes[step], layer, phase);
        plan.steps.push(Step { joined, scratch, parts, ..step });
    }
    for value in &graph.outputs {
        let value = number(&mut plan, *value);
        plan.outputs.push(value);
    }
    plan
}
