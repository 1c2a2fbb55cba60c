//! Plans written by hand, as programs that can run.

use graph::plan::Place;
use graph::{Op, Plan, Program, State, StateId};

/// The plans of a text, each with the states that it uses.
pub fn plans(text: &str) -> Vec<Plan> {
    let starts =
        text.match_indices("plan ").map(|(at, _)| at).filter(|at| *at == 0 || text[..*at].ends_with('\n'));
    let starts: Vec<usize> = starts.chain([text.len()]).collect();
    let parse = |w: &[usize]| {
        let plan: Plan = text[w[0]..w[1]].parse().unwrap_or_else(|e| panic!("{e}"));
        plan.check().unwrap_or_else(|e| panic!("{}: {e}", plan.name));
        plan
    };
    starts.windows(2).map(parse).collect()
}

/// A program of the plans of a text, by their names, over one table of all their states. Where there is no `first`, it is as
/// `micro` without what was there before; where there is no `last`, it is as `first`; other plans that are not there are empty.
pub fn program(text: &str) -> Program {
    let mut states: Vec<State> = vec![];
    let mut named: Vec<Plan> = plans(text).into_iter().map(|plan| over(plan, &mut states)).collect();
    named.iter_mut().for_each(|plan| plan.states = states.clone());
    let find = |name: &str| named.iter().find(|plan| plan.name == name).cloned();
    let empty = || Plan { states: states.clone(), ..Plan::default() };
    let micro = find("micro").unwrap_or_else(empty);
    let first = find("first").unwrap_or_else(|| anew(&micro));
    let last = find("last").unwrap_or_else(|| Plan { name: "last".into(), ..first.clone() });
    let (update, eval) = (find("update").unwrap_or_else(empty), find("eval").unwrap_or_else(empty));
    Program { first, micro, last, update, eval, states, ..Program::default() }
}

/// The plan that begins the sums that `micro` adds to.
fn anew(micro: &Plan) -> Plan {
    let mut plan = Plan { name: "first".into(), ..micro.clone() };
    for step in &mut plan.steps {
        match &mut step.op {
            Op::Accumulate => {
                step.inputs.remove(0);
                step.op = Op::Reshape { shape: plan.values[step.outputs[0]].ty.shape.clone() };
            }
            Op::LinearGradW { accumulate, .. }
            | Op::ConvGradW { accumulate, .. }
            | Op::ColumnSum { accumulate }
            | Op::Quantize { accumulate, .. }
            | Op::ScaledMatmul { accumulate, .. }
                if *accumulate =>
            {
                *accumulate = false;
                step.inputs.pop();
            }
            _ => {}
        }
    }
    plan.check().unwrap_or_else(|e| panic!("{}: {e}", plan.name));
    plan
}

/// The plan with its states as numbers of one table, to which it adds those that it is the first to have.
fn over(mut plan: Plan, states: &mut Vec<State>) -> Plan {
    let numbers: Vec<StateId> = plan.states.iter().map(|state| number(state, states)).collect();
    for value in &mut plan.values {
        if let Place::State(state) = &mut value.place {
            *state = numbers[state.index()];
        }
    }
    for step in &mut plan.steps {
        if let Op::Assign { state } = &mut step.op {
            *state = numbers[state.index()];
        }
    }
    plan
}

fn number(state: &State, states: &mut Vec<State>) -> StateId {
    let index = states.iter().position(|other| other.name == state.name).unwrap_or_else(|| {
        states.push(state.clone());
        states.len() - 1
    });
    assert_eq!(states[index], *state, "a state is the same in every plan");
    StateId(index as u32)
}
