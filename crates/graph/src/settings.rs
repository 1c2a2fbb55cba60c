//! Settings that shape plans beside the model.

use crate::graph::State;
use crate::mesh::Mesh;
use crate::target::Target;
use crate::types::DType;
use serde::{Deserialize, Serialize};

/// Optimizer and its hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Optimizer {
    /// torch.optim.AdamW.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Number added to the denominator.
        eps: f64,
        /// Weight decay.
        weight_decay: f64,
    },
    /// torch.optim.SGD.
    Sgd {
        /// Decay of the momentum.
        momentum: f64,
        /// Flag: the momentum is Nesterov's.
        nesterov: bool,
        /// Weight decay.
        weight_decay: f64,
    },
    /// DeepSpeed's FusedLamb.
    Lamb {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Number added to the denominator.
        eps: f64,
        /// Weight decay.
        weight_decay: f64,
        /// Smallest trust ratio.
        min_coeff: f64,
        /// Largest trust ratio.
        max_coeff: f64,
    },
    /// Orthogonalised momentum for the matrices of hidden layers; AdamW for all else.
    Muon {
        /// Decay of the momentum of matrices.
        momentum: f64,
        /// Flag: that momentum is Nesterov's.
        nesterov: bool,
        /// Decay of AdamW's first moment.
        beta1: f64,
        /// Decay of AdamW's second moment.
        beta2: f64,
        /// Number added to AdamW's denominator.
        eps: f64,
        /// Weight decay of both.
        weight_decay: f64,
    },
}

impl Optimizer {
    /// The weight decay, whatever the optimizer.
    pub fn weight_decay(&self) -> f64 {
        match *self {
            Optimizer::AdamW { weight_decay, .. }
            | Optimizer::Sgd { weight_decay, .. }
            | Optimizer::Lamb { weight_decay, .. }
            | Optimizer::Muon { weight_decay, .. } => weight_decay,
        }
    }

    /// Name, as settings have it.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::AdamW { .. } => "adamw",
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Lamb { .. } => "lamb",
            Optimizer::Muon { .. } => "muon",
        }
    }

    /// True for optimizers that treat the weights of hidden layers as matrices, apart from other parameters.
    pub fn treats_matrices(&self) -> bool {
        matches!(self, Optimizer::Muon { .. })
    }

    /// Endings of the names of its states of a parameter.
    pub fn keeps(&self, matrix: bool) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { .. } => &["momentum"],
            Optimizer::Muon { .. } if matrix => &["momentum"],
            Optimizer::AdamW { .. } | Optimizer::Lamb { .. } | Optimizer::Muon { .. } => &["m", "v"],
        }
    }
}

/// Settings of a group of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamGroup {
    /// Factor of the learning rate. A parameter with 0 is frozen: it has no gradient, no moments and no average, and
    /// backward ops that would only serve it are left out.
    pub lr_scale: f64,
    /// Flag: weight decay applies.
    pub decays: bool,
}

impl ParamGroup {
    /// True for parameters that are not trained.
    pub fn is_frozen(&self) -> bool {
        self.lr_scale == 0.0
    }
}

/// Settings that shape plans beside the model.
pub struct Settings<'a> {
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Largest gradient norm; larger gradients are scaled down to it.
    pub max_grad_norm: Option<f64>,
    /// Activations that are computed again instead of kept.
    pub recompute: Recompute,
    /// Group of each parameter.
    pub group: &'a dyn Fn(&State) -> ParamGroup,
    /// Keeps a moving average of every trained parameter, with this decay, for evaluation to read instead of the
    /// parameter. The decay is the same from the first step on: averages start as the parameters and need no
    /// correction, but a short run wants a smaller decay.
    pub ema: Option<f64>,
    /// Mixed precision: matmuls in half precision, where the model's own type is f32.
    pub mixed: Option<Mixed>,
    /// A factor of the loss that keeps small gradients within the range of fp16.
    pub loss_scale: Option<LossScaling>,
    /// The ranks that train together.
    pub mesh: Mesh,
    /// Communication of gradients between them.
    pub communication: Communication,
    /// What ranks divide among each other instead of each holding all of it. One rank divides nothing.
    pub zero: Zero,
    /// How parameters are gathered that ranks divide.
    pub gathering: Gathering,
    /// Flag: a step has several micro-steps, so that sums over it are kept from one to the next. Where it has one,
    /// gradients are not there while activations are being made, and lie in the arena.
    pub accumulates: bool,
    /// Device that the plans are for.
    pub target: &'a dyn Target,
}

