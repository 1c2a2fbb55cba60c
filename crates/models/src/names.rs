//! What each tensor of a model is called, here and by the libraries whose weights are read and written.
//!
//! The names used everywhere in the program ("canonical") are timm's; the others are spelled only in the
//! tables below.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::dense_names::DenseError;
use crate::vit::{Pool, Vit};

mod segmenter;
mod swin;

pub use swin::{own_window_of, window_of};

/// Values in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

impl Tensor {
    /// Whether `data` has as many values as `shape` says.
    pub fn is_whole(&self) -> bool {
        elements(&self.shape) == Some(self.data.len())
    }
}

/// The number of values in a tensor of this shape, unless it overflows.
pub fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side))
}

pub type Weights = BTreeMap<String, Tensor>;

/// Whose names a set of weights uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Convention {
    Timm,
    Torchvision,
    HuggingFace,
}

impl Convention {
    pub const ALL: [Convention; 3] = [Convention::Timm, Convention::Torchvision, Convention::HuggingFace];
}

impl fmt::Display for Convention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Convention::Timm => "timm",
            Convention::Torchvision => "torchvision",
            Convention::HuggingFace => "huggingface",
        })
    }
}

impl FromStr for Convention {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let known = Convention::ALL.into_iter().find(|convention| convention.to_string() == text);
        known.ok_or_else(|| NameError::NoSuchConvention(text.to_string()))
    }
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NameError {
    #[error("`{0}` is not a naming convention: choose timm, torchvision or huggingface")]
    NoSuchConvention(String),
    #[error("there are no tensors")]
    Empty,
    #[error(
        "no tensor is named as in a timm, torchvision or huggingface ViT or Swin V2 (the first is `{first}`)"
    )]
    Unrecognised { first: String },
    #[error("`{name}` is not a tensor of a plain ViT in {convention} names")]
    Unknown { name: String, convention: Convention },
    #[error("`{name}` is a second `{canonical}`")]
    Duplicate { name: String, canonical: String },
    #[error("`{name}` is missing: query, key and value come together")]
    MissingPart { name: String },
    #[error("`{name}` is {shape:?}, but its query is {query:?}: query, key and value must be alike")]
    UnlikeParts { name: String, shape: Vec<usize>, query: Vec<usize> },
    #[error("`{name}` is {shape:?}: its rows do not split into query, key and value")]
    Unsplittable { name: String, shape: Vec<usize> },
    #[error("a mean-pooled model (no class token) has no {convention} form: export it as timm")]
    MeanPooled { convention: Convention },
    #[error("a Swin V2 has no {convention} form here: export it as timm or huggingface")]
    SwinOnlyElsewhere { convention: Convention },
    #[error(transparent)]
    Dense(#[from] DenseError),
    #[error("weights are of another model: {first}{}", and_more(*others))]
    OtherModel { first: Mismatch, others: usize },
}

/// How one tensor differs from what a model needs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Mismatch {
    #[error("{name} {needed:?} is missing")]
    Missing { name: String, needed: Vec<usize> },
    #[error("{name} is {found:?}, this model needs {needed:?}")]
    Shape { name: String, found: Vec<usize>, needed: Vec<usize> },
    #[error("{name} is {shape:?} but holds {values} values")]
    Torn { name: String, shape: Vec<usize>, values: usize },
    #[error("this model has no {name} {found:?}")]
    Unexpected { name: String, found: Vec<usize> },
}

fn and_more(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " (and 1 more tensor differs)".to_string(),
        _ => format!(" (and {others} more tensors differ)"),
    }
}

/// One row per tensor outside the blocks; columns in the order of [`Convention`].
const OUTSIDE: [[&str; 3]; 8] = [
    ["cls_token", "class_token", "vit.embeddings.cls_token"],
    ["pos_embed", "encoder.pos_embedding", "vit.embeddings.position_embeddings"],
    ["patch_embed.proj.weight", "conv_proj.weight", "vit.embeddings.patch_embeddings.projection.weight"],
    ["patch_embed.proj.bias", "conv_proj.bias", "vit.embeddings.patch_embeddings.projection.bias"],
    ["norm.weight", "encoder.ln.weight", "vit.layernorm.weight"],
    ["norm.bias", "encoder.ln.bias", "vit.layernorm.bias"],
    ["head.weight", "heads.head.weight", "classifier.weight"],
    ["head.bias", "heads.head.bias", "classifier.bias"],
];

/// The norm of a mean-pooled model, which only timm has.
const MEAN_POOL_NORM: [&str; 2] = ["fc_norm.weight", "fc_norm.bias"];

