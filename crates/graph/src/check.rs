//! Checks that a plan, however it was made, can be run: types, order, lanes and memory.
//!
//! The memory rule is checked here on its own terms, not by repeating `place`: two steps that touch the same bytes,
//! one of them writing, must be ordered by their lanes and waits.

mod contents;

use crate::clocks::Clocks;
use crate::graph::{Held, Home, State};
use crate::mesh::Group;
use crate::op::{Lane, Op};
use crate::plan::{Place, Plan, Step};
use crate::types::{DType, Type};
use contents::{Checked, Contents, aligned, assigned};

/// Defect of a plan.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PlanError {
    /// A step that can't be run as it stands.
    #[error("step {step} ({op}, {layer}): {why}")]
    Step {
        /// Number of the step.
        step: usize,
        /// Op of the step.
        op: String,
        /// Layer of the step.
        layer: String,
        /// Defect.
        why: String,
    },
    /// An input that can't be filled.
    #[error("input {name}: {why}")]
    Input {
        /// Name of the input.
        name: String,
        /// Defect.
        why: String,
    },
    /// An output that the host could not read.
    #[error("output {0} is overwritten before the plan ends")]
    LostOutput(String),
    /// A state without a place in memory.
    #[error("state {0} has no home")]
    NoHome(String),
    /// A state that the next plan would not find.
    #[error("state {0} is overwritten before the plan ends")]
    LostState(String),
}

impl Plan {
    /// Checks types, order, lanes and memory.
    pub fn check(&self) -> Result<(), PlanError> {
        let in_step = |step: usize| {
            let Step { op, layer, .. } = &self.steps[step];
            move |why| PlanError::Step { step, op: op.name(), layer: layer.clone(), why }
        };
        if let Some(state) = self.states.iter().find(|state| state.home == Home::Nowhere) {
            return Err(PlanError::NoHome(state.name.clone()));
        }
        for (i, step) in self.steps.iter().enumerate() {
            check_step(self, i, step).map_err(in_step(i))?;
        }
        let mut memory = Contents::new(self);
        memory.find_states();
        for value in &self.inputs {
            let name = self.values[*value].name.clone();
            memory.fill(*value).map_err(|why| PlanError::Input { name, why })?;
        }
        for (i, step) in self.steps.iter().enumerate() {
            memory.read(i, step).and_then(|()| memory.write(i, step)).map_err(in_step(i))?;
        }
        if let Some(lost) = self.outputs.iter().find(|v| memory.record_of(**v).is_none()) {
            return Err(PlanError::LostOutput(self.values[*lost].name.clone()));
        }
        match memory.written.iter().find(|state| !memory.holds(**state)) {
            Some(lost) => Err(PlanError::LostState(self.states[lost.index()].name.clone())),
            None => Ok(()),
        }
    }

    /// The order that lanes and waits enforce.
    pub fn clocks(&self) -> Clocks {
        Clocks::of((0..self.steps.len()).map(|index| {
            let Step { lane, waits, .. } = &self.steps[index];
            (*lane, &waits[..], self.beside(index))
        }))
    }
}

