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
    let mut pass = Pass { graph, mixed, copy_of, typed: HashMap::new() };
    for mut node in nodes {
        for (operand, dtype) in operands(&node, &pass.graph, mixed, &logits) {
            node.inputs[operand] = pass.typed(node.inputs[operand], dtype, &node)?;
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
        for operand in 0..multiplied_inputs(node, &logits) {
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

/// The inputs of a step that must be of a certain type, and that type. A bias is of the type of what it is added to; a sum over
/// columns reads what the product beside it reads.
fn operands(node: &Node, graph: &Graph, mixed: Mixed, logits: &HashSet<ValueId>) -> Vec<(usize, DType)> {
    let Mixed { half, residual } = mixed;
    let halves = |list: &[usize]| list.iter().map(|i| (*i, half)).collect();
    match node.op {
        _ if node.op.is_product() => halves(&(0..multiplied_inputs(node, logits)).collect::<Vec<_>>()),
        Op::ColumnSum { .. } | Op::Gelu | Op::Attention { .. } => halves(&[0]),
        Op::GeluGrad { .. } => halves(&[0, 1]),
        Op::AttentionGrad { .. } => halves(&[0, 1, 3]),
        Op::LayerNorm { add: true, .. } => vec![(0, residual)],
        // The gradient that is added is of the type of what it is the gradient of.
        Op::LayerNormGrad { add: true, .. } => vec![(5, graph.ty(node.inputs[0]).dtype)],
        Op::WindowAttention { .. } | Op::NormAdd { .. } | Op::NormAddGrad { .. } => halves(&[0]),
        Op::WindowAttentionGrad { .. } => halves(&[0, 5, 7]),
        Op::PositionBiasGrad { .. } => vec![(3, DType::F32)],
        Op::Moments | Op::BatchNorm { .. } => halves(&[0]),
        Op::BatchNormSums { .. } | Op::BatchNormGrad { .. } => halves(&[0, 4]),
        Op::Resize { .. }
        | Op::ResizeGrad { .. }
        | Op::Slice { .. }
        | Op::Grid { .. }
        | Op::Ungrid { .. } => halves(&[0]),
        Op::Concat => halves(&(0..node.inputs.len()).collect::<Vec<_>>()),
        Op::Accumulate => vec![(1, DType::F32)],
        Op::Assign { .. } => vec![(0, DType::F32)],
        _ => vec![],
    }
}

/// How many of a product's inputs, from the first on, are halves.
fn multiplied_inputs(node: &Node, logits: &HashSet<ValueId>) -> usize {
    match node.op {
        Op::Linear { bias: true, .. } if !logits.contains(&node.outputs[0]) => 3,
        Op::Conv { bias: true, .. } => 3,
        _ => 2,
    }
}

/// What the loss is taken of stays f32, as its softmax is.
fn logits(graph: &Graph) -> HashSet<ValueId> {
    let is_loss = |op: &Op| matches!(op, Op::CrossEntropy { .. } | Op::ResizedCrossEntropy { .. });
    let losses = graph.nodes.iter().filter(|n| is_loss(&n.op));
    losses.map(|n| n.inputs[0]).collect()
}

struct Pass<'a> {
    /// With the nodes that were gone through.
    graph: Graph,
    mixed: Mixed,
    copy_of: &'a dyn Fn(StateId) -> Option<StateId>,
    typed: HashMap<(ValueId, DType), ValueId>,
}

impl Pass<'_> {
    /// The type that an output has from now on, if it is another.
    fn dtype(&self, node: &Node, output: usize) -> Option<DType> {
        let Mixed { half, residual } = self.mixed;
        let like_input = || Some(self.graph.ty(node.inputs[0]).dtype);
        match (&node.op, output) {
            // Losses add up as they are.
            _ if self.graph.ty(node.outputs[output]).shape.rank() == 0 => None,
            (Op::Patches { .. } | Op::Linear { .. } | Op::CrossEntropyGrad { .. }, _) => Some(half),
            (Op::ResizedCrossEntropyGrad { .. }, _) => Some(half),
            (Op::LinearGradX { .. } | Op::GeluGrad { .. } | Op::EmbedGrad { .. }, 0) => Some(half),
            (Op::Attention { .. } | Op::AttentionGrad { .. }, 0) => Some(half),
            (Op::LayerNorm { add: false, .. }, 0) | (Op::LayerNorm { add: true, .. }, 1) => Some(half),
            // A sum with the residual stream is of it; maps of a head, and gradients of what is used twice, are not.
            (Op::Add, 0) if node.inputs.iter().all(|v| self.graph.ty(*v).dtype == half) => Some(half),
            (Op::LayerNorm { add: true, .. } | Op::NormAdd { .. } | Op::Embed { .. } | Op::Add, 0) => {
                Some(residual)
            }
            (Op::LayerNormGrad { .. }, 0) => like_input(),
            (Op::WindowAttention { .. } | Op::WindowAttentionGrad { .. }, 0) => Some(half),
            (Op::NormAddGrad { .. } | Op::MergePatches, 0) => Some(half),
            // The gradient of a stage's stream begins here.
            (Op::SplitPatches { .. }, 0) => Some(residual),
            (Op::Reshape { .. }, 0) => like_input(),
            // What leaves the gradient of the residual stream goes into a branch.
            (Op::Drop { .. }, 0) if node.phase == Phase::Backward => Some(half),
            (Op::Conv { .. } | Op::ConvGradX { .. } | Op::BatchNorm { .. } | Op::BatchNormGrad { .. }, 0) => {
                Some(half)
            }
            (Op::Resize { .. } | Op::ResizeGrad { .. } | Op::Concat | Op::Slice { .. }, 0) => Some(half),
            (Op::Grid { .. } | Op::Ungrid { .. }, 0) => Some(half),
            (Op::Gelu | Op::Drop { .. } | Op::Scale { .. }, 0) => like_input(),
            (Op::Pool { .. } | Op::PoolGrad { .. } | Op::Unpatches { .. }, 0) => like_input(),
            _ => None,
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

    /// The step that makes the residual stream, or its gradient, writes it as halves too.
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