/// What stands before the number of a block.
const BLOCK_PREFIX: [&str; 3] = ["blocks.", "encoder.layers.encoder_layer_", "vit.encoder.layer."];

/// One row per tensor of a block, without prefix and number; `*` stands for each of [`PARTS`].
const BLOCK: [[&str; 3]; 12] = [
    ["norm1.weight", "ln_1.weight", "layernorm_before.weight"],
    ["norm1.bias", "ln_1.bias", "layernorm_before.bias"],
    ["attn.qkv.weight", "self_attention.in_proj_weight", "attention.attention.*.weight"],
    ["attn.qkv.bias", "self_attention.in_proj_bias", "attention.attention.*.bias"],
    ["attn.proj.weight", "self_attention.out_proj.weight", "attention.output.dense.weight"],
    ["attn.proj.bias", "self_attention.out_proj.bias", "attention.output.dense.bias"],
    ["norm2.weight", "ln_2.weight", "layernorm_after.weight"],
    ["norm2.bias", "ln_2.bias", "layernorm_after.bias"],
    ["mlp.fc1.weight", "mlp.0.weight", "intermediate.dense.weight"],
    ["mlp.fc1.bias", "mlp.0.bias", "intermediate.dense.bias"],
    ["mlp.fc2.weight", "mlp.3.weight", "output.dense.weight"],
    ["mlp.fc2.bias", "mlp.3.bias", "output.dense.bias"],
];

/// Early torchvision named the layers of its MLP, later ones number them.
const OLD_TORCHVISION: [[&str; 2]; 2] = [["mlp.linear_1.", "mlp.0."], ["mlp.linear_2.", "mlp.3."]];

/// transformers 5 gives a ViT other names in memory than in the files it writes, and `torch.save` takes those. (in memory, in files)
const IN_MEMORY: [[&str; 2]; 8] = [
    ["attention.q_proj.", "attention.attention.query."],
    ["attention.k_proj.", "attention.attention.key."],
    ["attention.v_proj.", "attention.attention.value."],
    ["attention.o_proj.", "attention.output.dense."],
    ["layernorm_before.", "layernorm_before."],
    ["layernorm_after.", "layernorm_after."],
    ["mlp.fc1.", "intermediate.dense."],
    ["mlp.fc2.", "output.dense."],
];
const IN_MEMORY_PREFIX: &str = "vit.layers.";

/// The thirds of qkv, in the order of its rows.
const PARTS: [&str; 3] = ["query", "key", "value"];

/// Every tensor of the model with its shape, canonically named, in the order of the forward pass.
pub fn expected(vit: &Vit) -> Vec<(String, Vec<usize>)> {
    let c = vit.width;
    let mut tensors = Vec::new();
    if vit.pool == Pool::ClassToken {
        tensors.push(("cls_token".to_string(), vec![1, 1, c]));
    }
    tensors.push(("pos_embed".to_string(), vec![1, vit.tokens(), c]));
    let mut layer = |name: String, weight: &[usize]| {
        let out = weight.first().copied().into_iter().collect();
        tensors.push((format!("{name}.weight"), weight.to_vec()));
        tensors.push((format!("{name}.bias"), out));
    };
    layer("patch_embed.proj".to_string(), &[c, vit.channels, vit.patch, vit.patch]);
    for i in 0..vit.depth {
        layer(format!("blocks.{i}.norm1"), &[c]);
        layer(format!("blocks.{i}.attn.qkv"), &[3 * c, c]);
        layer(format!("blocks.{i}.attn.proj"), &[c, c]);
        layer(format!("blocks.{i}.norm2"), &[c]);
        layer(format!("blocks.{i}.mlp.fc1"), &[vit.mlp, c]);
        layer(format!("blocks.{i}.mlp.fc2"), &[c, vit.mlp]);
    }
    match vit.pool {
        Pool::ClassToken => layer("norm".to_string(), &[c]),
        Pool::Mean => layer("fc_norm".to_string(), &[c]),
    }
    layer("head".to_string(), &[vit.classes, c]);
    tensors
}

/// The convention that knows the most of these names.
pub fn detect<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Convention, NameError> {
    let names: Vec<&str> = names.into_iter().collect();
    let first = names.first().ok_or(NameError::Empty)?;
    if let Some(backbone) = segmenter::backbone_names(&names) {
        return detect(backbone.iter().map(String::as_str));
    }
    if let Some(convention) = swin::detect(&names) {
        return Ok(convention);
    }
    let known = |convention| {
        let is_known =
            |name: &&&str| rename(&starred(&in_file(name)), convention, Convention::Timm).is_some();
        names.iter().filter(is_known).count()
    };
    match Convention::ALL.into_iter().map(|convention| (known(convention), convention)).max_by_key(|c| c.0) {
        Some((count, convention)) if count > 0 => Ok(convention),
        _ => Err(NameError::Unrecognised { first: first.to_string() }),
    }
}

