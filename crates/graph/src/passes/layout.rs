//! Layout of everything that is trained, and the states beside a model's own.
//!
//! Buckets come first: which parameters follow each other, at which elements, with how much padding. Parameters, gradients, moments,
//! averages and half-precision copies are then views into one flat buffer for each of these kinds, all at the same elements.

use super::differentiate::Gradients;
use super::matrices::matrices;
use super::precision::multiplied;
use crate::flat::{CHUNK, Flat, Piece, Stack, UNIT};
use crate::graph::{AVERAGE, COPY, GRADIENT, Graph, Home, PENDING, Role, State, own_bytes, settle};
use crate::op::StateId;
use crate::settings::{LossScaling, ParamGroup, Settings};
use crate::types::{DType, Type};
use std::collections::HashMap;

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
}

impl Layout {
    /// The average that evaluation reads in the place of a state.
    pub fn average_of(&self, state: StateId) -> Option<StateId> {
        let of_parameter = self.trained.iter().find(|t| t.parameter == state).map(|t| t.average);
        of_parameter.or_else(|| self.running.iter().find(|r| r.state == state).map(|r| r.average))?
    }
}

/// Division of a flat buffer among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// No division: each rank holds the whole.
    Whole,
    /// Into equal parts for so many ranks, wherever tensors end.
    Even(usize),
    /// Into equal parts for so many ranks, each tensor whole in one of them: for optimizers that work on matrices.
    Owners(usize),
}

/// Offsets of tensors of so many elements in a flat buffer, and its length.
pub fn arrange(counts: &[usize], division: Division) -> (Vec<usize>, usize) {
    let mut starts = vec![0; counts.len()];
    let parts = match division {
        Division::Whole => 1,
        Division::Even(ranks) | Division::Owners(ranks) => ranks,
    };
    if let Division::Owners(ranks) = division {
        // The largest first, each to whoever has least.
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|tensor| std::cmp::Reverse(counts[*tensor]));
        let mut filled = vec![0; ranks];
        let mut owners = vec![0; counts.len()];
        for tensor in order {
            let owner = (0..ranks).min_by_key(|rank| filled[*rank]).unwrap_or(0);
            owners[tensor] = owner;
            filled[owner] += counts[tensor].next_multiple_of(UNIT);
        }
        let part = filled.iter().max().copied().unwrap_or(0).next_multiple_of(CHUNK);
        let mut ends: Vec<usize> = (0..ranks).map(|rank| rank * part).collect();
        for tensor in 0..counts.len() {
            starts[tensor] = ends[owners[tensor]];
            ends[owners[tensor]] += counts[tensor].next_multiple_of(UNIT);
        }
        return (starts, parts * part);
    }
    let mut end: usize = 0;
    for (start, count) in starts.iter_mut().zip(counts) {
        *start = end;
        end += count.next_multiple_of(UNIT);
    }
    (starts, end.next_multiple_of(parts * CHUNK))
}

/// Parameters that a bucket will hold.
struct Cut {
    /// Parameters, in the order in which they lie.
    parameters: Vec<StateId>,
    flat: Flat,
    /// Parameters as matrices, if that is how they are updated.
    stacks: Vec<Stack>,
}

/// Number of matrices of each parameter that is updated as such: see [`matrices`].
type Matrices = HashMap<StateId, usize>;

/// Parameters that a bucket will hold, as they get ready.
struct List {
    parameters: Vec<StateId>,
    elements: usize,
    /// Flag: they are updated as matrices.
    matrices: bool,
    /// The place of the last in the order of gradients.
    last: usize,
}

/// Gradients that get ready one after the other share a bucket until there are `communication.bucket` elements. Matrices have buckets of
/// their own. Buckets come in the order in which they are complete.
fn lists(graph: &Graph, gradients: &Gradients, matrices: &Matrices, bucket: usize) -> Vec<List> {
    let mut lists: Vec<List> = Vec::new();
    for (last, (parameter, _)) in gradients.iter().enumerate() {
        let elements = graph.state_type(*parameter).shape.count();
        let of_matrices = matrices.contains_key(parameter);
        let open = lists.iter_mut().rfind(|list| list.matrices == of_matrices);
        match open.filter(|list| list.elements + elements <= bucket) {
            Some(list) => {
                list.parameters.push(*parameter);
                (list.elements, list.last) = (list.elements + elements, last);
            }
            None => {
                lists.push(List { parameters: vec![*parameter], elements, matrices: of_matrices, last });
            }
        }
    }
    lists.sort_by_key(|list| list.last);
    lists
}

