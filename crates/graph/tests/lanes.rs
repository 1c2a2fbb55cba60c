//! Whatever the timing of the lanes, nobody reads or writes memory that another step is using: random graphs and a
//! small transformer, compiled and then run by a simulator that knows nothing of how plans are made.

#[path = "support/generator.rs"]
mod generator;
#[path = "support/simulator.rs"]
mod simulator;
#[path = "support/transformer.rs"]
mod transformer;

use generator::{random_graph, random_scratch};
use graph::op::Lane;
use graph::passes::{place, schedule};
use graph::plan::{Key, Place, Plan, Step};
use graph::{
    ALIGN, Batching, Communication, Deferred, Graph, Home, Mesh, Op, Partial, Recompute, Settings, Target,
    Zero, compile,
};
use simulator::simulate;
use std::collections::HashMap;
use testing::Random;

const GRAPHS: u64 = 400;
const TIMINGS: u64 = 8;

fn compiled(graph: &Graph, seed: u64) -> Plan {
    let target = random_scratch(seed);
    place(graph, &schedule(graph, &target), "random", Key::default(), &target)
}

/// From steps that take about equally long to one step that outlasts all the others.
fn timing(plan: &Plan, seed: u64) -> Vec<u64> {
    let mut rng = Random::seeded(seed);
    let spread = [1, 4, 10][rng.below(3)];
    let slow = Lane::ALL[rng.below(2)];
    let mut one = |lane: Lane| (1u64 << rng.below(spread)) * if lane == slow { 8 } else { 1 };
    plan.steps.iter().map(|step| one(step.lane)).collect()
}

/// One step so slow that every step which need not wait for it runs first.
fn held_up_at(plan: &Plan, step: usize) -> Vec<u64> {
    let mut durations = vec![1; plan.steps.len()];
    durations[step] = 1_000_000;
    durations
}

/// The first timing that goes wrong, if any does.
fn caught(plan: &Plan, seed: u64) -> Option<String> {
    let random = (0..TIMINGS).map(|t| timing(plan, seed << 8 | t));
    let slow = (0..plan.steps.len()).map(|step| held_up_at(plan, step));
    random.chain(slow).find_map(|durations| simulate(plan, &durations).err())
}

#[test]
fn random_graphs_run_safely_at_any_timing() {
    let (mut steps, mut waits, mut side_by_side, mut in_state, mut in_arena) = (0, 0, 0, 0, 0);
    for seed in 0..GRAPHS {
        let plan = compiled(&random_graph(seed), seed);
        plan.check().unwrap_or_else(|e| panic!("seed {seed}: {e}\n{plan}"));
        for t in 0..TIMINGS {
            let run = simulate(&plan, &timing(&plan, seed << 8 | t));
            side_by_side +=
                run.unwrap_or_else(|e| panic!("seed {seed}, timing {t}: {e}\n{plan}")).side_by_side;
        }
        steps += plan.steps.len();
        waits += plan.steps.iter().map(|s| s.waits.len()).sum::<usize>();
        let made_in_state = |v: &&usize| matches!(plan.values[**v].place, Place::State(_));
        in_state += plan.steps.iter().flat_map(|s| &s.outputs).filter(made_in_state).count();
        in_arena += usize::from(lies_over_a_state(&plan));
    }
    // The graphs have what the test is about: work side by side, waits, states written in place.
    assert!(side_by_side > steps, "{side_by_side} of {steps} steps × {TIMINGS} timings ran side by side");
    assert!(waits * 10 > steps, "{waits} waits in {steps} steps");
    assert!(in_state > GRAPHS as usize / 2, "{in_state} results were made in their state");
    assert!(in_arena > GRAPHS as usize / 4, "in {in_arena} graphs a value and a state share memory");
}

/// Whether a value lies where a state of the arena does that the plan writes.
fn lies_over_a_state(plan: &Plan) -> bool {
    let made = plan.steps.iter().flat_map(|s| &s.outputs).filter_map(|v| match plan.values[*v].place {
        Place::State(state) => {
            let state = &plan.states[state.index()];
            match state.home {
                Home::Arena(offset) => Some(offset..offset + state.ty.bytes()),
                _ => None,
            }
        }
        Place::Arena(_) => None,
    });
    made.into_iter().any(|state| {
        plan.values.iter().any(|value| match value.place {
            Place::Arena(offset) => offset < state.end && state.start < offset + value.ty.bytes(),
            Place::State(_) => false,
        })
    })
}

