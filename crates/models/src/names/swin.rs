//! The names of Swin Transformer V2: timm's, which are canonical, and Hugging Face's. Microsoft's own files are read too.

use super::{Convention, NameError, PARTS, Table, Tensor, Weights, split_qkv, stack_rows};
use std::collections::BTreeMap;

/// (timm, Hugging Face) of each tensor outside the stages.
const OUTSIDE: [[&str; 2]; 8] = [
    ["patch_embed.proj.weight", "swinv2.embeddings.patch_embeddings.projection.weight"],
    ["patch_embed.proj.bias", "swinv2.embeddings.patch_embeddings.projection.bias"],
    ["patch_embed.norm.weight", "swinv2.embeddings.norm.weight"],
    ["patch_embed.norm.bias", "swinv2.embeddings.norm.bias"],
    ["norm.weight", "swinv2.layernorm.weight"],
    ["norm.bias", "swinv2.layernorm.bias"],
    ["head.fc.weight", "classifier.weight"],
    ["head.fc.bias", "classifier.bias"],
];

/// Part of a name before the number of a stage.
const STAGE: [&str; 2] = ["layers.", "swinv2.encoder.layers."];

/// Each tensor of a block; `*` stands for query, key and value.
const BLOCK: [[&str; 2]; 17] = [
    ["attn.logit_scale", "attention.self.logit_scale"],
    ["attn.q_bias", "attention.self.query.bias"],
    ["attn.v_bias", "attention.self.value.bias"],
    ["attn.cpb_mlp.0.weight", "attention.self.continuous_position_bias_mlp.0.weight"],
    ["attn.cpb_mlp.0.bias", "attention.self.continuous_position_bias_mlp.0.bias"],
    ["attn.cpb_mlp.2.weight", "attention.self.continuous_position_bias_mlp.2.weight"],
    ["attn.qkv.weight", "attention.self.*.weight"],
    ["attn.proj.weight", "attention.output.dense.weight"],
    ["attn.proj.bias", "attention.output.dense.bias"],
    ["norm1.weight", "layernorm_before.weight"],
    ["norm1.bias", "layernorm_before.bias"],
    ["mlp.fc1.weight", "intermediate.dense.weight"],
    ["mlp.fc1.bias", "intermediate.dense.bias"],
    ["mlp.fc2.weight", "output.dense.weight"],
    ["mlp.fc2.bias", "output.dense.bias"],
    ["norm2.weight", "layernorm_after.weight"],
    ["norm2.bias", "layernorm_after.bias"],
];

/// Alike in both, but Hugging Face has them at the end of the stage before.
const MERGING: [&str; 3] = ["downsample.reduction.weight", "downsample.norm.weight", "downsample.norm.bias"];

/// Constants in some files that follow from the size of windows and images.
const CONSTANTS: [&str; 4] =
    [".relative_coords_table", ".relative_position_index", ".attn_mask", ".attn.k_bias"];

/// The names of a Swin V2.
pub struct Swin;

impl Table for Swin {
    fn detect(&self, names: &[&str]) -> Option<Convention> {
        if names.iter().any(|name| name.starts_with("swinv2.")) {
            return Some(Convention::HuggingFace);
        }
        let scale = |name: &&str| name.starts_with(STAGE[0]) && name.ends_with(".attn.logit_scale");
        names.iter().any(scale).then_some(Convention::Timm)
    }

    fn import(&self, mut weights: Weights, from: Convention) -> Result<Weights, NameError> {
        weights.retain(|name, _| !CONSTANTS.iter().any(|end| name.ends_with(end)));
        match from {
            Convention::HuggingFace => rename_all(join_qkv(weights)?, from, 1, 0),
            _ if weights.contains_key("head.weight") => rename_all(of_microsoft(weights)?, from, 0, 0),
            _ => rename_all(weights, from, 0, 0),
        }
    }

    fn export(&self, weights: Weights, to: Convention) -> Result<Weights, NameError> {
        match to {
            Convention::Timm => rename_all(weights, to, 0, 0),
            Convention::HuggingFace => split_qkv(rename_all(weights, Convention::Timm, 0, 1)?),
            Convention::Torchvision => Err(NameError::SwinOnlyElsewhere { convention: to }),
        }
    }
}