fn check_step(plan: &Plan, index: usize, step: &Step) -> Checked {
    if let Some(wait) = step.waits.iter().find(|w| **w >= index) {
        return Err(format!("waits for step {wait}, which comes later"));
    }
    if step.op.lane() != step.lane && (step.op.lane(), step.lane) != (Lane::Compute, Lane::Side) {
        return Err(format!("runs on the {} lane", step.op.lane().name()));
    }
    let in_arena = |value: &usize| match plan.values[*value].place {
        Place::Arena(_) => true,
        Place::State(state) => matches!(plan.states[state.index()].home, Home::Arena(_)),
    };
    if step.left && matches!(step.lane, Lane::Compute | Lane::Side) {
        return Err("is left when the plan has ended, but computes".into());
    }
    if step.left && (step.scratch.is_some() || step.inputs.iter().chain(&step.outputs).any(in_arena)) {
        return Err(
            "is left when the plan has ended, but works in the arena, which the next plan has then".into()
        );
    }
    if step.joined && index.checked_sub(1).is_none_or(|before| plan.steps[before].lane != step.lane) {
        return Err("is launched with the step before, which is of another lane".into());
    }
    if step.joined && !step.waits.is_empty() {
        return Err("waits for others than what it is launched with".into());
    }
    if let Op::AddUp { starts } = &step.op {
        let left = |value: &usize| {
            plan.steps[..index].iter().any(|s| s.parts.is_some() && s.outputs.contains(value))
        };
        let whole = step.inputs[..step.inputs.len().saturating_sub(starts.len())].iter().find(|v| !left(v));
        if let Some(whole) = whole {
            return Err(format!("nobody leaves parts of {}", plan.values[*whole].name));
        }
    }
    if let Some(group) = step.op.group()
        && plan.mesh.group(&group.axes()) != group
    {
        return Err(format!("is among {group}, but the mesh is {}", plan.mesh));
    }
    check_parts(plan, step)?;
    let ty = |v: &usize| &plan.values[*v].ty;
    let inputs: Vec<&Type> = step.inputs.iter().map(ty).collect();
    let outputs: Vec<Type> = step.outputs.iter().map(|v| ty(v).clone()).collect();
    let declared: Vec<DType> = outputs.iter().map(|ty| ty.dtype).collect();
    let inferred = step.op.infer_as(&inputs, &declared)?;
    if inferred != outputs {
        return Err(format!("gives {}, not {}", list(&inferred), list(&outputs)));
    }
    step.outputs.iter().try_for_each(|v| aligned(plan, *v))?;
    check_message(plan, step)?;
    if let Some(held) = states_of(plan, step).find(|s| matches!(s.held, Held::Of { .. })) {
        return Err(format!("works on {}, which is in a shard", held.name));
    }
    if let Op::Assign { state } = step.op {
        let (is, needs) = (ty(&step.inputs[0]), &plan.states[state.index()].ty);
        if is != needs {
            return Err(format!("writes {is} to a state of {needs}"));
        }
    }
    Ok(())
}

/// Checks that what a step scatters, gathers or updates is divided among the step's own group.
fn check_parts(plan: &Plan, step: &Step) -> Checked {
    let groups: Vec<Group> = match &step.op {
        Op::ReduceScatter { group, .. } | Op::AllGather { group, .. } => vec![*group],
        op => op.flats().iter().filter_map(|flat| flat.group).collect(),
    };
    let other = |state: &&State| match state.held {
        Held::Shard(group) | Held::Within(group) => !groups.is_empty() && !groups.contains(&group),
        _ => false,
    };
    match states_of(plan, step).find(other) {
        Some(state) => Err(format!("is among {}, but ranks divide {} otherwise", groups[0], state.name)),
        None => Ok(()),
    }
}

/// The states that a step reads or writes.
fn states_of<'a>(plan: &'a Plan, step: &'a Step) -> impl Iterator<Item = &'a State> {
    let values = step.inputs.iter().chain(&step.outputs);
    let of_values = values.filter_map(|value| match plan.values[*value].place {
        Place::State(state) => Some(state),
        Place::Arena(_) => None,
    });
    of_values.chain(assigned(step)).map(|state| &plan.states[state.index()])
}

/// Checks that the tensors of one message lie where it has them.
fn check_message(plan: &Plan, step: &Step) -> Checked {
    let Some((first, views)) = plan.message(step) else { return Ok(()) };
    let values = if step.outputs.contains(&first) { &step.outputs } else { &step.inputs };
    let size = plan.values[first].ty.dtype.bytes();
    let place = |value: usize| match plan.values[value].place {
        Place::Arena(offset) => Home::Arena(offset),
        Place::State(state) => plan.states[state.index()].home,
    };
    let base = place(first).moved(-((views.starts[0] * size) as isize));
    let wrong = values.iter().zip(&views.starts).find(|(value, start)| {
        base.is_none_or(|base| base.moved((**start * size) as isize) != Some(place(**value)))
    });
    match wrong {
        Some((value, start)) => {
            Err(format!("{} doesn't lie at element {start} of the message", plan.values[*value].name))
        }
        None => Ok(()),
    }
}

fn list(types: &[Type]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
