//! What each stage of ZeRO does to the plans.

#[path = "support/simulator.rs"]
mod simulator;
#[path = "support/transformer.rs"]
mod transformer;

use graph::op::Lane;
use graph::plan::{Place, Step};
use graph::{
    Batching, Communication, Gathering, Graph, Held, Mesh, Op, Plan, Program, Recompute, Role, Settings,
    StateId, Target, Use, Zero, compile, compile_observed, stage_taken,
};
use simulator::simulate;
use transformer::{model, model_of, settings};

const SMALL: Communication =
    Communication { bucket: 5000, overlap: true, dtype: None, each_micro_step: false };

fn compiled(zero: Zero, ranks: usize, accumulates: bool, recompute: Recompute) -> Program {
    let mesh = Mesh::of_data(ranks);
    let settings = Settings { mesh, communication: SMALL, zero, accumulates, recompute, ..settings() };
    let program = compile(model(4), &settings).unwrap();
    program.check().unwrap_or_else(|error| panic!("stage {zero}: {error}"));
    for plan in program.plans() {
        let text = plan.to_string();
        assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
    }
    program
}

fn count(plan: &Plan, is: impl Fn(&Op) -> bool) -> usize {
    plan.steps.iter().filter(|step| is(&step.op)).count()
}

fn scatters(op: &Op) -> bool {
    matches!(op, Op::ReduceScatter { .. })
}

fn gathers(op: &Op) -> bool {
    matches!(op, Op::AllGather { .. })
}

fn reduces(op: &Op) -> bool {
    matches!(op, Op::AllReduce { .. })
}

/// Plans of stages that have no state within another pass the simulator, whichever step is slow.
#[test]
fn lanes_never_meet_in_memory() {
    for zero in [Zero::Stage2, Zero::Stage3] {
        for (accumulates, recompute) in [(true, Recompute::None), (false, Recompute::Full)] {
            let program = compiled(zero, 2, accumulates, recompute);
            for plan in [&program.first, &program.last, &program.eval] {
                for slow in 0..plan.steps.len() {
                    let durations: Vec<u64> =
                        (0..plan.steps.len()).map(|step| if step == slow { 999 } else { 1 }).collect();
                    simulate(plan, &durations).unwrap_or_else(|e| panic!("stage {zero}, {}: {e}", plan.name));
                }
            }
        }
    }
}

#[test]
fn one_rank_divides_nothing() {
    let plain = compiled(Zero::Stage0, 1, true, Recompute::None);
    for zero in Zero::ALL {
        let program = compiled(zero, 1, true, Recompute::None);
        assert!(program.plans() == plain.plans() && program.zero == Zero::Stage0);
    }
}

/// Stage 1 reduce-scatters sums where they lie, once per step, and leaves gathers under way that the next plans wait for.
#[test]
fn stage_1_divides_what_the_optimizer_keeps() {
    let program = compiled(Zero::Stage1, 2, true, Recompute::None);
    assert_eq!((count(&program.first, scatters), count(&program.micro, scatters)), (0, 0));
    let buckets = count(&program.last, scatters);
    assert!(buckets > 1);
    assert_eq!((count(&program.last, reduces), count(&program.update, reduces)), (1, 1), "statistics, norm");
    let left: Vec<&Step> = program.update.steps.iter().filter(|step| step.left).collect();
    assert_eq!(left.len(), buckets);
    assert!(left.iter().all(|step| gathers(&step.op)));
    let waiting = |plan: &Plan| plan.steps.iter().map(|step| step.after.len()).sum::<usize>();
    assert!(waiting(&program.first) >= buckets && waiting(&program.update) >= buckets);
    let state = |plan: &Plan, value: usize| match plan.values[value].place {
        Place::State(state) => plan.states[state.index()].clone(),
        Place::Arena(offset) => panic!("{} lies in the arena, at {offset}", plan.values[value].name),
    };
    for step in program.last.steps.iter().filter(|step| scatters(&step.op)) {
        let part = state(&program.last, step.outputs[0]);
        assert!(matches!(part.held, Held::Within(_)));
        assert!(step.inputs.iter().all(|input| part.overlaps(&state(&program.last, *input))), "in place");
    }
}

