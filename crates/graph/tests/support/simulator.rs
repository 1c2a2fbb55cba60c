//! Runs a plan without arithmetic: lanes side by side, each step taking as long as it is told to, memory as byte ranges
//! that know what they hold. Knows nothing of clocks or liveness, so that it judges `place` and `check` from outside.

use graph::Home;
use graph::op::{Lane, Op, StateId};
use graph::plan::{Place, Plan, Step};
use std::collections::HashSet;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Range {
    Arena(usize, usize),
    State(StateId),
}

impl Range {
    fn meets(self, other: Range) -> bool {
        match (self, other) {
            (Range::Arena(start, end), Range::Arena(s, e)) => start < e && s < end,
            (a, b) => a == b,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Value(usize),
    /// What a state held before the plan, or was assigned by it.
    Found(StateId),
    Assigned(StateId),
    /// Partial sums that a step left, behind the first ones, which are values.
    Left(usize),
    /// Half-written by a step.
    Busy(usize),
}

/// How a run went, if nothing was read or written at the wrong time.
#[derive(Debug, Default)]
pub struct Run {
    /// Steps that began while another lane was busy.
    pub side_by_side: usize,
}

/// Runs `plan` with the durations given, or says which step met which.
pub fn simulate(plan: &Plan, durations: &[u64]) -> Result<Run, String> {
    let mut machine = Machine::new(plan)?;
    let mut queues: Vec<Vec<usize>> = Lane::ALL.iter().map(|lane| queue(plan, *lane)).collect();
    let mut running: Vec<Option<(u64, usize)>> = vec![None; queues.len()];
    let mut finished = HashSet::new();
    let mut run = Run::default();
    let mut now = 0;
    while finished.len() < plan.steps.len() {
        for lane in 0..queues.len() {
            let Some(step) = queues[lane].last().copied().filter(|_| running[lane].is_none()) else {
                continue;
            };
            if plan.steps[step].waits.iter().all(|w| finished.contains(w)) {
                machine.start(step)?;
                run.side_by_side += usize::from(running.iter().any(Option::is_some));
                running[lane] = Some((now + durations[step].max(1), step));
                queues[lane].pop();
            }
        }
        now = running.iter().flatten().map(|(end, _)| *end).min().ok_or("every lane waits for another")?;
        for lane in &mut running {
            if let Some((_, step)) = lane.filter(|(end, _)| *end == now) {
                machine.finish(step)?;
                finished.insert(step);
                *lane = None;
            }
        }
    }
    machine.outputs_are_there()?;
    Ok(run)
}

/// The steps of a lane, the next one last.
fn queue(plan: &Plan, lane: Lane) -> Vec<usize> {
    (0..plan.steps.len()).rev().filter(|s| plan.steps[*s].lane == lane).collect()
}

struct Machine<'a> {
    plan: &'a Plan,
    /// Values that some step writes; the others are inputs or states as found.
    made: HashSet<usize>,
    memory: Vec<(Range, Content)>,
    running: Vec<usize>,
}

impl<'a> Machine<'a> {
    fn new(plan: &'a Plan) -> Result<Self, String> {
        let made = plan.steps.iter().flat_map(|s| s.outputs.iter().copied()).collect();
        let mut machine = Machine { plan, made, memory: vec![], running: vec![] };
        for (i, state) in plan.states.iter().enumerate() {
            let id = StateId(i as u32);
            let found = |v: usize| plan.values[v].place == Place::State(id) && !machine.made.contains(&v);
            let in_arena = matches!(state.home, Home::Arena(_));
            if !in_arena || (0..plan.values.len()).any(found) {
                machine.memory.push((machine.range_of(id), Content::Found(id)));
            }
        }
        for value in &plan.inputs {
            let range = machine.range(*value);
            if machine.outside(range) || machine.memory.iter().any(|(held, _)| held.meets(range)) {
                return Err(format!("input {} has no room", plan.values[*value].name));
            }
            machine.memory.push((range, Content::Value(*value)));
        }
        Ok(machine)
    }

    fn outside(&self, range: Range) -> bool {
        matches!(range, Range::Arena(_, end) if end > self.plan.arena)
    }

    fn range(&self, value: usize) -> Range {
        match self.plan.values[value].place {
            Place::Arena(start) => Range::Arena(start, start + self.plan.values[value].ty.bytes()),
            Place::State(state) => self.range_of(state),
        }
    }

    fn range_of(&self, id: StateId) -> Range {
        let state = &self.plan.states[id.index()];
        match state.home {
            Home::Arena(start) => Range::Arena(start, start + state.ty.bytes()),
            _ => Range::State(id),
        }
    }

    fn content(&self, value: usize) -> Content {
        match self.plan.values[value].place {
            Place::State(state) if !self.made.contains(&value) => Content::Found(state),
            _ => Content::Value(value),
        }
    }

    fn holds(&self, range: Range, content: Content) -> bool {
        self.memory.contains(&(range, content))
    }

    fn reads(&self, step: &Step) -> Vec<Range> {
        let parts = self.added_up(step).into_iter().map(|maker| self.left(&self.plan.steps[maker]));
        step.inputs.iter().map(|v| self.range(*v)).chain(parts.flatten()).collect()
    }

    /// The steps whose partial sums a step adds up.
    fn added_up(&self, step: &Step) -> Vec<usize> {
        let Op::AddUp { .. } = step.op else { return vec![] };
        let is = |maker: &usize| step.inputs.iter().any(|v| self.plan.steps[*maker].outputs.contains(v));
        (0..self.plan.steps.len()).filter(is).collect()
    }

