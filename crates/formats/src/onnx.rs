//! Classifiers as ONNX files: the model's own evaluation graph, op by op (`onnx/rules.rs`), so that there is no second description of any
//! model. An op that has no ONNX form is refused by its name.
//!
//! Version 17 of ONNX's operators: it has LayerNormalization, onnxruntime makes single kernels of what GELU takes in it, and runtimes of
//! 2022 read it.

mod operand;
mod proto;
mod rules;
#[cfg(test)]
mod tests;
mod windows;
mod writer;

use config::card::Card;
use graph::{DType, Graph, GraphError, Loss, Op, ValueId};
use models::Network;
use models::names::Weights;
use operand::Operand;
use proto::Message;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use writer::{Dim, Writer, value};

/// Version of the file format: that of ONNX 1.12.
const FORMAT: i64 = 8;
/// Version of the operators.
pub const OPERATORS: i64 = 17;
/// What protocol buffers can hold.
const MOST_BYTES: usize = i32::MAX as usize;
/// Batch of the graph that is walked: a number that no other axis has by chance, so that a value that mixes samples shows.
const BATCH: usize = 65_521;

#[derive(Debug, thiserror::Error)]
pub enum OnnxError {
    #[error("{}: {op} of {layer} has no ONNX form", path.display())]
    Op { path: PathBuf, op: String, layer: String },
    #[error("{}: ONNX files are written of classifiers, and {model} has a class for each pixel", path.display())]
    Segments { path: PathBuf, model: String },
    #[error(
        "{}: the model takes {:.1} GB, but an ONNX file holds 2.1 GB at most: write safetensors instead",
        path.display(),
        *bytes as f64 / 1e9
    )]
    TooLarge { path: PathBuf, bytes: usize },
    #[error("{}: {source}", path.display())]
    Graph { path: PathBuf, source: Box<GraphError> },
    #[error("{}: the weights have no {name}", path.display())]
    Missing { path: PathBuf, name: String },
    #[error("{}: cannot write: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Writes canonical weights with their model, for images of its size in batches of any: `images` (N,ch,height,width) → `logits` (N,K).
/// What the card says stands in the file's metadata.
pub fn save(path: &Path, network: &Network, weights: &Weights, card: &Card) -> Result<(), OnnxError> {
    let file = || path.to_path_buf();
    let model = card.model.clone().unwrap_or_default();
    if network.segments() {
        return Err(OnnxError::Segments { path: file(), model });
    }
    let fits = |bytes: usize| match bytes <= MOST_BYTES {
        true => Ok(()),
        false => Err(OnnxError::TooLarge { path: file(), bytes }),
    };
    fits(weights.values().map(|tensor| tensor.data.len() * size_of::<f32>()).sum())?;
    let built = network.build(BATCH, Loss::default(), DType::F32);
    let mut graph = built.map_err(|source| OnnxError::Graph { path: file(), source: Box::new(source) })?.eval;
    // Of loss, statistics and logits, the last alone.
    let logits = graph.outputs.last().copied();
    graph.outputs = logits.into_iter().collect();
    graph.prune();
    let message = model_of(&Walk { path, graph: &graph, weights }, network, &model, card)?;
    fits(message.length())?;
    files::replace(path, |out| message.write(out)).map_err(|source| OnnxError::Io { path: file(), source })
}

/// The ModelProto.
fn model_of(walk: &Walk<'_>, network: &Network, name: &str, card: &Card) -> Result<Message, OnnxError> {
    let writer = walk.nodes()?;
    let [height, width] = network.size();
    let preparation = preparation(network, card);
    let sides = [network.channels(), height, width].map(Dim::Size);
    let images = value("images", &[&[Dim::Batch], &sides[..]].concat(), Some(&preparation));
    let logits = value("logits", &[Dim::Batch, Dim::Size(network.classes())], None);
    let version = env!("CARGO_PKG_VERSION");
    let entry = |(key, text): (&str, String)| Message::new().text(1, key).text(2, &text);
    let about = metadata(network, card, version, preparation.clone());
    let model = Message::new().int(1, FORMAT).text(2, "vitesse").text(3, version);
    let model = model.text(6, &preparation).message(7, writer.finish(name, images, logits));
    let operators = Message::new().text(1, "").int(2, OPERATORS);
    Ok(model.message(8, operators).messages(14, about.into_iter().map(entry)))
}

