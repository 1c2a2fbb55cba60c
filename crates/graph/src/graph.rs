//! A graph in single-assignment form: nodes in program order, each value defined once.

mod state;

pub use state::{ALIGN, AVERAGE, COPY, GRADIENT, Held, Home, Init, PENDING, Role, State, own_bytes, settle};

use crate::mesh::Mesh;
use crate::op::{Op, StateId};
use crate::types::Type;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// A value, by its place in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub u32);

impl ValueId {
    /// Index in the table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl StateId {
    /// Index in the table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Result of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Unique in its graph; derived from the layer, so that two plans can be compared line by line.
    pub name: String,
    /// Element type and shape.
    pub ty: Type,
}

/// The part of a step a node belongs to; the account of time and the plan's text group by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Forward pass, from inputs to the loss.
    Forward,
    /// Backward pass, from the loss to gradients.
    Backward,
    /// Forward ops again, for the backward ops that need their results.
    Recompute,
    /// Collectives between ranks.
    Communication,
    /// Optimizer, from gradients to new parameters.
    Update,
}

impl Phase {
    /// The name in plan texts and messages.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Recompute => "recompute",
            Phase::Communication => "communication",
            Phase::Update => "update",
        }
    }
}

/// An op with its operands and results.
#[derive(Clone, Debug)]
pub struct Node {
    /// The op.
    pub op: Op,
    /// Operands, in the order of the op's description.
    pub inputs: Vec<ValueId>,
    /// Results, in the order of the op's description.
    pub outputs: Vec<ValueId>,
    /// Layer that it belongs to, for messages and accounts.
    pub layer: String,
    /// Part of the step that it belongs to.
    pub phase: Phase,
}

/// Reason why a graph or its plans can't be made.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum GraphError {
    /// Operands that don't fit an op.
    #[error("{layer}: {op} {why}")]
    Shape {
        /// Layer of the node.
        layer: String,
        /// The op, with the types of its operands.
        op: String,
        /// Defect.
        why: String,
    },
    /// An op with another number of results than the layer uses.
    #[error("{layer}: {op} has {results} results, not {wanted}")]
    Results {
        /// Layer of the node.
        layer: String,
        /// The op.
        op: String,
        /// Results it has.
        results: usize,
        /// Results that are asked for.
        wanted: usize,
    },
    /// A gradient would have to pass through it.
    #[error("{layer}: {op} has no backward rule")]
    NoBackward {
        /// Layer of the node.
        layer: String,
        /// The op.
        op: String,
    },
    /// Two nodes write one state.
    #[error("state {0} is assigned twice")]
    AssignedTwice(String),
    /// A value of another type than its state.
    #[error("{value} is {is}, but its state {state} is {needs}")]
    AssignType {
        /// Name of the value.
        value: String,
        /// Type of the value.
        is: Type,
        /// Name of the state.
        state: String,
        /// The state's type.
        needs: Type,
    },
    /// The old content of a state is gone by then.
    #[error("{user} reads state {state} as it was before its assign, but comes after it")]
    ReadAfterAssign {
        /// Name of the state.
        state: String,
        /// Op and layer that read it.
        user: String,
    },
    /// Two parameters of one name.
    #[error("two parameters are named {0}")]
    DuplicateParameter(String),
    /// A value is used before the node that makes it.
    #[error("{0} is not defined before {1} uses it")]
    UseBeforeDefinition(String, String),
    /// Two graphs of one model don't share their parameters.
    #[error("the training and evaluation graphs disagree on parameter {0}")]
    ParametersDiffer(String),
    /// Nothing is named so.
    #[error("the graph has no output named {0}")]
    NoOutput(String),
    /// A batch norm over one value a channel, which has no variance.
    #[error(
        "{layer}: batch norm needs more than {values} value a channel to train with: take a larger batch or image"
    )]
    NoMoments {
        /// Layer of the node.
        layer: String,
        /// Values of a channel.
        values: usize,
    },
    /// No parameter has a gradient.
    #[error("every parameter is frozen: there is nothing to train")]
    NothingToTrain,
}

