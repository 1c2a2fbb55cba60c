//! From a model's graphs to the plans of a run: `micro`, `last`, `update` and `eval`.

use crate::graph::{AVERAGE, At, COPY, Graph, GraphError, Node, PENDING, Phase, Role, State, ValueId};
use crate::op::{Op, StateId};
use crate::passes::Schedule;
use crate::passes::{ALIGN, Exchange, GRADIENT, Gradients, Mixed, Recompute, Scratch, multiplied};
use crate::passes::{
    differentiate, fuse, gather, late, narrow, parallelise, peephole, place, precision, recompute,
    resized_loss, schedule, synchronise,
};
use crate::plan::{Key, Plan};
use crate::types::{DType, Type};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// A model as it was built, with and without dropout. Both end in the values `loss`, `loss.stats` and `head` (logits).
pub struct Model {
    pub train: Graph,
    pub eval: Graph,
    pub key: Key,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Optimizer {
    AdamW { beta1: f64, beta2: f64, eps: f64, weight_decay: f64 },
    Sgd { momentum: f64, nesterov: bool, weight_decay: f64 },
    Lamb { beta1: f64, beta2: f64, eps: f64, weight_decay: f64, min_coeff: f64, max_coeff: f64 },
}

impl Optimizer {
    pub fn weight_decay(&self) -> f64 {
        match *self {
            Optimizer::AdamW { weight_decay, .. }
            | Optimizer::Sgd { weight_decay, .. }
            | Optimizer::Lamb { weight_decay, .. } => weight_decay,
        }
    }
}

/// How the parameters of a group are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Factor of the learning rate. A parameter with 0 is frozen: it has no gradient, no moments and no average, and
    /// backward ops that would only serve it are left out.
    pub lr_scale: f64,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl Group {
    pub fn is_frozen(&self) -> bool {
        self.lr_scale == 0.0
    }
}

/// What shapes the plans beside the model.
pub struct Settings<'a> {
    pub optimizer: Optimizer,
    pub max_grad_norm: Option<f64>,
    pub recompute: Recompute,
    /// How each parameter is trained.
    pub group: &'a dyn Fn(&State) -> Group,
    /// Keeps a moving average of every trained parameter, with this decay, for evaluation to read instead of the
    /// parameter. The decay is the same from the first step on: averages start as the parameters and need no
    /// correction, but a short run wants a smaller decay.
    pub ema: Option<f64>,
    /// Halves where products are, if not all is computed in the model's own type, which must be f32 then.
    pub mixed: Option<Mixed>,
    /// A factor of the loss that keeps small gradients within the range of fp16.
    pub loss_scale: Option<LossScaling>,
    /// How gradients are exchanged, if there is more than one rank.
    pub exchange: Option<Exchange>,
    /// Whether a step may have several micro-steps. Where it has one, gradients are not there while activations are being
    /// made, and lie in the arena.
    pub accumulates: bool,
    /// How many small weight gradients the executor makes at once, if they follow each other.
    pub gathers: usize,
    /// Steps for which the executor wants memory left alone after its last use: see [`crate::passes::Schedule::linger`].
    pub linger: usize,
    /// Working memory the executor asks for.
    pub scratch: Scratch<'a>,
}

/// The factor of the loss under fp16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    pub initial: f64,
    /// How it follows what the gradients can bear; without, it stays.
    pub dynamic: Option<DynamicScale>,
}

/// See [`Op::LossScale`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScale {
    pub window: u64,
    pub hysteresis: u64,
    pub min: f64,
}

/// Every plan of a run, over one table of states.
#[derive(Clone, Debug)]
pub struct Program {
    pub states: Vec<State>,
    /// Forward and backward of a micro-batch whose gradients only accumulate.
    pub micro: Plan,
    /// The last micro-batch of a step: under data parallelism, with the gradient exchange.
    pub last: Plan,
    /// Norm, clipping and optimizer.
    pub update: Plan,
    /// Loss and logits of a batch, without gradients.
    pub eval: Plan,
}

impl Program {
    /// Bytes of the one arena that all plans share.
    pub fn arena(&self) -> usize {
        self.plans().map(|p| p.arena).into_iter().max().unwrap_or(0)
    }

    pub fn plans(&self) -> [&Plan; 4] {
        [&self.micro, &self.last, &self.update, &self.eval]
    }

    /// Whether training takes moments over a batch, which samples of weight 0 would falsify.
    pub fn normalises_batches(&self) -> bool {
        self.last.steps.iter().any(|step| step.op == Op::Moments)
    }