#[test]
fn a_value_moved_onto_another_is_refused_where_it_can_go_wrong() {
    let mut wrong = 0;
    for seed in 0..GRAPHS {
        let mut plan = compiled(&random_graph(seed), seed);
        shift_a_value(&mut plan, &mut Random::seeded(seed));
        wrong += u64::from(both_judge(&plan, seed));
    }
    assert!(wrong > GRAPHS / 4 && wrong < GRAPHS, "{wrong} of {GRAPHS} shifted plans went wrong");
}

/// Whether the plan is wrong: `check` refuses it and the simulator finds a timing at which it fails, or neither.
fn both_judge(plan: &Plan, seed: u64) -> bool {
    match (plan.check(), caught(plan, seed)) {
        (Ok(()), Some(why)) => panic!("seed {seed}: {why}, but the plan passes\n{plan}"),
        (Err(e), None) => panic!("seed {seed}: refused without need: {e}\n{plan}"),
        (_, why) => why.is_some(),
    }
}

/// Moves one value to where another one lies.
fn shift_a_value(plan: &mut Plan, rng: &mut Random) {
    let arena = |v: &usize| matches!(plan.values[*v].place, Place::Arena(_));
    let list: Vec<usize> = (0..plan.values.len()).filter(arena).collect();
    if !list.is_empty() {
        let (value, other) = (*rng.pick(&list), *rng.pick(&list));
        plan.values[value].place = plan.values[other].place;
    }
}

#[test]
fn every_wait_for_an_operand_is_needed() {
    let mut removed = 0;
    for seed in 0..GRAPHS {
        let plan = compiled(&random_graph(seed), seed);
        for (step, wait) in waits_for_operands(&plan) {
            let mut plan = plan.clone();
            plan.steps[step].waits.retain(|w| *w != wait);
            assert!(plan.check().is_err(), "seed {seed}: step {step} need not wait for {wait}\n{plan}");
            let run = simulate(&plan, &held_up_at(&plan, wait));
            assert!(run.is_err(), "seed {seed}: step {step} without its wait for {wait} went well\n{plan}");
            removed += 1;
        }
    }
    assert!(removed > GRAPHS as usize, "only {removed} waits were tried");
}

fn waits_for_operands(plan: &Plan) -> Vec<(usize, usize)> {
    let mut makers: HashMap<usize, usize> = HashMap::new();
    let mut list = Vec::new();
    for (i, step) in plan.steps.iter().enumerate() {
        let made: Vec<usize> = step.inputs.iter().filter_map(|v| makers.get(v).copied()).collect();
        list.extend(step.waits.iter().filter(|w| made.contains(w)).map(|w| (i, *w)));
        makers.extend(step.outputs.iter().map(|v| (*v, i)));
    }
    list
}

/// A planner that takes lanes for one queue reuses memory too early, and both judges see it.
#[test]
fn reuse_by_program_order_alone_is_caught() {
    let mut wrong = 0;
    for seed in 0..GRAPHS {
        let graph = random_graph(seed);
        let good = schedule(&graph, &|_: &Graph, _: usize| 0);
        let mut naive = good.clone();
        naive.lanes.fill(Lane::Compute);
        let mut plan = place(&graph, &naive, "naive", Key::default(), &random_scratch(seed));
        for (step, lane) in plan.steps.iter_mut().zip(&good.lanes) {
            step.lane = *lane;
        }
        wrong += u64::from(both_judge(&plan, seed));
    }
    assert!(wrong > GRAPHS / 4 && wrong < GRAPHS, "{wrong} of {GRAPHS} naive plans went wrong");
}

#[test]
fn everything_at_offset_zero_is_caught() {
    let mut plan = transformer::program(1, Recompute::None).micro;
    for value in &mut plan.values {
        if let Place::Arena(offset) = &mut value.place {
            *offset = 0;
        }
    }
    assert!(plan.check().is_err());
    assert!(simulate(&plan, &timing(&plan, 0)).is_err());
}

#[test]
fn transformers_check_and_run_with_and_without_recompute() {
    for recompute in [Recompute::None, Recompute::Full] {
        for plan in transformer::program(2, recompute).plans() {
            plan.check().unwrap_or_else(|e| panic!("{recompute:?}, {}: {e}", plan.name));
            simulate(plan, &timing(plan, 1)).unwrap_or_else(|e| panic!("{recompute:?}, {}: {e}", plan.name));
        }
    }
}

