//! Data parallelism in the plans: which gradients travel together, when they leave, and that they travel where they lie.

#[path = "support/simulator.rs"]
mod simulator;
#[path = "support/transformer.rs"]
mod transformer;

use graph::graph::Phase;
use graph::op::{Lane, Reduction};
use graph::plan::{Place, Step};
use graph::{Communication, DType, Graph, Mesh, Op, Plan, Program, Recompute, Role, Settings, compile};
use simulator::simulate;
use transformer::{model, settings};

const TWO: Mesh = Mesh { replica: 1, data: 2, sequence: 1 };
const PLAIN: Communication =
    Communication { bucket: 5000, overlap: true, dtype: None, each_micro_step: false };

fn compiled(communication: Communication, recompute: Recompute) -> Program {
    let settings = Settings { mesh: TWO, communication, recompute, ..settings() };
    let program = compile(model(2), &settings).unwrap();
    for plan in program.plans() {
        plan.check().unwrap_or_else(|e| panic!("{}: {e}\n{plan}", plan.name));
        for slow in 0..plan.steps.len() {
            let durations: Vec<u64> =
                (0..plan.steps.len()).map(|s| if s == slow { 999 } else { 1 }).collect();
            simulate(plan, &durations).unwrap_or_else(|e| panic!("{}: {e}", plan.name));
        }
        let text = plan.to_string();
        assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
    }
    program
}

fn exchanges(plan: &Plan) -> Vec<(usize, &Step)> {
    plan.steps.iter().enumerate().filter(|(_, s)| s.lane == Lane::Comm).collect()
}

fn state_of(plan: &Plan, value: usize) -> Option<usize> {
    match plan.values[value].place {
        Place::State(state) => Some(state.index()),
        Place::Arena(_) => None,
    }
}

/// The states each bucket takes along.
fn buckets(plan: &Plan) -> Vec<Vec<usize>> {
    let states =
        |(_, step): (usize, &Step)| step.inputs.iter().map(|v| state_of(plan, *v).unwrap()).collect();
    exchanges(plan).into_iter().map(states).collect()
}

#[test]
fn gradients_lie_in_the_order_in_which_they_get_ready() {
    for recompute in [Recompute::None, Recompute::Full] {
        let program = compiled(PLAIN, recompute);
        let mut made: Vec<usize> = Vec::new();
        for value in program.micro.steps.iter().flat_map(|s| &s.outputs) {
            let is_sum = |s: &usize| matches!(program.states[*s].role, Role::Gradient | Role::Statistic);
            made.extend(state_of(&program.micro, *value).filter(is_sum));
        }
        let first = program.states.iter().position(|s| s.role == Role::Statistic).unwrap();
        assert_eq!(made, (first..first + made.len()).collect::<Vec<_>>(), "one after the other");
        let gradients = program.states.iter().filter(|s| s.role == Role::Gradient).count();
        assert_eq!(made.len(), gradients + 1);
    }
}

#[test]
fn buckets_are_neighbours_and_hold_what_they_may() {
    for bucket in [1, 1000, 5000, usize::MAX] {
        let program = compiled(Communication { bucket, ..PLAIN }, Recompute::None);
        let buckets = buckets(&program.last);
        let all: Vec<usize> = buckets.concat();
        assert_eq!(all, (all[0]..all[0] + all.len()).collect::<Vec<_>>());
        assert_eq!(program.states[all[0]].name, "stats");
        let size = |s: &usize| match program.states[*s].role {
            Role::Gradient => program.states[*s].ty.shape.count(),
            _ => 0,
        };
        for (i, states) in buckets.iter().enumerate() {
            let elements: usize = states.iter().map(size).sum();
            let alone = states.iter().filter(|s| size(s) > 0).count() == 1;
            assert!(elements <= bucket || alone, "{elements} elements in a bucket of {bucket}");
            let next = buckets.get(i + 1).map(|b| size(&b[0]));
            assert!(
                next.is_none_or(|next| elements + next > bucket),
                "bucket {i} has room for {next:?} more"
            );
        }
    }
}

#[test]
fn a_bucket_leaves_after_its_last_gradient() {
    let program = compiled(PLAIN, Recompute::None);
    let plan = &program.last;
    let exchanges = exchanges(plan);
    assert!(exchanges.len() > 4, "{} buckets", exchanges.len());
    for (index, step) in &exchanges {
        assert_eq!(step.op, Op::AllReduce { reduction: Reduction::Sum, group: TWO.world() });
        assert_eq!(step.phase, Phase::Communication);
        assert_eq!(step.waits, [index - 1], "only for what completes it");
        let before = &plan.steps[index - 1];
        assert_eq!(before.outputs.last(), step.inputs.last(), "which is the step before");
    }
    assert!(plan.steps.iter().all(|s| s.lane == Lane::Comm || s.waits.is_empty()), "nobody waits for them");
    assert_eq!(exchanges[0].1.layer, "head.weight … blocks.1.fc2.bias");
    let (_, last) = exchanges[exchanges.len() - 1];
    assert!(last.layer.ends_with("patch_embed.proj.bias"), "{}", last.layer);
}

