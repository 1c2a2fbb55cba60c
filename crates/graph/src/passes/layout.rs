//! The states beside a model's own: what is trained, how it is summed, and where it lies.

use super::differentiate::Gradients;
use super::precision::multiplied;
use crate::graph::{AVERAGE, COPY, GRADIENT, Graph, PENDING, Role, State};
use crate::op::StateId;
use crate::plan::ALIGN;
use crate::settings::{LossScaling, Optimizer, Settings};
use crate::types::{DType, Type};
use std::collections::HashMap;

/// States beside the parameters.
#[derive(Clone, Default)]
pub struct Layout {
    /// In the order of the parameters.
    pub trained: Vec<Trained>,
    /// Sums of loss, count and hits.
    pub stats: StateId,
    /// Optimizer steps that were applied.
    pub applied: StateId,
    /// The factor of the loss under fp16.
    pub loss_scale: Option<StateId>,
    /// Half-precision copies of parameters.
    pub copies: HashMap<StateId, StateId>,
    /// Of batch norms.
    pub running: Vec<Running>,
}

/// Running moments of a batch norm. A step writes the pending ones, and `update` takes them over if it is applied.
#[derive(Clone)]
pub struct Running {
    /// As the last applied step left it.
    pub state: StateId,
    /// As the step under way leaves it.
    pub pending: StateId,
    /// Its moving average.
    pub average: Option<StateId>,
}

/// A parameter that is trained, and what that takes.
#[derive(Clone)]
pub struct Trained {
    /// The parameter itself.
    pub parameter: StateId,
    /// The sum of its gradients over a step.
    pub gradient: StateId,
    /// What the optimizer keeps of earlier gradients.
    pub moments: Vec<StateId>,
    /// Its moving average.
    pub average: Option<StateId>,
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
    Layout { trained, stats, applied, loss_scale, copies, running }
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
