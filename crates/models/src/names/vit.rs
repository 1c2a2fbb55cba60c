//! The names of a plain ViT: timm's, which are canonical, torchvision's and Hugging Face's.

use super::{Convention, NameError, PARTS, Table, Tensor, Weights, split_qkv, stack_rows};
use std::collections::BTreeMap;

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

/// Part of a name before the number of a block.
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

/// The names of a plain ViT.
pub struct Vit;

impl Table for Vit {
    /// The convention that knows the most of them.
    fn detect(&self, names: &[&str]) -> Option<Convention> {
        let known = |convention| {
            let is_known =
                |name: &&&str| rename(&starred(&in_file(name)), convention, Convention::Timm).is_some();
            names.iter().filter(is_known).count()
        };
        let counts = Convention::ALL.into_iter().map(|convention| (known(convention), convention));
        counts.max_by_key(|c| c.0).filter(|(count, _)| *count > 0).map(|(_, convention)| convention)
    }

    fn import(&self, weights: Weights, from: Convention) -> Result<Weights, NameError> {
        let weights = if from == Convention::HuggingFace { join_qkv(weights)? } else { weights };
        rename_all(weights, from, Convention::Timm)
    }

    fn export(&self, weights: Weights, to: Convention) -> Result<Weights, NameError> {
        let mean_pooled = !weights.contains_key("cls_token")
            || MEAN_POOL_NORM.iter().any(|&name| weights.contains_key(name));
        if mean_pooled && to != Convention::Timm {
            return Err(NameError::MeanPooled { convention: to });
        }
        let renamed = rename_all(weights, Convention::Timm, to)?;
        if to == Convention::HuggingFace { split_qkv(renamed) } else { Ok(renamed) }
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
pub(super) fn rename(name: &str, from: Convention, to: Convention) -> Option<String> {
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
pub(super) fn in_file(name: &str) -> String {
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
