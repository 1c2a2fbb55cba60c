//! What a run's settings make of its plans: groups of parameters, frozen ones, moving averages.

#[path = "support/simulator.rs"]
mod simulator;
#[path = "support/transformer.rs"]
mod transformer;

use graph::plan::{Place, Step};
use graph::{
    Batching, Graph, GraphError, Op, Optimizer, ParamGroup, Plan, Program, Recompute, Settings, State,
    Target, compile,
};
use graph::{Communication, DType, Home, Mesh, Mixed, Role, Type, compile_observed, passes_of};
use simulator::simulate;
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use transformer::{model, settings};

fn compiled(settings: &Settings<'_>) -> Program {
    let program = compile(model(2), settings).unwrap();
    for plan in program.plans() {
        plan.check().unwrap_or_else(|e| panic!("{}: {e}\n{plan}", plan.name));
        simulate(plan, &vec![1; plan.steps.len()]).unwrap_or_else(|e| panic!("{}: {e}", plan.name));
        let text = plan.to_string();
        assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
    }
    program
}

/// Names of the states that steps read or write.
fn used(plan: &Plan) -> BTreeSet<&str> {
    let states = plan.values.iter().filter_map(|v| match v.place {
        Place::State(state) => Some(&plan.states[state.index()]),
        Place::Arena(_) => None,
    });
    states.map(|s| s.name.as_str()).collect()
}

fn parameters(program: &Program) -> BTreeSet<&str> {
    program.states.iter().filter(|s| s.is_parameter()).map(|s| s.name.as_str()).collect()
}

fn averages(program: &Program) -> Vec<&State> {
    program.states.iter().filter(|s| s.averages().is_some()).collect()
}

fn ops(plan: &Plan) -> Vec<String> {
    plan.steps.iter().map(|s| s.op.name()).collect()
}

#[test]
fn without_averages_evaluation_reads_the_parameters() {
    let program = compiled(&Settings { ema: None, ..settings() });
    assert!(averages(&program).is_empty());
    assert_eq!(used(&program.eval), parameters(&program));
    assert!(!ops(&program.update).contains(&"ema".to_string()));
}

#[test]
fn evaluation_reads_the_averages_and_training_does_not() {
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
        let program = compiled(&Settings { recompute, ..settings() });
        let averages = averages(&program);
        assert_eq!(
            averages.iter().filter_map(|s| s.averages()).collect::<BTreeSet<_>>(),
            parameters(&program)
        );
        let names: BTreeSet<&str> = averages.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(used(&program.eval), names);
        assert!(used(&program.last).is_disjoint(&names) && used(&program.micro).is_disjoint(&names));
    }
}

/// An average is one more step for each bucket, written where it is kept, from the parameters where they lie.
#[test]
fn averages_cost_no_copy_and_no_memory_but_their_own() {
    let communication = Communication { bucket: 5000, ..Communication::default() };
    let with = compiled(&Settings { communication, ..settings() });
    let without = compiled(&Settings { ema: None, communication, ..settings() });
    assert_eq!(with.update.arena, without.update.arena);
    assert!(!ops(&with.update).contains(&"assign".to_string()));
    let optimizers = with.update.steps.iter().filter(|step| matches!(step.op, Op::AdamW { .. }));
    let averages: Vec<&Step> =
        with.update.steps.iter().filter(|step| matches!(step.op, Op::Ema { decay: 0.999 })).collect();
    assert!(averages.len() > 1 && averages.len() == optimizers.clone().count());
    for (Step { outputs, .. }, Step { inputs, outputs: average, .. }) in optimizers.zip(averages) {
        assert_eq!(inputs[1], outputs[0], "the parameters as updated");
        let place = |value: usize| with.update.values[value].place;
        assert_eq!(place(inputs[0]), place(average[0]), "in place");
    }
    assert_eq!(with.last.to_string(), without.last.to_string());
}

