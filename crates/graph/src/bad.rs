//! The first value of a run that is not finite, as executors report it.

use crate::graph::{Phase, Role};
use crate::op::{Op, StateId};
use crate::plan::{Place, Plan, PlanValue, Step};
use crate::types::DType;
use std::collections::HashSet;
use std::fmt;

/// Origin of a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// The host filled it in.
    Input,
    /// A state held it before the plan ran.
    State(Role),
    /// A step of a plan.
    Step {
        /// Layer of the step.
        layer: String,
        /// Op of the step.
        op: String,
        /// Part of the training step.
        phase: Phase,
    },
}

/// The first element found that is NaN or infinite.
#[derive(Clone, Debug, PartialEq)]
pub struct BadValue {
    /// Origin of the value.
    pub origin: Origin,
    /// Name of the value or state.
    pub value: String,
    /// Place of the element in the value.
    pub index: usize,
    /// The element: NaN or an infinity.
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

/// The states that steps find as they were before the plan, in the order in which they are first read. Of a flat buffer, whose
/// padding is anything, they are the tensors in it.
pub fn states_read(plan: &Plan) -> Vec<StateId> {
    let made: HashSet<usize> = plan.steps.iter().flat_map(|s| s.outputs.iter().copied()).collect();
    let read = plan.steps.iter().flat_map(|s| s.inputs.iter().copied()).filter(|value| !made.contains(value));
    let mut states: Vec<StateId> = vec![];
    for value in read {
        let Place::State(state) = plan.values[value].place else { continue };
        let ids = (0..plan.states.len() as u32).map(StateId);
        let of = &plan.states[state.index()];
        let in_it = |id: &StateId| {
            plan.states[id.index()].role != Role::Flat && plan.states[id.index()].lies_in(of, state)
        };
        match of.role {
            Role::Flat => states.extend(ids.filter(in_it)),
            _ => states.push(state),
        }
    }
    let mut seen = HashSet::new();
    states.retain(|state| seen.insert(*state));
    states
}

/// Decides whether a result is checked. A flat buffer, or a part of one, is checked when it is read next; sums of squares in f64 are
/// finite if the values are.
pub fn is_looked_at(plan: &Plan, step: &Step, result: usize) -> bool {
    let PlanValue { ty, place, .. } = &plan.values[step.outputs[result]];
    let sums = matches!(step.op, Op::SumSquares { .. } | Op::LambMoments { .. }) && ty.dtype == DType::F64;
    match place {
        Place::State(state) => plan.states[state.index()].role != Role::Flat,
        Place::Arena(_) => !sums && !matches!(step.op, Op::ReduceScatter { views: Some(_), .. }),
    }
}
