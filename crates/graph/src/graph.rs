//! A graph in single-assignment form: nodes in program order, each value defined once.

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
    /// Its place in the table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl StateId {
    /// Its place in the table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a node makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Unique in its graph; derived from the layer, so that two plans can be compared line by line.
    pub name: String,
    pub ty: Type,
}

/// The part of a step a node belongs to; the account of time and the plan's text group by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// From inputs to the loss.
    Forward,
    /// From the loss to gradients.
    Backward,
    /// Forward ops again, for the backward ops that need their results.
    Recompute,
    /// What ranks send each other.
    Exchange,
    /// From gradients to new parameters.
    Update,
}

impl Phase {
    /// The name in plan texts and messages.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Recompute => "recompute",
            Phase::Exchange => "exchange",
            Phase::Update => "update",
        }
    }
}

/// An op with its operands and results.
#[derive(Clone, Debug)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub layer: String,
    pub phase: Phase,
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// All this value.
    Constant { value: f64 },
    /// Normal, around 0.
    Normal { std: f64 },
    /// Normal, cut at two absolute units as torch's `trunc_normal_` is by default.
    TruncatedNormal { std: f64 },
    /// Uniform between -bound and bound.
    Uniform { bound: f64 },
}

/// What a state is for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Learned; saved with the model.
    Parameter(Init),
    /// The sum of a parameter's gradients over a step.
    Gradient,
    /// Optimizer state.
    Moment,
    /// Moving average of the parameter it is named after: `X.ema` of `X`.
    Average,
    /// Sums of loss, count and hits over the micro-steps; largest values of operands in fp8.
    Statistic,
    /// Applied optimizer steps.
    Counter,
    /// This rank's share of the f32 numbers of parameters that are halves elsewhere.
    Master,
    /// Copy in half precision of the parameter it is named after: `X.half` of `X`. Products read it; the optimizer
    /// writes it with the parameter.
    Copy,
    /// What the host puts there before the first run and no plan changes: images, tables.
    Resident,
    /// Running moments of batch norm (3,C): mean, variance, batches seen.
    Running,
    /// Running moments as the step under way leaves them: `X.pending` of `X`, which `update` makes of it unless the step
    /// is skipped.
    Pending,
    /// (scale, good steps since it changed, skipped steps it still bears), which starts at this scale.
    LossScale { initial: f64 },
    /// Of an operand in fp8: (scale, largest values of the last steps). The scale starts at 1.
    Scale,
    /// A buffer of several tensors, each a state of its own that lies in it; or one rank's part of such a buffer.
    Flat,
}

impl Role {
    /// Whether it is a state of its own that steps to come depend on: what checkpoints hold, and what ranks have alike at the start.
    /// What is made anew in every step, derived from another state or a view of others is not.
    pub fn lasts(self) -> bool {
        match self {
            Role::Parameter(_) | Role::Moment | Role::Average | Role::Counter | Role::Master => true,
            Role::Running | Role::LossScale { .. } | Role::Scale => true,
            Role::Gradient | Role::Statistic | Role::Copy | Role::Resident | Role::Pending | Role::Flat => {
                false
            }
        }
    }

    /// For messages: `moment blocks.0.mlp.fc1.weight.m`.
    pub fn name(self) -> &'static str {
        match self {
            Role::Parameter(_) => "parameter",
            Role::Gradient => "gradient",
            Role::Moment => "moment",
            Role::Average => "average",
            Role::Statistic => "statistic",
            Role::Counter => "counter",
            Role::Master => "master copy",
            Role::Copy => "half-precision copy",
            Role::Resident => "table",
            Role::Running => "running statistic",
            Role::Pending => "running statistic of the step",
            Role::LossScale { .. } => "loss scale",
            Role::Scale => "scale of fp8",
            Role::Flat => "buffer",
        }
    }
}

/// What the name of a parameter's copy in half precision ends in.
pub const COPY: &str = ".half";

/// What the name of a gradient's state ends in.
pub const GRADIENT: &str = ".grad";

/// What the name of running moments within a step ends in.
pub const PENDING: &str = ".pending";

/// What the name of a parameter's moving average ends in.
pub const AVERAGE: &str = ".ema";