fn is_head(state: &State) -> bool {
    state.name.starts_with("head.")
}

#[test]
fn each_group_has_its_rate_and_decay() {
    let group = |state: &State| match is_head(state) {
        true => ParamGroup { lr_scale: 10.0, decays: false },
        false => ParamGroup { lr_scale: 0.1, decays: true },
    };
    let (beta1, beta2, eps, weight_decay) = (0.9, 0.999, 1e-8, 0.05);
    for optimizer in [
        Optimizer::AdamW { beta1, beta2, eps, weight_decay },
        Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay },
        Optimizer::Lamb { beta1, beta2, eps, weight_decay, min_coeff: 0.01, max_coeff: 10.0 },
    ] {
        let program = compiled(&Settings { optimizer, group: &group, ..settings() });
        let mut pieces = 0;
        for step in &program.update.steps {
            let (Op::AdamW { flat, .. } | Op::Sgd { flat, .. } | Op::LambApply { flat, .. }) = &step.op
            else {
                continue;
            };
            let Place::State(buffer) = program.update.values[step.outputs[0]].place else {
                panic!("in place")
            };
            let buffer = &program.states[buffer.index()];
            for piece in &flat.pieces {
                // The parameter that lies where the piece does.
                let Home::Own(start) = buffer.home else { panic!("{buffer:?}") };
                let home = Home::Own(start + piece.start * buffer.ty.dtype.bytes());
                let is_there = |state: &&State| state.is_parameter() && state.home == home;
                let parameter = program.states.iter().find(is_there).unwrap();
                assert_eq!(piece.count, parameter.ty.shape.count(), "{}", parameter.name);
                let expected = if is_head(parameter) { (0.0, 10.0) } else { (0.05, 0.1) };
                assert_eq!((piece.weight_decay, piece.lr_scale), expected, "{}", parameter.name);
                pieces += 1;
            }
        }
        assert_eq!(pieces, parameters(&program).len());
    }
}

/// Everything but the head: there is no backward pass beyond it, and nothing is kept for the frozen parameters.
#[test]
fn frozen_parameters_cost_nothing() {
    let group = |state: &State| ParamGroup { lr_scale: f64::from(u8::from(is_head(state))), decays: true };
    let program = compiled(&Settings { group: &group, ..settings() });
    let own = program.states.iter().filter(|state| state.role != Role::Flat);
    let states: Vec<&str> = own.map(|s| s.name.as_str()).collect();
    let extra: Vec<&str> = states.into_iter().filter(|s| !parameters(&program).contains(s)).collect();
    let exchanged = ["stats", "head.weight.grad", "head.bias.grad"].map(String::from);
    let of_head = ["weight", "bias"].map(|p| ["m", "v", "ema"].map(|s| format!("head.{p}.{s}")));
    assert_eq!(extra, [&exchanged[..], &of_head.concat(), &["applied".into()]].concat());

    let backward = program.last.steps.iter().filter(|s| s.phase == graph::graph::Phase::Backward);
    let backward: Vec<String> = backward.map(|s| s.op.name()).collect();
    assert_eq!(backward, ["seed", "cross_entropy_grad", "linear_grad_w", "column_sum"]);
    let updated: Vec<&str> = program.update.steps.iter().map(|s| s.layer.as_str()).collect();
    let head = ["head.weight … head.bias"; 2];
    assert_eq!(updated, [&["norm", "control", "applied"][..], &head].concat());
    let mut read = parameters(&program);
    read.retain(|name| !name.starts_with("head."));
    read.extend(["head.weight.ema", "head.bias.ema"]);
    assert_eq!(used(&program.eval), read, "a frozen parameter is its own average");
}

