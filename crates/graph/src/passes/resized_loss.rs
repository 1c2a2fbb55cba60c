//! Losses of resized logits.
//!
//! Logits of every pixel, and their gradient, are the largest values of a segmentation model: 150 numbers for each pixel of the
//! image, made of a sixteenth as many or fewer. A loss can resize them as it goes.

use super::fuse::remove;
use crate::graph::Graph;
use crate::op::{Op, Sampling};
use crate::types::Type;
use std::collections::HashSet;

/// Classes up to which a loss resizes: the row of a pixel is held in registers.
const MOST_CLASSES: usize = 1024;

/// Lets losses read logits as they are before they are enlarged, unless somebody else reads those that are.
pub fn resized_loss(mut graph: Graph) -> Graph {
    let (producers, consumers) = (graph.producers(), graph.consumers());
    let mut gone = HashSet::new();
    for i in 0..graph.nodes.len() {
        let Op::CrossEntropy { smoothing, mixed: false } = graph.nodes[i].op else { continue };
        let logits = graph.nodes[i].inputs[0];
        let only_here = consumers[logits.index()] == [i] && !graph.outputs.contains(&logits);
        let Some(resize) = producers[logits.index()].filter(|_| only_here) else { continue };
        let Op::Resize { height, width, sampling: Sampling::Bilinear } = graph.nodes[resize].op else {
            continue;
        };
        let small = graph.nodes[resize].inputs[0];
        let Type { dtype, shape } = graph.ty(small).clone();
        if shape.0[1] > height || shape.0[2] > width || shape.last() > MOST_CLASSES {
            continue;
        }
        let name = format!("{}.lse", graph.name(graph.nodes[i].outputs[0]));
        let lse = graph.add_value(&name, Type::new(dtype, [shape.0[0], height, width]));
        let node = &mut graph.nodes[i];
        node.op = Op::ResizedCrossEntropy { smoothing };
        node.inputs[0] = small;
        node.outputs.push(lse);
        gone.insert(resize);
    }
    remove(graph, &gone)
}