/// Nodes in program order over values and states.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Table of values.
    pub values: Vec<Value>,
    /// Nodes, in program order.
    pub nodes: Vec<Node>,
    /// Table of states.
    pub states: Vec<State>,
    /// The ranks that run it together.
    pub mesh: Mesh,
    /// Values the host reads after the run: they live to the end of the plan.
    pub outputs: Vec<ValueId>,
    /// Values that full recompute keeps: the borders between blocks.
    pub borders: HashSet<ValueId>,
    names: HashMap<String, u32>,
}

impl Graph {
    /// A new graph over the same states.
    pub fn over(states: Vec<State>) -> Self {
        Graph { states, ..Graph::default() }
    }

    /// The type of a value.
    pub fn ty(&self, value: ValueId) -> &Type {
        &self.values[value.index()].ty
    }

    /// The name of a value.
    pub fn name(&self, value: ValueId) -> &str {
        &self.values[value.index()].name
    }

    /// The value of a name.
    pub fn find(&self, name: &str) -> Result<ValueId, GraphError> {
        let index = self.values.iter().position(|v| v.name == name);
        index.map(|i| ValueId(i as u32)).ok_or_else(|| GraphError::NoOutput(name.to_string()))
    }

    /// The type of a state.
    pub fn state_type(&self, state: StateId) -> &Type {
        &self.states[state.index()].ty
    }

    /// Adds a state to the table.
    pub fn add_state(&mut self, name: impl Into<String>, ty: Type, role: Role) -> StateId {
        self.states.push(State { name: name.into(), ty, role, home: Home::Nowhere, held: Held::Whole });
        StateId(self.states.len() as u32 - 1)
    }

    /// Gives a value another name, made unique if it is taken.
    pub fn rename(&mut self, value: ValueId, name: &str) {
        self.values[value.index()].name = self.unique(name);
    }

    fn unique(&mut self, name: &str) -> String {
        let uses = self.names.entry(name.to_string()).or_insert(0);
        *uses += 1;
        if *uses == 1 { name.to_string() } else { format!("{name}~{uses}") }
    }