/// Freezing the embedding and first block, the usual way: the gradients that are left are those of an unfrozen model.
#[test]
fn freezing_the_first_layers_ends_the_backward_pass_there() {
    let frozen = |state: &State| !state.name.starts_with("blocks.1") && !is_head(state);
    let group = |state: &State| ParamGroup { lr_scale: f64::from(u8::from(!frozen(state))), decays: true };
    let (all, some) = (compiled(&settings()), compiled(&Settings { group: &group, ..settings() }));
    assert!(some.last.steps.iter().any(|s| s.layer == "blocks.1.qkv" && s.op.name() == "linear_grad_w"));
    let backward = |layer: &str, program: &Program| {
        let steps = program.last.steps.iter().filter(|s| s.phase == graph::graph::Phase::Backward);
        steps.filter(|s| s.layer.starts_with(layer)).count()
    };
    assert!(backward("blocks.0", &all) > 0 && backward("patch_embed", &all) > 0);
    assert_eq!((backward("blocks.0", &some), backward("patch_embed", &some)), (0, 0));
    assert!(some.last.cost().flops < 0.75 * all.last.cost().flops);
}

#[test]
fn a_model_frozen_whole_is_refused() {
    let settings = Settings { group: &|_| ParamGroup { lr_scale: 0.0, decays: true }, ..settings() };
    assert_eq!(compile(model(1), &settings).unwrap_err(), GraphError::NothingToTrain);
}

/// The steps of each run of weight gradients that follow each other.
fn runs(plan: &Plan) -> Vec<std::ops::Range<usize>> {
    let is = |step: &Step| matches!(step.op, Op::LinearGradW { .. });
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for index in (0..plan.steps.len()).filter(|index| is(&plan.steps[*index])) {
        match runs.last_mut().filter(|run| run.end == index) {
            Some(run) => run.end += 1,
            None => runs.push(index..index + 1),
        }
    }
    runs
}

#[test]
fn small_weight_gradients_are_gathered() {
    for (accumulates, recompute) in
        [(false, Recompute::None), (true, Recompute::None), (true, Recompute::Full), (false, Recompute::Gelu)]
    {
        let plain = compiled(&Settings { accumulates, recompute, ..settings() }).last;
        let gathered = compiled(&Settings { accumulates, recompute, target: &FOUR, ..settings() }).last;
        let products = |plan: &Plan| runs(plan).iter().map(|run| run.len()).sum::<usize>();
        assert_eq!(products(&plain), products(&gathered));
        assert!(runs(&plain).iter().all(|run| run.len() == 1));
        // The head, whose classes the copy engine can't take; the class token's; four that are alike; the last of those, and the
        // embedding, which has fewer rows.
        let lengths: Vec<usize> = runs(&gathered).iter().map(|run| run.len()).collect();
        assert_eq!(lengths, [1, 3, 4, 1, 1]);

        // They may come in any order, since they leave each other's memory alone.
        let mut turned = gathered.clone();
        runs(&gathered).into_iter().for_each(|run| turned.steps[run].reverse());
        turned.check().unwrap();
        simulate(&turned, &vec![1; turned.steps.len()]).unwrap();
        let run = runs(&gathered).into_iter().find(|run| run.len() == 4).unwrap();
        let (first, second) = (&gathered.steps[run.start], &gathered.steps[run.start + 1]);
        let mut broken = gathered.clone();
        broken.values[second.outputs[0]].place = gathered.values[first.inputs[0]].place;
        let error = broken.check().unwrap_err().to_string();
        assert!(error.contains("writes over"), "{error}");
    }
}

/// Steps between the last use of memory and its next, the least of all that are not in place.
fn shortest_rest(plan: &Plan) -> usize {
    let range = |value: &usize| match plan.values[*value].place {
        Place::Arena(start) => Some((start, start + plan.values[*value].ty.bytes())),
        Place::State(_) => None,
    };
    let mut used: Vec<(usize, (usize, usize))> = vec![];
    let mut shortest = usize::MAX;
    for (number, step) in plan.steps.iter().enumerate() {
        let inputs: Vec<_> = step.inputs.iter().filter_map(range).collect();
        for (start, end) in step.outputs.iter().filter_map(range).filter(|own| !inputs.contains(own)) {
            let before = used.iter().filter(|(_, (s, e))| *s < end && start < *e);
            shortest = before.map(|(last, _)| number - last).fold(shortest, usize::min);
        }
        used.extend(inputs.into_iter().chain(step.outputs.iter().filter_map(range)).map(|r| (number, r)));
    }
    shortest
}