#[test]
fn without_overlap_they_leave_at_the_end() {
    let (early, late) = (
        compiled(PLAIN, Recompute::None),
        compiled(Communication { overlap: false, ..PLAIN }, Recompute::None),
    );
    let first = exchanges(&late.last)[0].0;
    assert!(late.last.steps[..first].iter().all(|s| s.lane == Lane::Compute));
    assert!(late.last.steps[first..].iter().all(|s| s.lane == Lane::Comm));
    assert_eq!(buckets(&late.last), buckets(&early.last));
    assert_eq!(late.last.steps.len(), early.last.steps.len());
    // The plan itself says so, for executors that don't walk it in order.
    let seconds = |program: &Program| vec![1.0; program.last.steps.len()];
    let ends = |program: &Program| graph::replay(&program.last, &seconds(program)).seconds();
    assert_eq!(ends(&late), late.last.steps.len() as f64);
    assert!(ends(&early) < ends(&late));
}

/// read → accumulate → all_reduce → assign, all in the state's own memory.
#[test]
fn the_exchange_needs_no_memory_and_no_copy() {
    for recompute in [Recompute::None, Recompute::Full] {
        let alone = Settings { mesh: Mesh::default(), communication: PLAIN, recompute, ..settings() };
        let (plain, program) = (compile(model(2), &alone).unwrap(), compiled(PLAIN, recompute));
        assert_eq!(program.last.arena, program.micro.arena);
        let alone = |plan: &Plan| Plan { mesh: Mesh::default(), ..plan.clone() };
        assert_eq!(alone(&program.micro), plain.micro, "nothing is exchanged in a micro-step");
        assert_eq!(program.states, plain.states);
        assert_eq!(alone(&program.update), plain.update);
        let compute: Vec<&Step> = program.last.steps.iter().filter(|s| s.lane == Lane::Compute).collect();
        let same =
            compute.iter().zip(&plain.micro.steps).all(|(a, b)| (&a.op, &a.layer) == (&b.op, &b.layer));
        assert!(same && compute.len() == plain.micro.steps.len(), "no step but the exchanges is new");
        for (_, step) in exchanges(&program.last) {
            let place = |v: &usize| program.last.values[*v].place;
            let (inputs, outputs): (Vec<_>, Vec<_>) =
                (step.inputs.iter().map(place).collect(), step.outputs.iter().map(place).collect());
            assert_eq!(inputs, outputs);
            assert!(inputs.iter().all(|p| matches!(p, Place::State(_))));
        }
    }
}

#[test]
fn one_rank_exchanges_nothing() {
    let settings = Settings { communication: PLAIN, ..settings() };
    let program = compile(model(2), &settings).unwrap();
    assert_eq!(Plan { name: "micro".into(), ..program.last }, program.micro);
}

/// Halves are packed when a bucket is complete and unpacked, over the sums, when everything has come back; the statistics
/// travel in their own type.
#[test]
fn another_type_on_the_wire() {
    for overlap in [true, false] {
        let dtype = Some(DType::Bf16);
        let program = compiled(Communication { dtype, overlap, ..PLAIN }, Recompute::None);
        let plan = &program.last;
        let exchanges = exchanges(plan);
        let ty = |v: &usize| plan.values[*v].ty.dtype;
        assert_eq!(exchanges[0].1.layer, "stats");
        assert_eq!(exchanges[0].1.inputs.iter().map(ty).collect::<Vec<_>>(), [DType::F32]);
        for (index, step) in &exchanges[1..] {
            assert_eq!(step.inputs.iter().map(ty).collect::<Vec<_>>(), [DType::Bf16]);
            assert!(matches!(plan.steps[index - 1].op, Op::Pack { to: Some(DType::Bf16), .. }));
        }
        let unpacks: Vec<usize> = (0..plan.steps.len())
            .filter(|s| matches!(plan.steps[*s].op, Op::Unpack { over: true, .. }))
            .collect();
        assert_eq!(unpacks.len(), exchanges.len() - 1);
        assert!(unpacks[0] > exchanges[exchanges.len() - 1].0, "nobody waits before the end");
        for (unpack, (communication, _)) in unpacks.iter().zip(&exchanges[1..]) {
            let Step { outputs, waits, .. } = &plan.steps[*unpack];
            assert_eq!(waits, &[*communication]);
            assert!(outputs.iter().all(|v| state_of(plan, *v).is_some()), "into the states");
        }
        assert!(!plan.steps.iter().any(|s| matches!(s.op, Op::Assign { .. })), "no copies");
        let halves: usize =
            program.states.iter().filter(|s| s.role == Role::Gradient).map(|s| s.ty.bytes()).sum();
        assert!(plan.arena <= program.micro.arena + halves / 2 + 128 * exchanges.len());
    }
    let own = compiled(Communication { dtype: Some(DType::F32), ..PLAIN }, Recompute::None);
    assert_eq!(own.last, compiled(PLAIN, Recompute::None).last, "their own type is no other");
}

#[test]
fn the_text_of_a_small_plan() {
    let text = include_str!("plans/data-parallel.plan");
    let settings = Settings {
        mesh: TWO,
        communication: PLAIN,
        ema: None,
        target: &|_: &Graph, _: usize| 0,
        ..settings()
    };
    let plan = compile(model(1), &settings).unwrap().last;
    let written: String =
        text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).flat_map(|l| [l, "\n"]).collect();
    assert_eq!(plan.to_string(), written);
}
