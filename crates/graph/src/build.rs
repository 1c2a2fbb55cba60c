//! The builder models are written with. Methods are named after the boxes of the papers' figures; the first mistake
//! is kept and reported by [`Builder::finish`], so that a model reads without a `?` in every line.

mod dense;

pub use dense::{BatchNorm, Conv};

use crate::graph::{At, Graph, GraphError, Init, Phase, Role, ValueId};
use crate::op::{AttentionDrop, Op, Per, Pooling};
use crate::types::{DType, Shape, Type};

mod windows;

pub use windows::CosineAttention;

/// Writes a graph, layer by layer.
pub struct Builder {
    graph: Graph,
    dtype: DType,
    scope: Vec<String>,
    sites: u32,
    training: bool,
    error: Option<GraphError>,
}

/// A linear layer: its name, output width and initial values.
pub struct Linear<'a> {
    /// Name in its scope.
    pub name: &'a str,
    /// Output width.
    pub out: usize,
    /// Initial values of the weight.
    pub weight: Init,
    /// Initial values of the bias.
    pub bias: Init,
}

/// Settings of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// ε of label smoothing.
    pub smoothing: f64,
    /// Flag: a sample has two labels (mixup, cutmix).
    pub mixed: bool,
}

/// The inputs that a loss reads beside the logits, one entry a row: see [`Op::CrossEntropy`].
#[derive(Clone, Copy, Debug)]
pub struct Targets {
    /// Class of each row.
    pub labels: ValueId,
    /// Weight of each row in the loss.
    pub weights: ValueId,
    /// Partners, and the label's share, where samples are mixed.
    pub mixed: Option<(ValueId, ValueId)>,
}

impl Builder {
    /// Starts an empty graph; without `training`, dropout and stochastic depth are left out.
    pub fn new(dtype: DType, training: bool) -> Self {
        Builder { graph: Graph::default(), dtype, scope: vec![], sites: 0, training, error: None }
    }