impl<'a> Settings<'a> {
    /// Settings with nothing but an optimizer: one rank, one micro-step a step, all parameters in one group.
    pub fn plain(optimizer: Optimizer, target: &'a dyn Target) -> Settings<'a> {
        Settings {
            optimizer,
            max_grad_norm: None,
            recompute: Recompute::None,
            group: &|_| ParamGroup { lr_scale: 1.0, decays: true },
            ema: None,
            mixed: None,
            loss_scale: None,
            mesh: Mesh::default(),
            communication: Communication::default(),
            zero: Zero::Stage0,
            gathering: Gathering::default(),
            accumulates: false,
            target,
        }
    }

    /// The stage that the plans are for. Of gradients that are reduced in every micro-step a rank needs its part alone: stage 1 is then
    /// stage 2.
    pub fn stage(&self) -> Zero {
        match self.zero {
            _ if self.mesh.shards().ranks() <= 1 => Zero::Stage0,
            Zero::Stage1 if self.asks_for_each_micro_step() => Zero::Stage2,
            stage => stage,
        }
    }

    /// True if a setting asks that gradients of a micro-step are reduced before they are added to those of other micro-steps.
    pub(crate) fn asks_for_each_micro_step(&self) -> bool {
        self.communication.each_micro_step && self.accumulates && self.mesh.ranks() > 1
    }

    /// True if they are, because of that or of the stage.
    pub(crate) fn reduces_each_micro_step(&self) -> bool {
        self.asks_for_each_micro_step() || self.stage() > Zero::Stage1
    }
}

/// Stage of ZeRO: what ranks divide among each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Zero {
    /// Nothing: every rank holds all, and gradients are all-reduced.
    #[default]
    Stage0,
    /// What the optimizer keeps, averages, and f32 parameters where layers read copies in half precision. Gradients are
    /// reduce-scattered once per step, parameters gathered after the update.
    Stage1,
    /// Gradients too: they are reduce-scattered in every micro-step.
    Stage2,
    /// Parameters too: they are gathered where they are used, forward and backward.
    Stage3,
}

impl Zero {
    /// Every stage.
    pub const ALL: [Zero; 4] = [Zero::Stage0, Zero::Stage1, Zero::Stage2, Zero::Stage3];
}

/// Gathering of parameters at stage 3, in elements of whole parameters. It changes memory and messages, and nothing that is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gathering {
    /// Parameters of at most so many elements are whole on every rank; by default of 100,000, or 1/256 of all if that is less.
    pub whole: Option<usize>,
    /// All that are whole have at most so many together.
    pub whole_in_all: Option<usize>,
    /// So many are gathered ahead of their use at most; by default one bucket, whatever it has.
    pub ahead: Option<usize>,
    /// So many are there at a time at most, in use or on their way, as far as a single bucket allows.
    pub live: Option<usize>,
    /// What comes back in use after at most so many others stays until then; by default after none.
    pub reuse: Option<usize>,
}

impl From<Zero> for u8 {
    fn from(stage: Zero) -> u8 {
        stage as u8
    }
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        let stage = Zero::ALL.get(usize::from(number)).copied();
        stage.ok_or_else(|| format!("{number} is no stage of ZeRO: 0, 1, 2 or 3"))
    }
}

impl std::fmt::Display for Zero {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", u8::from(*self))
    }
}

/// The factor of the loss under fp16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// Scale of the first step.
    pub initial: f64,
    /// Rule by which the scale changes; without, it is constant.
    pub dynamic: Option<DynamicScale>,
}

/// Dynamic loss scale: see [`Op::LossScale`](crate::Op::LossScale).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScale {
    /// Good steps after which the scale is doubled.
    pub window: u64,
    /// Skipped steps, the last of which halves the scale.
    pub hysteresis: u64,
    /// Smallest scale.
    pub min: f64,
}

/// Communication of gradients between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Communication {
    /// Elements of one all-reduce; a larger gradient has one of its own.
    pub bucket: usize,
    /// Flag: a bucket is reduced as soon as it is complete, rather than after the last backward op.
    pub overlap: bool,
    /// Communication dtype of gradients, if not their own.
    pub dtype: Option<DType>,
    /// Flag: gradients are reduced in every micro-step, rather than their sums once per step. Stages 2 and 3 of ZeRO always do.
    #[serde(default)]
    pub each_micro_step: bool,
}

/// Buckets of 2²⁰ elements, reduced as soon as they are complete, in the gradients' own dtype.
impl Default for Communication {
    fn default() -> Self {
        Communication { bucket: 1 << 20, overlap: true, dtype: None, each_micro_step: false }
    }
}

/// Activations that are computed again instead of kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Keep every activation the backward ops need.
    #[default]
    None,
    /// Make what a GELU makes again from what it was made of, which is kept for the GELU's own backward op anyway. In half precision
    /// that was rounded once before.
    Gelu,
    /// Keep only the borders between blocks; the rest of a block is computed again just before its backward ops.
    Full,
}

/// The types of values where not all is computed in the model's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixed {
    /// Type of operands and results of matmuls: bf16 or f16.
    pub half: DType,
    /// Type of the residual stream and its gradient: f32, or the same as `half`.
    pub residual: DType,
}
