//! Mixed precision: which values are halves, and where products find their operands as such.
//!
//! Parameters, their gradients, moments and all sums stay f32. What products read and write is of half precision; a parameter
//! that they read has a copy of that type, which the optimizer keeps up to date. The residual stream, to which every block
//! adds little, has a type of its own. Kernels read and write whatever types their operands have, so almost no value is
//! converted by a step of its own.

use crate::graph::{At, Graph, GraphError, Node, Phase, ValueId};
use crate::op::{Op, StateId};
use crate::types::{DType, Type};
use std::collections::{HashMap, HashSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixed {
    /// bf16 or f16: what products read and write.
    pub half: DType,
    /// Of the residual stream and its gradient: f32, or as `half`.
    pub residual: DType,
}

/// Retypes a graph whose floats are all f32. `copy_of` says where the half-precision copy of a parameter lies; what has none
/// is cast where it is used.
pub fn precision(
    mut graph: Graph,
    mixed: Mixed,
    copy_of: &dyn Fn(StateId) -> Option<StateId>,
) -> Result<Graph, GraphError> {
    let logits = logits(&graph);
    let nodes = std::mem::take(&mut graph.nodes);
    let mut pass = Pass { graph, mixed, copy_of, halves: HashMap::new() };
    for mut node in nodes {
        for operand in product_operands(&node, &logits) {
            node.inputs[operand] = pass.as_half(node.inputs[operand], &node)?;
        }
        if node.op == Op::Accumulate {
            node.inputs[1] = pass.as_single(node.inputs[1], &node)?;
        }
        for output in 0..node.outputs.len() {
            let value = node.outputs[output];
            if let Some(dtype) = pass.dtype(&node, output).filter(|_| !logits.contains(&value)) {
                pass.graph.values[value.index()].ty.dtype = dtype;
            }
        }
        pass.graph.nodes.push(node);
    }
    Ok(pass.graph)
}

/// The parameters that products read.
pub fn multiplied(graph: &Graph) -> Vec<StateId> {
    let (producers, logits) = (graph.producers(), logits(graph));
    let mut states: Vec<StateId> = Vec::new();
    for node in graph.nodes.iter().filter(|n| n.op.is_product()) {
        for operand in product_operands(node, &logits) {
            let maker = producers[node.inputs[operand].index()].map(|p| &graph.nodes[p].op);
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

/// The inputs of a step that must be halves. A bias is of the type of what it is added to; a sum over columns reads what the
/// product beside it reads.
fn product_operands(node: &Node, logits: &HashSet<ValueId>) -> std::ops::Range<usize> {
    match node.op {
        Op::Linear { .. } if logits.contains(&node.outputs[0]) => 0..2,
        Op::Linear { .. } => 0..node.inputs.len(),
        Op::LinearGradX { .. } | Op::LinearGradW { .. } => 0..2,
        Op::ColumnSum { .. } => 0..1,
        _ => 0..0,
    }
}

/// What the loss is taken of stays f32, as its softmax is.
fn logits(graph: &Graph) -> HashSet<ValueId> {
    let losses = graph.nodes.iter().filter(|n| matches!(n.op, Op::CrossEntropy { .. }));
    losses.map(|n| n.inputs[0]).collect()
}

struct Pass<'a> {
    /// With the nodes that were gone through.
    graph: Graph,
    mixed: Mixed,
    copy_of: &'a dyn Fn(StateId) -> Option<StateId>,
    halves: HashMap<ValueId, ValueId>,
}

impl Pass<'_> {
    /// The type that an output has from now on, if it is another.
    fn dtype(&self, node: &Node, output: usize) -> Option<DType> {
        let Mixed { half, residual } = self.mixed;
        let like_input = || Some(self.graph.ty(node.inputs[0]).dtype);
        match (&node.op, output) {
            (Op::Patches { .. } | Op::Linear { .. } | Op::CrossEntropyGrad { .. }, _) => Some(half),
            (Op::LinearGradX { .. } | Op::GeluGrad { .. } | Op::EmbedGrad { .. }, 0) => Some(half),
            (Op::Attention { .. } | Op::AttentionGrad { .. }, 0) => Some(half),
            (Op::LayerNorm { add: false, .. }, 0) | (Op::LayerNorm { add: true, .. }, 1) => Some(half),
            (Op::LayerNorm { add: true, .. } | Op::LayerNormGrad { .. }, 0) => Some(residual),
            (Op::Embed { .. } | Op::Add, 0) => Some(residual),
            // What leaves the gradient of the residual stream goes into a branch.
            (Op::Drop { .. }, 0) if node.phase == Phase::Backward => Some(half),
            (Op::Gelu | Op::Drop { .. } | Op::Scale { .. }, 0) => like_input(),
            (Op::Pool { .. } | Op::PoolGrad { .. } | Op::Unpatches { .. }, 0) => like_input(),
            _ => None,
        }
    }

    /// `value` in half precision, made at most once.
    fn as_half(&mut self, value: ValueId, user: &Node) -> Result<ValueId, GraphError> {
        if self.graph.ty(value).dtype == self.mixed.half {
            return Ok(value);
        }
        if let Some(half) = self.halves.get(&value) {
            return Ok(*half);
        }
        let maker = self.graph.nodes.iter().rposition(|n| n.outputs.contains(&value));
        let copy = match maker.map(|m| &self.graph.nodes[m].op) {
            Some(Op::Read { state }) => (self.copy_of)(*state),
            _ => None,
        };
        let half = match (maker, copy) {
            (_, Some(copy)) => self.graph.read(copy),
            (Some(maker), None) if self.is_norm_gradient(maker, value) => self.write_twice(maker, value),
            _ => {
                let name = format!("{}.half", self.graph.name(value));
                let at = At::named(&user.layer, name, user.phase);
                self.graph.push(Op::Cast { to: self.mixed.half }, &[value], &at)?[0]
            }
        };
        self.halves.insert(value, half);
        Ok(half)
    }

    /// `value` as sums are kept.
    fn as_single(&mut self, value: ValueId, user: &Node) -> Result<ValueId, GraphError> {
        if !self.graph.ty(value).dtype.is_half() {
            return Ok(value);
        }
        let at = At::named(&user.layer, format!("{}.f32", self.graph.name(value)), user.phase);
        Ok(self.graph.push(Op::Cast { to: DType::F32 }, &[value], &at)?[0])
    }

    fn is_norm_gradient(&self, maker: usize, value: ValueId) -> bool {
        let Node { op, outputs, .. } = &self.graph.nodes[maker];
        matches!(op, Op::LayerNormGrad { half: None, .. }) && outputs[0] == value
    }

    /// The step that makes the gradient of the residual stream writes it as halves too.
    fn write_twice(&mut self, maker: usize, value: ValueId) -> ValueId {
        let dtype = self.mixed.half;
        let (name, shape) = (format!("{}.half", self.graph.name(value)), self.graph.ty(value).shape.clone());
        let copy = self.graph.add_value(&name, Type { dtype, shape });
        let node = &mut self.graph.nodes[maker];
        if let Op::LayerNormGrad { half, .. } = &mut node.op {
            *half = Some(dtype);
        }
        node.outputs.push(copy);
        copy
    }
}