/// The first step of a plan that computes with a state.
fn read_first(plan: &Plan, state: StateId) -> usize {
    let reads = |step: &Step| {
        step.lane == Lane::Compute
            && step.inputs.iter().any(|value| match plan.values[*value].place {
                Place::State(read) => {
                    read == state || plan.states[read.index()].overlaps(&plan.states[state.index()])
                }
                Place::Arena(_) => false,
            })
    };
    plan.steps.iter().position(reads).unwrap_or(usize::MAX)
}

/// One queue carries the gathers that an update leaves under way: what the next forward pass reads first has to be first.
#[test]
fn gathers_leave_in_the_order_in_which_they_are_needed() {
    for (zero, accumulates) in [(Zero::Stage1, true), (Zero::Stage1, false), (Zero::Stage2, true)] {
        let program = compiled(zero, 2, accumulates, Recompute::None);
        let gathered =
            program.update.steps.iter().filter(|step| gathers(&step.op)).map(|step| {
                match program.update.values[step.outputs[0]].place {
                    Place::State(state) => state,
                    Place::Arena(_) => panic!("what is gathered stays"),
                }
            });
        let needed: Vec<usize> = gathered.map(|state| read_first(&program.last, state)).collect();
        assert!(needed.len() > 2 && needed.is_sorted(), "stage {zero}: {needed:?}");
    }
}

/// Stage 2 sends every micro-step's gradients from memory that is free again, and adds up parts.
#[test]
fn stage_2_divides_gradients() {
    let program = compiled(Zero::Stage2, 2, true, Recompute::None);
    let buckets = count(&program.first, scatters);
    assert!(buckets > 2);
    assert_eq!((count(&program.micro, scatters), count(&program.last, scatters)), (buckets, buckets));
    assert_eq!(count(&program.micro, reduces), 0);
    let whole = program.states.iter().filter(|s| s.role == Role::Gradient && s.held.is_whole()).count();
    assert_eq!(whole, 0);
    // Some messages lie where another was.
    let message = |step: &Step| match program.first.values[step.inputs[0]].place {
        Place::Arena(offset) => offset,
        Place::State(_) => panic!("gradients are in the arena"),
    };
    let mut places: Vec<usize> =
        program.first.steps.iter().filter(|step| scatters(&step.op)).map(message).collect();
    places.sort_unstable();
    places.dedup();
    assert!(places.len() < buckets, "{buckets} messages at {places:?}");
}

/// Stage 3 gathers parameters ahead of their use, forward and backward, and keeps what is used on both sides of the turn.
#[test]
fn stage_3_divides_parameters() {
    for recompute in [Recompute::None, Recompute::Full] {
        let program = compiled(Zero::Stage3, 2, false, recompute);
        let of_bucket = |plan: &Plan| -> Vec<String> {
            let gathered = plan.steps.iter().filter(|step| gathers(&step.op));
            gathered.map(|step| step.layer.clone()).collect()
        };
        let (training, evaluation) = (of_bucket(&program.last), of_bucket(&program.eval));
        let mut once = training.clone();
        once.sort_unstable();
        once.dedup();
        assert!(once.len() > 2, "{training:?}");
        assert_eq!(training.len(), 2 * once.len() - 1, "all but the last are gathered twice: {training:?}");
        // Small parameters are whole: an update gathers them. Of their averages, as of all others, evaluation does.
        assert_eq!(evaluation.len(), once.len() + count(&program.update, gathers), "{evaluation:?}");
        assert!(program.states.iter().any(|state| state.is_parameter() && state.held.is_whole()));
        // Each leaves before the one before it is used, and compute steps come between.
        let steps = &program.last.steps;
        let late =
            steps.iter().enumerate().filter(|(_, step)| gathers(&step.op)).skip(1).filter(|(at, step)| {
                let user =
                    steps.iter().position(|s| s.lane == Lane::Compute && s.inputs.contains(&step.outputs[0]));
                user.is_some_and(|user| user < at + 2)
            });
        assert_eq!(late.count(), 0, "gathers are ahead of their use");
    }
}