/// Side of the windows of the first stage, of files that hold the table of offsets between their tokens (1,2·side-1,2·side-1,2).
pub fn window_of(weights: &Weights) -> Option<usize> {
    let first = |name: &str| name.contains("layers.0.blocks.0.") && name.ends_with(CONSTANTS[0]);
    let (_, table) = weights.iter().find(|(name, _)| first(name))?;
    Some(table.shape.get(1)?.checked_add(1)? / 2)
}

/// The same, if biases were learned in windows of that very size: the table then ends at sign · log2(8 + 1) / log2(8).
pub fn own_window_of(weights: &Weights) -> Option<usize> {
    let first = |name: &str| name.contains("layers.0.blocks.0.") && name.ends_with(CONSTANTS[0]);
    let (_, table) = weights.iter().find(|(name, _)| first(name))?;
    let end = f64::from(*table.data.last()?);
    ((end - 9f64.log2() / 3.0).abs() < 1e-3).then(|| window_of(weights)).flatten()
}

fn rename_all(
    weights: Weights,
    convention: Convention,
    from: usize,
    to: usize,
) -> Result<Weights, NameError> {
    let renamed = weights.into_iter().map(|(name, tensor)| match rename(&name, from, to) {
        Some(renamed) => Ok((renamed, tensor)),
        None => Err(NameError::Unknown { name, convention }),
    });
    renamed.collect()
}

fn rename(name: &str, from: usize, to: usize) -> Option<String> {
    let Some(rest) = name.strip_prefix(STAGE[from]) else {
        return OUTSIDE.iter().find(|row| row[from] == name).map(|row| row[to].to_string());
    };
    let (stage, rest) = numbered(rest)?;
    if MERGING.contains(&rest) {
        let stage = match (from, to) {
            (0, 1) => stage.checked_sub(1)?,
            (1, 0) => stage.checked_add(1)?,
            _ => stage,
        };
        return Some(format!("{}{stage}.{rest}", STAGE[to]));
    }
    let (block, leaf) = numbered(rest.strip_prefix("blocks.")?)?;
    let row = BLOCK.iter().find(|row| row[from] == leaf)?;
    Some(format!("{}{stage}.blocks.{block}.{}", STAGE[to], row[to]))
}

/// A number as it is printed, and what follows its dot.
fn numbered(text: &str) -> Option<(usize, &str)> {
    let (digits, rest) = text.split_once('.')?;
    let number: usize = digits.parse().ok()?;
    (number.to_string() == digits).then_some((number, rest))
}

/// Microsoft's files have the head without its pool, and patches merged at the end of the stage before.
fn of_microsoft(weights: Weights) -> Result<Weights, NameError> {
    let mut renamed = Weights::new();
    for (name, tensor) in weights {
        let merging =
            name.strip_prefix(STAGE[0]).and_then(numbered).filter(|(_, leaf)| MERGING.contains(leaf));
        let new_name = match (merging, name.strip_prefix("head.")) {
            (Some((stage, leaf)), _) => format!("{}{}.{leaf}", STAGE[0], stage.saturating_add(1)),
            (None, Some(kind)) => format!("head.fc.{kind}"),
            _ => name.clone(),
        };
        if renamed.contains_key(&new_name) {
            return Err(NameError::Duplicate { name, canonical: new_name });
        }
        renamed.insert(new_name, tensor);
    }
    Ok(renamed)
}

