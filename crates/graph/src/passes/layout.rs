//! Layout of everything that is trained, and the states beside a model's own.
//!
//! Buckets come first: which parameters follow each other, at which elements, with how much padding. Parameters, gradients, moments,
//! averages and half-precision copies are then views into one flat buffer for each of these kinds, all at the same elements.

use super::buckets::{Cut, Cutter, Matrices, small};
use super::differentiate::Gradients;
use super::matrices::matrices;
use super::precision::multiplied;
use crate::flat::{Flat, Stack, UNIT, Views};
use crate::graph::{AVERAGE, COPY, GRADIENT, Graph, Held, Home, PENDING, Role, State, own_bytes, settle};
use crate::op::StateId;
use crate::settings::{LossScaling, Settings, Zero};
use crate::types::{DType, Shape, Type};
use std::collections::{HashMap, HashSet};

/// States beside the parameters.
#[derive(Clone, Default)]
pub struct Layout {
    /// Trained parameters, in their order.
    pub trained: Vec<Trained>,
    /// Buckets, in the order in which their gradients get ready.
    pub buckets: Vec<Bucket>,
    /// Sums of loss, count and hits.
    pub stats: StateId,
    /// Optimizer steps that were applied.
    pub applied: StateId,
    /// The factor of the loss under fp16.
    pub loss_scale: Option<StateId>,
    /// Half-precision copies of parameters.
    pub copies: HashMap<StateId, StateId>,
    /// Running moments of batch norms.
    pub running: Vec<Running>,
    /// What ranks divide.
    pub stage: Zero,
    /// Flag: gradients of a micro-step are reduced before they are added up.
    pub reduces_each: bool,
}

/// Running moments of a batch norm. A step writes the pending ones, and `update` takes them over if it is applied.
#[derive(Clone)]
pub struct Running {
    /// State after the last applied step.
    pub state: StateId,
    /// State within the step under way.
    pub pending: StateId,
    /// Moving average.
    pub average: Option<StateId>,
}

/// A parameter that is trained, and what that takes.
#[derive(Clone)]
pub struct Trained {
    /// The parameter itself.
    pub parameter: StateId,
    /// The sum of its gradients over a step.
    pub gradient: StateId,
    /// Optimizer states.
    pub moments: Vec<StateId>,
    /// Moving average.
    pub average: Option<StateId>,
}

/// Parameters that are updated together and whose gradients are one message: the flat buffers that they lie in.
#[derive(Clone)]
pub struct Bucket {
    /// The gradients of its parameters, in the order in which they lie.
    pub gradients: Vec<StateId>,
    /// Name, made of its first and its last parameter.
    pub name: String,
    /// Offsets in each of the buffers.
    pub flat: Flat,
    /// Parameters as matrices, if that is how they are updated.
    pub stacks: Vec<Stack>,
    /// All of its parameters.
    pub parameter: StateId,
    /// All of their gradients.
    pub gradient: StateId,
    /// All of what the optimizer keeps.
    pub moments: Vec<StateId>,
    /// All of their averages.
    pub average: Option<StateId>,
    /// All of their half-precision copies. Not all of them are read.
    pub copy: Option<StateId>,
    /// What an update gathers from all ranks: this rank's part, and the whole that layers read.
    pub gathered: Option<(StateId, StateId)>,
}

impl Bucket {
    /// The tensors as they lie in the bucket, of these shapes.
    pub(super) fn views(&self, shapes: Vec<Shape>) -> Views {
        let starts = self.flat.pieces.iter().map(|piece| piece.start).collect();
        Views { elements: self.flat.elements, starts, shapes }
    }
}

impl Layout {
    /// The average that evaluation reads in the place of a state.
    pub fn average_of(&self, state: StateId) -> Option<StateId> {
        let of_parameter = self.trained.iter().find(|t| t.parameter == state).map(|t| t.average);
        of_parameter.or_else(|| self.running.iter().find(|r| r.state == state).map(|r| r.average))?
    }
}

