//! The plan of an update: norm, clipping, optimizer, averages.

use super::layout::Layout;
use crate::graph::{At, Graph, GraphError, Phase, ValueId};
use crate::op::Op;
use crate::settings::{DynamicScale, Optimizer, ParamGroup, Settings};

/// Makes an empty graph over the states of a layout that of an update.
pub fn update(mut graph: Graph, layout: &Layout, settings: &Settings<'_>) -> Result<Graph, GraphError> {
    let at = |name: &str| At::new(name, Phase::Update);
    let gradients: Vec<ValueId> = layout.trained.iter().map(|t| graph.read(t.gradient)).collect();
    let stats = graph.read(layout.stats);
    let squares = graph.push(Op::SumSquares, &gradients, &at("norm"))?[0];
    let scale = layout.loss_scale.map(|state| graph.read(state));
    let clip = Op::Clip { max_norm: settings.max_grad_norm, scaled: scale.is_some() };
    let inputs: Vec<ValueId> = [squares, stats].into_iter().chain(scale).collect();
    let control = graph.push(clip, &inputs, &at("control"))?[0];
    let before = graph.read(layout.applied);
    let applied = graph.push(Op::Advance, &[before, control], &at("applied"))?[0];
    graph.assign(layout.applied, applied, Phase::Update)?;
    for (trained, gradient) in layout.trained.iter().zip(gradients) {
        let state = graph.states[trained.parameter.index()].clone();
        let op = optimizer_op(&settings.optimizer, (settings.group)(&state));
        let mut inputs = vec![graph.read(trained.parameter), gradient];
        inputs.extend(trained.moments.iter().map(|m| graph.read(*m)));
        inputs.extend([control, applied]);
        let copy = layout.copies.get(&trained.parameter);
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

fn optimizer_op(optimizer: &Optimizer, ParamGroup { lr_scale, decays }: ParamGroup) -> Op {
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