/// The matrices that pieces of a flat buffer are, those of one shape together.
fn stacks(graph: &Graph, pieces: &[(StateId, Piece)], matrices: &Matrices) -> Vec<Stack> {
    let mut stacks: Vec<Stack> = vec![];
    for (parameter, piece) in pieces {
        let Some(parts) = matrices.get(parameter) else { continue };
        let shape = &graph.state_type(*parameter).shape;
        let (rows, columns) = (shape.0[0] / parts, shape.0[1..].iter().product());
        let starts = (0..*parts).map(|part| piece.start + part * rows * columns);
        match stacks.iter_mut().find(|stack| (stack.rows, stack.columns) == (rows, columns)) {
            Some(stack) => stack.starts.extend(starts),
            None => stacks.push(Stack { rows, columns, starts: starts.collect() }),
        }
    }
    stacks
}

fn cut(graph: &Graph, gradients: &Gradients, matrices: &Matrices, settings: &Settings<'_>) -> Vec<Cut> {
    let count = |parameter: &StateId| graph.state_type(*parameter).shape.count();
    let lists = lists(graph, gradients, matrices, settings.communication.bucket);
    let cut = lists.into_iter().map(|List { parameters, .. }| {
        let counts: Vec<usize> = parameters.iter().map(count).collect();
        let (starts, elements) = arrange(&counts, Division::Whole);
        let piece = |(parameter, start): (StateId, usize)| {
            let state = &graph.states[parameter.index()];
            let ParamGroup { lr_scale, decays } = (settings.group)(state);
            let weight_decay = if decays { settings.optimizer.weight_decay() } else { 0.0 };
            (parameter, Piece { start, count: state.ty.shape.count(), lr_scale, weight_decay })
        };
        let mut pieces: Vec<(StateId, Piece)> = parameters.into_iter().zip(starts).map(piece).collect();
        pieces.sort_by_key(|(_, piece)| piece.start);
        let stacks = stacks(graph, &pieces, matrices);
        let (parameters, pieces) = pieces.into_iter().unzip();
        Cut { parameters, flat: Flat { elements, pieces, ..Flat::default() }, stacks }
    });
    cut.collect()
}

