//! Compiler from a model's graphs to the plans of a run: `first`, `micro`, `last`, `update` and `eval`. Each is made by
//! a list of named passes.

use crate::graph::{AVERAGE, COPY, Graph, GraphError, State, settle};
use crate::mesh::Mesh;
use crate::op::StateId;
use crate::passes::{self, Gradients, Layout};
use crate::plan::{Key, Plan};
use crate::program::{Model, Program};
use crate::settings::{Gathering, Mixed, Settings, Zero};
use crate::target::Target;

/// A graph on its way to a plan, with results of passes that later passes read.
#[derive(Clone, Default)]
struct Draft {
    graph: Graph,
    gradients: Gradients,
    layout: Layout,
    /// Flag: sums continue those of earlier micro-steps.
    adds: bool,
}

/// A step on the way from a model to a plan.
pub struct Pass {
    /// Name, as `vitesse plan --print-after` takes it.
    pub name: &'static str,
    run: fn(Draft, &Settings<'_>) -> Result<Draft, GraphError>,
}

/// A pass over the graph alone.
macro_rules! pass {
    ($name:literal, $run:expr) => {
        Pass {
            name: $name,
            run: |draft, settings| {
                let run: fn(Graph, &Draft, &Settings<'_>) -> Result<Graph, GraphError> = $run;
                let mut draft = draft;
                let graph = std::mem::take(&mut draft.graph);
                let graph = run(graph, &draft, settings)?;
                Ok(Draft { graph, ..draft })
            },
        }
    };
}

const NARROW: Pass = pass!("narrow", |graph, _, _| passes::narrow(graph));
const FUSE: Pass = pass!("fuse", |graph, _, _| Ok(passes::fuse(graph)));
const RESIZED_LOSS: Pass = pass!("resized_loss", |graph, _, _| Ok(passes::resized_loss(graph)));
const DIFFERENTIATE: Pass = Pass { name: "differentiate", run: differentiate };
const LAY_OUT: Pass = Pass { name: "lay_out", run: lay_out };
const ACCUMULATE: Pass = pass!("accumulate", |graph, draft, _| passes::accumulate(
    graph,
    &draft.gradients,
    &draft.layout,
    draft.adds
));
const DEFER: Pass = pass!("defer", |graph, draft, _| Ok(passes::defer(graph, &draft.layout, draft.adds)));
const PEEPHOLE: Pass = pass!("peephole", |graph, _, _| Ok(passes::peephole(graph)));
const RECOMPUTE: Pass = pass!("recompute", |graph, _, settings| passes::recompute(graph, settings.recompute));
const PRECISION: Pass = pass!("precision", |graph, draft, settings| match settings.mixed {
    Some(mixed) => passes::precision(graph, mixed, &|parameter| draft.layout.copies.get(&parameter).copied()),
    None => Ok(graph),
});
const LATE: Pass = pass!("late", |graph, _, _| Ok(passes::late(graph)));
const GATHER: Pass =
    pass!("gather", |graph, _, settings| Ok(passes::gather(graph, &settings.target.batching())));
const SYNCHRONISE: Pass = pass!("synchronise", |graph, _, _| passes::synchronise(graph));
const SHARDS: Pass = pass!("shards", |graph, _, settings| passes::shards(graph, &settings.gathering));
const SCATTER: Pass = pass!("scatter", |graph, draft, settings| passes::scatter(
    graph,
    &draft.layout,
    &settings.communication,
    draft.adds
));
const PARALLELISE: Pass = pass!("parallelise", |graph, draft, settings| passes::parallelise(
    graph,
    &draft.layout,
    &settings.communication
));
const REPLICAS: Pass = pass!("replicas", |graph, draft, settings| passes::replicas(
    graph,
    &draft.layout,
    &settings.communication
));
const SUMS: Pass = pass!("sums", |graph, _, settings| passes::sums(graph, settings.target));
const AVERAGES: Pass = pass!("averages", |mut graph, draft, _| {
    graph.read_instead(|state| draft.layout.average_of(state));
    Ok(graph)
});
const UPDATE: Pass = Pass { name: "update", run: update };

/// Passes from a model to forward and backward ops.
const TRAINING: [Pass; 5] = [NARROW, FUSE, RESIZED_LOSS, DIFFERENTIATE, LAY_OUT];

/// Passes from there to a micro-step that begins the sums of a step, or adds to them.
const MICRO: [Pass; 10] =
    [ACCUMULATE, DEFER, PEEPHOLE, RECOMPUTE, PRECISION, LATE, GATHER, SYNCHRONISE, SHARDS, SCATTER];

/// Passes at the end of every list of training.
const END: [Pass; 1] = [SUMS];

/// Passes of the last micro-step alone.
const LAST: [Pass; 2] = [PARALLELISE, REPLICAS];

/// Passes from a model to loss and logits.
const EVALUATION: [Pass; 6] = [AVERAGES, NARROW, FUSE, RESIZED_LOSS, PRECISION, SHARDS];

/// The names of the passes that lead to a plan, in their order.
pub fn passes_of(plan: &str) -> Vec<&'static str> {
    let lists: &[&[Pass]] = match plan {
        "first" | "micro" => &[&TRAINING, &MICRO, &END],
        "last" => &[&TRAINING, &MICRO, &LAST, &END],
        "eval" => &[&EVALUATION],
        "update" => &[&[UPDATE]],
        _ => &[],
    };
    lists.iter().flat_map(|list| list.iter().map(|pass| pass.name)).collect()
}

/// Looks at what a pass has made: the plans that the graph is on its way to, the pass, the graph.
pub type Observer<'a> = &'a mut dyn FnMut(&[&str], &str, &Graph) -> Result<(), GraphError>;

/// Runs passes in order.
fn apply(
    passes: &[Pass],
    mut draft: Draft,
    settings: &Settings<'_>,
    plans: &[&str],
    observe: Observer<'_>,
) -> Result<Draft, GraphError> {
    for pass in passes {
        draft = (pass.run)(draft, settings)?;
        observe(plans, pass.name, &draft.graph)?;
    }
    Ok(draft)
}

/// The plans of a run.
pub fn compile(model: Model, settings: &Settings<'_>) -> Result<Program, GraphError> {
    let zero = stage_taken(&model, settings)?;
    compile_stage(model, &Settings { zero, ..*settings }, &mut |_, _, _| Ok(()))
}

/// The stage whose plans a run takes: the one that is asked for, or stage 1 in the place of stage 2 where that takes less memory. Gradients
/// may take less in a range that is theirs than under way: where they are few, or a step has one micro-step and they lie where
/// activations were. Not where gradients are to be reduced in every micro-step.
pub fn stage_taken(model: &Model, settings: &Settings<'_>) -> Result<Zero, GraphError> {
    if settings.stage() != Zero::Stage2 || settings.asks_for_each_micro_step() {
        return Ok(settings.stage());
    }
    let bytes = |zero: Zero| {
        let program = compile_stage(model.clone(), &Settings { zero, ..*settings }, &mut |_, _, _| Ok(()));
        program.map(|program| program.bytes())
    };
    Ok(if bytes(Zero::Stage1)? < bytes(Zero::Stage2)? { Zero::Stage1 } else { Zero::Stage2 })
}

/// Compiles the plans of exactly the stage that is asked for, and shows an observer the graph after every pass. Ranks that have different
/// numbers of images decide on it by the same number: see [`stage_taken`].
pub fn compile_observed(
    model: Model,
    settings: &Settings<'_>,
    observe: Observer<'_>,
) -> Result<Program, GraphError> {
    compile_stage(model, settings, observe)
}

fn compile_stage(
    model: Model,
    settings: &Settings<'_>,
    observe: Observer<'_>,
) -> Result<Program, GraphError> {
    let Model { train, eval, key } = model;
    same_parameters(&train, &eval)?;
    let over = |mut graph: Graph, states: Option<&Vec<State>>| {
        graph.mesh = settings.mesh;
        graph.states = states.cloned().unwrap_or(graph.states);
        graph
    };
    let start = Draft { graph: over(train, None), ..Draft::default() };
    let several = settings.accumulates;
    let plans: &[&str] = if several { &["first", "micro", "last"] } else { &["first", "last"] };
    let both = apply(&TRAINING, start, settings, plans, observe)?;
    let (states, layout) = (both.graph.states.clone(), both.layout.clone());
    let plans = if several { &plans[..1] } else { plans };
    let first = apply(&MICRO, Draft { adds: false, ..both.clone() }, settings, plans, observe)?;
    let micro = match several {
        true => Some(apply(&MICRO, Draft { adds: true, ..both }, settings, &["micro", "last"], observe)?),
        false => None,
    };
    let last = apply(&LAST, micro.as_ref().unwrap_or(&first).clone(), settings, &["last"], observe)?;
    let mut end = |draft: Draft, name: &str| apply(&END, draft, settings, &[name], observe);
    let (first, last) = (end(first, "first")?, end(last, "last")?);
    let micro = micro.map(|micro| end(micro, "micro")).transpose()?;
    let start = Draft { graph: over(Graph::default(), Some(&states)), layout, ..Draft::default() };
    let update = apply(&[UPDATE], start.clone(), settings, &["update"], observe)?;
    let start = Draft { graph: over(eval, Some(&states)), ..start };
    let eval = apply(&EVALUATION, start, settings, &["eval"], observe)?;

    let plan_beside =
        |draft: &Draft, name: &str, others: usize| plan(&draft.graph, name, key, settings.target, others);
    let plan = |draft: &Draft, name: &str| plan_beside(draft, name, 0);
    let first = plan(&first, "first")?;
    let micro = match &micro {
        Some(micro) => plan(micro, "micro")?,
        None => self::plan(&Graph::over(states.clone()), "micro", key, settings.target, 0)?,
    };
    let before = if several { &micro } else { &first };
    let last = match settings.mesh.ranks() {
        1 => Plan { name: "last".into(), ..before.clone() },
        _ => plan(&last, "last")?,
    };
    // Of one arena, training needs the most.
    let others = first.arena.max(micro.arena).max(last.arena);
    let (update, eval) = (plan_beside(&update, "update", others)?, plan_beside(&eval, "eval", others)?);
    let [mut first, mut micro, mut last, mut update, mut eval] = [first, micro, last, update, eval];
    passes::across(&mut [&mut first, &mut micro, &mut last, &mut update, &mut eval]);
    Ok(Program { first, micro, last, update, eval, states, zero: settings.stage() })
}

/// The end of every list: order and memory.
fn plan(graph: &Graph, name: &str, key: Key, target: &dyn Target, others: usize) -> Result<Plan, GraphError> {
    graph.check()?;
    Ok(passes::place_beside(graph, &passes::schedule(graph, target), name, key, target, others))
}

fn differentiate(draft: Draft, settings: &Settings<'_>) -> Result<Draft, GraphError> {
    let loss = draft.graph.find("loss")?;
    let trains = |state: &State| !(settings.group)(state).is_frozen();
    let (graph, gradients) = passes::differentiate(draft.graph, loss, &trains)?;
    if gradients.is_empty() {
        return Err(GraphError::NothingToTrain);
    }
    Ok(Draft { graph, gradients, ..draft })
}

fn lay_out(mut draft: Draft, settings: &Settings<'_>) -> Result<Draft, GraphError> {
    let layout = passes::lay_out(&mut draft.graph, &draft.gradients, settings);
    Ok(Draft { layout, ..draft })
}

fn update(draft: Draft, settings: &Settings<'_>) -> Result<Draft, GraphError> {
    let graph = passes::update(draft.graph, &draft.layout, settings)?;
    Ok(Draft { graph, ..draft })
}

/// A program that only evaluates: parameters are its only states, and its other plans are empty.
pub fn inference(model: Model, mixed: Option<Mixed>, target: &dyn Target) -> Result<Program, GraphError> {
    let Model { eval, key, .. } = model;
    let mut states = eval.states.clone();
    settle(&mut states);
    let mut graph = eval;
    graph.states = states.clone();
    let eval = evaluating(graph, mixed, &|_| None, key, target)?;
    let empty = |name: &str| plan(&Graph::over(states.clone()), name, key, target, 0);
    let (first, micro, last) = (empty("first")?, empty("micro")?, empty("last")?);
    Ok(Program { first, micro, last, update: empty("update")?, eval, states, zero: Zero::Stage0 })
}

/// The plan of evaluation of a model of another size, over the states of a program with the same parameters, which is of these ranks.
pub fn evaluation(
    model: Model,
    states: &[State],
    mesh: Mesh,
    mixed: Option<Mixed>,
    target: &dyn Target,
) -> Result<Plan, GraphError> {
    let Model { mut eval, key, .. } = model;
    // A model's own states come first in every program.
    let differs =
        |(index, state): &(usize, &State)| !states.get(*index).is_some_and(|other| state.is_like(other));
    if let Some((_, other)) = eval.states.iter().enumerate().find(differs) {
        return Err(GraphError::ParametersDiffer(other.name.clone()));
    }
    let beside = |state: StateId, suffix: &str| {
        let name = format!("{}{suffix}", states[state.index()].name);
        states.iter().position(|state| state.name == name).map(|index| StateId(index as u32))
    };
    (eval.states, eval.mesh) = (states.to_vec(), mesh);
    eval.read_instead(|state| beside(state, AVERAGE));
    evaluating(eval, mixed, &|parameter| beside(parameter, COPY), key, target)
}

/// The plan of a graph that evaluates, over states that are settled.
fn evaluating(
    graph: Graph,
    mixed: Option<Mixed>,
    copy_of: &dyn Fn(StateId) -> Option<StateId>,
    key: Key,
    target: &dyn Target,
) -> Result<Plan, GraphError> {
    let mut graph = passes::resized_loss(passes::fuse(passes::narrow(graph)?));
    if let Some(mixed) = mixed {
        graph = passes::precision(graph, mixed, copy_of)?;
    }
    graph = passes::shards(graph, &Gathering::default())?;
    plan(&graph, "eval", key, target, 0)
}

fn same_parameters(train: &Graph, eval: &Graph) -> Result<(), GraphError> {
    let differs = train.states.iter().zip(&eval.states).find(|(a, b)| !a.is_like(b)).map(|(a, _)| a);
    let missing = train.states.get(eval.states.len()).or(eval.states.get(train.states.len()));
    match differs.or(missing) {
        Some(state) => Err(GraphError::ParametersDiffer(state.name.clone())),
        None => Ok(()),
    }
}