/// Adds the states of training to a graph that has gradients.
pub fn lay_out(graph: &mut Graph, gradients: &Gradients, settings: &Settings<'_>) -> Layout {
    let matrices = if settings.optimizer.treats_matrices() { matrices(graph) } else { Matrices::new() };
    let multiplied = if settings.mixed.is_some() { multiplied(graph) } else { vec![] };
    let copied: HashSet<StateId> = multiplied.iter().copied().collect();
    let small = small(graph, gradients, settings);
    let cutter =
        Cutter { graph, gradients, matrices: &matrices, multiplied: &copied, small: &small, settings };
    let cuts = cutter.cut();
    let dtype = gradients.first().map_or(DType::F32, |(p, _)| graph.state_type(*p).dtype);
    let stats = graph.add_state("stats", Type::new(dtype, [4]), Role::Statistic);
    let mut pairs: Vec<(StateId, StateId)> = Vec::with_capacity(gradients.len());
    for (parameter, _) in gradients {
        let State { name, ty, .. } = graph.states[parameter.index()].clone();
        pairs.push((*parameter, graph.add_state(format!("{name}{GRADIENT}"), ty, Role::Gradient)));
    }
    pairs.sort();
    let trained = pairs.into_iter().map(|(parameter, gradient)| {
        let State { name, ty, .. } = graph.states[parameter.index()].clone();
        let moment = |suffix| graph.add_state(format!("{name}.{suffix}"), ty.clone(), Role::Moment);
        let kept = settings.optimizer.keeps(matrices.contains_key(&parameter));
        let moments = kept.iter().map(moment).collect();
        let average = settings.ema.map(|_| graph.add_state(format!("{name}{AVERAGE}"), ty, Role::Average));
        Trained { parameter, gradient, moments, average }
    });
    let trained: Vec<Trained> = trained.collect();
    let applied = graph.add_state("applied", Type::new(dtype, [1]), Role::Counter);
    let loss_scale = settings.loss_scale.map(|LossScaling { initial, .. }| {
        graph.add_state("loss_scale", Type::new(dtype, [3]), Role::LossScale { initial })
    });
    let copies = multiplied.into_iter().zip(settings.mixed.into_iter().cycle()).map(|(parameter, mixed)| {
        let State { name, ty, .. } = graph.states[parameter.index()].clone();
        let ty = Type { dtype: mixed.half, ..ty };
        (parameter, graph.add_state(format!("{name}{COPY}"), ty, Role::Copy))
    });
    let copies: HashMap<StateId, StateId> = copies.collect();
    let running = add_running(graph, settings.ema.is_some());
    let mut homes = Homes { graph, cuts: &cuts, trained: &trained };
    let buckets = homes.lay_all(&copies, stats, settings);
    settle(&mut graph.states);
    let (stage, reduces_each) = (settings.stage(), settings.reduces_each_micro_step());
    Layout { trained, buckets, stats, applied, loss_scale, copies, running, stage, reduces_each }
}

/// Gives states their homes in flat buffers.
struct Homes<'a> {
    graph: &'a mut Graph,
    cuts: &'a [Cut],
    trained: &'a [Trained],
}