/// Memory that outlives a plan and is shared by all plans of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub name: String,
    #[serde(flatten)]
    pub ty: Type,
    pub role: Role,
    /// Where it lies. States may lie over each other: a flat buffer and the tensors in it.
    pub home: Home,
}

/// Where a state lies: a memory and the byte in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Home {
    /// Not decided yet: see [`settle`].
    #[default]
    Nowhere,
    /// In the states' own memory on the device, for as long as the program runs.
    Own(usize),
    /// In the arena, from the step that writes it to the end of the `update` that follows: others may lie there before and after.
    Arena(usize),
    /// In the host's memory.
    Host(usize),
}

impl State {
    /// Whether it is the same but for where it lies.
    pub fn is_like(&self, other: &State) -> bool {
        (&self.name, &self.ty, self.role) == (&other.name, &other.ty, other.role)
    }

    /// Whether some of its bytes are some of the other's.
    pub fn overlaps(&self, other: &State) -> bool {
        let meet = |a: usize, b: usize| a < b + other.ty.bytes() && b < a + self.ty.bytes();
        match (self.home, other.home) {
            (Home::Own(a), Home::Own(b))
            | (Home::Arena(a), Home::Arena(b))
            | (Home::Host(a), Home::Host(b)) => meet(a, b),
            _ => false,
        }
    }
}

/// Gives every state that has no home yet one in the states' own memory, behind all that lie there, in the order of their table.
pub fn settle(states: &mut [State]) {
    let mut end = own_bytes(states);
    for state in states.iter_mut().filter(|state| state.home == Home::Nowhere) {
        state.home = Home::Own(end);
        end += state.ty.bytes().next_multiple_of(ALIGN);
    }
}

/// Bytes of the states' own memory.
pub fn own_bytes(states: &[State]) -> usize {
    let end = |state: &State| match state.home {
        Home::Own(offset) => offset + state.ty.bytes().next_multiple_of(ALIGN),
        Home::Nowhere | Home::Arena(_) | Home::Host(_) => 0,
    };
    states.iter().map(end).max().unwrap_or(0)
}

/// Buffers start at cache-line pairs, as wide SIMD and copies between devices like them.
pub const ALIGN: usize = 128;

impl State {
    /// Whether it is learned.
    pub fn is_parameter(&self) -> bool {
        matches!(self.role, Role::Parameter(_))
    }

    /// The parameter that this is the half-precision copy of.
    pub fn copies(&self) -> Option<&str> {
        self.name.strip_suffix(COPY).filter(|_| self.role == Role::Copy)
    }

    /// The parameter, or the running moments, that this is the moving average of.
    pub fn averages(&self) -> Option<&str> {
        self.name.strip_suffix(AVERAGE).filter(|_| self.role == Role::Average)
    }
}

/// Why a graph or its plans can't be made.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum GraphError {
    /// Operands that don't fit an op.
    #[error("{layer}: {op} {why}")]
    Shape { layer: String, op: String, why: String },
    /// A gradient would have to pass through it.
    #[error("{layer}: {op} has no backward rule")]
    NoBackward { layer: String, op: String },
    /// Two nodes write one state.
    #[error("state {0} is assigned twice")]
    AssignedTwice(String),
    /// A value of another type than its state.
    #[error("{value} is {is}, but its state {state} is {needs}")]
    AssignType { value: String, is: Type, state: String, needs: Type },
    /// The old content of a state is gone by then.
    #[error("{user} reads state {state} as it was before its assign, but comes after it")]
    ReadAfterAssign { state: String, user: String },
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
    #[error(
        "{layer}: batch norm needs more than {values} value a channel to train with: take a larger batch or image"
    )]
    /// One value has no variance.
    NoMoments { layer: String, values: usize },
    /// No parameter has a gradient.
    #[error("every parameter is frozen: there is nothing to train")]
    NothingToTrain,
}

/// Nodes in program order over values and states.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub values: Vec<Value>,
    pub nodes: Vec<Node>,
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
        self.states.push(State { name: name.into(), ty, role, home: Home::Nowhere });
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

/// Where a new node belongs: its layer, the stem of its values' names, its phase.
#[derive(Clone, Debug)]
pub struct At {
    pub layer: String,
    pub name: String,
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
