//! Lets a model begin with bytes and choices, for devices that make images of them by themselves.
//!
//! The input `images` becomes the result of a [`Op::Prepare`], and the inputs are `pixels` and `choices` instead. What never
//! changes lies in states: what each byte becomes, the weights of the resizing, and the images themselves where a whole set has
//! room on the device. Training and evaluation each have their own, since they may resize differently.

use crate::graph::{At, Graph, GraphError, Node, Phase, Role, ValueId};
use crate::op::{CHOICES, Op, StateId};
use crate::program::Model;
use crate::types::{DType, Type};

/// Form in which images come to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Height of the images as bytes, before they are resized.
    pub height: usize,
    /// Width of the images as bytes.
    pub width: usize,
    /// Images that come with a batch, or that the whole set has if it is resident.
    pub images: usize,
    /// Flag: the bytes lie in the state `….pixels` instead of an input.
    pub resident: bool,
    /// Rows of the weights of the resizing, and numbers of each; none if nothing is resized.
    pub taps: Option<[usize; 2]>,
}

/// `train` and `eval` say how images of each come; a model that only evaluates needs no training.
pub fn prepare(model: Model, train: Option<&Delivery>, eval: Option<&Delivery>) -> Result<Model, GraphError> {
    let deliveries = [("train", train), ("eval", eval)];
    let each = |graph, name| begin_with_bytes(graph, deliveries, name);
    Ok(Model { train: each(model.train, "train")?, eval: each(model.eval, "eval")?, key: model.key })
}

/// The states that a delivery has, after those of the model.
#[derive(Clone, Copy)]
struct Tables {
    levels: StateId,
    taps: Option<StateId>,
    pixels: Option<StateId>,
}

/// Both graphs have the states of both, since they share one table of them.
fn begin_with_bytes(
    mut graph: Graph,
    deliveries: [(&str, Option<&Delivery>); 2],
    mine: &str,
) -> Result<Graph, GraphError> {
    let images = graph.find("images")?;
    let [batch, channels, size, _] = graph.ty(images).shape.0[..] else {
        let (layer, op, why) =
            ("images".into(), "prepare".into(), format!("needs 4 axes, got {}", graph.ty(images)));
        return Err(GraphError::Shape { layer, op, why });
    };
    let mut found = None;
    for (name, delivery) in deliveries {
        let Some(delivery) = delivery else { continue };
        let tables = add_tables(&mut graph, name, delivery, channels);
        found = if name == mine { Some((delivery, tables)) } else { found };
    }
    let Some((delivery, tables)) = found else { return Ok(graph) };

    let nodes = std::mem::take(&mut graph.nodes);
    for node in nodes {
        if node.op != Op::Input || node.outputs[0] != images {
            graph.nodes.push(node);
            continue;
        }
        let pixels = match tables.pixels {
            Some(state) => graph.read(state),
            None => input(&mut graph, "pixels", pixels_of(delivery, channels)),
        };
        let choices = input(&mut graph, "choices", Type::new(DType::I32, [batch, CHOICES]));
        let levels = graph.read(tables.levels);
        let taps = tables.taps.map(|state| graph.read(state));
        let inputs: Vec<ValueId> = [pixels, choices, levels].into_iter().chain(taps).collect();
        let made = graph.make(Op::Prepare { size }, &inputs, &At::new("prepare", Phase::Forward))?;
        let (is, wants) = (graph.ty(made.outputs[0]), graph.ty(images));
        if is != wants {
            let (layer, op) = ("images".to_string(), "prepare".to_string());
            return Err(GraphError::Shape {
                layer,
                op,
                why: format!("makes {is}, but the model reads {wants}"),
            });
        }
        // The model goes on with the value that it was built with.
        graph.nodes.push(Node { outputs: vec![images], ..made });
    }
    Ok(graph)
}

fn pixels_of(delivery: &Delivery, channels: usize) -> Type {
    Type::new(DType::U8, [delivery.images, delivery.height, delivery.width, channels])
}

fn add_tables(graph: &mut Graph, name: &str, delivery: &Delivery, channels: usize) -> Tables {
    let mut add = |what: &str, ty| graph.add_state(format!("{name}.{what}"), ty, Role::Resident);
    Tables {
        levels: add("levels", Type::new(DType::F32, [channels, 256])),
        taps: delivery.taps.map(|shape| add("taps", Type::new(DType::I32, shape))),
        pixels: delivery.resident.then(|| add("pixels", pixels_of(delivery, channels))),
    }
}

fn input(graph: &mut Graph, name: &str, ty: Type) -> ValueId {
    let value = graph.add_value(name, ty);
    let (layer, phase) = (name.to_string(), Phase::Forward);
    graph.nodes.push(Node { op: Op::Input, inputs: vec![], outputs: vec![value], layer, phase });
    value
}
