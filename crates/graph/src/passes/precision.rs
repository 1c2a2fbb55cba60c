//! Mixed precision: which values are in half precision, and where matmuls find their operands in it.
//!
//! Parameters, their gradients, moments and all sums stay f32. What matmuls read and write is of half precision; a parameter
//! that they read has a copy of that type, which the optimizer keeps up to date. The residual stream, to which every block
//! adds little, has a type of its own. Kernels read and write whatever types their operands have, so almost no value is
//! converted by a step of its own.

use crate::graph::{At, Graph, GraphError, Node, Phase, ValueId};
use crate::op::slots::{Class, Description};
use crate::op::{Op, StateId};
use crate::settings::Mixed;
use crate::types::{DType, Type};
use std::collections::{HashMap, HashSet};

/// Retypes a graph whose floats are all f32. `copy_of` says where the half-precision copy of a parameter lies; what has none
/// is cast where it is used.
pub fn precision(
    mut graph: Graph,
    mixed: Mixed,
    copy_of: &dyn Fn(StateId) -> Option<StateId>,
) -> Result<Graph, GraphError> {
    let logits = logits(&graph);
    let nodes = std::mem::take(&mut graph.nodes);
    let mut pass = Pass { graph, mixed, logits, copy_of, typed: HashMap::new() };
    for mut node in nodes {
        let Description { operands, results, .. } = node.op.describe(node.inputs.len());
        for (operand, slot) in operands.iter().enumerate() {
            if let Some(dtype) = pass.operand(&node, slot.class) {
                node.inputs[operand] = pass.typed(node.inputs[operand], dtype, &node)?;
            }
        }
        for (value, slot) in node.outputs.iter().zip(&results) {
            // Losses stay f32, and so do logits, whose softmax is f32.
            let stays = pass.graph.ty(*value).shape.rank() == 0 || pass.logits.contains(value);
            if let Some(dtype) = pass.result(&node, slot.class).filter(|_| !stays) {
                pass.graph.values[value.index()].ty.dtype = dtype;
            }
        }
        pass.graph.nodes.push(node);
    }
    Ok(pass.graph)
}

/// The parameters that matmuls read.
pub fn multiplied(graph: &Graph) -> Vec<StateId> {
    let (producers, logits) = (graph.producers(), logits(graph));
    let mut states: Vec<StateId> = Vec::new();
    for node in graph.nodes.iter().filter(|n| n.op.is_matmul()) {
        let slots = node.op.describe(node.inputs.len()).operands;
        let in_half = slots.iter().zip(&node.inputs).filter(|(slot, _)| match slot.class {
            Class::Compute => true,
            Class::LikeResult => !logits.contains(&node.outputs[0]),
            _ => false,
        });
        for (_, input) in in_half {
            let maker = producers[input.index()].map(|p| &graph.nodes[p].op);
            if let Some(Op::Read { state }) = maker
                && graph.states[state.index()].is_parameter()
                && !states.contains(state)
            {
                states.push(*state);
            }
        }
    }
    states
}

/// Logits, which stay f32, as their softmax is.
fn logits(graph: &Graph) -> HashSet<ValueId> {
    let is_loss = |op: &Op| matches!(op, Op::CrossEntropy { .. } | Op::ResizedCrossEntropy { .. });
    let losses = graph.nodes.iter().filter(|n| is_loss(&n.op));
    losses.map(|n| n.inputs[0]).collect()
}

struct Pass<'a> {
    /// Graph of the nodes that were gone through.
    graph: Graph,
    mixed: Mixed,
    logits: HashSet<ValueId>,
    copy_of: &'a dyn Fn(StateId) -> Option<StateId>,
    typed: HashMap<(ValueId, DType), ValueId>,
}

impl Pass<'_> {
    /// The dtype that an operand must have, if it must have one.
    fn operand(&self, node: &Node, class: Class) -> Option<DType> {
        let Mixed { half, residual } = self.mixed;
        match class {
            Class::Compute => Some(half),
            Class::Stream => Some(residual),
            Class::Full | Class::Gradient => Some(DType::F32),
            Class::Like(operand) => Some(self.graph.ty(node.inputs[operand]).dtype),
            Class::LikeResult if self.logits.contains(&node.outputs[0]) => None,
            Class::LikeResult => Some(half),
            Class::State => match node.op {
                Op::Assign { state } => Some(self.graph.state_type(state).dtype),
                _ => None,
            },
            Class::Float | Class::Joined | Class::Branch | Class::Half | Class::Fp8 | Class::Exactly(_) => {
                None
            }
        }
    }

    /// The dtype that a result has from now on, if it is another.
    fn result(&self, node: &Node, class: Class) -> Option<DType> {
        let Mixed { half, residual } = self.mixed;
        let of_input = |operand: usize| self.graph.ty(node.inputs[operand]).dtype;
        match class {
            Class::Compute => Some(half),
            Class::Stream => Some(residual),
            Class::Like(operand) => Some(of_input(operand)),
            // A sum with the residual stream is of it; maps of a head, and gradients of what is used twice, are not.
            Class::Joined if (0..node.inputs.len()).all(|i| of_input(i) == half) => Some(half),
            Class::Joined => Some(residual),
            Class::Branch if node.phase == Phase::Backward => Some(half),
            Class::Branch => Some(of_input(0)),
            Class::Float | Class::Full | Class::Gradient | Class::LikeResult => None,
            Class::State | Class::Half | Class::Fp8 | Class::Exactly(_) => None,
        }
    }

    /// `value` in another type, made at most once.
    fn typed(&mut self, value: ValueId, dtype: DType, user: &Node) -> Result<ValueId, GraphError> {
        if self.graph.ty(value).dtype == dtype {
            return Ok(value);
        }
        if let Some(typed) = self.typed.get(&(value, dtype)) {
            return Ok(*typed);
        }
        let maker = self.graph.nodes.iter().rposition(|n| n.outputs.contains(&value));
        let copy = match maker.map(|m| &self.graph.nodes[m].op) {
            Some(Op::Read { state }) if dtype == self.mixed.half => (self.copy_of)(*state),
            _ => None,
        };
        let typed = match (maker, copy) {
            (_, Some(copy)) => self.graph.read(copy),
            (Some(maker), None) if dtype.is_half() && self.may_write_twice(maker, value) => {
                self.write_twice(maker, value)
            }
            _ => {
                let name = format!("{}.{dtype}", self.graph.name(value));
                let at = At::named(&user.layer, name, user.phase);
                self.graph.push(Op::Cast { to: dtype }, &[value], &at)?[0]
            }
        };
        self.typed.insert((value, dtype), typed);
        Ok(typed)
    }

    fn may_write_twice(&self, maker: usize, value: ValueId) -> bool {
        let Node { op, outputs, .. } = &self.graph.nodes[maker];
        matches!(op, Op::LayerNormGrad { half: None, .. } | Op::NormAdd { half: None, .. })
            && outputs[0] == value
    }

    /// Lets the step that makes the residual stream, or its gradient, write it in half precision too.
    fn write_twice(&mut self, maker: usize, value: ValueId) -> ValueId {
        let dtype = self.mixed.half;
        let (name, shape) = (format!("{}.half", self.graph.name(value)), self.graph.ty(value).shape.clone());
        let copy = self.graph.add_value(&name, Type { dtype, shape });
        let node = &mut self.graph.nodes[maker];
        if let Op::LayerNormGrad { half, .. } | Op::NormAdd { half, .. } = &mut node.op {
            *half = Some(dtype);
        }
        node.outputs.push(copy);
        copy
    }
}