#[test]
fn full_recompute_at_least_halves_the_arena_of_twelve_blocks() {
    let arena = |recompute| transformer::program(12, recompute).micro.arena;
    let (all, borders) = (arena(Recompute::None), arena(Recompute::Full));
    assert!(2 * borders <= all, "{borders} bytes with recompute, {all} without");
}

#[test]
fn the_arena_is_close_to_what_is_alive_at_once() {
    for recompute in [Recompute::None, Recompute::Full] {
        for plan in transformer::program(12, recompute).plans() {
            let (least, name) = (alive_at_most(plan), &plan.name);
            assert!(plan.arena >= least, "{recompute:?}, {name}: {} < {least}", plan.arena);
            assert!(plan.arena * 4 <= least * 5, "{recompute:?}, {name}: {} for {least}", plan.arena);
        }
    }
}

/// The most bytes that hold something still needed at any one step of a plan with one lane: no arena can be smaller.
fn alive_at_most(plan: &Plan) -> usize {
    assert!(plan.steps.iter().all(|s| s.lane == Lane::Compute));
    let end = plan.steps.len();
    let mut lives: HashMap<usize, (usize, usize)> = plan.inputs.iter().map(|v| (*v, (0, 0))).collect();
    for (i, step) in plan.steps.iter().enumerate() {
        lives.extend(step.outputs.iter().map(|v| (*v, (i, i))));
        step.inputs.iter().for_each(|v| live_until(&mut lives, *v, i));
    }
    plan.outputs.iter().for_each(|v| live_until(&mut lives, *v, end));
    let alive_at = |i: usize| {
        // A result that takes its operand's place is counted once.
        let mut ranges: HashMap<usize, usize> = HashMap::new();
        for (value, (from, to)) in &lives {
            if let (Place::Arena(offset), true) = (plan.values[*value].place, (*from..=*to).contains(&i)) {
                ranges.insert(offset, plan.values[*value].ty.bytes().next_multiple_of(ALIGN));
            }
        }
        ranges.values().sum::<usize>() + plan.steps[i].scratch.map_or(0, |s| s.bytes.next_multiple_of(ALIGN))
    };
    (0..end).map(alive_at).max().unwrap_or(0)
}

fn live_until(lives: &mut HashMap<usize, (usize, usize)>, value: usize, step: usize) {
    if let Some((_, last)) = lives.get_mut(&value) {
        *last = step;
    }
}

/// A device with a lane beside that of the chain, whose kernels leave partial sums and are launched together.
struct Wide;

impl Target for Wide {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        if graph.nodes[node].op.is_matmul() { 512 } else { 0 }
    }

    fn batching(&self) -> Batching {
        Batching { most: 4, small: 1 << 20, short: 1 << 40, together: 1 << 22, unit: 8, stays: 8 }
    }

    fn lane(&self, op: &Op) -> Lane {
        match op {
            Op::LinearGradW { .. } | Op::ColumnSum { .. } | Op::CrossEntropy { .. } | Op::AddUp { .. } => {
                Lane::Side
            }
            _ => op.lane(),
        }
    }

    /// Five parts of every sum over rows, side by side.
    fn partial(&self, graph: &Graph, node: usize) -> Option<Partial> {
        let node = &graph.nodes[node];
        let first = match node.op {
            Op::ColumnSum { .. } => 0,
            Op::LayerNormGrad { .. } | Op::GeluGrad { bias: true } | Op::LinearGradX { gelu: true } => 1,
            Op::AttentionGrad { sum: true, .. } => 1,
            _ => return None,
        };
        let of = |output: &usize| graph.ty(node.outputs[*output]).bytes();
        let sums: Vec<usize> =
            (first..node.outputs.len()).filter(|o| graph.ty(node.outputs[*o]).shape.rank() == 1).collect();
        let offset = |at: usize| sums[..at].iter().map(of).sum();
        let results = sums.iter().enumerate().map(|(at, output)| (*output, offset(at))).collect();
        Some(Partial { bytes: 5 * sums.iter().map(of).sum::<usize>(), results })
    }

    fn deferred(&self) -> Deferred {
        Deferred { most: 8192, stays: 4 }
    }

    fn launch(&self, next: &[&Op]) -> usize {
        let optimizers = next.iter().take_while(|op| matches!(op, Op::AdamW { .. } | Op::Ema { .. })).count();
        let weights = 1 + next.windows(2).take_while(|pair| pair[1].runs_beside(pair[0])).count();
        optimizers.max(weights.min(4))
    }
}