/// Every byte has a purpose, and each stage divides what it promises to.
#[test]
fn memory_is_for_what_stages_divide() {
    let of = |zero: Zero| {
        let program = compiled(zero, 2, true, Recompute::None);
        let memory = program.memory();
        assert_eq!(
            (memory.total(), memory.states()),
            (program.bytes(), program.state_bytes()),
            "stage {zero}"
        );
        memory
    };
    let [plain, moments, gradients, parameters] = Zero::ALL.map(of);
    let padding = 2 * 2048 * 4 * 20;
    for (what, before, after) in [
        (Use::Moments, plain, moments),
        (Use::Gradients, moments, gradients),
        (Use::Parameters, gradients, parameters),
    ] {
        let (before, after) = (before.of(what), after.of(what));
        assert!(
            before > 0 && after < before && after <= before / 2 + padding,
            "{}: {before} to {after}",
            what.name()
        );
    }
    assert_eq!(plain.of(Use::Moments), 2 * plain.of(Use::Parameters));
    let text = plain.to_string();
    assert!(text.contains("moments ") && !text.contains("half-precision"), "{text}");
}

/// What `--print-after` shows is of the plans that are compiled.
#[test]
fn observed_or_not_the_plans_are_the_same() {
    for zero in Zero::ALL {
        for accumulates in [true, false] {
            let settings =
                Settings { mesh: Mesh::of_data(2), communication: SMALL, zero, accumulates, ..settings() };
            let plain = compile(model(2), &settings).unwrap();
            let mut seen = vec![];
            let settings = Settings { zero: stage_taken(&model(2), &settings).unwrap(), ..settings };
            let observed = compile_observed(model(2), &settings, &mut |_, pass, _| {
                seen.push(pass.to_string());
                Ok(())
            });
            let observed = observed.unwrap();
            assert!(observed.plans() == plain.plans() && observed.zero == plain.zero, "stage {zero}");
            assert!(seen.iter().any(|pass| pass == "scatter") && seen.iter().any(|pass| pass == "shards"));
        }
    }
}

/// Numbers of elements decide how far ahead parameters are gathered, how many are there at a time, how long they stay, and which stay
/// whole.
#[test]
fn gathers_keep_to_what_they_are_told() {
    let of = |gathering: Gathering| {
        let mesh = Mesh::of_data(2);
        let settings = Settings { mesh, communication: SMALL, zero: Zero::Stage3, gathering, ..settings() };
        let program = compile(model(4), &settings).unwrap();
        program.check().unwrap();
        program
    };
    // The gathers that leave before the first of their users is the next compute step.
    let ahead = |program: &Program| {
        let steps = &program.last.steps;
        let compute: Vec<usize> = (0..steps.len()).filter(|at| steps[*at].lane == Lane::Compute).collect();
        let is_ahead = |at: &usize| {
            let outputs = &steps[*at].outputs;
            let user = compute.iter().position(|c| steps[*c].inputs.iter().any(|v| outputs.contains(v)));
            let next = compute.iter().position(|c| c > at);
            user.zip(next).is_some_and(|(user, next)| user > next)
        };
        (0..steps.len()).filter(|at| gathers(&steps[*at].op)).filter(is_ahead).count()
    };
    let gathered = |program: &Program| count(&program.last, gathers);
    let whole = |program: &Program| {
        let whole = program.states.iter().filter(|state| state.is_parameter() && state.held.is_whole());
        whole.map(|state| state.ty.shape.count()).collect::<Vec<_>>()
    };
    let plain = of(Gathering::default());
    assert!(
        gathered(&plain) > 4 && ahead(&plain) + 1 >= gathered(&plain),
        "{} of {}",
        ahead(&plain),
        gathered(&plain)
    );
    let nothing = of(Gathering { ahead: Some(0), ..Gathering::default() });
    assert_eq!((gathered(&nothing), ahead(&nothing)), (gathered(&plain), 0));
    assert!(nothing.last.arena <= plain.last.arena);
    let all = of(Gathering { ahead: Some(usize::MAX), ..Gathering::default() });
    assert!(all.last.arena > plain.last.arena, "{} and {}", all.last.arena, plain.last.arena);
    let few = of(Gathering { ahead: Some(usize::MAX), live: Some(1), ..Gathering::default() });
    assert_eq!(ahead(&few), 0, "one bucket is more already");
    let kept = of(Gathering { reuse: Some(usize::MAX), ..Gathering::default() });
    assert_eq!(gathered(&kept), gathered(&plain).div_ceil(2), "what is gathered stays for the backward pass");
    assert!(kept.last.arena > plain.last.arena);
    let large = of(Gathering { whole: Some(usize::MAX), ..Gathering::default() });
    assert!(gathered(&large) == 0 && whole(&large).len() > whole(&plain).len());
    let some = of(Gathering { whole: Some(usize::MAX), whole_in_all: Some(500), ..Gathering::default() });
    assert!(whole(&some).iter().sum::<usize>() <= 500 && !whole(&some).is_empty(), "{:?}", whole(&some));
    let none = of(Gathering { whole: Some(0), ..Gathering::default() });
    assert!(whole(&none).is_empty(), "{:?}", whole(&none));
}

