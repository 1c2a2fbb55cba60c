//! UPerNet (Xiao et al., 2018) and the auxiliary FCN head (Long et al., 2015), as transformers has them, over the four stages
//! of any backbone. Names are transformers' own.
//!
//! Legend: B batch, h and w height and width, C channels, K classes.

use crate::architecture::Ends;
use graph::build::{BatchNorm, Conv, Targets};
use graph::op::Window;
use graph::{Builder, Init, Loss, ValueId};
use serde::{Deserialize, Serialize};

/// Sides of the pyramid's poolings.
const POOLS: [usize; 4] = [1, 2, 3, 6];
/// The stage that the auxiliary head reads.
const AUXILIARY_STAGE: usize = 2;
/// Weight of the auxiliary head's loss.
pub const AUXILIARY_WEIGHT: f64 = 0.4;
const WEIGHT: Init = Init::Normal { std: 0.02 };

/// Shape of the heads beside the backbone's widths.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UperNet {
    pub classes: usize,
    /// Channels of every layer before the classifier.
    pub channels: usize,
    /// Channels of the auxiliary head.
    pub auxiliary: usize,
    /// Rate at which channels are dropped before the classifiers. mmsegmentation has 0.1, transformers none.
    pub dropout: f64,
}

/// Logits of a pixel each (B,height,width,K).
#[derive(Clone, Copy, Debug)]
pub struct Logits {
    pub main: ValueId,
    pub auxiliary: ValueId,
    /// Main logits before they are resized, (B,h,w,K).
    pub coarse: ValueId,
}

impl UperNet {
    /// Heads as published for ADE20K.
    pub fn published(classes: usize) -> Self {
        UperNet { classes, channels: 512, auxiliary: 256, dropout: 0.1 }
    }

    /// Graph from the stages' outputs, finest first, to loss, statistics and logits of images of `size` (height,
    /// width). Training adds the auxiliary loss; evaluation has the main one alone. Statistics, and with them the loss
    /// that is logged, are the main head's in both, so that they compare.
    pub fn finish(
        &self,
        b: &mut Builder,
        stages: [ValueId; 4],
        size: (usize, usize),
        targets: Targets,
        loss: Loss,
    ) -> Ends {
        let Logits { main, auxiliary, coarse } = self.heads(b, stages, size);
        let others = [("auxiliary", auxiliary, AUXILIARY_WEIGHT)];
        let others = if b.is_training() { &others[..] } else { &[] };
        let (loss, stats) = b.weighted_losses(main, others, targets, loss.smoothing);
        b.name(coarse, "head");
        Ends { loss, stats, logits: coarse }
    }

    pub fn heads(&self, b: &mut Builder, stages: [ValueId; 4], size: (usize, usize)) -> Logits {
        let coarse = b.scope("decode_head", |b| self.decode(b, stages));
        let auxiliary = b.scope("auxiliary_head", |b| {
            let x = layer(b, "convs.0", stages[AUXILIARY_STAGE], self.auxiliary, 3);
            self.classify(b, x)
        });
        let main = b.resize("logits", coarse, size);
        Logits { main, auxiliary: b.resize("auxiliary", auxiliary, size), coarse }
    }

    /// The pyramid over the last stage, then from the coarsest stage to the finest, then all of them together.
    fn decode(&self, b: &mut Builder, stages: [ValueId; 4]) -> ValueId {
        let [finer @ .., last] = stages;
        let lateral =
            |b: &mut Builder, i: usize| layer(b, &format!("lateral_convs.{i}"), finer[i], self.channels, 1);
        let mut laterals = [0, 1, 2].map(|i| lateral(b, i));
        let top = self.pyramid(b, last);
        let mut above = top;
        for (i, lateral) in laterals.iter_mut().enumerate().rev() {
            let size = b.size(*lateral);
            let resized = b.resize(&format!("top_down.{i}"), above, size);
            *lateral = b.add(*lateral, resized);
            above = *lateral;
        }
        let size = b.size(laterals[0]);
        let mut outputs = vec![];
        for (i, lateral) in laterals.into_iter().enumerate() {
            let y = layer(b, &format!("fpn_convs.{i}"), lateral, self.channels, 3);
            outputs.push(b.resize(&format!("fpn.{i}"), y, size));
        }
        outputs.push(b.resize("fpn.3", top, size));
        let y = b.concat("fpn", &outputs);
        let y = layer(b, "fpn_bottleneck", y, self.channels, 3);
        self.classify(b, y)
    }

