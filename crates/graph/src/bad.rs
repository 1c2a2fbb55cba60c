//! The first value of a run that is not finite, as executors report it.

use crate::graph::{Phase, Role};
use crate::plan::{Place, Plan};
use std::collections::HashSet;
use std::fmt;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// The host filled it in.
    Input,
    /// A state held it before the plan ran.
    State(Role),
    /// A step of a plan.
    Step { layer: String, op: String, phase: Phase },
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

/// The states that steps find as they were before the plan, in the order in which they are first read.
pub fn states_read(plan: &Plan) -> impl Iterator<Item = (usize, Role)> {
    let made: HashSet<usize> = plan.steps.iter().flat_map(|s| s.outputs.iter().copied()).collect();
    let mut seen = HashSet::new();
    let read = plan.steps.iter().flat_map(|s| s.inputs.iter().copied());
    let first = read.filter(move |value| !made.contains(value) && seen.insert(*value));
    first.filter_map(|value| match plan.values[value].place {
        Place::State(state) => Some((value, plan.states[state.index()].role)),
        Place::Arena(_) => None,
    })
}