    /// What a state holds first, if that is not zero and not drawn as parameters are: running variances of one, scales.
    pub fn first_values(&self, state: &State) -> Option<Vec<f64>> {
        let bears = |op: &Op| match op {
            Op::LossScale { hysteresis, .. } => Some(*hysteresis as f64),
            _ => None,
        };
        let (count, channels) = (state.ty.shape.count(), state.ty.shape.last());
        let ones = |ones: std::ops::Range<usize>| (0..count).map(|i| f64::from(ones.contains(&i))).collect();
        match state.role {
            Role::Running => Some(ones(channels..2 * channels)),
            Role::Scale => Some(ones(0..1)),
            Role::LossScale { initial } => {
                let borne = self.update.steps.iter().find_map(|step| bears(&step.op)).unwrap_or(1.0);
                Some([initial, 0.0, borne].into_iter().take(count).collect())
            }
            _ => None,
        }
    }

    /// Whether plans can add to what earlier micro-steps left: not where it lies in the arena.
    pub fn accumulates(&self) -> bool {
        self.states.iter().all(|state| state.arena.is_none())
    }

    /// Bytes of the states that don't lie in the arena.
    pub fn state_bytes(&self) -> usize {
        self.states.iter().filter(|s| s.arena.is_none()).map(|s| s.ty.bytes()).sum()
    }
}

pub fn compile(model: Model, settings: &Settings<'_>) -> Result<Program, GraphError> {
    let Model { train, mut eval, key } = model;
    same_parameters(&train, &eval)?;
    let loss = train.find("loss")?;
    let stats = train.find("loss.stats")?;
    let trains = |state: &State| !(settings.group)(state).is_frozen();
    let (mut graph, gradients) = differentiate(resized_loss(fuse(narrow(train)?)), loss, &trains)?;
    if gradients.is_empty() {
        return Err(GraphError::NothingToTrain);
    }
    let shared = add_states(&mut graph, &gradients, settings);
    let states = graph.states.clone();
    let graph = shared.defer(keep_sums(graph, &gradients, &shared, stats, settings.accumulates)?);
    let graph = late(shared.retyped(recompute(peephole(graph), settings.recompute)?, settings.mixed)?);
    let graph = gather(graph, settings.gathers);
    let update = update_graph(states.clone(), &shared, settings)?;
    eval.states = states.clone();
    eval.read_instead(|state| shared.average_of(state));
    let eval = shared.retyped(resized_loss(fuse(narrow(eval)?)), settings.mixed)?;

    let plan = |graph: &Graph, name: &str| -> Result<Plan, GraphError> {
        graph.check()?;
        let schedule = Schedule { linger: settings.linger, ..schedule(graph) };
        Ok(place(graph, &schedule, name, key, settings.scratch))
    };
    let graph = synchronise(graph, settings.exchange.map_or(1, |exchange| exchange.ranks))?;
    let micro = plan(&graph, "micro")?;
    let last = match settings.exchange.filter(|exchange| exchange.ranks > 1) {
        Some(exchange) => plan(&parallelise(graph, &exchange)?, "last")?,
        None => Plan { name: "last".into(), ..micro.clone() },
    };
    Ok(Program { micro, last, update: plan(&update, "update")?, eval: plan(&eval, "eval")?, states })
}

/// A program that only evaluates: parameters are its only states, and its other plans are empty.
pub fn inference(model: Model, mixed: Option<Mixed>, scratch: Scratch<'_>) -> Result<Program, GraphError> {
    let Model { eval, key, .. } = model;
    let mut graph = resized_loss(fuse(narrow(eval)?));
    if let Some(mixed) = mixed {
        graph = precision(graph, mixed, &|_| None)?;
    }
    graph.check()?;
    let states = graph.states.clone();
    let eval = place(&graph, &schedule(&graph), "eval", key, scratch);
    let empty = |name: &str| {
        let graph = Graph::over(states.clone());
        place(&graph, &schedule(&graph), name, key, scratch)
    };
    Ok(Program { micro: empty("micro"), last: empty("last"), update: empty("update"), eval, states })
}

