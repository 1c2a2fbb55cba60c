//! Adds the backward ops: the gradient of a loss with respect to every parameter that is trained.

use crate::graph::{At, Graph, GraphError, Phase, State, ValueId};
use crate::op::{Op, StateId};
use crate::rules::backward::backward;
use std::collections::HashMap;

/// The gradient of each parameter, in the order in which they become ready.
pub type Gradients = Vec<(StateId, ValueId)>;

/// `trains` says which parameters have a gradient; what only the others would need is not computed.
pub fn differentiate(
    mut graph: Graph,
    loss: ValueId,
    trains: &dyn Fn(&State) -> bool,
) -> Result<(Graph, Gradients), GraphError> {
    let wanted = depends_on_parameters(&graph, trains);
    let dtype = graph.ty(loss).dtype;
    let seed = graph.push(Op::Seed { dtype }, &[], &At::named("loss", "d.loss", Phase::Backward))?[0];

    let mut sums = Sums { of: HashMap::from([(loss, seed)]) };
    let mut gradients = Vec::new();
    let forward = graph.nodes[..graph.nodes.len() - 1].to_vec();
    for node in forward.iter().rev() {
        let dout: Vec<_> = node.outputs.iter().map(|v| sums.of.get(v).copied()).collect();
        if dout.iter().all(Option::is_none) {
            continue;
        }
        if let Op::Read { state } = node.op {
            gradients.extend(dout[0].map(|gradient| (state, gradient)));
            continue;
        }
        let wants: Vec<_> = node.inputs.iter().map(|v| wanted[v.index()]).collect();
        if !wants.contains(&true) {
            continue;
        }
        let grads = backward(&mut graph, node, &dout, &wants)?;
        for ((input, gradient), want) in node.inputs.iter().zip(grads).zip(wants) {
            if let (Some(gradient), true) = (gradient, want) {
                sums.add(&mut graph, &node.layer, *input, gradient)?;
            }
        }
    }
    let ready: HashMap<ValueId, usize> =
        graph.producers().iter().enumerate().filter_map(|(v, p)| Some((ValueId(v as u32), (*p)?))).collect();
    gradients.sort_by_key(|(_, value)| (ready.get(value).copied(), *value));
    Ok((graph, gradients))
}

/// Gradients of values used more than once add up in the order they arrive: the reverse of program order.
struct Sums {
    of: HashMap<ValueId, ValueId>,
}

impl Sums {
    fn add(
        &mut self,
        graph: &mut Graph,
        layer: &str,
        value: ValueId,
        gradient: ValueId,
    ) -> Result<(), GraphError> {
        let sum = match self.of.get(&value) {
            None => gradient,
            Some(so_far) => {
                let at = At::named(layer, format!("d.{}", graph.name(value)), Phase::Backward);
                graph.push(Op::Add, &[*so_far, gradient], &at)?[0]
            }
        };
        self.of.insert(value, sum);
        Ok(())
    }
}

fn depends_on_parameters(graph: &Graph, trains: &dyn Fn(&State) -> bool) -> Vec<bool> {
    let mut wanted = vec![false; graph.values.len()];
    for node in &graph.nodes {
        let from_parameter = match node.op {
            Op::Read { state } => {
                Some(&graph.states[state.index()]).is_some_and(|s| s.is_parameter() && trains(s))
            }
            _ => node.inputs.iter().any(|v| wanted[v.index()]),
        };
        for out in &node.outputs {
            wanted[out.index()] = from_parameter && graph.ty(*out).dtype.is_float();
        }
    }
    wanted
}
