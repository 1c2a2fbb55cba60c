//! An ONNX graph while it is written: nodes, constants, and the names of both.

use super::proto::Message;
use std::collections::{HashMap, HashSet};

/// A dimension of a value: a number, or the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    Batch,
    Size(usize),
}

/// Value of a node's attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
}

/// A node: an operator of ONNX, its operands and results by name.
struct Node {
    name: String,
    op: &'static str,
    inputs: Vec<String>,
    outputs: Vec<String>,
    attributes: Vec<(&'static str, Attribute)>,
}

/// Element types of ONNX's TensorProto.
const FLOAT: i64 = 1;
const INT64: i64 = 7;

/// Nodes and constants in the order that they were asked for.
#[derive(Default)]
pub struct Writer {
    nodes: Vec<Node>,
    constants: Vec<Message>,
    /// Names of constants.
    known: HashSet<String>,
    /// How often a name was asked for.
    used: HashMap<String, usize>,
    /// Results that are the same wherever they are asked for.
    shared: HashMap<String, String>,
    values: Vec<Message>,
    /// Layer that nodes are named after.
    layer: String,
}

impl Writer {
    /// Names nodes after this layer from here on.
    pub fn begin(&mut self, layer: &str) {
        self.layer = layer.to_string();
    }

    /// A node of one result; the result's name.
    pub fn node(
        &mut self,
        op: &'static str,
        inputs: &[&str],
        attributes: Vec<(&'static str, Attribute)>,
    ) -> String {
        let name = self.fresh(op);
        let outputs = vec![name.clone()];
        self.push(name.clone(), op, inputs, outputs, attributes);
        name
    }

    /// A value cut into parts of these lengths along its last axis.
    pub fn split<const N: usize>(&mut self, x: &str, lengths: [usize; N]) -> [String; N] {
        let sizes = self.sizes(&lengths);
        let name = self.fresh("Split");
        let outputs: [String; N] = std::array::from_fn(|part| format!("{name}_part{part}"));
        let axis = vec![("axis", Attribute::Int(-1))];
        self.push(name, "Split", &[x, &sizes], outputs.to_vec(), axis);
        outputs
    }

    fn push(
        &mut self,
        name: String,
        op: &'static str,
        inputs: &[&str],
        outputs: Vec<String>,
        attributes: Vec<(&'static str, Attribute)>,
    ) {
        let inputs = inputs.iter().map(|input| input.to_string()).collect();
        self.nodes.push(Node { name, op, inputs, outputs, attributes });
    }

    /// A result by what it is: made by `make` when it is first asked for.
    pub fn once(&mut self, what: &str, make: impl FnOnce(&mut Self) -> String) -> String {
        if let Some(made) = self.shared.get(what) {
            return made.clone();
        }
        let made = make(self);
        self.shared.insert(what.to_string(), made.clone());
        made
    }

    /// `LAYER/OP`, with a number from the second on.
    fn fresh(&mut self, op: &str) -> String {
        let name = format!("{}/{op}", self.layer);
        let used = self.used.entry(name.clone()).or_insert(0);
        *used += 1;
        if *used == 1 { name } else { format!("{name}_{used}") }
    }

    /// Gives the result of the last node its name in the graph, and notes its shape, if given. A value that the last node didn't make
    /// keeps the name it has.
    pub fn settle(&mut self, made: String, name: &str, shape: Option<&[Dim]>) -> String {
        let Some(output) = self.nodes.last_mut().and_then(|node| node.outputs.last_mut()) else {
            return made;
        };
        if *output != made {
            return made;
        }
        *output = name.to_string();
        self.values.extend(shape.map(|shape| value(name, shape, None)));
        name.to_string()
    }

    /// Floats under a name of their own; `data` is asked for when the name is new.
    pub fn floats(&mut self, name: &str, shape: &[usize], data: impl FnOnce() -> Vec<f32>) -> String {
        self.constant(name, shape, FLOAT, || data().iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// A single float.
    pub fn float(&mut self, value: f32) -> String {
        self.floats(&format!("constant_{value}"), &[], || vec![value])
    }

    /// Whole numbers under a name of their own.
    pub fn ints(&mut self, name: &str, shape: &[usize], data: impl FnOnce() -> Vec<i64>) -> String {
        self.constant(name, shape, INT64, || data().iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// Whole numbers in a row, named after themselves: shapes, starts, ends.
    pub fn row(&mut self, values: &[i64]) -> String {
        let name: Vec<String> = values.iter().map(i64::to_string).collect();
        self.ints(&format!("constant_{}", name.join("_")), &[values.len()], || values.to_vec())
    }

    fn sizes(&mut self, values: &[usize]) -> String {
        let values: Vec<i64> = values.iter().map(|value| *value as i64).collect();
        self.row(&values)
    }

    fn constant(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: i64,
        bytes: impl FnOnce() -> Vec<u8>,
    ) -> String {
        if self.known.insert(name.to_string()) {
            let dims = shape.iter().map(|side| *side as i64);
            self.constants.push(Message::new().ints(1, dims).int(2, kind).text(8, name).bytes(9, bytes()));
        }
        name.to_string()
    }

    /// The graph: a GraphProto with one input and one output.
    pub fn finish(self, name: &str, input: Message, output: Message) -> Message {
        let graph = Message::new().messages(1, self.nodes.iter().map(encode)).text(2, name);
        let graph = graph.messages(5, self.constants).message(11, input).message(12, output);
        graph.messages(13, self.values)
    }
}

fn encode(node: &Node) -> Message {
    let attribute = |(name, value): &(&str, Attribute)| {
        let message = Message::new().text(1, name);
        match value {
            Attribute::Float(x) => message.float(2, *x).int(20, 1),
            Attribute::Int(x) => message.int(3, *x).int(20, 2),
            Attribute::Ints(values) => message.ints(8, values.iter().copied()).int(20, 7),
        }
    };
    let message = Message::new().texts(1, node.inputs.iter().map(String::as_str));
    let message = message.texts(2, node.outputs.iter().map(String::as_str)).text(3, &node.name);
    message.text(4, node.op).messages(5, node.attributes.iter().map(attribute))
}

/// A ValueInfoProto of floats.
pub fn value(name: &str, shape: &[Dim], text: Option<&str>) -> Message {
    let dim = |dim: &Dim| match dim {
        Dim::Batch => Message::new().text(2, "N"),
        Dim::Size(size) => Message::new().int(1, *size as i64),
    };
    let shape = Message::new().messages(1, shape.iter().map(dim));
    let tensor = Message::new().int(1, FLOAT).message(2, shape);
    let value = Message::new().text(1, name).message(2, Message::new().message(1, tensor));
    text.into_iter().fold(value, |value, text| value.text(3, text))
}
