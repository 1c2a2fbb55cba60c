//! States in place: assigns that are no steps, waits for states, and the text of plans.

use super::*;
use graph::op::{Lane, Reduction};
use graph::plan::Place;
use graph::{GraphError, Recompute};

/// sum' = sum + x, with the old sum used again (or not) between that and the assign.
fn summed(old_is_used_later: bool) -> Graph {
    let mut graph = Graph::default();
    let x = parameter(&mut graph, "x", [4]);
    let (sum, so_far) = state(&mut graph, "sum", [4]);
    let at = At::new("total", Phase::Update);
    let total = graph.push(Op::Accumulate, &[so_far, x], &at).unwrap()[0];
    if old_is_used_later {
        let at = At::new("old", Phase::Update);
        graph.outputs = graph.push(Op::Scale { factor: 2.0 }, &[so_far], &at).unwrap();
    }
    graph.assign(sum, total, Phase::Update).unwrap();
    graph
}

#[test]
fn an_assign_in_place_is_no_step() {
    let plan = planned(&summed(false));
    assert_eq!(plan.steps.len(), 1);
    assert_eq!(plan.values[plan.steps[0].outputs[0]].place, Place::State(StateId(1)));
    assert_eq!(plan.arena, 0);
}

#[test]
fn an_assign_copies_when_the_old_value_is_needed_after_the_new_one_is_made() {
    let plan = planned(&summed(true));
    let steps: Vec<String> = plan.steps.iter().map(|s| s.op.name()).collect();
    assert_eq!(steps, ["accumulate", "scale", "assign"]);
    assert!(matches!(plan.values[plan.steps[0].outputs[0]].place, Place::Arena(_)));
}

#[test]
fn a_state_is_not_read_after_its_assign() {
    let mut graph = summed(false);
    let so_far = graph.find("sum").unwrap();
    graph.push(Op::Gelu, &[so_far], &At::new("late", Phase::Update)).unwrap();
    let error = GraphError::ReadAfterAssign { state: "sum".into(), user: "gelu of late".into() };
    assert_eq!(graph.check(), Err(error));
}

/// The assign of an all-reduce in place is no step, so it can't be what makes the compute lane wait.
#[test]
fn a_state_reduced_in_place_is_waited_for_by_its_users_only() {
    let mut graph = among_two();
    let x = parameter(&mut graph, "x", [4]);
    let (sum, own) = state(&mut graph, "sum", [4]);
    let at = |name: &str| At::new(name, Phase::Update);
    let op = Op::AllReduce { reduction: Reduction::Sum, group: Mesh::of_data(2).world() };
    let all = graph.push(op, &[own], &at("all")).unwrap()[0];
    graph.assign(sum, all, Phase::Update).unwrap();
    let beside = graph.push(Op::Gelu, &[x], &at("beside")).unwrap()[0];
    graph.outputs = graph.push(Op::Add, &[beside, all], &at("after")).unwrap();
    let plan = planned(&graph);
    let steps: Vec<_> = plan.steps.iter().map(|s| (s.op.name(), s.lane, s.waits.clone())).collect();
    let expected = [
        ("all_reduce", Lane::Comm, vec![]),
        ("gelu", Lane::Compute, vec![]),
        ("add", Lane::Compute, vec![0]),
    ];
    assert_eq!(steps, expected.map(|(name, lane, waits)| (name.to_string(), lane, waits)));
}

#[test]
fn lanes_may_read_the_same_state_side_by_side() {
    let mut graph = among_two();
    let x = parameter(&mut graph, "x", [4]);
    let at = |name: &str| At::new(name, Phase::Update);
    let all = graph
        .push(Op::AllGather { group: Mesh::of_data(2).world(), views: None }, &[x], &at("all"))
        .unwrap()[0];
    let beside = graph.push(Op::Gelu, &[x], &at("beside")).unwrap()[0];
    graph.outputs = vec![all, beside];
    assert!(planned(&graph).steps.iter().all(|step| step.waits.is_empty()));
}

// ---- text ------------------------------------------------------------------------------------------------------

#[test]
fn compiled_plans_survive_their_text() {
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
        for plan in transformer::program(2, recompute).plans() {
            let text = plan.to_string();
            let parsed: Plan = text.parse().unwrap_or_else(|e| panic!("{recompute:?}, {}: {e}", plan.name));
            assert_eq!(parsed.check(), Ok(()), "{recompute:?}, {}", plan.name);
            assert_eq!(parsed.to_string(), text, "{recompute:?}, {}", plan.name);
        }
    }
}
