//! Names of a model's tensors, here and in the libraries whose weights are read and written.
//!
//! The names used everywhere in the program ("canonical") are timm's; the others are spelled only in the
//! tables below.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::dense_names::DenseError;
use crate::network::TABLES;

mod layer_scale_vit;
mod segmenter;
mod swin;
mod vit;

pub use layer_scale_vit::LayerScaleVit;
pub use segmenter::Segmenter;
pub use swin::{Swin, own_window_of, window_of};
pub use vit::Vit;

/// Values in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

impl Tensor {
    /// Checks that `data` has as many values as `shape`.
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
    #[error("{what} has no {convention} form here: export it as timm")]
    OnlyTimm { what: &'static str, convention: Convention },
    #[error(
        "the position embedding is {shape:?}, which has none for the class token beside those of patches"
    )]
    ClassPosition { shape: Vec<usize> },
    #[error(transparent)]
    Dense(#[from] DenseError),
    #[error("weights are of another model: {first}{}", and_more(*others))]
    OtherModel { first: Mismatch, others: usize },
}

/// Difference of one tensor from what a model needs.
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

/// The names of one family's tensors, by every convention that has some.
pub trait Table: Sync {
    /// Whose names these are, if they are this family's.
    fn detect(&self, names: &[&str]) -> Option<Convention>;

    /// Renames weights of this family to canonical names; joins what others keep apart.
    fn import(&self, weights: Weights, from: Convention) -> Result<Weights, NameError>;

    /// The reverse of [`Self::import`].
    fn export(&self, weights: Weights, to: Convention) -> Result<Weights, NameError>;
}

/// The thirds of qkv, in the order of its rows.
const PARTS: [&str; 3] = ["query", "key", "value"];

/// The table of the family that has these names, and whose they are.
fn table(names: &[&str]) -> Option<(&'static dyn Table, Convention)> {
    TABLES.iter().find_map(|table| Some((*table, table.detect(names)?)))
}

fn table_of(weights: &Weights) -> Result<(&'static dyn Table, Convention), NameError> {
    let names: Vec<&str> = weights.keys().map(String::as_str).collect();
    let first = names.first().ok_or(NameError::Empty)?;
    table(&names).ok_or_else(|| NameError::Unrecognised { first: first.to_string() })
}

/// The convention that knows the most of these names.
pub fn detect<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Convention, NameError> {
    let names: Vec<&str> = names.into_iter().collect();
    let first = names.first().ok_or(NameError::Empty)?;
    let found = table(&names).ok_or_else(|| NameError::Unrecognised { first: first.to_string() })?;
    Ok(found.1)
}

/// Renames weights to canonical names; joins what Hugging Face keeps apart.
pub fn to_canonical(weights: Weights, from: Convention) -> Result<Weights, NameError> {
    table_of(&weights)?.0.import(weights, from)
}

/// Renames canonical weights for another library; the reverse of [`to_canonical`].
pub fn from_canonical(weights: Weights, to: Convention) -> Result<Weights, NameError> {
    table_of(&weights)?.0.export(weights, to)
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