/// What computes beside the chain, sums that wait in parts and launches of several steps: whatever the timing, nothing is read or
/// written at the wrong time, sums are made of what was left, and the plan says all of it.
#[test]
fn lanes_beside_the_chain_run_safely_at_any_timing() {
    let (mut beside, mut sums, mut joined) = (0, 0, 0);
    for (recompute, ranks) in
        [(Recompute::None, 1), (Recompute::Full, 1), (Recompute::None, 2), (Recompute::Full, 2)]
    {
        for (accumulates, overlap) in [(true, true), (false, true), (false, false)] {
            let communication = Communication { bucket: 5000, overlap, dtype: None, each_micro_step: false };
            let settings = Settings {
                recompute,
                communication,
                accumulates,
                mesh: Mesh::of_data(ranks),
                target: &Wide,
                ..transformer::settings()
            };
            let program = compile(transformer::model(2), &settings).unwrap();
            for (number, plan) in program.plans().into_iter().enumerate() {
                let what = format!("{recompute:?}, {ranks} ranks, {accumulates}, {}", plan.name);
                plan.check().unwrap_or_else(|e| panic!("{what}: {e}\n{plan}"));
                let found = caught(plan, number as u64);
                assert!(found.is_none(), "{what}: {}\n{plan}", found.unwrap_or_default());
                let again: Plan = plan.to_string().parse().unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(again.to_string(), plan.to_string());
                beside += simulate(plan, &timing(plan, 7)).unwrap().side_by_side;
                let adds = plan.steps.iter().filter(|step| matches!(step.op, Op::AddUp { .. }));
                sums += adds.map(|step| step.outputs.len()).sum::<usize>();
                joined += plan.steps.iter().filter(|step| step.joined).count();
            }
        }
    }
    assert!(beside > 100 && sums > 100 && joined > 100, "{beside} beside, {sums} sums, {joined} joined");
}

/// The layers of the weight gradients of each launch of a plan.
fn launches<'a>(plan: &'a Plan) -> Vec<Vec<&'a str>> {
    let firsts = (0..plan.steps.len()).filter(|at| !plan.steps[*at].joined);
    let made = |step: &'a Step| matches!(step.op, Op::LinearGradW { .. }).then_some(step.layer.as_str());
    let all = firsts.map(|first| plan.steps[plan.launch(first)].iter().filter_map(made).collect());
    all.filter(|launch: &Vec<&str>| !launch.is_empty()).collect()
}

/// How sums are cut depends on what is launched together, so that bits would differ with the messages if one could come between.
#[test]
fn launches_are_those_of_one_rank_whatever_the_messages() {
    for accumulates in [true, false] {
        let of = |ranks: usize, zero: Zero, bucket: usize| {
            let communication = Communication { bucket, overlap: true, dtype: None, each_micro_step: false };
            let mesh = Mesh::of_data(ranks);
            let settings =
                Settings { communication, accumulates, mesh, zero, target: &Wide, ..transformer::settings() };
            compile(transformer::model(4), &settings).unwrap()
        };
        let one = of(1, Zero::Stage0, 5000);
        let alone = launches(&one.last);
        assert!(alone.iter().any(|launch| launch.len() > 2), "{alone:?}");
        for zero in Zero::ALL {
            for bucket in [2000, 5000, 20_000, 1 << 20] {
                let among = of(2, zero, bucket);
                assert_eq!(launches(&among.last), alone, "stage {zero}, buckets of {bucket}, {accumulates}");
            }
        }
    }
}

/// A plan that forgets to wait for the side lane, or reuses parts too soon, is caught by both judges.
#[test]
fn a_wait_that_is_missing_is_caught() {
    let settings = Settings { target: &Wide, ..transformer::settings() };
    let plan = compile(transformer::model(2), &settings).unwrap().micro;
    plan.check().unwrap();
    let waiting: Vec<usize> =
        (0..plan.steps.len()).filter(|step| !plan.steps[*step].waits.is_empty()).collect();
    assert!(waiting.len() > 10);
    for step in waiting {
        let mut wrong = plan.clone();
        wrong.steps[step].waits.pop();
        assert!(wrong.check().is_err(), "step {step}\n{plan}");
        assert!(caught(&wrong, 1).is_some(), "step {step}");
    }
}
