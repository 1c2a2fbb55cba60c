//! Checks that a plan, however it was made, can be run: types, order, lanes and memory.
//!
//! The memory rule is checked here on its own terms, not by repeating `place`: two steps that touch the same bytes,
//! one of them writing, must be ordered by their lanes and waits.

use crate::op::{Lane, Op, StateId};
use crate::passes::Clocks;
use crate::plan::{Place, Plan, Step};
use crate::rules::shape::infer;
use crate::types::Type;

#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PlanError {
    #[error("step {step} ({op}, {layer}): {why}")]
    Step { step: usize, op: String, layer: String, why: String },
    #[error("output {0} is overwritten before the plan ends")]
    LostOutput(String),
}

type Checked = Result<(), String>;

impl Plan {
    pub fn check(&self) -> Result<(), PlanError> {
        let mut memory = Memory::new(self);
        for (i, step) in self.steps.iter().enumerate() {
            let checked = check_step(self, i, step)
                .and_then(|()| memory.read(i, step))
                .and_then(|()| memory.write(i, step));
            checked.map_err(|why| {
                let (op, layer) = (step.op.name(), step.layer.clone());
                PlanError::Step { step: i, op, layer, why }
            })?;
        }
        match self.outputs.iter().find(|v| memory.record_of(**v).is_none()) {
            Some(lost) => Err(PlanError::LostOutput(self.values[*lost].name.clone())),
            None => Ok(()),
        }
    }

    /// The order that lanes and waits enforce.
    pub fn clocks(&self) -> Clocks {
        let lanes: Vec<Lane> = self.steps.iter().map(|s| s.lane).collect();
        let waits: Vec<Vec<usize>> = self.steps.iter().map(|s| s.waits.clone()).collect();
        Clocks::of(&lanes, &waits)
    }
}

fn check_step(plan: &Plan, index: usize, step: &Step) -> Checked {
    if let Some(wait) = step.waits.iter().find(|w| **w >= index) {
        return Err(format!("waits for step {wait}, which comes later"));
    }
    if step.op.lane() != step.lane {
        return Err(format!("runs on the {} lane", step.op.lane().name()));
    }
    let ty = |v: &usize| &plan.values[*v].ty;
    let inferred = infer(&step.op, &step.inputs.iter().map(ty).collect::<Vec<_>>())?;
    let outputs: Vec<Type> = step.outputs.iter().map(|v| ty(v).clone()).collect();
    if inferred != outputs {
        return Err(format!("gives {}, not {}", list(&inferred), list(&outputs)));
    }
    if let Op::Assign { state } = step.op {
        let (is, needs) = (ty(&step.inputs[0]), &plan.states[state.index()].ty);
        if is != needs {
            return Err(format!("writes {is} to a state of {needs}"));
        }
    }
    Ok(())
}

fn list(types: &[Type]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Region {
    Arena { start: usize, end: usize },
    State(StateId),
}

impl Region {
    fn overlaps(self, other: Region) -> bool {
        match (self, other) {
            (Region::Arena { start, end }, Region::Arena { start: s, end: e }) => start < e && s < end,
            (Region::State(a), Region::State(b)) => a == b,
            _ => false,
        }
    }
}

/// The content of a region: which value it is, and which steps have touched it.
struct Record {
    region: Region,
    value: Option<usize>,
    touched: Vec<usize>,
}

struct Memory<'a> {
    plan: &'a Plan,
    clocks: Clocks,
    /// Contents not yet overwritten.
    live: Vec<Record>,
    written: Vec<StateId>,
}

impl<'a> Memory<'a> {
    fn new(plan: &'a Plan) -> Self {
        let mut memory = Memory { plan, clocks: plan.clocks(), live: vec![], written: vec![] };
        for value in &plan.inputs {
            let region = memory.region(*value);
            memory.live.push(Record { region, value: Some(*value), touched: vec![] });
        }
        memory
    }

    fn region(&self, value: usize) -> Region {
        let value = &self.plan.values[value];
        match value.place {
            Place::Arena(start) => Region::Arena { start, end: start + value.ty.bytes() },
            Place::State(state) => Region::State(state),
        }
    }

    fn record_of(&self, value: usize) -> Option<usize> {
        self.live.iter().position(|r| r.value == Some(value))
    }

    fn read(&mut self, step: usize, node: &Step) -> Checked {
        for value in &node.inputs {
            let name = &self.plan.values[*value].name;
            let record = match (self.record_of(*value), self.region(*value)) {
                (Some(record), _) => record,
                // A state not written so far holds what the plan found.
                (None, Region::State(state)) if !self.written.contains(&state) => {
                    self.live.push(Record {
                        region: Region::State(state),
                        value: Some(*value),
                        touched: vec![],
                    });
                    self.live.len() - 1
                }
                (None, _) => return Err(format!("{name} is not there, or overwritten by now")),
            };
            // The first to touch a record is its writer.
            let record = &mut self.live[record];
            if let Some(writer) = record.touched.first()
                && !self.clocks.happens_before(*writer, step)
            {
                return Err(format!("{name} may not be written yet: step {writer} is not waited for"));
            }
            record.touched.push(step);
        }
        Ok(())
    }

    fn write(&mut self, step: usize, node: &Step) -> Checked {
        for (o, value) in node.outputs.iter().enumerate() {
            let over = node.op.in_place().iter().find(|p| p.1 == o).map(|p| node.inputs[p.0]);
            self.overwrite(step, self.region(*value), Some(*value), over)?;
        }
        if let Op::Assign { state } = node.op {
            self.overwrite(step, Region::State(state), None, None)?;
        }
        if let Some(scratch) = node.scratch {
            let region = Region::Arena { start: scratch.offset, end: scratch.offset + scratch.bytes };
            self.overwrite(step, region, None, None)?;
        }
        Ok(())
    }

    fn overwrite(
        &mut self,
        step: usize,
        region: Region,
        value: Option<usize>,
        over: Option<usize>,
    ) -> Checked {
        match region {
            Region::Arena { end, .. } if end > self.plan.arena => {
                return Err(format!("writes to byte {end} of an arena of {}", self.plan.arena));
            }
            Region::State(state) if self.written.contains(&state) => {
                return Err(format!("{} is written a second time", self.plan.states[state.index()].name));
            }
            Region::State(state) => self.written.push(state),
            Region::Arena { .. } => {}
        }
        for record in self.live.iter().filter(|r| r.region.overlaps(region)) {
            let in_place = record.value.is_some() && record.value == over;
            let mut unfinished = record.touched.iter().filter(|s| !self.clocks.happens_before(**s, step));
            if let Some(other) = unfinished.find(|s| **s != step || !in_place) {
                let name = record.value.map_or("scratch", |v| &self.plan.values[v].name);
                return Err(format!("writes over {name}, which step {other} may still use"));
            }
        }
        self.live.retain(|r| !r.region.overlaps(region));
        self.live.push(Record { region, value, touched: vec![step] });
        Ok(())
    }
}