/// Adds the states of training to a graph that has gradients.
pub fn lay_out(graph: &mut Graph, gradients: &Gradients, settings: &Settings<'_>) -> Layout {
    let matrices = if settings.optimizer.treats_matrices() { matrices(graph) } else { Matrices::new() };
    let cuts = cut(graph, gradients, &matrices, settings);
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
    let multiplied = if settings.mixed.is_some() { multiplied(graph) } else { vec![] };
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
    Layout { trained, buckets, stats, applied, loss_scale, copies, running }
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
        let dtype = self.graph.state_type(stats).dtype;
        let parameters = self.lay("", dtype, None, |t| Some(t.parameter));
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
            let laid = self.lay_some(&suffix, dtype, None, |cut| place(cut).is_some(), of);
            moments.iter_mut().zip(laid).for_each(|(list, state)| list.extend(state));
        }
        let copies = settings
            .mixed
            .map(|mixed| self.lay(COPY, mixed.half, None, |t| copies.get(&t.parameter).copied()));
        // Statistics go before the gradients, so that the first bucket takes them along. Where a step has one micro-step, both lie in
        // the arena: they are made when activations are done with.
        let first =
            if settings.accumulates { Home::Own(own_bytes(&self.graph.states)) } else { Home::Arena(0) };
        self.graph.states[stats.index()].home = first;
        let behind = moved(first, UNIT * dtype.bytes());
        let gradients = self.lay(GRADIENT, dtype, Some(behind), |t| Some(t.gradient));
        let averages = settings.ema.map(|_| self.lay(AVERAGE, dtype, None, |t| t.average));
        let bucket = |(index, cut): (usize, &Cut)| {
            let gradient = |parameter: &StateId| {
                self.trained.iter().find(|t| t.parameter == *parameter).map(|t| t.gradient)
            };
            let name = |parameter: &StateId| self.graph.states[parameter.index()].name.as_str();
            let (first, last) = (cut.parameters.first().map(name), cut.parameters.last().map(name));
            let name = match (first, last) {
                (Some(first), Some(last)) if first != last => format!("{first} … {last}"),
                (first, _) => first.unwrap_or_default().to_string(),
            };
            Bucket {
                gradients: cut.parameters.iter().filter_map(gradient).collect(),
                name,
                flat: cut.flat.clone(),
                stacks: cut.stacks.clone(),
                parameter: parameters[index],
                gradient: gradients[index],
                moments: moments[index].clone(),
                average: averages.as_ref().map(|kind| kind[index]),
                copy: copies.as_ref().map(|kind| kind[index]),
            }
        };
        self.cuts.iter().enumerate().map(bucket).collect()
    }

    /// One kind of buffer: a state for each bucket, from `home` on or behind the states' own memory, and in them the states of
    /// parameters.
    fn lay(
        &mut self,
        suffix: &str,
        dtype: DType,
        home: Option<Home>,
        of: impl Fn(&Trained) -> Option<StateId>,
    ) -> Vec<StateId> {
        self.lay_some(suffix, dtype, home, |_| true, |t, _| of(t)).into_iter().flatten().collect()
    }

    /// Lays out like [`Self::lay`], for some of the buckets.
    fn lay_some(
        &mut self,
        suffix: &str,
        dtype: DType,
        home: Option<Home>,
        has: impl Fn(&Cut) -> bool,
        of: impl Fn(&Trained, &Cut) -> Option<StateId>,
    ) -> Vec<Option<StateId>> {
        let home = home.unwrap_or(Home::Own(own_bytes(&self.graph.states)));
        let (mut flats, mut base) = (vec![], 0);
        for (index, cut) in self.cuts.iter().enumerate() {
            if !has(cut) {
                flats.push(None);
                continue;
            }
            let Cut { parameters, flat, .. } = cut;
            let at = |element: usize| moved(home, (base + element) * dtype.bytes());
            let ty = Type::new(dtype, [flat.elements]);
            let state = self.graph.add_state(format!("bucket.{index}{suffix}"), ty, Role::Flat);
            self.graph.states[state.index()].home = at(0);
            flats.push(Some(state));
            for (parameter, piece) in parameters.iter().zip(&flat.pieces) {
                let trained = self.trained.iter().find(|t| t.parameter == *parameter);
                let member = trained.and_then(|t| of(t, cut));
                if let Some(member) = member {
                    self.graph.states[member.index()].home = at(piece.start);
                }
            }
            base += flat.elements;
        }
        flats
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_for_owners_hold_whole_tensors() {
        let counts = [5000, 64, 3000, 1, 4000, 2500, 700, 0];
        for ranks in [1, 2, 3, 5] {
            let (starts, elements) = arrange(&counts, Division::Owners(ranks));
            assert!(elements.is_multiple_of(ranks * CHUNK), "{ranks}: {elements}");
            let part = elements / ranks;
            let mut ranges: Vec<(usize, usize)> = vec![];
            for (start, count) in starts.iter().zip(counts).filter(|(_, count)| *count > 0) {
                assert!(start.is_multiple_of(UNIT));
                assert_eq!(
                    start / part,
                    (start + count - 1) / part,
                    "{ranks}: {count} at {start} of parts of {part}"
                );
                ranges.push((*start, start + count));
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranks}: {ranges:?}");
        }
        // As balanced as the largest allows.
        assert_eq!(arrange(&counts, Division::Owners(3)).1, 3 * 3 * CHUNK);
    }

    #[test]
    fn even_parts_end_at_borders() {
        let (starts, elements) = arrange(&[100, 5000, 3], Division::Even(4));
        assert_eq!((starts, elements), (vec![0, 128, 5184], 4 * CHUNK));
        assert_eq!(arrange(&[100, 5000, 3], Division::Whole).1, 3 * CHUNK);
        assert_eq!(arrange(&[], Division::Whole), (vec![], 0));
    }
}