/// What is there at a time, kept between its uses, in use or on its way, is never more than is allowed, or one bucket where that is more.
#[test]
fn no_more_is_there_than_is_allowed() {
    let elements = |plan: &Plan, gather: &Step| -> usize {
        gather.outputs.iter().map(|value| plan.values[*value].ty.shape.count()).sum()
    };
    let gathers_of = |plan: &Plan| -> Vec<(usize, usize)> {
        let steps = plan.steps.iter().enumerate();
        steps.filter(|(_, step)| gathers(&step.op)).map(|(at, step)| (at, elements(plan, step))).collect()
    };
    let most_at_once = |plan: &Plan| {
        let mut there = vec![0; plan.steps.len()];
        for (at, elements) in gathers_of(plan) {
            let uses = |step: &Step| step.inputs.iter().any(|value| plan.steps[at].outputs.contains(value));
            let last = plan.steps.iter().rposition(uses).unwrap_or(at);
            there[at..=last].iter_mut().for_each(|sum| *sum += elements);
        }
        there.into_iter().max().unwrap_or(0)
    };
    let mut seen = vec![];
    for live in [1, 20_000, 35_000, 50_000, usize::MAX] {
        for reuse in [None, Some(20_000), Some(usize::MAX)] {
            for ahead in [None, Some(0), Some(20_000), Some(usize::MAX)] {
                let gathering = Gathering { live: Some(live), reuse, ahead, ..Gathering::default() };
                let mesh = Mesh::of_data(2);
                let settings =
                    Settings { mesh, communication: SMALL, zero: Zero::Stage3, gathering, ..settings() };
                let program = compile(model(4), &settings).unwrap();
                program.check().unwrap();
                for plan in [&program.first, &program.micro, &program.last] {
                    let largest = gathers_of(plan).into_iter().map(|(_, elements)| elements).max().unwrap();
                    let (most, name) = (most_at_once(plan), &plan.name);
                    assert!(most <= live.max(largest), "{name}: {most} of {live} with {reuse:?} {ahead:?}");
                    seen.push(most);
                }
            }
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() > 3, "{seen:?}");
}

/// Ranks of unequal batches launch gradients in other groups, yet their messages have one order.
#[test]
fn messages_have_one_order_whatever_the_batch() {
    struct Grouping;
    impl Target for Grouping {
        fn scratch(&self, graph: &Graph, node: usize) -> usize {
            settings().target.scratch(graph, node)
        }
        fn batching(&self) -> Batching {
            Batching { most: 4, small: 1 << 20, short: 250_000, together: 1 << 22, unit: 8, stays: 8 }
        }
    }
    let kinds = Zero::ALL.into_iter().flat_map(|zero| [(zero, false), (zero, true)]);
    for (zero, each_micro_step) in kinds {
        let mut grouped = vec![];
        let orders = [1, 4, 5, 64].map(|batch| {
            let communication = Communication { bucket: 1500, each_micro_step, ..SMALL };
            let (mesh, target) = (Mesh::of_data(2), &Grouping);
            let settings = Settings { mesh, communication, zero, target, ..settings() };
            // Of this stage, whatever the batch: ranks decide by one number.
            let program = compile_observed(model_of(4, batch), &settings, &mut |_, _, _| Ok(())).unwrap();
            program.check().unwrap();
            let joins = |two: &&[Step]| two[1].op.runs_beside(&two[0].op);
            grouped.push(program.last.steps.windows(2).filter(joins).count());
            let told = |(step, group): (&Step, _)| format!("{} {} {group}", step.op.name(), step.layer);
            program.plans().map(|plan| plan.collectives().map(told).collect::<Vec<_>>())
        });
        assert!(grouped.windows(2).any(|two| two[0] != two[1]), "stage {zero}: {grouped:?}");
        assert!(orders.iter().all(|order| *order == orders[0]), "stage {zero}: {orders:#?}");
    }
}

/// What a step sends or updates is divided among the step's own group.
#[test]
fn groups_are_those_of_the_states() {
    let mesh = Mesh::of_replicas(4, 2);
    for zero in [Zero::Stage1, Zero::Stage2, Zero::Stage3] {
        let settings = Settings { mesh, communication: SMALL, zero, ..settings() };
        let program = compile(model(2), &settings).unwrap();
        program.check().unwrap();
        let mut changed = 0;
        for plan in program.plans() {
            for at in 0..plan.steps.len() {
                let mut other = plan.clone();
                match &mut other.steps[at].op {
                    // Of two pairs, the ranks that have the same part.
                    Op::AllGather { group, .. } | Op::ReduceScatter { group, .. } => *group = mesh.replicas(),
                    Op::AdamW { flat, .. } => flat.group = Some(mesh.replicas()),
                    _ => continue,
                }
                let is_state = |value: &usize| matches!(plan.values[*value].place, Place::State(_));
                // What comes from the arena and goes there belongs to no group.
                if !other.steps[at].inputs.iter().chain(&other.steps[at].outputs).any(is_state) {
                    continue;
                }
                let why = other.check().unwrap_err().to_string();
                assert!(why.contains("but ranks divide"), "stage {zero}, {}: {why}", plan.name);
                changed += 1;
            }
        }
        assert!(changed > 4, "stage {zero}");
    }
}

/// Every byte of a program has a purpose, and each stage less of what it divides.
#[test]
fn memory_has_purposes() {
    for accumulates in [true, false] {
        let memories = Zero::ALL.map(|zero| {
            let program = compiled(zero, 2, accumulates, Recompute::None);
            assert_eq!(program.memory().total(), program.bytes(), "stage {zero}");
            program.memory()
        });
        let of = |what: Use| memories.map(|memory| memory.of(what));
        let [whole, one, two, three] = of(Use::Moments);
        assert!(one < whole && two <= whole && three < whole, "{:?}", of(Use::Moments));
        let [whole, .., three] = of(Use::Parameters);
        assert!(three < whole, "{:?}", of(Use::Parameters));
        let [.., before, three] = of(Use::Gathered);
        assert!(before == 0 && three > 0, "{:?}", of(Use::Gathered));
        assert!(of(Use::Activations).iter().all(|bytes| *bytes > 0));
        if accumulates {
            let [whole, one, ..] = of(Use::Gradients);
            assert!(2 * one > whole && of(Use::Gradients)[3] < whole, "{:?}", of(Use::Gradients));
        }
    }
}