/// A sentence on what the caller does with an image.
fn preparation(network: &Network, card: &Card) -> String {
    let ([height, width], [mean, std]) =
        (network.size(), [&card.mean, &card.std].map(|values| commas(values)));
    let order = if network.channels() == 3 { "RGB, " } else { "" };
    format!(
        "images: {order}channels first, {width}×{height} px, each value from 0 to 1 minus its channel's mean ({mean}) over its std ({std})"
    )
}

/// Metadata of the file, by key.
fn metadata(
    network: &Network,
    card: &Card,
    version: &str,
    preparation: String,
) -> Vec<(&'static str, String)> {
    let mut about = vec![
        ("vitesse_version", version.to_string()),
        ("model", card.model.clone().unwrap_or_default()),
        ("image_size", network.image().to_string()),
        ("mean", commas(&card.mean)),
        ("std", commas(&card.std)),
        ("preprocessing", preparation),
    ];
    about.extend(card.interpolation.map(|kind| ("interpolation", kind.to_string())));
    about.extend(card.eval_resize.map(|pixels| ("eval_resize", pixels.to_string())));
    if !card.class_names.is_empty() {
        about.push(("class_names", serde_json::json!(card.class_names).to_string()));
    }
    about
}

fn commas(values: &[f32]) -> String {
    values.iter().map(f32::to_string).collect::<Vec<_>>().join(",")
}

/// A graph on its way to the file.
struct Walk<'a> {
    path: &'a Path,
    graph: &'a Graph,
    weights: &'a Weights,
}

impl Walk<'_> {
    /// Every node of the graph, in its order.
    fn nodes(&self) -> Result<Writer, OnnxError> {
        let graph = self.graph;
        let mut writer = Writer::default();
        let mut names: HashMap<ValueId, String> = HashMap::new();
        for node in graph.nodes.iter().filter(|node| !matches!(node.op, Op::Input | Op::Read { .. })) {
            let refused = || OnnxError::Op {
                path: self.path.to_path_buf(),
                op: node.op.name(),
                layer: node.layer.clone(),
            };
            let &[result, ..] = &node.outputs[..] else { return Err(refused()) };
            let operands = node.inputs.iter().map(|input| self.operand(*input, &names));
            let operands = operands.collect::<Result<Vec<_>, _>>()?;
            let shape = &graph.ty(result).shape.0[..];
            writer.begin(&node.layer);
            let made = rules::emit(&mut writer, &node.op, &operands, shape).ok_or_else(refused)?;
            let mixes = operands.iter().any(|operand| operand.shape.first() == Some(&BATCH))
                != (shape.first() == Some(&BATCH));
            if mixes {
                return Err(refused());
            }
            // The shape of the output stands beside its name.
            let settled = match graph.outputs.contains(&result) {
                true => writer.settle(made, "logits", None),
                false => writer.settle(made, graph.name(result), Some(&dims(shape))),
            };
            names.insert(result, settled);
        }
        Ok(writer)
    }

    /// A value that a node made, the images, or a parameter.
    fn operand(&self, value: ValueId, names: &HashMap<ValueId, String>) -> Result<Operand<'_>, OnnxError> {
        let shape = &self.graph.ty(value).shape.0[..];
        let name = names.get(&value).cloned().unwrap_or_else(|| self.graph.name(value).to_string());
        if names.contains_key(&value) || shape.first() == Some(&BATCH) {
            return Ok(Operand { name, shape, values: None });
        }
        match self.weights.get(&name) {
            Some(tensor) => Ok(Operand { name, shape, values: Some(&tensor.data) }),
            None => Err(OnnxError::Missing { path: self.path.to_path_buf(), name }),
        }
    }
}

fn dims(shape: &[usize]) -> Vec<Dim> {
    shape.iter().map(|side| if *side == BATCH { Dim::Batch } else { Dim::Size(*side) }).collect()
}
