//! The boxes of Swin Transformer V2's figure.

use super::{Builder, Linear};
use crate::graph::{Init, ValueId};
use crate::op::{Op, PathDrop};
use crate::types::Shape;
use crate::windows::Windows;

/// Width of the hidden layer that makes the position bias.
const POSITION_BIAS_WIDTH: usize = 512;

/// Scaled cosine attention in windows.
pub struct CosineAttention {
    /// Number of heads.
    pub heads: usize,
    /// Geometry of the windows.
    pub windows: Windows,
    /// The window that the position bias was learned for, if it was another.
    pub pretrained: Option<[usize; 2]>,
    /// Initial values of the weights of all layers.
    pub weight: Init,
}

impl Builder {
    /// A linear layer without bias; what `layer.bias` says is not read.
    pub fn linear_without_bias(&mut self, x: ValueId, layer: Linear<'_>) -> ValueId {
        let shape = [layer.out, self.shape(x).last()];
        let w = self.scope(layer.name, |b| b.parameter("weight", shape, layer.weight));
        let [y] = self.push(layer.name, Op::Linear { bias: false, gelu: false }, &[x, w]);
        y
    }

    /// x (B,h,w,C) → what its windows attend to (B,h,w,C), before the projection. Queries and values have a bias, keys
    /// have none.
    pub fn window_attention(&mut self, x: ValueId, attention: &CosineAttention) -> ValueId {
        let CosineAttention { heads, windows, pretrained, weight } = *attention;
        let c = self.shape(x).last();
        let scale = self.parameter("logit_scale", [heads, 1, 1], Init::Constant { value: 10f64.ln() });
        let bias = self.scope("cpb_mlp", |b| {
            let w1 = b.parameter("0.weight", [POSITION_BIAS_WIDTH, 2], weight);
            let b1 = b.parameter("0.bias", [POSITION_BIAS_WIDTH], Init::Zeros);
            let w2 = b.parameter("2.weight", [heads, POSITION_BIAS_WIDTH], weight);
            let [bias] = b.push("", Op::PositionBias { window: windows.size, pretrained }, &[w1, b1, w2]);
            bias
        });
        let layer = Linear { name: "qkv", out: 3 * c, weight, bias: Init::Zeros };
        let qkv = self.linear_without_bias(x, layer);
        let (q_bias, v_bias) =
            (self.parameter("q_bias", [c], Init::Zeros), self.parameter("v_bias", [c], Init::Zeros));
        let inputs = [qkv, q_bias, v_bias, scale, bias];
        let [y, _] = self.push("windows", Op::WindowAttention { heads, windows }, &inputs);
        y
    }

    /// Residual post-norm: x + norm(y), where stochastic depth may leave out the norm. The norm's weight starts as `weight`.
    pub fn add_norm(
        &mut self,
        name: &str,
        x: ValueId,
        y: ValueId,
        eps: f64,
        drop_path: f64,
        weight: Init,
    ) -> ValueId {
        let width = self.shape(y).last();
        let (gamma, beta) = self.scope(name, |b| {
            (b.parameter("weight", [width], weight), b.parameter("bias", [width], Init::Zeros))
        });
        let site = self.site();
        let drop = (self.training && drop_path > 0.0).then_some(PathDrop { rate: drop_path, site });
        let [sum, _, _] = self.push(name, Op::NormAdd { eps, drop, half: None }, &[y, x, gamma, beta]);
        sum
    }

    /// (B,h,w,C) → (B,⌈h/2⌉,⌈w/2⌉,4C).
    pub fn merge_patches(&mut self, x: ValueId) -> ValueId {
        let [y] = self.push("merge", Op::MergePatches, &[x]);
        y
    }

    /// The same numbers in another shape.
    pub fn reshape(&mut self, x: ValueId, shape: impl Into<Shape>) -> ValueId {
        let [y] = self.push("reshape", Op::Reshape { shape: shape.into() }, &[x]);
        y
    }
}