/// The plan of evaluation of a model of another size, over the states of a program with the same parameters.
pub fn evaluation(
    model: Model,
    states: &[State],
    mixed: Option<Mixed>,
    scratch: Scratch<'_>,
) -> Result<Plan, GraphError> {
    let Model { mut eval, key, .. } = model;
    // A model's own states come first in every program.
    if let Some(other) = (0..eval.states.len()).find(|i| states.get(*i) != eval.states.get(*i)) {
        return Err(GraphError::ParametersDiffer(eval.states[other].name.clone()));
    }
    let beside = |state: StateId, suffix: &str| {
        let name = format!("{}{suffix}", states[state.index()].name);
        states.iter().position(|state| state.name == name).map(|index| StateId(index as u32))
    };
    eval.states = states.to_vec();
    eval.read_instead(|state| beside(state, AVERAGE));
    let mut graph = resized_loss(fuse(narrow(eval)?));
    if let Some(mixed) = mixed {
        graph = precision(graph, mixed, &|parameter| beside(parameter, COPY))?;
    }
    graph.check()?;
    Ok(place(&graph, &schedule(&graph), "eval", key, scratch))
}

fn same_parameters(train: &Graph, eval: &Graph) -> Result<(), GraphError> {
    let differs = train.states.iter().zip(&eval.states).find(|(a, b)| a != b).map(|(a, _)| a);
    let missing = train.states.get(eval.states.len()).or(eval.states.get(train.states.len()));
    match differs.or(missing) {
        Some(state) => Err(GraphError::ParametersDiffer(state.name.clone())),
        None => Ok(()),
    }
}

/// States beside the parameters.
struct Shared {
    /// In the order of the parameters.
    trained: Vec<Trained>,
    stats: StateId,
    applied: StateId,
    loss_scale: Option<StateId>,
    /// Half-precision copies of parameters.
    copies: HashMap<StateId, StateId>,
    running: Vec<Running>,
}

/// Running moments of a batch norm. A step writes the pending ones, and `update` takes them over if it is applied.
struct Running {
    state: StateId,
    pending: StateId,
    average: Option<StateId>,
}

struct Trained {
    parameter: StateId,
    gradient: StateId,
    moments: Vec<StateId>,
    average: Option<StateId>,
}

impl Shared {
    fn retyped(&self, graph: Graph, mixed: Option<Mixed>) -> Result<Graph, GraphError> {
        match mixed {
            Some(mixed) => precision(graph, mixed, &|parameter| self.copies.get(&parameter).copied()),
            None => Ok(graph),
        }
    }

    fn average_of(&self, state: StateId) -> Option<StateId> {
        let of_parameter = self.trained.iter().find(|t| t.parameter == state).map(|t| t.average);
        of_parameter.or_else(|| self.running.iter().find(|r| r.state == state).map(|r| r.average))?
    }

    /// Lets the graph write pending running moments where the model writes the running moments themselves: nobody knows yet
    /// whether the step will be skipped.
    fn defer(&self, mut graph: Graph) -> Graph {
        let nodes = std::mem::take(&mut graph.nodes);
        let reads: HashMap<StateId, ValueId> =
            self.running.iter().map(|running| (running.state, graph.read(running.pending))).collect();
        let state_of = |value: ValueId| {
            nodes.iter().find_map(|node| match node.op {
                Op::Read { state } if node.outputs[0] == value => Some(state),
                _ => None,
            })
        };
        let pending = nodes.iter().map(|node| match node.op {
            Op::RunningMoments { .. } => reads.get(&state_of(node.inputs[0])?).copied(),
            _ => None,
        });
        let pending: Vec<Option<ValueId>> = pending.collect();
        for (mut node, pending) in nodes.into_iter().zip(pending) {
            if let Some(pending) = pending {
                node.inputs.insert(1, pending);
            }
            if let Op::Assign { state } = &mut node.op
                && let Some(running) = self.running.iter().find(|r| r.state == *state)
            {
                *state = running.pending;
                node.layer.push_str(PENDING);
            }
            graph.nodes.push(node);
        }
        graph
    }
}