/// A device of these wishes.
struct Device {
    linger: usize,
    batching: Batching,
}

const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

const NONE: Device = Device { linger: 0, batching: Batching::NONE };
/// Four weight gradients at once.
const FOUR: Device = Device {
    batching: Batching { most: 4, small: 1 << 20, short: 1 << 40, together: 1 << 22, unit: 8, stays: 8 },
    ..NONE
};

impl Target for Device {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        settings().target.scratch(graph, node)
    }

    fn linger(&self) -> usize {
        self.linger
    }

    fn batching(&self) -> Batching {
        self.batching
    }
}

#[test]
fn memory_rests_where_there_is_room() {
    // With many blocks, a few values more are little.
    let program = |linger: usize| {
        let target = Device { linger, ..NONE };
        compile(model(16), &Settings { target: &target, ..settings() }).unwrap()
    };
    let last = |linger: usize| program(linger).last;
    let (tight, resting, longer) = (last(0), last(3), last(20));
    assert_eq!(shortest_rest(&tight), 1);
    assert!(shortest_rest(&resting) > 3);
    for plan in [resting, longer] {
        plan.check().unwrap();
        assert!(plan.arena > tight.arena && plan.arena as f64 <= 1.045 * tight.arena as f64);
    }
    // Evaluation is small, and rests in what training needs anyway.
    let (tight, resting) = (program(0), program(3));
    assert!(shortest_rest(&tight.eval) == 1 && shortest_rest(&resting.eval) > 3);
    assert!(resting.eval.arena as f64 > 1.045 * tight.eval.arena as f64);
    let training = [&resting.first, &resting.micro, &resting.last].map(|plan| plan.arena);
    assert_eq!(resting.arena(), training.into_iter().max().unwrap());
}

/// Every pass leaves a graph that is sound, whatever the settings; and the lists are what is run.
#[test]
fn a_graph_is_sound_after_every_pass() {
    for (accumulates, mixed) in [(true, None), (false, Some(BF16))] {
        for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
            let settings = Settings {
                accumulates,
                mixed,
                recompute,
                mesh: Mesh::of_data(2),
                target: &FOUR,
                ..settings()
            };
            let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
            let mut look = |plans: &[&str], pass: &str, graph: &Graph| {
                plans.iter().for_each(|plan| seen.entry(plan.to_string()).or_default().push(pass.into()));
                typed(graph, pass);
                graph.check()
            };
            compile_observed(model(2), &settings, &mut look).unwrap();
            assert_eq!(seen.contains_key("micro"), accumulates);
            let plans = ["first", "last", "update", "eval", "micro"];
            for plan in &plans[..if accumulates { 5 } else { 4 }] {
                assert_eq!(seen[*plan], passes_of(plan), "{plan}");
            }
        }
    }
}

/// The types of all results follow from the operands.
fn typed(graph: &Graph, pass: &str) {
    for node in graph.nodes.iter().filter(|n| !matches!(n.op, Op::Input | Op::Read { .. })) {
        let inputs: Vec<&Type> = node.inputs.iter().map(|v| graph.ty(*v)).collect();
        let outputs: Vec<Type> = node.outputs.iter().map(|v| graph.ty(*v).clone()).collect();
        let declared: Vec<DType> = outputs.iter().map(|ty| ty.dtype).collect();
        assert_eq!(node.op.infer_as(&inputs, &declared), Ok(outputs), "after {pass}: {}", node.layer);
    }
}
