//! Losses of resized logits.
//!
//! Logits of every pixel, and their gradient, are the largest values of a segmentation model: 150 numbers for each pixel of the
//! image, made of a sixteenth as many or fewer. A loss can resize them as it goes.

use super::pattern::{Rewriter, rewrite};
use crate::graph::Graph;
use crate::op::{Op, Sampling};
use crate::types::Type;

/// Classes up to which a loss resizes: the row of a pixel is held in registers.
const MOST_CLASSES: usize = 1024;

/// Lets losses read logits before they are enlarged, unless another node reads the enlarged ones.
pub fn resized_loss(graph: Graph) -> Graph {
    rewrite(graph, enlarged)
}

/// resize → cross-entropy becomes a loss of what is resized.
fn enlarged(at: &mut Rewriter, loss: usize) -> Option<()> {
    let Op::CrossEntropy { smoothing, mixed: false } = *at.op(loss) else { return None };
    let resize = at.own_maker(at.node(loss).inputs[0], loss)?;
    let Op::Resize { height, width, sampling: Sampling::Bilinear } = *at.op(resize) else { return None };
    let small = at.node(resize).inputs[0];
    let Type { dtype, shape } = at.graph.ty(small).clone();
    if shape.0[1] > height || shape.0[2] > width || shape.last() > MOST_CLASSES {
        return None;
    }
    let name = format!("{}.lse", at.graph.name(at.node(loss).outputs[0]));
    let lse = at.graph.add_value(&name, Type::new(dtype, [shape.0[0], height, width]));
    let inputs = [&[small], &at.node(loss).inputs[1..]].concat();
    let outputs = [&at.node(loss).outputs[..], &[lse]].concat();
    at.replace(loss, Op::ResizedCrossEntropy { smoothing }, inputs, outputs);
    at.merge(resize)
}
