//! Contents of memory from step to step: whether what a step reads is there, and what it writes over is no longer used.

use crate::clocks::Clocks;
use crate::graph::{Held, Home};
use crate::op::{Lane, Op, StateId};
use crate::plan::{Place, Plan, PlanValue, Step};
use crate::touched::MemoryKind;
use std::collections::HashSet;

/// What is wrong, if anything is.
pub(super) type Checked = Result<(), String>;

/// Bytes of a memory.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Region {
    memory: MemoryKind,
    start: usize,
    end: usize,
}

impl Region {
    fn arena(start: usize, bytes: usize) -> Self {
        Region { memory: MemoryKind::Arena, start, end: start + bytes }
    }

    fn overlaps(self, other: Region) -> bool {
        self.memory == other.memory && self.start < other.end && other.start < self.end
    }
}

/// The content of a region: which value it is, who wrote it, and which steps have touched it.
struct Record {
    region: Region,
    value: Option<usize>,
    /// None for what was there before the plan: inputs and states.
    writer: Option<usize>,
    touched: Vec<usize>,
}

impl Record {
    fn found(region: Region, value: usize) -> Self {
        Record { region, value: Some(value), writer: None, touched: vec![] }
    }

    /// Records that remain after a write to `region`: all, or no value but the bytes on either side, which the same
    /// steps may still be using.
    fn outside(self, region: Region) -> Vec<Record> {
        let Record { region: own, writer, touched, .. } = &self;
        let Region { memory, start, end } = *own;
        if !own.overlaps(region) {
            return vec![self];
        }
        let sides = [(start, region.start.min(end)), (region.end.max(start), end)];
        let side = |(start, end)| {
            let (writer, touched) = (*writer, touched.clone());
            Record { region: Region { memory, start, end }, value: None, writer, touched }
        };
        sides.into_iter().filter(|(start, end)| start < end).map(side).collect()
    }
}

/// What lies in every memory while steps are gone through in their order.
pub(super) struct Contents<'a> {
    plan: &'a Plan,
    clocks: Clocks,
    /// Contents not yet overwritten.
    live: Vec<Record>,
    pub(super) written: Vec<StateId>,
    /// Flag: the step at hand may write over what it sends.
    within: bool,
}

impl<'a> Contents<'a> {
    pub(super) fn new(plan: &'a Plan) -> Self {
        Contents { plan, clocks: plan.clocks(), live: vec![], written: vec![], within: false }
    }

    /// An input, which the host writes before the plan runs.
    pub(super) fn fill(&mut self, value: usize) -> Checked {
        let region = self.region(value);
        aligned(self.plan, value)?;
        self.fits(region)?;
        if let Some(other) = self.live.iter().find(|r| r.region.overlaps(region)).and_then(|r| r.value) {
            return Err(format!("lies over {}", self.plan.values[other].name));
        }
        self.live.push(Record::found(region, value));
        Ok(())
    }

    fn fits(&self, region: Region) -> Checked {
        if region.memory == MemoryKind::Arena && region.end > self.plan.arena {
            return Err(format!("reaches byte {} of an arena of {}", region.end, self.plan.arena));
        }
        Ok(())
    }

    fn region(&self, value: usize) -> Region {
        let value = &self.plan.values[value];
        match value.place {
            Place::Arena(start) => Region::arena(start, value.ty.bytes()),
            Place::State(state) => self.region_of(state),
        }
    }

    fn region_of(&self, state: StateId) -> Region {
        let state = &self.plan.states[state.index()];
        let (memory, start) = match state.home {
            Home::Arena(start) => (MemoryKind::Arena, start),
            Home::Own(start) => (MemoryKind::Own, start),
            Home::Host(start) => (MemoryKind::Host, start),
            // Refused before anything is looked at.
            Home::Nowhere => (MemoryKind::Own, 0),
        };
        Region { memory, start, end: start + state.extent() }
    }

    fn state(&self, value: usize) -> Option<StateId> {
        match self.plan.values[value].place {
            Place::State(state) => Some(state),
            Place::Arena(_) => None,
        }
    }

