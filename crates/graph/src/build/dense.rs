//! Layers of heads for dense prediction. Images are channels-last.
//!
//! Legend: B batch, h and w height and width, C channels.

use super::{Builder, Targets};
use crate::graph::{Init, Phase, Role, ValueId};
use crate::op::{Op, Per, Sampling, Window};
use crate::types::{Shape, Type};

/// A convolution: its name, output channels, square kernel, stride and padding, and initial values. A kernel of one
/// pixel that steps by one is a linear layer, with a weight (O,I).
pub struct Conv<'a> {
    /// Name in its scope.
    pub name: &'a str,
    /// Output channels.
    pub out: usize,
    /// Side of the square kernel, in pixels.
    pub kernel: usize,
    /// Stride and padding.
    pub window: Window,
    /// Initial values of the weight.
    pub weight: Init,
    /// Initial values of the bias; none for a layer without, such as one before a batch norm.
    pub bias: Option<Init>,
}

/// A batch norm, and whether a ReLU follows. Numbers are torch's by default.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'a> {
    /// Name in its scope.
    pub name: &'a str,
    /// Number added to the variance.
    pub eps: f64,
    /// Share of the new batch in the running moments.
    pub momentum: f64,
    /// Flag: a ReLU follows.
    pub relu: bool,
}

impl<'a> BatchNorm<'a> {
    /// Batch norm with the defaults of torch's `BatchNorm2d`.
    pub fn named(name: &'a str) -> Self {
        BatchNorm { name, eps: 1e-5, momentum: 0.1, relu: false }
    }
}

impl Builder {
    /// (B,h,w,I) → (B,h',w',O).
    pub fn conv(&mut self, x: ValueId, layer: Conv<'_>) -> ValueId {
        let Conv { name, out, kernel, window, weight, bias } = layer;
        let channels = self.shape(x).last();
        let point = kernel == 1 && window == Window { stride: 1, pad: 0 };
        let shape =
            if point { Shape::from([out, channels]) } else { Shape::from([out, kernel, kernel, channels]) };
        let mut inputs = vec![x];
        self.scope(name, |b| {
            inputs.push(b.parameter("weight", shape, weight));
            inputs.extend(bias.map(|init| b.parameter("bias", [out], init)));
        });
        let bias = bias.is_some();
        let op = if point { Op::Linear { bias, gelu: false } } else { Op::Conv { window, bias } };
        let [y] = self.push(name, op, &inputs);
        y
    }

    /// Batch norm over all axes but the last: by the batch's own moments in training, which running moments follow, and
    /// by running moments in evaluation.
    pub fn batch_norm(&mut self, x: ValueId, norm: BatchNorm<'_>) -> ValueId {
        let BatchNorm { name, eps, momentum, relu } = norm;
        let width = self.shape(x).last();
        let (gamma, beta) = self.scope(name, |b| {
            (b.parameter("weight", [width], Init::Ones), b.parameter("bias", [width], Init::Zeros))
        });
        let layer = self.path(name);
        let ty = Type::new(self.dtype, [3, width]);
        let state = self.graph.add_state(format!("{layer}.running"), ty, Role::Running);
        let running = self.graph.read(state);
        if !self.training {
            let op = Op::BatchNorm { eps, relu, running: true };
            let [y] = self.push(name, op, &[x, running, gamma, beta]);
            return y;
        }
        let [moments] = self.push(name, Op::Moments, &[x]);
        let [next] = self.push(name, Op::RunningMoments { momentum }, &[running, moments]);
        if self.error.is_none()
            && let Err(error) = self.graph.assign(state, next, Phase::Forward)
        {
            self.error = Some(error);
        }
        let [y] = self.push(name, Op::BatchNorm { eps, relu, running: false }, &[x, moments, gamma, beta]);
        y
    }

    /// Bilinear resizing; a value of that size is returned unchanged.
    pub fn resize(&mut self, name: &str, x: ValueId, (height, width): (usize, usize)) -> ValueId {
        if self.shape(x).0.get(1..3) == Some(&[height, width]) {
            return x;
        }
        let [y] = self.push(name, Op::Resize { height, width, sampling: Sampling::Bilinear }, &[x]);
        y
    }

    /// The means over bins×bins parts of the image.
    pub fn average_pool(&mut self, name: &str, x: ValueId, bins: usize) -> ValueId {
        let op = Op::Resize { height: bins, width: bins, sampling: Sampling::Average };
        let [y] = self.push(name, op, &[x]);
        y
    }

    /// Channels side by side.
    pub fn concat(&mut self, name: &str, parts: &[ValueId]) -> ValueId {
        let [y] = self.push(name, Op::Concat, parts);
        y
    }

    /// Tokens (B,T,C) back to where they came from (B,height,width,C), without a class token.
    pub fn grid(&mut self, x: ValueId, (height, width): (usize, usize)) -> ValueId {
        let [y] = self.push("grid", Op::Grid { height, width }, &[x]);
        y
    }

    /// Dropout of whole channels of a sample.
    pub fn channel_dropout(&mut self, x: ValueId, rate: f64) -> ValueId {
        self.drop("dropout", x, rate, Per::Channel)
    }

    /// (height, width) of an image.
    pub fn size(&self, x: ValueId) -> (usize, usize) {
        match self.shape(x).0[..] {
            [_, height, width, _] => (height, width),
            // Not an image: the op that takes it for one refuses it.
            _ => (0, 0),
        }
    }

    /// The loss of the main logits, plus that of each other times its weight. Statistics are those of the main ones.
    pub fn weighted_losses(
        &mut self,
        main: ValueId,
        others: &[(&str, ValueId, f64)],
        targets: Targets,
        smoothing: f64,
    ) -> (ValueId, ValueId) {
        let (mut loss, stats) = self.cross_entropy(main, targets, smoothing);
        for (name, logits, weight) in others {
            let (other, _) = self.scope(name, |b| b.cross_entropy(*logits, targets, smoothing));
            let [weighted] = self.push(&format!("{name}.weighted"), Op::Scale { factor: *weight }, &[other]);
            [loss] = self.push("loss", Op::Add, &[loss, weighted]);
        }
        self.name(loss, "loss");
        self.name(stats, "loss.stats");
        (loss, stats)
    }

    /// Gives a value the name that others look for it by; whoever has it swaps with it.
    pub fn name(&mut self, value: ValueId, name: &str) {
        let values = &mut self.graph.values;
        let before = std::mem::take(&mut values[value.index()].name);
        if let Some(other) = values.iter_mut().find(|v| v.name == name) {
            other.name = before;
        }
        values[value.index()].name = name.to_string();
    }
}