/// Query, key and value weights of each block become one.
fn join_qkv(weights: Weights) -> Result<Weights, NameError> {
    const SELF: &str = ".attention.self.";
    let part_name = |block: &str, part: &str| format!("{block}{SELF}{part}.weight");
    let mut joined = Weights::new();
    let mut apart: BTreeMap<String, [Option<Tensor>; 3]> = BTreeMap::new();
    for (name, tensor) in weights {
        let part =
            name.strip_suffix(".weight").and_then(|name| name.split_once(SELF)).and_then(|(block, part)| {
                let part = PARTS.iter().position(|known| *known == part)?;
                Some((block.to_string(), part))
            });
        match part {
            Some((block, part)) => apart.entry(block).or_default()[part] = Some(tensor),
            None if name.contains('*') => {
                return Err(NameError::Unknown { name, convention: Convention::HuggingFace });
            }
            None => {
                joined.insert(name, tensor);
            }
        }
    }
    for (block, parts) in apart {
        let tensor = stack_rows(parts, |part| part_name(&block, part))?;
        joined.insert(part_name(&block, "*"), tensor);
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::super::tests::counted_of as counted;
    use super::super::{check_against, detect, from_canonical, to_canonical};
    use super::*;
    use crate::Network;
    use crate::swin;

    fn small() -> Network {
        Network::Swin(swin::Swin {
            image: [32, 64],
            channels: 3,
            classes: 5,
            width: 4,
            depths: [1, 2, 1, 2],
            heads: [1, 2, 2, 4],
            window: 4,
            pretrained: None,
            trained: None,
            dropout: 0.0,
            drop_path: 0.0,
        })
    }

    #[test]
    fn a_conversion_and_its_reverse_change_nothing() {
        let weights = counted(&small());
        assert_eq!(check_against(&weights, &small().expected()), Ok(()));
        for convention in [Convention::Timm, Convention::HuggingFace] {
            let theirs = from_canonical(weights.clone(), convention).unwrap();
            assert_eq!(detect(theirs.keys().map(String::as_str)), Ok(convention));
            assert_eq!(to_canonical(theirs, convention), Ok(weights.clone()), "{convention}");
        }
        let error = from_canonical(weights, Convention::Torchvision).unwrap_err().to_string();
        assert_eq!(error, "a Swin V2 has no torchvision form here: export it as timm or huggingface");
    }

    #[test]
    fn names_are_those_of_the_libraries() {
        let weights = counted(&small());
        let theirs = from_canonical(weights.clone(), Convention::HuggingFace).unwrap();
        assert_eq!(theirs.len(), weights.len() + 2 * 6);
        let qkv = &weights["layers.1.blocks.1.attn.qkv.weight"];
        let key = &theirs["swinv2.encoder.layers.1.blocks.1.attention.self.key.weight"];
        assert_eq!((&key.shape, &key.data[..]), (&vec![8, 8], &qkv.data[64..128]));
        assert_eq!(
            theirs["swinv2.encoder.layers.1.downsample.reduction.weight"],
            weights["layers.2.downsample.reduction.weight"]
        );
        assert_eq!(
            theirs["swinv2.encoder.layers.3.blocks.0.attention.self.value.bias"],
            weights["layers.3.blocks.0.attn.v_bias"]
        );
    }

    #[test]
    fn constants_and_microsofts_spelling_are_read() {
        let weights = counted(&small());
        let tensor = Tensor { shape: vec![1], data: vec![0.0] };
        let mut microsoft = Weights::new();
        for (name, tensor) in weights.clone() {
            let name = name.replace("head.fc.", "head.");
            let name = (1..4).fold(name, |name, stage| {
                name.replace(
                    &format!("layers.{stage}.downsample"),
                    &format!("layers.{}.downsample", stage - 1),
                )
            });
            microsoft.insert(name, tensor);
        }
        let table = Tensor { shape: vec![1, 7, 7, 2], data: vec![0.0; 98] };
        microsoft.insert("layers.0.blocks.0.attn.relative_coords_table".into(), table);
        assert_eq!((window_of(&microsoft), window_of(&weights)), (Some(4), None));
        microsoft.insert("layers.1.blocks.1.attn_mask".into(), tensor);
        assert_eq!(to_canonical(microsoft, Convention::Timm), Ok(weights));
    }

    #[test]
    fn foreign_names_are_refused() {
        for foreign in
            ["layers.0.blocks.00.norm1.weight", "layers.0.blocks.0.ls1.gamma", "layers.x.norm", "pos_embed"]
        {
            let mut weights = counted(&small());
            weights.insert(foreign.to_string(), Tensor { shape: vec![1], data: vec![0.0] });
            let unknown = NameError::Unknown { name: foreign.to_string(), convention: Convention::Timm };
            assert_eq!(to_canonical(weights, Convention::Timm), Err(unknown));
        }
    }
}