/// Renames weights to canonical names; joins what Hugging Face keeps apart.
pub fn to_canonical(weights: Weights, from: Convention) -> Result<Weights, NameError> {
    if segmenter::has_heads(&weights) {
        return segmenter::to_canonical(weights, |backbone| to_canonical(backbone, from));
    }
    if swin::is_swin(&weights) {
        return swin::to_canonical(weights, from);
    }
    let weights = if from == Convention::HuggingFace { join_qkv(weights)? } else { weights };
    rename_all(weights, from, Convention::Timm)
}

/// Renames canonical weights for another library; the reverse of [`to_canonical`].
pub fn from_canonical(weights: Weights, to: Convention) -> Result<Weights, NameError> {
    if segmenter::has_heads(&weights) {
        return segmenter::from_canonical(weights, to, |backbone| from_canonical(backbone, to));
    }
    if swin::is_swin(&weights) {
        return swin::from_canonical(weights, to);
    }
    let mean_pooled =
        !weights.contains_key("cls_token") || MEAN_POOL_NORM.iter().any(|&name| weights.contains_key(name));
    if mean_pooled && to != Convention::Timm {
        return Err(NameError::MeanPooled { convention: to });
    }
    let renamed = rename_all(weights, Convention::Timm, to)?;
    if to == Convention::HuggingFace { split_qkv(renamed) } else { Ok(renamed) }
}

/// Fails unless canonical weights are exactly the tensors of this model.
pub fn check(weights: &Weights, vit: &Vit) -> Result<(), NameError> {
    check_against(weights, &expected(vit))
}

/// Fails unless canonical weights are exactly these tensors.
pub fn check_against(weights: &Weights, expected: &[(String, Vec<usize>)]) -> Result<(), NameError> {
    let needed: BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
    let differing = expected.iter().filter_map(|(name, needed)| mismatch(weights, name, needed));
    let unexpected = weights
        .iter()
        .filter(|(name, _)| !needed.contains(name.as_str()))
        .map(|(name, tensor)| Mismatch::Unexpected { name: name.clone(), found: tensor.shape.clone() });
    let mut mismatches = differing.chain(unexpected);
    match mismatches.next() {
        None => Ok(()),
        Some(first) => Err(NameError::OtherModel { first, others: mismatches.count() }),
    }
}

fn mismatch(weights: &Weights, name: &str, needed: &[usize]) -> Option<Mismatch> {
    let (name, needed) = (name.to_string(), needed.to_vec());
    match weights.get(&name) {
        None => Some(Mismatch::Missing { name, needed }),
        Some(tensor) if tensor.shape != needed => {
            Some(Mismatch::Shape { name, found: tensor.shape.clone(), needed })
        }
        Some(tensor) if !tensor.is_whole() => {
            Some(Mismatch::Torn { name, shape: needed, values: tensor.data.len() })
        }
        Some(_) => None,
    }
}

fn rename_all(weights: Weights, from: Convention, to: Convention) -> Result<Weights, NameError> {
    let mut renamed = Weights::new();
    for (name, tensor) in weights {
        let Some(new_name) = rename(&name, from, to) else {
            return Err(NameError::Unknown { name, convention: from });
        };
        if renamed.contains_key(&new_name) {
            return Err(NameError::Duplicate { name, canonical: new_name });
        }
        renamed.insert(new_name, tensor);
    }
    Ok(renamed)
}

/// The name of the same tensor in another convention; none for a name that either does not have.
fn rename(name: &str, from: Convention, to: Convention) -> Option<String> {
    let (from_column, to_column) = (from as usize, to as usize);
    if let Some(rest) = name.strip_prefix(BLOCK_PREFIX[from_column]) {
        let (index, leaf) = rest.split_once('.')?;
        // "07" and "+7" parse as well, and would be a second spelling of block 7.
        if index.parse::<usize>().ok()?.to_string() != index {
            return None;
        }
        let leaf = if from == Convention::Torchvision { modern_torchvision(leaf) } else { leaf.to_string() };
        let row = BLOCK.iter().find(|row| row[from_column] == leaf)?;
        return Some(format!("{}{index}.{}", BLOCK_PREFIX[to_column], row[to_column]));
    }
    if from == Convention::Timm && to == Convention::Timm && MEAN_POOL_NORM.contains(&name) {
        return Some(name.to_string());
    }
    OUTSIDE.iter().find(|row| row[from_column] == name).map(|row| row[to_column].to_string())
}

