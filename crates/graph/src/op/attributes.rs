//! Types of ops' attributes.

use serde::{Deserialize, Serialize};

/// A state, by its place in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StateId(pub u32);

/// Scope of one draw of a random op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    /// Dropout: every (token, channel) of a sample has its own draw.
    Element,
    /// Stochastic depth: one draw for the sample.
    Sample,
    /// Dropout of feature maps: every channel of a sample has one draw, whatever the pixel.
    Channel,
}

/// Dropout of attention probabilities; a draw for every (head, query, key) of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionDrop {
    /// Share of the probabilities that are dropped.
    pub rate: f64,
    /// Number of the random stream.
    pub site: u32,
}

/// Stochastic depth within an op: one draw for the sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathDrop {
    /// Share of the samples whose branch is dropped.
    pub rate: f64,
    /// Number of the random stream.
    pub site: u32,
}

/// Pooling of tokens into one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The first token (the class token).
    First,
    /// The mean of all tokens.
    Mean,
}

/// Reduction over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Sum over ranks.
    Sum,
    /// Mean over ranks.
    Mean,
    /// Largest over ranks.
    Max,
}

pub(super) fn is_false(flag: &bool) -> bool {
    !*flag
}

pub(super) fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Numbers that say how one image is prepared: see [`Op::Prepare`](super::Op::Prepare).
pub const CHOICES: usize = 34;

/// Interpolation of [`Op::Resize`](super::Op::Resize).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// Mix of the four pixels around it, pixels being areas: torch's `interpolate` with `align_corners=False`.
    #[default]
    Bilinear,
    /// The mean over its bin: torch's `AdaptiveAvgPool2d`, whose bins overlap where sizes don't divide.
    Average,
}

pub(super) fn is_bilinear(sampling: &Sampling) -> bool {
    *sampling == Sampling::Bilinear
}

/// Stride and zero padding of a channels-last convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Pixels from one result to the next.
    pub stride: usize,
    /// Zeros on each side.
    pub pad: usize,
}

/// The queue a step runs on. Steps of one lane run in program order; lanes run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Computation.
    Compute,
    /// Computation beside the compute lane: steps whose results are needed late.
    Side,
    /// Collectives.
    Comm,
    /// Copies between memories.
    Copy,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Lane; 4] = [Lane::Compute, Lane::Comm, Lane::Copy, Lane::Side];

    /// The name in plan texts.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Side => "side",
            Lane::Comm => "comm",
            Lane::Copy => "copy",
        }
    }
}