fn add_states(graph: &mut Graph, gradients: &Gradients, settings: &Settings<'_>) -> Shared {
    let suffixes: &[&str] = match settings.optimizer {
        Optimizer::Sgd { .. } => &["momentum"],
        Optimizer::AdamW { .. } | Optimizer::Lamb { .. } => &["m", "v"],
    };
    let dtype = gradients.first().map_or(DType::F32, |(p, _)| graph.state_type(*p).dtype);
    // What ranks exchange lies side by side, in the order in which it gets ready: see `parallelise`.
    let stats = graph.add_state("stats", Type::new(dtype, [4]), Role::Statistic);
    let mut pairs: Vec<(StateId, StateId)> = Vec::with_capacity(gradients.len());
    for (parameter, _) in gradients {
        let State { name, ty, .. } = graph.states[parameter.index()].clone();
        pairs.push((*parameter, graph.add_state(format!("{name}{GRADIENT}"), ty, Role::Gradient)));
    }
    if !settings.accumulates {
        lay_in_arena(&mut graph.states[stats.index()..]);
    }
    pairs.sort();
    let trained = pairs.into_iter().map(|(parameter, gradient)| {
        let State { name, ty, .. } = graph.states[parameter.index()].clone();
        let moment = |suffix| graph.add_state(format!("{name}.{suffix}"), ty.clone(), Role::Moment);
        let moments = suffixes.iter().map(moment).collect();
        let average = settings.ema.map(|_| graph.add_state(format!("{name}{AVERAGE}"), ty, Role::Average));
        Trained { parameter, gradient, moments, average }
    });
    let trained = trained.collect();
    let applied = graph.add_state("applied", Type::new(dtype, [1]), Role::Counter);
    let loss_scale = settings.loss_scale.map(|LossScaling { initial, .. }| {
        graph.add_state("loss_scale", Type::new(dtype, [3]), Role::LossScale { initial })
    });
    let multiplied = if settings.mixed.is_some() { multiplied(graph) } else { vec![] };
    let copies = multiplied.into_iter().zip(settings.mixed.into_iter().cycle()).map(|(parameter, mixed)| {
        let State { name, ty, .. } = graph.states[parameter.index()].clone();
        let ty = Type { dtype: mixed.half, ..ty };
        (parameter, graph.add_state(format!("{name}{COPY}"), ty, Role::Copy))
    });
    let copies = copies.collect();
    let running = add_running(graph, settings.ema.is_some());
    Shared { trained, stats, applied, loss_scale, copies, running }
}

/// States side by side, from the arena's start on.
fn lay_in_arena(states: &mut [State]) {
    let mut offset = 0;
    for state in states {
        state.arena = Some(offset);
        offset += state.ty.bytes().next_multiple_of(ALIGN);
    }
}

fn add_running(graph: &mut Graph, averaged: bool) -> Vec<Running> {
    let states: Vec<(usize, State)> =
        graph.states.iter().cloned().enumerate().filter(|(_, s)| s.role == Role::Running).collect();
    let running = states.into_iter().map(|(index, State { name, ty, .. })| {
        let pending = graph.add_state(format!("{name}{PENDING}"), ty.clone(), Role::Pending);
        let average = averaged.then(|| graph.add_state(format!("{name}{AVERAGE}"), ty, Role::Average));
        Running { state: StateId(index as u32), pending, average }
    });
    running.collect()
}