    /// The states in the arena that the plan reads as it finds them.
    pub(super) fn find_states(&mut self) {
        let made: HashSet<usize> = self.plan.steps.iter().flat_map(|step| &step.outputs).copied().collect();
        for value in (0..self.plan.values.len()).filter(|value| !made.contains(value)) {
            let region = self.state(value).map(|state| self.region_of(state));
            if let Some(region) = region.filter(|region| region.memory == MemoryKind::Arena) {
                self.live.push(Record::found(region, value));
            }
        }
    }

    /// Checks that a state still holds what the plan has written to it.
    pub(super) fn holds(&self, state: StateId) -> bool {
        let of = |value: usize| self.state(value) == Some(state);
        let whole = |record: &&Record| record.region == self.region_of(state);
        self.live.iter().filter(whole).any(|record| record.value.is_none_or(of))
    }

    /// Checks whether a step has written some of these bytes.
    fn is_written(&self, region: Region) -> bool {
        self.live.iter().any(|record| record.writer.is_some() && record.region.overlaps(region))
    }

    pub(super) fn record_of(&self, value: usize) -> Option<usize> {
        self.live.iter().position(|r| r.value == Some(value))
    }

    pub(super) fn read(&mut self, step: usize, node: &Step) -> Checked {
        for value in &node.inputs {
            let name = &self.plan.values[*value].name;
            let record = match (self.record_of(*value), self.region(*value)) {
                (Some(record), _) => record,
                // A state not written so far holds what the plan found; one in the arena was there from the start.
                (None, region) if region.memory != MemoryKind::Arena && !self.is_written(region) => {
                    self.live.push(Record::found(region, *value));
                    self.live.len() - 1
                }
                (None, _) => return Err(format!("{name} is not there, or overwritten by now")),
            };
            let record = &mut self.live[record];
            if let Some(writer) = record.writer
                && !self.clocks.happens_before(writer, step)
            {
                return Err(format!("{name} may not be written yet: step {writer} is not waited for"));
            }
            record.touched.push(step);
        }
        if let Op::AddUp { .. } = node.op {
            self.read_parts(step, node);
        }
        // Padding between tensors is sent along.
        if let Some(region) = self.message(node).filter(|_| matches!(node.op, Op::ReduceScatter { .. })) {
            self.live.push(Record { region, value: None, writer: None, touched: vec![step] });
        }
        Ok(())
    }

    /// The bytes of a message, with the padding between its tensors.
    fn message(&self, node: &Step) -> Option<Region> {
        let (first, views) = self.plan.message(node)?;
        let (region, size) = (self.region(first), self.plan.values[first].ty.dtype.bytes());
        let start = region.start.saturating_sub(views.around(size).0);
        Some(Region { start, end: start + views.elements * size, ..region })
    }

    /// Checks whether a collective works in a buffer that is whole on every rank: what a rank sends or receives is its part of it, or
    /// what the others' parts come from.
    fn works_within(&self, node: &Step) -> bool {
        let part = |value: &usize| {
            let state = self.state(*value)?;
            let is_part = matches!(self.plan.states[state.index()].held, Held::Within(_));
            is_part.then(|| self.region_of(state))
        };
        match (&node.op, &node.inputs[..], &node.outputs[..]) {
            (Op::ReduceScatter { .. }, _, [out]) => part(out).is_some_and(|p| self.message(node) == Some(p)),
            (Op::AllGather { views: None, .. }, [from], [out]) => part(from) == Some(self.region(*out)),
            _ => false,
        }
    }

    /// All the memory of parts that a step adds up, of which the values that it names are the first.
    fn read_parts(&mut self, step: usize, node: &Step) {
        let makers = self.plan.steps[..step].iter();
        let parts = makers.filter(|maker| node.inputs.iter().any(|value| maker.outputs.contains(value)));
        for range in parts.filter_map(|maker| maker.parts) {
            let region = Region::arena(range.offset, range.bytes);
            let records = self.live.iter_mut().filter(|record| record.region.overlaps(region));
            records.for_each(|record| record.touched.push(step));
        }
    }

