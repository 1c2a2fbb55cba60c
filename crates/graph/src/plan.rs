//! A plan: the flat list of steps a device runs, with every buffer placed.

pub use crate::graph::ALIGN;
use crate::graph::{Phase, State};
use crate::mesh::{Group, Mesh};
use crate::op::{Lane, Op, StateId};
use crate::rules::cost::{Cost, cost};
use crate::types::Type;
use serde::Serialize;
use std::ops::Range;

/// The sizes a plan was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Key {
    /// Samples of a micro-batch.
    pub batch: usize,
    /// Height of the images.
    pub height: usize,
    /// Width of the images.
    pub width: usize,
}

/// Place of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// Byte offset in the arena.
    Arena(usize),
    /// The state's own memory.
    State(StateId),
}

/// A value with its place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanValue {
    /// Name, unique in the plan.
    pub name: String,
    /// Element type and shape.
    #[serde(flatten)]
    pub ty: Type,
    /// Place in memory.
    pub place: Place,
}

/// Working memory of one step, in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScratchRange {
    /// First byte, in the arena.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// An op with its operands, queue and memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Step {
    /// The op.
    #[serde(flatten)]
    pub op: Op,
    /// Operands, as indices into [`Plan::values`].
    pub inputs: Vec<usize>,
    /// Results, as indices into [`Plan::values`].
    pub outputs: Vec<usize>,
    /// Queue that it runs on.
    pub lane: Lane,
    /// Flag: one launch makes it and the step before it, which is of the same lane.
    pub joined: bool,
    /// Earlier steps of other lanes that must have finished.
    pub waits: Vec<usize>,
    /// Flag: it may still run when the plan has ended: a collective or a copy between states. Steps of later plans wait
    /// for it where they touch what it does.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// States that a step of an earlier plan may still be working on: that step must have finished.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<StateId>,
    /// Layer that it belongs to, for messages and accounts.
    pub layer: String,
    /// Part of the training step that it belongs to.
    pub phase: Phase,
    /// Working memory.
    pub scratch: Option<ScratchRange>,
    /// Memory for partial sums of some of its results: their place is that of the first part, and an [`Op::AddUp`]
    /// makes the sums. A device that makes whole sums puts them there and leaves the rest alone.
    pub parts: Option<ScratchRange>,
}

impl Step {
    /// A step that waits for nothing and has no memory of its own.
    pub fn new(
        op: Op,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
        lane: Lane,
        layer: String,
        phase: Phase,
    ) -> Self {
        let (waits, after) = (vec![], vec![]);
        let (joined, left, scratch, parts) = (false, false, None, None);
        Step { op, inputs, outputs, lane, joined, waits, left, after, layer, phase, scratch, parts }
    }
}

/// The flat list of steps that a device runs, with every buffer placed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Plan {
    /// Name: `last`, `update`, …
    pub name: String,
    /// Sizes that it was made for.
    pub key: Key,
    /// The ranks that run it together.
    pub mesh: Mesh,
    /// Bytes of the arena: the peak memory of a run beside the states.
    pub arena: usize,
    /// Table of states, the same for all plans of a program.
    pub states: Vec<State>,
    /// Table of values.
    pub values: Vec<PlanValue>,
    /// Values the host fills before a run.
    pub inputs: Vec<usize>,
    /// Values the host may read after it.
    pub outputs: Vec<usize>,
    /// Steps, in the order in which they are issued.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Cost of a step.
    pub fn cost_of(&self, step: &Step) -> Cost {
        let types = |list: &[usize]| list.iter().map(|v| &self.values[*v].ty).collect::<Vec<_>>();
        let mut cost = cost(&step.op, &types(&step.inputs), &types(&step.outputs));
        if let Op::AddUp { .. } = step.op {
            let is_maker = |maker: &&Step| step.inputs.iter().any(|value| maker.outputs.contains(value));
            let parts = self.steps.iter().filter(is_maker).filter_map(|maker| maker.parts);
            cost.bytes += parts.map(|parts| parts.bytes as f64).sum::<f64>();
        }
        cost
    }

    /// Cost of all steps.
    pub fn cost(&self) -> Cost {
        let mut total = Cost::default();
        self.steps.iter().for_each(|step| total += self.cost_of(step));
        total
    }

    /// The collectives, in the one order in which every rank makes them, over all groups.
    pub fn collectives(&self) -> impl Iterator<Item = (&Step, Group)> {
        self.steps.iter().filter_map(|step| Some((step, step.op.group()?)))
    }

    /// The steps that are launched with this one, which is the first of them.
    pub fn launch(&self, first: usize) -> Range<usize> {
        let more = self.steps[first + 1..].iter().take_while(|step| step.joined).count();
        first..first + 1 + more
    }

    /// The steps that are launched with this one.
    pub fn launch_of(&self, step: usize) -> Range<usize> {
        let first = (0..=step).rev().find(|at| !self.steps[*at].joined).unwrap_or(0);
        self.launch(first)
    }

    /// Checks whether a step may run at the same time as the one before it: of one launch, and no chain.
    pub fn beside(&self, step: usize) -> bool {
        self.steps[step].joined && self.steps[step].op.runs_beside(&self.steps[step - 1].op)
    }

    /// Finds an input or output by name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.inputs.iter().chain(&self.outputs).copied().find(|v| self.values[*v].name == name)
    }

    /// The plan as JSON, with the cost of each step.
    pub fn to_json(&self) -> serde_json::Value {
        // A plan holds only names, numbers and lists, so it always has a JSON form.
        let mut json = serde_json::to_value(self).unwrap_or_default();
        let costs: Vec<_> = self.steps.iter().map(|s| self.cost_of(s)).collect();
        if let Some(steps) = json.get_mut("steps").and_then(|s| s.as_array_mut()) {
            for (step, Cost { flops, bytes }) in steps.iter_mut().zip(costs) {
                step["flops"] = flops.into();
                step["bytes"] = bytes.into();
            }
        }
        json
    }
}

/// Values that change from step to step. Plans read it; nothing of it is baked into them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Header {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Optimizer steps begun so far.
    pub step: u64,
    /// Global number of the first sample of this micro-batch within its step.
    pub first_sample: u64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Divisor of the loss: the samples of a full step, over all micro-steps and ranks.
    pub nominal: f64,
}