    /// The graph with these values as its outputs, or the first thing that was wrong.
    pub fn finish(mut self, outputs: &[ValueId]) -> Result<Graph, GraphError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.graph.outputs = outputs.to_vec();
        self.graph.check()?;
        Ok(self.graph)
    }

    /// Names of layers and parameters made inside `body` start with `name`.
    pub fn scope<R>(&mut self, name: &str, body: impl FnOnce(&mut Self) -> R) -> R {
        self.scope.push(name.to_string());
        let result = body(self);
        self.scope.pop();
        result
    }

    /// True for the graph of training, false for that of evaluation.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// The name that a value has from here on, whatever the layer's; logits are called `head`.
    pub fn rename(&mut self, x: ValueId, name: &str) {
        self.graph.rename(x, name);
    }

    /// The shape of a value.
    pub fn shape(&self, x: ValueId) -> &Shape {
        &self.graph.ty(x).shape
    }

    fn path(&self, name: &str) -> String {
        let mut parts: Vec<&str> = self.scope.iter().map(String::as_str).collect();
        if !name.is_empty() {
            parts.push(name);
        }
        parts.join(".")
    }

    /// A layer called `name` that is an op of one result, such as one that has no method of its own here.
    pub fn op(&mut self, name: &str, op: Op, inputs: &[ValueId]) -> ValueId {
        let [y] = self.push(name, op, inputs);
        y
    }

    fn push<const N: usize>(&mut self, name: &str, op: Op, inputs: &[ValueId]) -> [ValueId; N] {
        let at = At::new(&self.path(name), Phase::Forward);
        if self.error.is_none() {
            let name_of_op = op.name();
            match self.graph.push(op, inputs, &at).map(<[ValueId; N]>::try_from) {
                Ok(Ok(outputs)) => return outputs,
                Ok(Err(outputs)) => {
                    let (layer, results, wanted) = (at.layer, outputs.len(), N);
                    self.error = Some(GraphError::Results { layer, op: name_of_op, results, wanted });
                }
                Err(error) => self.error = Some(error),
            }
        }
        // After a mistake every value is a placeholder; `finish` reports the mistake.
        std::array::from_fn(|_| self.graph.add_value("invalid", Type::new(self.dtype, [])))
    }

    /// A value that the host fills before every run.
    pub fn input(&mut self, name: &str, dtype: DType, shape: impl Into<Shape>) -> ValueId {
        let value = self.graph.add_value(name, Type::new(dtype, shape));
        self.graph.nodes.push(crate::graph::Node {
            op: Op::Input,
            inputs: vec![],
            outputs: vec![value],
            layer: name.to_string(),
            phase: Phase::Forward,
        });
        value
    }

    /// A parameter of the scope that is open.
    pub fn parameter(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> ValueId {
        let name = self.path(name);
        if self.graph.states.iter().any(|s| s.name == name) && self.error.is_none() {
            self.error = Some(GraphError::DuplicateParameter(name.clone()));
        }
        let state = self.graph.add_state(name, Type::new(self.dtype, shape), Role::Parameter(init));
        self.graph.read(state)
    }

    /// Marks a border between blocks: what full recompute keeps.
    pub fn border(&mut self, x: ValueId) -> ValueId {
        self.graph.borders.insert(x);
        x
    }

    /// Images (B,ch,h,w) → patches (B,N,ch·patch²) → (B,N,out), with the weight shaped like a convolution's.
    pub fn patch_embedding(&mut self, images: ValueId, patch: usize, layer: Linear<'_>) -> ValueId {
        let channels = self.shape(images).0.get(1).copied().unwrap_or(1);
        let [patches] = self.push("patches", Op::Patches { patch }, &[images]);
        let shape = Shape::from([layer.out, channels, patch, patch]);
        self.linear_shaped(patches, layer, shape)
    }

    /// x·wᵀ + b.
    pub fn linear(&mut self, x: ValueId, layer: Linear<'_>) -> ValueId {
        let shape = Shape::from([layer.out, self.shape(x).last()]);
        self.linear_shaped(x, layer, shape)
    }

    fn linear_shaped(&mut self, x: ValueId, layer: Linear<'_>, shape: Shape) -> ValueId {
        let (w, b) = self.scope(layer.name, |b| {
            let w = b.parameter("weight", shape, layer.weight);
            (w, b.parameter("bias", [layer.out], layer.bias))
        });
        let [y] = self.push(layer.name, Op::Linear { bias: true, gelu: false }, &[x, w, b]);
        y
    }

    /// Exact GELU.
    pub fn gelu(&mut self, x: ValueId) -> ValueId {
        let [y] = self.push("gelu", Op::Gelu, &[x]);
        y
    }

    /// Layer norm over the last axis.
    pub fn layer_norm(&mut self, name: &str, x: ValueId, eps: f64) -> ValueId {
        let width = self.shape(x).last();
        let (gamma, beta) = self.scope(name, |b| {
            (b.parameter("weight", [width], Init::Ones), b.parameter("bias", [width], Init::Zeros))
        });
        let [y, _, _] = self.push(name, Op::LayerNorm { eps, add: false }, &[x, gamma, beta]);
        y
    }

    /// Multi-head softmax attention over packed queries, keys and values (B,T,3C) → (B,T,C).
    pub fn attention(&mut self, qkv: ValueId, heads: usize, dropout: f64) -> ValueId {
        let site = self.site();
        let drop = (self.training && dropout > 0.0).then_some(AttentionDrop { rate: dropout, site });
        let [y, _] = self.push("heads", Op::Attention { heads, drop }, &[qkv]);
        y
    }

    /// Patches as tokens: a class token before them, positions added.
    pub fn embed(&mut self, patches: ValueId, class_token: Option<ValueId>, positions: ValueId) -> ValueId {
        let op = Op::Embed { class_token: class_token.is_some() };
        let inputs: Vec<_> = [Some(patches), class_token, Some(positions)].into_iter().flatten().collect();
        let [tokens] = self.push("embed", op, &inputs);
        tokens
    }

    /// Dropout of single elements, while training.
    pub fn dropout(&mut self, x: ValueId, rate: f64) -> ValueId {
        self.drop("dropout", x, rate, Per::Element)
    }

    /// Stochastic depth: the whole branch of a sample is dropped.
    pub fn drop_path(&mut self, x: ValueId, rate: f64) -> ValueId {
        self.drop("drop_path", x, rate, Per::Sample)
    }

    fn drop(&mut self, name: &str, x: ValueId, rate: f64, per: Per) -> ValueId {
        let site = self.site();
        if !self.training || rate == 0.0 {
            return x;
        }
        let [y] = self.push(name, Op::Drop { rate, site, per }, &[x]);
        y
    }

    /// Every random op has a number of its own that every pass keeps, used or not.
    fn site(&mut self) -> u32 {
        self.sites += 1;
        self.sites
    }

    /// The sum of two values.
    pub fn add(&mut self, x: ValueId, y: ValueId) -> ValueId {
        let [sum] = self.push("add", Op::Add, &[x, y]);
        sum
    }

    /// A value times a number.
    pub fn scale(&mut self, x: ValueId, factor: f64) -> ValueId {
        let [y] = self.push("scale", Op::Scale { factor }, &[x]);
        y
    }

    /// One vector a sample.
    pub fn pool(&mut self, x: ValueId, kind: Pooling) -> ValueId {
        let [y] = self.push("pool", Op::Pool { kind }, &[x]);
        y
    }

    /// The inputs `labels` and `weights` and, for `mixed` samples, `partners` and `mix`.
    pub fn targets(&mut self, rows: impl Into<Shape>, mixed: bool) -> Targets {
        let (rows, dtype) = (rows.into(), self.dtype);
        let labels = self.input("labels", DType::I32, rows.clone());
        let weights = self.input("weights", dtype, rows.clone());
        let second = || (self.input("partners", DType::I32, rows.clone()), self.input("mix", dtype, rows));
        Targets { labels, weights, mixed: mixed.then(second) }
    }

    /// (loss, stats): see [`Op::CrossEntropy`].
    pub fn cross_entropy(&mut self, logits: ValueId, targets: Targets, smoothing: f64) -> (ValueId, ValueId) {
        let mut inputs = vec![logits, targets.labels, targets.weights];
        inputs.extend(targets.mixed.into_iter().flat_map(|(partners, mix)| [partners, mix]));
        let op = Op::CrossEntropy { smoothing, mixed: targets.mixed.is_some() };
        let [loss, stats] = self.push("loss", op, &inputs);
        (loss, stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mistake_is_reported_with_its_layer() {
        let mut b = Builder::new(DType::F32, true);
        let images = b.input("images", DType::F32, [2, 3, 30, 30]);
        let layer = Linear { name: "proj", out: 8, weight: Init::Zeros, bias: Init::Zeros };
        let x = b.scope("patch_embed", |b| b.patch_embedding(images, 4, layer));
        let y = b.gelu(x);
        let error = b.finish(&[y]).unwrap_err().to_string();
        let expected = "patch_embed.patches: patches(f32[2,3,30,30]) patch 4 doesn't divide the 30×30 image";
        assert_eq!(error, expected);
    }

    #[test]
    fn an_op_of_several_results_is_no_layer_of_one() {
        let mut b = Builder::new(DType::F32, true);
        let x = b.input("x", DType::F32, [2, 8]);
        let (weight, bias) = (b.parameter("w", [8], Init::Ones), b.parameter("b", [8], Init::Zeros));
        let y = b.op("norm", Op::LayerNorm { eps: 1e-6, add: false }, &[x, weight, bias]);
        let error = b.finish(&[y]).unwrap_err().to_string();
        assert_eq!(error, "norm: layer_norm has 3 results, not 1");
    }
}