    /// Adds a value that no node makes yet.
    pub fn add_value(&mut self, name: &str, ty: Type) -> ValueId {
        let name = self.unique(name);
        self.values.push(Value { name, ty });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Types the outputs of `op` and makes a value for each, without placing the node anywhere.
    pub fn make(&mut self, op: Op, inputs: &[ValueId], at: &At) -> Result<Node, GraphError> {
        let types: Vec<&Type> = inputs.iter().map(|v| self.ty(*v)).collect();
        let outputs = op.infer(&types).map_err(|why| {
            let shapes = types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
            GraphError::Shape { layer: at.layer.clone(), op: format!("{}({shapes})", op.name()), why }
        })?;
        let outputs = outputs
            .into_iter()
            .enumerate()
            .map(|(i, ty)| self.add_value(&op.output_name(inputs.len(), &at.name, i), ty))
            .collect();
        Ok(Node { op, inputs: inputs.to_vec(), outputs, layer: at.layer.clone(), phase: at.phase })
    }

    /// Adds a node at the end; returns its results.
    pub fn push(&mut self, op: Op, inputs: &[ValueId], at: &At) -> Result<Vec<ValueId>, GraphError> {
        let node = self.make(op, inputs, at)?;
        let outputs = node.outputs.clone();
        self.nodes.push(node);
        Ok(outputs)
    }

    /// Reads a state; one read node per state and graph.
    pub fn read(&mut self, state: StateId) -> ValueId {
        let op = Op::Read { state };
        if let Some(node) = self.nodes.iter().find(|n| n.op == op) {
            return node.outputs[0];
        }
        let State { name, ty, .. } = self.states[state.index()].clone();
        let value = self.add_value(&name, ty);
        let node = Node { op, inputs: vec![], outputs: vec![value], layer: name, phase: Phase::Forward };
        self.nodes.push(node);
        value
    }

    /// Adds the write of a state.
    pub fn assign(&mut self, state: StateId, value: ValueId, phase: Phase) -> Result<(), GraphError> {
        let State { name, ty, .. } = &self.states[state.index()];
        if self.ty(value) != ty {
            let (value, is) = (self.name(value).to_string(), self.ty(value).clone());
            return Err(GraphError::AssignType { value, is, state: name.clone(), needs: ty.clone() });
        }
        let layer = name.clone();
        self.nodes.push(Node {
            op: Op::Assign { state },
            inputs: vec![value],
            outputs: vec![],
            layer,
            phase,
        });
        Ok(())
    }

    /// The node that defines each value.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for out in &node.outputs {
                producers[out.index()] = Some(i);
            }
        }
        producers
    }

    /// The nodes that use each value, in program order.
    pub fn consumers(&self) -> Vec<Vec<usize>> {
        let mut consumers = vec![Vec::new(); self.values.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for input in &node.inputs {
                consumers[input.index()].push(i);
            }
        }
        consumers
    }

    /// Reads other states instead, of the same types, where `instead` has one.
    pub fn read_instead(&mut self, instead: impl Fn(StateId) -> Option<StateId>) {
        for node in &mut self.nodes {
            if let Op::Read { state } = &mut node.op
                && let Some(other) = instead(*state)
            {
                *state = other;
                node.layer = self.states[other.index()].name.clone();
                self.values[node.outputs[0].index()].name = node.layer.clone();
            }
        }
    }

    /// Drops nodes whose results nobody uses.
    pub fn prune(&mut self) {
        let mut used: HashSet<ValueId> = self.outputs.iter().copied().collect();
        let mut keep = vec![false; self.nodes.len()];
        for (i, node) in self.nodes.iter().enumerate().rev() {
            let rooted = matches!(node.op, Op::Assign { .. } | Op::Input);
            if rooted || node.outputs.iter().any(|v| used.contains(v)) {
                keep[i] = true;
                used.extend(node.inputs.iter().copied());
            }
        }
        let mut flags = keep.into_iter();
        self.nodes.retain(|_| flags.next().unwrap_or(true));
    }

    /// Single assignment: every use after its definition, every state assigned at most once and read only before.
    pub fn check(&self) -> Result<(), GraphError> {
        let mut defined = vec![false; self.values.len()];
        let mut assigned = HashSet::new();
        let mut state_of: HashMap<ValueId, StateId> = HashMap::new();
        for node in &self.nodes {
            let user = || format!("{} of {}", node.op.name(), node.layer);
            for input in &node.inputs {
                if !defined[input.index()] {
                    return Err(GraphError::UseBeforeDefinition(self.name(*input).to_string(), user()));
                }
                if let Some(state) = state_of.get(input).filter(|s| assigned.contains(*s)) {
                    let state = self.states[state.index()].name.clone();
                    return Err(GraphError::ReadAfterAssign { state, user: user() });
                }
            }
            if let Op::Read { state } = node.op {
                state_of.insert(node.outputs[0], state);
            }
            for out in &node.outputs {
                defined[out.index()] = true;
            }
            if let Op::Assign { state } = node.op
                && !assigned.insert(state)
            {
                return Err(GraphError::AssignedTwice(self.states[state.index()].name.clone()));
            }
        }
        Ok(())
    }
}

/// Position of a new node: its layer, the stem of its values' names, its phase.
#[derive(Clone, Debug)]
pub struct At {
    /// Layer of the node.
    pub layer: String,
    /// Stem of its values' names.
    pub name: String,
    /// Part of the step.
    pub phase: Phase,
}

impl At {
    /// A node of a layer, whose values are named after it.
    pub fn new(layer: &str, phase: Phase) -> Self {
        At { layer: layer.to_string(), name: layer.to_string(), phase }
    }

    /// A node of a layer, whose values have a name of their own.
    pub fn named(layer: &str, name: impl Into<String>, phase: Phase) -> Self {
        At { layer: layer.to_string(), name: name.into(), phase }
    }
}
