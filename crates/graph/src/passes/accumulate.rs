//! Keeps the sums of a step: gradients and statistics go into their states.

use super::differentiate::Gradients;
use super::layout::Layout;
use crate::graph::{At, Graph, GraphError, Node, ValueId};
use crate::op::{Op, StateId};
use std::collections::HashMap;

/// Puts each gradient into its state as soon as it is ready: with `adds` adds it to what earlier micro-steps left there, else makes it
/// there. Where those of a micro-step are reduced before they are added up, [`scatter`](super::scatter()) adds.
pub fn accumulate(
    mut graph: Graph,
    gradients: &Gradients,
    layout: &Layout,
    adds: bool,
) -> Result<Graph, GraphError> {
    let stats = graph.find("loss.stats")?;
    let mut sums: HashMap<ValueId, Vec<StateId>> = HashMap::from([(stats, vec![layout.stats])]);
    for (parameter, value) in gradients {
        let gradient = layout.trained.iter().find(|t| t.parameter == *parameter).map(|t| t.gradient);
        sums.entry(*value).or_default().extend(gradient);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let adds = |state: StateId| adds && (state == layout.stats || !layout.reduces_each);
    for state in sums.values().flatten().copied().collect::<std::collections::BTreeSet<_>>() {
        if adds(state) {
            graph.read(state);
        }
    }
    let scale = layout.loss_scale.map(|state| graph.read(state));
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
            if adds(state) {
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