    /// Partial sums behind the first ones.
    fn left(&self, step: &Step) -> Option<Range> {
        let parts = step.parts?;
        let end = parts.offset + parts.bytes;
        let within = |v: &usize| match self.range(*v) {
            Range::Arena(start, last) if start >= parts.offset && last <= end => Some(last),
            _ => None,
        };
        let start = step.outputs.iter().filter_map(within).max().unwrap_or(parts.offset);
        Some(Range::Arena(start, end))
    }

    /// What a step writes, and what it leaves there; nothing for scratch.
    fn writes(&self, step: &Step) -> Vec<(Range, Option<Content>)> {
        let mut list: Vec<_> =
            step.outputs.iter().map(|v| (self.range(*v), Some(Content::Value(*v)))).collect();
        if let Op::Assign { state } = step.op {
            list.push((self.range_of(state), Some(Content::Assigned(state))));
        }
        list.extend(step.scratch.map(|s| (Range::Arena(s.offset, s.offset + s.bytes), None)));
        let number = self.plan.steps.iter().position(|other| std::ptr::eq(other, step)).unwrap_or(0);
        list.extend(self.left(step).map(|range| (range, Some(Content::Left(number)))));
        list
    }

    /// The inputs that the step itself overwrites, as its op allows.
    fn overwritten(&self, step: &Step) -> Vec<usize> {
        let pairs = step.op.in_place(step.inputs.len());
        pairs
            .filter(|(i, o)| self.range(step.inputs[*i]) == self.range(step.outputs[*o]))
            .map(|(i, _)| i)
            .collect()
    }

    fn start(&mut self, index: usize) -> Result<(), String> {
        let plan = self.plan;
        let step = &plan.steps[index];
        self.inputs_are_there(index, &[])?;
        let (reads, writes, in_place) = (self.reads(step), self.writes(step), self.overwritten(step));
        for (w, (range, _)) in writes.iter().enumerate() {
            if self.outside(*range) {
                return Err(format!("step {index} leaves the arena"));
            }
            let over_input =
                |i: usize| reads[i].meets(*range) && !(in_place.contains(&i) && reads[i] == *range);
            let over_output = writes[..w].iter().any(|(other, _)| other.meets(*range));
            if (0..reads.len()).any(over_input) || over_output {
                return Err(format!("step {index} writes over its own operands"));
            }
            for other in &self.running {
                let (reads, writes) = (self.reads(&plan.steps[*other]), self.writes(&plan.steps[*other]));
                if reads.iter().chain(writes.iter().map(|(w, _)| w)).any(|r| r.meets(*range)) {
                    return Err(format!("step {index} writes what step {other} is using"));
                }
            }
        }
        for (range, _) in writes {
            self.memory.retain(|(held, _)| !held.meets(range));
            self.memory.push((range, Content::Busy(index)));
        }
        self.running.push(index);
        Ok(())
    }

    fn finish(&mut self, index: usize) -> Result<(), String> {
        let plan = self.plan;
        let step = &plan.steps[index];
        self.inputs_are_there(index, &self.overwritten(step))?;
        for (range, content) in self.writes(step) {
            let busy = self.memory.iter().position(|held| *held == (range, Content::Busy(index)));
            let Some(busy) = busy else {
                return Err(format!("what step {index} wrote was overwritten while it ran"));
            };
            self.memory.swap_remove(busy);
            self.memory.extend(content.map(|content| (range, content)));
        }
        self.running.retain(|s| *s != index);
        Ok(())
    }

    fn inputs_are_there(&self, index: usize, but: &[usize]) -> Result<(), String> {
        let inputs = &self.plan.steps[index].inputs;
        let there = |i: &usize| self.holds(self.range(inputs[*i]), self.content(inputs[*i]));
        if let Some(i) = (0..inputs.len()).filter(|i| !but.contains(i)).find(|i| !there(i)) {
            return Err(format!("step {index} reads {}, not there", self.plan.values[inputs[i]].name));
        }
        let left = |maker: &usize| self.left(&self.plan.steps[*maker]);
        let lost = |maker: &usize| left(maker).is_some_and(|range| !self.holds(range, Content::Left(*maker)));
        match self.added_up(&self.plan.steps[index]).iter().find(|maker| lost(maker)) {
            Some(maker) => Err(format!("step {index} adds up what step {maker} left, not there")),
            None => Ok(()),
        }
    }

    /// The outputs, and every state that was written.
    fn outputs_are_there(&self) -> Result<(), String> {
        for step in &self.plan.steps {
            let made = step.outputs.iter().filter_map(|v| match self.plan.values[*v].place {
                Place::State(state) => Some(state),
                Place::Arena(_) => None,
            });
            let assigned = match step.op {
                Op::Assign { state } => Some(state),
                _ => None,
            };
            for state in made.chain(assigned) {
                let is_its = |content: &Content| match content {
                    Content::Value(v) => self.plan.values[*v].place == Place::State(state),
                    content => *content == Content::Assigned(state),
                };
                if !self.memory.iter().any(|(range, held)| *range == self.range_of(state) && is_its(held)) {
                    return Err(format!("state {} is lost", self.plan.states[state.index()].name));
                }
            }
        }
        let lost = self.plan.outputs.iter().find(|v| !self.holds(self.range(**v), self.content(**v)));
        lost.map_or(Ok(()), |v| Err(format!("output {} is lost", self.plan.values[*v].name)))
    }
}