    /// Pyramid pooling: the whole image at several scales, beside the stage itself.
    fn pyramid(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let size = b.size(x);
        let mut parts = vec![x];
        for (i, bins) in POOLS.into_iter().enumerate() {
            let y = b.average_pool(&format!("psp_modules.{i}.0"), x, bins);
            let y = layer(b, &format!("psp_modules.{i}.1"), y, self.channels, 1);
            parts.push(b.resize(&format!("psp_modules.{i}"), y, size));
        }
        let y = b.concat("psp", &parts);
        layer(b, "bottleneck", y, self.channels, 3)
    }

    fn classify(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let x = b.channel_dropout(x, self.dropout);
        let window = Window { stride: 1, pad: 0 };
        let (out, bias) = (self.classes, Some(Init::Zeros));
        b.conv(x, Conv { name: "classifier", out, kernel: 1, window, weight: WEIGHT, bias })
    }
}

/// Convolution, batch norm, ReLU.
fn layer(b: &mut Builder, name: &str, x: ValueId, out: usize, kernel: usize) -> ValueId {
    b.scope(name, |b| {
        let window = Window { stride: 1, pad: kernel / 2 };
        let y = b.conv(x, Conv { name: "conv", out, kernel, window, weight: WEIGHT, bias: None });
        b.batch_norm(y, BatchNorm { relu: true, ..BatchNorm::named("batch_norm") })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::{DType, Graph, Role};

    /// The heads of Swin V2-B on images of 512 pixels.
    fn published(training: bool) -> Graph {
        let mut b = Builder::new(DType::F32, training);
        let stage = |b: &mut Builder, i: usize| {
            b.input(&format!("stage.{i}"), DType::F32, [1, 128 >> i, 128 >> i, 128 << i])
        };
        let stages = [0, 1, 2, 3].map(|i| stage(&mut b, i));
        let targets = b.targets([1, 512, 512], false);
        let ends = UperNet::published(150).finish(&mut b, stages, (512, 512), targets, Loss::default());
        b.finish(&ends.values()).unwrap()
    }

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let count = |prefix: &str| -> usize {
            let of = |s: &&graph::State| s.is_parameter() && s.name.starts_with(prefix);
            published(true).states.iter().filter(of).map(|s| s.ty.shape.count()).sum()
        };
        // transformers' UperNetHead and UperNetFCNHead over widths of 128, 256, 512 and 1024.
        assert_eq!(count("decode_head."), 33_315_990);
        assert_eq!(count("auxiliary_head."), 1_218_710);
    }

    #[test]
    fn evaluation_has_the_same_states_and_no_auxiliary_loss() {
        let (train, eval) = (published(true), published(false));
        assert_eq!(train.states, eval.states);
        assert_eq!(train.states.iter().filter(|s| s.role == Role::Running).count(), 13);
        let losses = |graph: &Graph| {
            let is_loss = |n: &&graph::graph::Node| matches!(n.op, graph::Op::CrossEntropy { .. });
            graph.nodes.iter().filter(is_loss).count()
        };
        assert_eq!((losses(&train), losses(&eval)), (2, 1));
        for graph in [&train, &eval] {
            for name in ["loss", "loss.stats", "head"] {
                assert!(graph.outputs.contains(&graph.find(name).unwrap()), "{name}");
            }
        }
    }
}