    pub(super) fn write(&mut self, step: usize, node: &Step) -> Checked {
        let parts = node.parts.map(|p| Region::arena(p.offset, p.bytes));
        if let Some(parts) = parts {
            self.overwrite(step, parts, None, None)?;
            // Its results may lie there.
            self.live.last_mut().into_iter().for_each(|record| record.touched.clear());
        }
        self.within = self.works_within(node);
        if let Some(message) = self.message(node).filter(|_| matches!(node.op, Op::AllGather { .. })) {
            self.overwrite(step, message, None, None)?;
            self.live.last_mut().into_iter().for_each(|record| record.touched.clear());
        }
        for (o, value) in node.outputs.iter().enumerate() {
            let over = node.op.overwritten_by(node.inputs.len(), o).map(|input| node.inputs[input]);
            let once = |v: &usize| node.inputs.iter().filter(|i| *i == v).count() == 1;
            let over = over.filter(once);
            if let Some(state) = self.state(*value) {
                self.write_state(step, state, over)?;
            }
            self.overwrite(step, self.region(*value), Some(*value), over)?;
        }
        // Between values of one message lies padding, which comes back as anything.
        if node.lane == Lane::Comm {
            let regions: Vec<Region> = node.outputs.iter().map(|value| self.region(*value)).collect();
            for pair in regions.windows(2).filter(|pair| pair[0].end < pair[1].start) {
                let padding = Region { start: pair[0].end, end: pair[1].start, ..pair[0] };
                self.overwrite(step, padding, None, None)?;
            }
        }
        let left = self.live.iter_mut().filter(|r| parts.is_some_and(|parts| r.region.overlaps(parts)));
        left.for_each(|record| record.touched.push(step));
        if let Some(state) = assigned(node) {
            self.write_state(step, state, None)?;
            self.overwrite(step, self.region_of(state), None, None)?;
        }
        if let Some(scratch) = node.scratch {
            let region = Region::arena(scratch.offset, scratch.bytes);
            self.overwrite(step, region, None, None)?;
        }
        Ok(())
    }

    /// A state is written once in a plan, but for a sum that a second step completes in place.
    fn write_state(&mut self, step: usize, state: StateId, over: Option<usize>) -> Checked {
        let held = over.filter(|v| self.record_of(*v).is_some()).and_then(|v| self.state(v));
        let completed = self.plan.steps[step].op.completes_sums() && held == Some(state);
        if !completed && self.written.contains(&state) {
            return Err(format!("{} is written a second time", self.plan.states[state.index()].name));
        }
        // A buffer and the rank's part of it are written in turn: what is written later is what they hold.
        let is_part = |state: StateId| matches!(self.plan.states[state.index()].held, Held::Within(_));
        let (region, part) = (self.region_of(state), is_part(state));
        let in_turn = |other: StateId| {
            other != state && (part || is_part(other)) && self.region_of(other).overlaps(region)
        };
        let kept = self.written.iter().copied().filter(|other| !in_turn(*other)).collect();
        self.written = kept;
        self.written.push(state);
        Ok(())
    }

    fn overwrite(
        &mut self,
        step: usize,
        region: Region,
        value: Option<usize>,
        over: Option<usize>,
    ) -> Checked {
        self.fits(region)?;
        for record in self.live.iter().filter(|r| r.region.overlaps(region)) {
            let in_place = record.value.is_some() && record.value == over && record.region == region;
            let mut unfinished = record.touched.iter().filter(|s| !self.clocks.happens_before(**s, step));
            if let Some(other) = unfinished.find(|s| **s != step || !(in_place || self.within)) {
                let what = record.value.map_or("memory", |v| &self.plan.values[v].name);
                return Err(format!("writes over {what}, which step {other} may still use"));
            }
        }
        self.live = std::mem::take(&mut self.live).into_iter().flat_map(|r| r.outside(region)).collect();
        self.live.push(Record { region, value, writer: Some(step), touched: vec![step] });
        Ok(())
    }
}

/// The state that an assignment writes.
pub(super) fn assigned(step: &Step) -> Option<StateId> {
    match step.op {
        Op::Assign { state } => Some(state),
        _ => None,
    }
}

/// Checks that a value lies where its type may lie.
pub(super) fn aligned(plan: &Plan, value: usize) -> Checked {
    let PlanValue { name, ty, place } = &plan.values[value];
    match place {
        Place::Arena(offset) if !offset.is_multiple_of(ty.dtype.bytes()) => {
            Err(format!("{name} is {ty}, but lies at {offset}"))
        }
        _ => Ok(()),
    }
}
