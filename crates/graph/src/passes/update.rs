//! The plan of an update: norm, clipping, optimizer, averages.

use super::layout::{Bucket, Layout};
use crate::graph::{At, Graph, GraphError, Phase, ValueId};
use crate::op::{Op, Reduction};
use crate::settings::{DynamicScale, Optimizer, Settings, Zero};

/// Makes an empty graph over the states of a layout that of an update.
pub fn update(mut graph: Graph, layout: &Layout, settings: &Settings<'_>) -> Result<Graph, GraphError> {
    let at = |name: &str| At::new(name, Phase::Update);
    let gradients: Vec<ValueId> = layout.buckets.iter().map(|bucket| graph.read(bucket.gradient)).collect();
    let stats = graph.read(layout.stats);
    let flats = layout.buckets.iter().map(|bucket| bucket.flat.clone()).collect();
    let squares = graph.push(Op::SumSquares { flats }, &gradients, &at("norm"))?[0];
    let squares = of_all_parts(&mut graph, layout.stage, squares, &at("norm"))?;
    let scale = layout.loss_scale.map(|state| graph.read(state));
    let clip = Op::Clip { max_norm: settings.max_grad_norm, scaled: scale.is_some() };
    let inputs: Vec<ValueId> = [stats].into_iter().chain(scale).chain([squares]).collect();
    let control = graph.push(clip, &inputs, &at("control"))?[0];
    let before = graph.read(layout.applied);
    let applied = graph.push(Op::Advance, &[before, control], &at("applied"))?[0];
    graph.assign(layout.applied, applied, Phase::Update)?;
    let step = Step { settings, stage: layout.stage, control, applied };
    let mut buckets: Vec<(&Bucket, ValueId)> = layout.buckets.iter().zip(gradients).collect();
    if layout.stage != Zero::Stage0 {
        // Buckets are in the order in which gradients are ready. What the next forward pass reads first is gathered first, so that
        // the gathers after it hide behind computing.
        buckets.reverse();
    }
    let (matrices, others): (Vec<_>, Vec<_>) = buckets.into_iter().partition(|(b, _)| !b.stacks.is_empty());
    let is_lamb = matches!(settings.optimizer, Optimizer::Lamb { .. });
    // What is gathered is gathered as soon as it is updated.
    let together = if layout.stage == Zero::Stage0 || is_lamb { others.len().max(1) } else { 1 };
    for others in others.chunks(together) {
        let updated = match is_lamb {
            true => step.lamb(&mut graph, others)?,
            false => step.at_once(&mut graph, others)?,
        };
        // Averages first: one launch makes them with what updates.
        for ((bucket, _), updated) in others.iter().zip(&updated) {
            step.average(&mut graph, bucket, updated.0)?;
        }
        for ((bucket, _), updated) in others.iter().zip(updated) {
            step.gather(&mut graph, bucket, updated)?;
        }
    }
    // One after the other, so that what is made on the way of one bucket alone takes memory.
    if let Optimizer::Muon { momentum, nesterov, .. } = settings.optimizer {
        for (bucket, gradient) in matrices {
            let updated = step.muon(&mut graph, bucket, gradient, (momentum, nesterov))?;
            step.average(&mut graph, bucket, updated.0)?;
            step.gather(&mut graph, bucket, updated)?;
        }
    }
    commit_running(&mut graph, layout, settings, control)?;
    let dynamic = settings.loss_scale.and_then(|scaling| scaling.dynamic);
    if let (Some(DynamicScale { window, hysteresis, min }), Some(state)) = (dynamic, layout.loss_scale) {
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
    layout: &Layout,
    settings: &Settings<'_>,
    control: ValueId,
) -> Result<(), GraphError> {
    if layout.running.is_empty() {
        return Ok(());
    }
    let before: Vec<ValueId> = layout.running.iter().map(|r| graph.read(r.state)).collect();
    let after: Vec<ValueId> = layout.running.iter().map(|r| graph.read(r.pending)).collect();
    let inputs = [&[control], &before[..], &after].concat();
    let values = graph.push(Op::Commit, &inputs, &At::new("running", Phase::Update))?;
    for (running, value) in layout.running.iter().zip(values) {
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

/// Sums of which each rank has those of its parts, and zeros for the rest: adding them up rounds nothing. Replicas have the same.
fn of_all_parts(graph: &mut Graph, stage: Zero, sums: ValueId, at: &At) -> Result<ValueId, GraphError> {
    if stage == Zero::Stage0 {
        return Ok(sums);
    }
    let reduce = Op::AllReduce { reduction: Reduction::Sum, group: graph.mesh.shards() };
    Ok(graph.push(reduce, &[sums], &At { name: format!("all.{}", at.name), ..at.clone() })?[0])
}

/// Parameters of a bucket as updated, and their copies in half precision.
pub(super) type Updated = (ValueId, Option<ValueId>);

pub(super) fn at_bucket(graph: &Graph, bucket: &Bucket) -> At {
    At::named(&bucket.name, graph.states[bucket.parameter.index()].name.clone(), Phase::Update)
}

/// Values that all buckets share.
pub(super) struct Step<'a> {
    pub settings: &'a Settings<'a>,
    stage: Zero,
    pub control: ValueId,
    applied: ValueId,
}

impl Step<'_> {
    /// The moving average of a bucket's parameters, if there is one.
    fn average(&self, graph: &mut Graph, bucket: &Bucket, updated: ValueId) -> Result<(), GraphError> {
        if let (Some(average), Some(decay)) = (bucket.average, self.settings.ema) {
            let inputs = [graph.read(average), updated, self.control];
            let value = graph.push(Op::Ema { decay }, &inputs, &at_bucket(graph, bucket))?[0];
            graph.assign(average, value, Phase::Update)?;
        }
        Ok(())
    }

    /// Gathers what the ranks have updated where layers read it.
    fn gather(&self, graph: &mut Graph, bucket: &Bucket, updated: Updated) -> Result<(), GraphError> {
        let Some((_, whole)) = bucket.gathered else { return Ok(()) };
        let name = format!("all.{}", graph.states[whole.index()].name);
        let at = At::named(&bucket.name, name, Phase::Communication);
        let op = Op::AllGather { group: graph.mesh.shards(), views: None };
        let value = graph.push(op, &[updated.1.unwrap_or(updated.0)], &at)?[0];
        graph.assign(whole, value, Phase::Communication)
    }

    /// An optimizer of one op for each bucket; returns the parameters as updated.
    fn at_once(&self, graph: &mut Graph, buckets: &[(&Bucket, ValueId)]) -> Result<Vec<Updated>, GraphError> {
        let mut updated = vec![];
        for (bucket, gradient) in buckets {
            let flat = bucket.flat.clone();
            let op = match self.settings.optimizer {
                Optimizer::Sgd { momentum, nesterov, .. } => Op::Sgd { momentum, nesterov, flat },
                Optimizer::AdamW { beta1, beta2, eps, .. }
                | Optimizer::Lamb { beta1, beta2, eps, .. }
                | Optimizer::Muon { beta1, beta2, eps, .. } => Op::AdamW { beta1, beta2, eps, flat },
            };
            let mut inputs = vec![graph.read(bucket.parameter), *gradient];
            inputs.extend(bucket.moments.iter().map(|m| graph.read(*m)));
            inputs.extend([self.control, self.applied]);
            inputs.extend(bucket.copy.map(|copy| graph.read(copy)));
            let outputs = graph.push(op, &inputs, &at_bucket(graph, bucket))?;
            updated.push((outputs[0], bucket.copy.and(outputs.last().copied())));
            let written = std::iter::once(&bucket.parameter).chain(&bucket.moments).chain(&bucket.copy);
            for (state, value) in written.zip(outputs) {
                graph.assign(*state, value, Phase::Update)?;
            }
        }
        Ok(updated)
    }

    /// LAMB: the moments of all buckets, with the norms of their tensors, then the parameters.
    fn lamb(&self, graph: &mut Graph, buckets: &[(&Bucket, ValueId)]) -> Result<Vec<Updated>, GraphError> {
        let Optimizer::Lamb { beta1, beta2, eps, min_coeff, max_coeff, .. } = self.settings.optimizer else {
            return Ok(vec![]);
        };
        let mut made = vec![];
        for (bucket, gradient) in buckets {
            let op = Op::LambMoments { beta1, beta2, eps, flat: bucket.flat.clone() };
            let mut inputs = vec![graph.read(bucket.parameter), *gradient];
            inputs.extend(bucket.moments.iter().map(|m| graph.read(*m)));
            inputs.extend([self.control, self.applied]);
            let at =
                At { name: format!("{}.norms", at_bucket(graph, bucket).name), ..at_bucket(graph, bucket) };
            let mut outputs = graph.push(op, &inputs, &at_bucket(graph, bucket))?;
            for (state, value) in bucket.moments.iter().zip(&outputs) {
                graph.assign(*state, *value, Phase::Update)?;
            }
            if let Some(norms) = outputs.last_mut() {
                *norms = of_all_parts(graph, self.stage, *norms, &at)?;
            }
            made.push(outputs);
        }
        let mut updated = vec![];
        for ((bucket, _), made) in buckets.iter().zip(made) {
            let op = Op::LambApply { beta1, beta2, eps, min_coeff, max_coeff, flat: bucket.flat.clone() };
            let mut inputs = vec![graph.read(bucket.parameter)];
            inputs.extend(made);
            inputs.extend([self.control, self.applied]);
            inputs.extend(bucket.copy.map(|copy| graph.read(copy)));
            let outputs = graph.push(op, &inputs, &at_bucket(graph, bucket))?;
            updated.push((outputs[0], bucket.copy.and(outputs.last().copied())));
            for (state, value) in std::iter::once(&bucket.parameter).chain(&bucket.copy).zip(outputs) {
                graph.assign(*state, value, Phase::Update)?;
            }
        }
        Ok(updated)
    }
}
