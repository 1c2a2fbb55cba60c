//! A run that looks at every value, to name the first that is not finite. Far too slow to train with; made for the step
//! that has just failed.

use super::{Executor, Which};
use crate::error::CpuError;
use crate::kernels::Float;
use graph::graph::Phase;
use graph::plan::{Place, Plan};
use graph::{Header, Role};
use std::collections::HashSet;
use std::fmt;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// The host filled it in.
    Input,
    /// A state held it before the plan ran.
    State(Role),
    Step {
        layer: String,
        op: String,
        phase: Phase,
    },
}

/// The first element found that is NaN or infinite.
#[derive(Clone, Debug, PartialEq)]
pub struct BadValue {
    pub origin: Origin,
    /// Name of the value or state.
    pub value: String,
    pub index: usize,
    pub found: f64,
}

impl fmt::Display for BadValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadValue { origin, value, index, found } = self;
        match origin {
            Origin::Input => write!(f, "input {value} holds {found} (element {index})"),
            Origin::State(role) => {
                write!(f, "{} {value} holds {found} before the step (element {index})", role.name())
            }
            Origin::Step { layer, op, phase } => {
                write!(f, "first bad value in {layer} ({}, {op}): element {index}", phase.name())?;
                if value != layer {
                    write!(f, " of {value}")?;
                }
                write!(f, " is {found}")
            }
        }
    }
}

impl<T: Float> Executor<T> {
    /// Runs a plan like [`run`](Executor::run), but stops at the first value that is not finite: an input or state to
    /// begin with, then the results of each step. A plan with collectives goes on to its end all the same, since the other
    /// ranks take part in them.
    pub fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, CpuError> {
        let goes_on = !self.plans[which as usize].calls.is_empty();
        let mut first = self.bad_before(which, header);
        for index in 0..self.plans[which as usize].steps.len() {
            if first.is_some() && !goes_on {
                break;
            }
            self.run_step(which, index, header)?;
            if first.is_none() {
                first = self.bad_after(which, index);
            }
        }
        Ok(first)
    }

    fn bad_after(&self, which: Which, index: usize) -> Option<BadValue> {
        let step = &self.plan(which).steps[index];
        let origin = || Origin::Step { layer: step.layer.clone(), op: step.op.name(), phase: step.phase };
        step.outputs.iter().find_map(|value| self.bad(which, *value, origin))
    }

    fn bad_before(&self, which: Which, header: &Header) -> Option<BadValue> {
        let plan = self.plan(which);
        let input = |value: &usize| self.bad(which, *value, || Origin::Input);
        // The first micro-step overwrites sums, whatever an earlier step has left in them.
        let anew = !header.accumulate && matches!(which, Which::Micro | Which::Last);
        let state = |(value, role): (usize, Role)| match role {
            Role::Gradient | Role::Statistic if anew => None,
            _ => self.bad(which, value, || Origin::State(role)),
        };
        plan.inputs.iter().find_map(input).or_else(|| states_read(plan).find_map(state))
    }

    fn bad(&self, which: Which, value: usize, origin: impl Fn() -> Origin) -> Option<BadValue> {
        let value = &self.plan(which).values[value];
        // SAFETY: nothing runs between two steps, and `run_checked` holds `&mut self`.
        let elements = unsafe { self.view_of(value)?.read() };
        let index = elements.iter().position(|x| !x.to_f64().is_finite())?;
        let (name, found) = (value.name.clone(), elements[index].to_f64());
        Some(BadValue { origin: origin(), value: name, index, found })
    }
}

/// The states that steps find as they were before the plan, in the order in which they are first read.
fn states_read(plan: &Plan) -> impl Iterator<Item = (usize, Role)> {
    let made: HashSet<usize> = plan.steps.iter().flat_map(|s| s.outputs.iter().copied()).collect();
    let mut seen = HashSet::new();
    let read = plan.steps.iter().flat_map(|s| s.inputs.iter().copied());
    let first = read.filter(move |value| !made.contains(value) && seen.insert(*value));
    first.filter_map(|value| match plan.values[value].place {
        Place::State(state) => Some((value, plan.states[state.index()].role)),
        Place::Arena(_) => None,
    })
}