impl Homes<'_> {
    /// The buckets, each with a state over all its members for every kind of buffer.
    fn lay_all(
        &mut self,
        copies: &HashMap<StateId, StateId>,
        stats: StateId,
        settings: &Settings<'_>,
    ) -> Vec<Bucket> {
        let (dtype, stage) = (self.graph.state_type(stats).dtype, settings.stage());
        let shards = if stage > Zero::Stage0 { Mode::Shard } else { Mode::Whole };
        // Layers read whole parameters, or copies of them, from where ranks gather them after an update.
        let read = |cut: &Cut| match stage {
            Zero::Stage0 => Mode::Whole,
            Zero::Stage3 if !cut.kind.small => Mode::Shard,
            _ => Mode::Within,
        };
        let of_parameters = |cut: &Cut| Some(if cut.kind.copied { Mode::Shard } else { read(cut) });
        let parameters = self.lay("", dtype, None, of_parameters, |t, _| Some(t.parameter));
        let parameters: Vec<Laid> = parameters.into_iter().flatten().collect();
        let keeps = |cut: &Cut| settings.optimizer.keeps(!cut.stacks.is_empty());
        let mut kinds: Vec<&str> = vec![];
        for kind in self.cuts.iter().flat_map(|cut| keeps(cut).iter().copied()) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let mut moments: Vec<Vec<StateId>> = vec![vec![]; self.cuts.len()];
        for kind in kinds {
            let place = |cut: &Cut| keeps(cut).iter().position(|kept| *kept == kind);
            let suffix = format!(".{kind}");
            let of = |t: &Trained, cut: &Cut| t.moments.get(place(cut)?).copied();
            let laid = self.lay(&suffix, dtype, None, |cut| place(cut).map(|_| shards), of);
            moments.iter_mut().zip(laid).for_each(|(list, laid)| list.extend(laid.map(|laid| laid.own)));
        }
        let of_copies = |cut: &Cut| (stage == Zero::Stage0 || cut.kind.copied).then(|| read(cut));
        let half = settings.mixed.map(|mixed| mixed.half);
        let copies = half
            .map(|half| self.lay(COPY, half, None, of_copies, |t, _| copies.get(&t.parameter).copied()))
            .unwrap_or_else(|| vec![None; self.cuts.len()]);
        // Statistics go before the gradients, so that the first bucket takes them along. Where a step has one micro-step, both lie in
        // the arena: they are made when activations are done with.
        let first =
            if settings.accumulates { Home::Own(own_bytes(&self.graph.states)) } else { Home::Arena(0) };
        self.graph.states[stats.index()].home = first;
        let behind = moved(first, UNIT * dtype.bytes());
        let of_gradients = if stage == Zero::Stage1 { Mode::Within } else { shards };
        let gradients =
            self.lay(GRADIENT, dtype, Some(behind), |_| Some(of_gradients), |t, _| Some(t.gradient));
        let gradients: Vec<Laid> = gradients.into_iter().flatten().collect();
        let averages = self.lay(AVERAGE, dtype, None, |_| settings.ema.map(|_| shards), |t, _| t.average);
        let bucket = |(index, cut): (usize, &Cut)| {
            let (parameter, copy) = (parameters[index], copies[index]);
            Bucket {
                gradients: cut.parameters.iter().filter_map(|p| self.gradient_of(*p)).collect(),
                name: self.name(cut),
                flat: cut.flat.clone(),
                stacks: cut.stacks.clone(),
                parameter: parameter.own,
                gradient: gradients[index].own,
                moments: moments[index].clone(),
                average: averages[index].map(|laid| laid.own),
                copy: copy.map(|laid| laid.own),
                gathered: copy.and_then(Laid::gathered).or(parameter.gathered()),
            }
        };
        self.cuts.iter().enumerate().map(bucket).collect()
    }

    fn gradient_of(&self, parameter: StateId) -> Option<StateId> {
        self.trained.iter().find(|t| t.parameter == parameter).map(|t| t.gradient)
    }

    /// The name of a bucket, made of its first and its last parameter.
    fn name(&self, cut: &Cut) -> String {
        let name = |parameter: &StateId| self.graph.states[parameter.index()].name.as_str();
        match (cut.parameters.first().map(name), cut.parameters.last().map(name)) {
            (Some(first), Some(last)) if first != last => format!("{first} … {last}"),
            (first, _) => first.unwrap_or_default().to_string(),
        }
    }

    /// One kind of buffer: a state for each of the buckets that have it, from `home` on or behind the states' own memory, and in them
    /// the states of parameters.
    fn lay(
        &mut self,
        suffix: &str,
        dtype: DType,
        home: Option<Home>,
        mode: impl Fn(&Cut) -> Option<Mode>,
        of: impl Fn(&Trained, &Cut) -> Option<StateId>,
    ) -> Vec<Option<Laid>> {
        let home = home.unwrap_or(Home::Own(own_bytes(&self.graph.states)));
        let (mut flats, mut base) = (vec![], 0);
        for (index, cut) in self.cuts.iter().enumerate() {
            let Some(mode) = mode(cut) else {
                flats.push(None);
                continue;
            };
            let Cut { parameters, flat, .. } = cut;
            let at = |element: usize| moved(home, (base + element) * dtype.bytes());
            let name = format!("bucket.{index}{suffix}");
            let (elements, held) = match (mode, flat.group) {
                (Mode::Shard, Some(group)) => (flat.held(), Held::Shard(group)),
                _ => (flat.elements, Held::Whole),
            };
            let state = self.add(&name, Type::new(dtype, [elements]), at(0), held);
            let part = flat.group.filter(|_| mode == Mode::Within).map(|group| {
                let ty = Type::new(dtype, [flat.held()]);
                self.add(&format!("{name}{PART}"), ty, at(0), Held::Within(group))
            });
            flats.push(Some(Laid { own: part.unwrap_or(state), whole: part.map(|_| state) }));
            for (parameter, piece) in parameters.iter().zip(&flat.pieces) {
                let trained = self.trained.iter().find(|t| t.parameter == *parameter);
                let Some(member) = trained.and_then(|t| of(t, cut)) else { continue };
                let member = &mut self.graph.states[member.index()];
                (member.home, member.held) = match held {
                    Held::Shard(_) => (at(0), Held::Of { flat: state, start: piece.start }),
                    _ => (at(piece.start), Held::Whole),
                };
            }
            base += elements;
        }
        flats
    }

    fn add(&mut self, name: &str, ty: Type, home: Home, held: Held) -> StateId {
        let state = self.graph.add_state(name, ty, Role::Flat);
        let added = &mut self.graph.states[state.index()];
        (added.home, added.held) = (home, held);
        state
    }
}

/// Ending of the name of a rank's part of a buffer that is whole on every rank.
const PART: &str = ".part";

/// What a rank holds of a flat buffer.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Whole,
    /// All of it, of which a part is the rank's to write.
    Within,
    /// A part.
    Shard,
}

/// A flat buffer: the state that the optimizer works on, and the whole that it is a part of.
#[derive(Clone, Copy, Default)]
struct Laid {
    own: StateId,
    whole: Option<StateId>,
}

impl Laid {
    fn gathered(self) -> Option<(StateId, StateId)> {
        self.whole.map(|whole| (self.own, whole))
    }
}

/// Place that lies so many bytes further.
fn moved(home: Home, bytes: usize) -> Home {
    match home {
        Home::Nowhere => Home::Nowhere,
        Home::Own(offset) => Home::Own(offset + bytes),
        Home::Arena(offset) => Home::Arena(offset + bytes),
        Home::Host(offset) => Home::Host(offset + bytes),
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
