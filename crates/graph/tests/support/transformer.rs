//! A small class-token ViT, written as the models are.
#![allow(dead_code)]

use graph::build::Linear;
use graph::op::Pooling;
use graph::{
    Builder, DType, Graph, GraphError, Init, Key, Model, Optimizer, ParamGroup, Program, Settings, ValueId,
};
use graph::{Recompute, compile};

pub const BATCH: usize = 4;
const IMAGE: usize = 16;
const PATCH: usize = 4;
const TOKENS: usize = 17;
pub const WIDTH: usize = 32;
const DTYPE: DType = DType::F32;

pub fn program(depth: usize, recompute: Recompute) -> Program {
    compile(model(depth), &Settings { recompute, ..settings() }).expect("the model compiles")
}

pub fn model(depth: usize) -> Model {
    model_of(depth, BATCH)
}

/// For batches of so many images.
pub fn model_of(depth: usize, batch: usize) -> Model {
    Model {
        train: forward_of(depth, batch, true).expect("the model is well-formed"),
        eval: forward_of(depth, batch, false).expect("the model is well-formed"),
        key: Key { batch, height: IMAGE, width: IMAGE },
    }
}

/// With everything a run may have: two groups, averages.
pub fn settings() -> Settings<'static> {
    Settings {
        max_grad_norm: Some(1.0),
        group: &|state| ParamGroup { lr_scale: 1.0, decays: state.ty.shape.rank() > 1 },
        ema: Some(0.999),
        accumulates: true,
        ..Settings::plain(
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 },
            &|graph: &graph::Graph, node: usize| if graph.nodes[node].op.is_matmul() { 512 } else { 0 },
        )
    }
}

pub fn forward(depth: usize, training: bool) -> Result<Graph, GraphError> {
    forward_of(depth, BATCH, training)
}

fn forward_of(depth: usize, batch: usize, training: bool) -> Result<Graph, GraphError> {
    let mut b = Builder::new(DTYPE, training);
    let images = b.input("images", DTYPE, [batch, 3, IMAGE, IMAGE]);
    let targets = b.targets([batch], training);
    let class_token = b.parameter("cls_token", [1, 1, WIDTH], Init::Zeros);
    let positions = b.parameter("pos_embed", [1, TOKENS, WIDTH], Init::Zeros);
    let patches = b.scope("patch_embed", |b| b.patch_embedding(images, PATCH, layer("proj", WIDTH)));
    let tokens = b.embed(patches, Some(class_token), positions);
    let mut x = b.border(tokens);
    for i in 0..depth {
        let y = b.scope(&format!("blocks.{i}"), |b| block(b, x));
        x = b.border(y);
    }
    let y = b.layer_norm("norm", x, 1e-6);
    let y = b.pool(y, Pooling::First);
    let logits = b.linear(y, layer("head", 10));
    let (loss, stats) = b.cross_entropy(logits, targets, 0.1);
    b.finish(&[loss, stats, logits])
}

fn block(b: &mut Builder, x: ValueId) -> ValueId {
    let y = b.layer_norm("norm1", x, 1e-6);
    let y = b.linear(y, layer("qkv", 3 * WIDTH));
    let y = b.attention(y, 2, 0.1);
    let y = b.linear(y, layer("proj", WIDTH));
    let y = b.drop_path(y, 0.1);
    let x = b.add(x, y);
    let y = b.layer_norm("norm2", x, 1e-6);
    let y = b.linear(y, layer("fc1", 4 * WIDTH));
    let y = b.gelu(y);
    let y = b.linear(y, layer("fc2", WIDTH));
    b.add(x, y)
}

fn layer(name: &str, out: usize) -> Linear<'_> {
    Linear { name, out, weight: Init::Zeros, bias: Init::Zeros }
}