/// Puts each gradient into its state as soon as it is ready: adds it there, or, where steps have a single micro-step, makes it
/// there.
fn keep_sums(
    mut graph: Graph,
    gradients: &Gradients,
    shared: &Shared,
    stats: ValueId,
    accumulates: bool,
) -> Result<Graph, GraphError> {
    let mut sums: HashMap<ValueId, Vec<StateId>> = HashMap::from([(stats, vec![shared.stats])]);
    for (parameter, value) in gradients {
        let gradient = shared.trained.iter().find(|t| t.parameter == *parameter).map(|t| t.gradient);
        sums.entry(*value).or_default().extend(gradient);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    if accumulates {
        for state in sums.values().flatten().copied().collect::<std::collections::BTreeSet<_>>() {
            graph.read(state);
        }
    }
    let scale = shared.loss_scale.map(|state| graph.read(state));
    for mut node in nodes {
        if let Op::Seed { .. } = node.op {
            node.inputs.extend(scale);
        }
        let Node { outputs, layer, .. } = node.clone();
        let phase = node.phase;
        graph.nodes.push(node);
        for (value, state) in
            outputs.iter().flat_map(|v| sums.get(v).into_iter().flatten().map(move |s| (*v, *s)))
        {
            let mut sum = value;
            if accumulates {
                let so_far = graph.read(state);
                let name = format!("sum.{}", graph.states[state.index()].name);
                sum = graph.push(Op::Accumulate, &[so_far, value], &At::named(&layer, name, phase))?[0];
            }
            graph.assign(state, sum, phase)?;
        }
    }
    // The host reads loss and accuracy from the statistics' state.
    graph.outputs.clear();
    Ok(graph)
}

fn update_graph(states: Vec<State>, shared: &Shared, settings: &Settings<'_>) -> Result<Graph, GraphError> {
    let mut graph = Graph::over(states);
    let at = |name: &str| At::new(name, Phase::Update);
    let gradients: Vec<ValueId> = shared.trained.iter().map(|t| graph.read(t.gradient)).collect();
    let stats = graph.read(shared.stats);
    let squares = graph.push(Op::SumSquares, &gradients, &at("norm"))?[0];
    let scale = shared.loss_scale.map(|state| graph.read(state));
    let clip = Op::Clip { max_norm: settings.max_grad_norm, scaled: scale.is_some() };
    let inputs: Vec<ValueId> = [squares, stats].into_iter().chain(scale).collect();
    let control = graph.push(clip, &inputs, &at("control"))?[0];
    let before = graph.read(shared.applied);
    let applied = graph.push(Op::Advance, &[before, control], &at("applied"))?[0];
    graph.assign(shared.applied, applied, Phase::Update)?;
    for (trained, gradient) in shared.trained.iter().zip(gradients) {
        let state = graph.states[trained.parameter.index()].clone();
        let op = optimizer_op(&settings.optimizer, (settings.group)(&state));
        let mut inputs = vec![graph.read(trained.parameter), gradient];
        inputs.extend(trained.moments.iter().map(|m| graph.read(*m)));
        inputs.extend([control, applied]);
        let copy = shared.copies.get(&trained.parameter);
        inputs.extend(copy.map(|copy| graph.read(*copy)));
        let outputs = graph.push(op, &inputs, &at(&state.name))?;
        let updated = outputs[0];
        let written = std::iter::once(&trained.parameter).chain(&trained.moments).chain(copy);
        for (state, value) in written.zip(outputs) {
            graph.assign(*state, value, Phase::Update)?;
        }
        if let (Some(average), Some(decay)) = (trained.average, settings.ema) {
            let inputs = [graph.read(average), updated, control];
            let value = graph.push(Op::Ema { decay }, &inputs, &at(&state.name))?[0];
            graph.assign(average, value, Phase::Update)?;
        }
    }
    commit_running(&mut graph, shared, settings, control)?;
    let dynamic = settings.loss_scale.and_then(|scaling| scaling.dynamic);
    if let (Some(DynamicScale { window, hysteresis, min }), Some(state)) = (dynamic, shared.loss_scale) {
        let inputs = [graph.read(state), control];
        let value = graph.push(Op::LossScale { window, hysteresis, min }, &inputs, &at("loss_scale"))?[0];
        graph.assign(state, value, Phase::Update)?;
    }
    graph.outputs = vec![control];
    Ok(graph)
}

/// Takes over the running moments that the step has left, all of them in one op, and averages them as the parameters are.
fn commit_running(
    graph: &mut Graph,
    shared: &Shared,
    settings: &Settings<'_>,
    control: ValueId,
) -> Result<(), GraphError> {
    if shared.running.is_empty() {
        return Ok(());
    }
    let before: Vec<ValueId> = shared.running.iter().map(|r| graph.read(r.state)).collect();
    let after: Vec<ValueId> = shared.running.iter().map(|r| graph.read(r.pending)).collect();
    let inputs = [&[control], &before[..], &after].concat();
    let values = graph.push(Op::Commit, &inputs, &At::new("running", Phase::Update))?;
    for (running, value) in shared.running.iter().zip(values) {
        graph.assign(running.state, value, Phase::Update)?;
        if let (Some(average), Some(decay)) = (running.average, settings.ema) {
            let inputs = [graph.read(average), value, control];
            let at = At::new(&graph.states[running.state.index()].name.clone(), Phase::Update);
            let value = graph.push(Op::Ema { decay }, &inputs, &at)?[0];
            graph.assign(average, value, Phase::Update)?;
        }
    }
    Ok(())
}

fn optimizer_op(optimizer: &Optimizer, Group { lr_scale, decays }: Group) -> Op {
    let decay = |weight_decay: f64| if decays { weight_decay } else { 0.0 };
    match *optimizer {
        Optimizer::AdamW { beta1, beta2, eps, weight_decay } => {
            Op::AdamW { beta1, beta2, eps, weight_decay: decay(weight_decay), lr_scale }
        }
        Optimizer::Sgd { momentum, nesterov, weight_decay } => {
            Op::Sgd { momentum, nesterov, weight_decay: decay(weight_decay), lr_scale }
        }
        Optimizer::Lamb { beta1, beta2, eps, weight_decay, min_coeff, max_coeff } => {
            let weight_decay = decay(weight_decay);
            Op::Lamb { beta1, beta2, eps, weight_decay, min_coeff, max_coeff, lr_scale }
        }
    }
}