fn modern_torchvision(leaf: &str) -> String {
    let spelled_anew = |[old, new]: [&str; 2]| leaf.strip_prefix(old).map(|end| format!("{new}{end}"));
    OLD_TORCHVISION.into_iter().find_map(spelled_anew).unwrap_or_else(|| leaf.to_string())
}

/// The name that transformers 5 writes to files for one that it has in memory; any other as it is.
fn in_file(name: &str) -> String {
    let anew = || {
        let (index, leaf) = name.strip_prefix(IN_MEMORY_PREFIX)?.split_once('.')?;
        let (end, [_, file]) = IN_MEMORY.iter().find_map(|row| Some((leaf.strip_prefix(row[0])?, row)))?;
        Some(format!("{}{index}.{file}{end}", BLOCK_PREFIX[Convention::HuggingFace as usize]))
    };
    anew().unwrap_or_else(|| name.to_string())
}

fn all_in_file(weights: Weights) -> Result<Weights, NameError> {
    let mut renamed = Weights::new();
    for (name, tensor) in weights {
        let canonical = in_file(&name);
        if renamed.contains_key(&canonical) {
            return Err(NameError::Duplicate { name, canonical });
        }
        renamed.insert(canonical, tensor);
    }
    Ok(renamed)
}

/// Splits a Hugging Face name around `query`, `key` or `value`, and says which of them it has.
fn part_of(name: &str) -> Option<(&str, usize, &str)> {
    let (block, rest) = name.split_once(".attention.attention.")?;
    let (part, end) = rest.split_once('.')?;
    Some((block, PARTS.iter().position(|&known| known == part)?, end))
}

fn part_name(block: &str, part: &str, end: &str) -> String {
    format!("{block}.attention.attention.{part}.{end}")
}

/// The name with `*` for `query`, `key` or `value`, as the tables have it.
fn starred(name: &str) -> String {
    part_of(name).map_or_else(|| name.to_string(), |(block, _, end)| part_name(block, "*", end))
}

fn join_qkv(weights: Weights) -> Result<Weights, NameError> {
    let mut joined = Weights::new();
    let mut apart: BTreeMap<(String, String), [Option<Tensor>; 3]> = BTreeMap::new();
    for (name, tensor) in all_in_file(weights)? {
        match part_of(&name) {
            Some((block, part, end)) => {
                apart.entry((block.to_string(), end.to_string())).or_default()[part] = Some(tensor);
            }
            // The star is this file's own shorthand; a tensor that bears it would pass for a joined one.
            None if name.contains('*') => {
                return Err(NameError::Unknown { name, convention: Convention::HuggingFace });
            }
            None => {
                joined.insert(name, tensor);
            }
        }
    }
    for ((block, end), parts) in apart {
        let tensor = stack_rows(parts, |part| part_name(&block, part, &end))?;
        joined.insert(part_name(&block, "*", &end), tensor);
    }
    Ok(joined)
}

fn stack_rows(parts: [Option<Tensor>; 3], name: impl Fn(&str) -> String) -> Result<Tensor, NameError> {
    let needed = |part: Option<Tensor>, word| part.ok_or_else(|| NameError::MissingPart { name: name(word) });
    let [query, key, value] = parts;
    let mut whole = needed(query, "query")?;
    for (part, word) in [(key, "key"), (value, "value")] {
        let part = needed(part, word)?;
        if part.shape != whole.shape {
            return Err(NameError::UnlikeParts { name: name(word), shape: part.shape, query: whole.shape });
        }
        whole.data.extend(part.data);
    }
    if let Some(rows) = whole.shape.first_mut() {
        *rows = rows.saturating_mul(PARTS.len());
    }
    Ok(whole)
}

fn split_qkv(weights: Weights) -> Result<Weights, NameError> {
    let mut split = Weights::new();
    for (name, tensor) in weights {
        let Some((before, after)) = name.split_once('*') else {
            split.insert(name, tensor);
            continue;
        };
        let mut shape = tensor.shape.clone();
        match shape.first_mut() {
            Some(rows) if *rows > 0 && rows.is_multiple_of(PARTS.len()) && tensor.is_whole() => {
                *rows /= PARTS.len();
            }
            _ => return Err(NameError::Unsplittable { name: name.clone(), shape }),
        }
        let third = tensor.data.len() / PARTS.len();
        for (i, part) in PARTS.iter().enumerate() {
            let data = tensor.data[i * third..(i + 1) * third].to_vec();
            split.insert(format!("{before}{part}{after}"), Tensor { shape: shape.clone(), data });
        }
    }
    Ok(split)
}

#[cfg(test)]
mod tests;
