//! What shapes plans beside the model.

use crate::graph::State;
use crate::mesh::Mesh;
use crate::target::Target;
use crate::types::DType;
use serde::{Deserialize, Serialize};

/// What makes new parameters of gradients.
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
        /// Whether the momentum is Nesterov's.
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
}

impl Optimizer {
    /// The weight decay, whatever the optimizer.
    pub fn weight_decay(&self) -> f64 {
        match *self {
            Optimizer::AdamW { weight_decay, .. }
            | Optimizer::Sgd { weight_decay, .. }
            | Optimizer::Lamb { weight_decay, .. } => weight_decay,
        }
    }
}

/// How the parameters of a group are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamGroup {
    /// Factor of the learning rate. A parameter with 0 is frozen: it has no gradient, no moments and no average, and
    /// backward ops that would only serve it are left out.
    pub lr_scale: f64,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl ParamGroup {
    /// Whether its parameters are not trained.
    pub fn is_frozen(&self) -> bool {
        self.lr_scale == 0.0
    }
}

/// What shapes the plans beside the model.
pub struct Settings<'a> {
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Largest gradient norm; larger gradients are scaled down to it.
    pub max_grad_norm: Option<f64>,
    /// Activations that are computed again instead of kept.
    pub recompute: Recompute,
    /// How each parameter is trained.
    pub group: &'a dyn Fn(&State) -> ParamGroup,
    /// Keeps a moving average of every trained parameter, with this decay, for evaluation to read instead of the
    /// parameter. The decay is the same from the first step on: averages start as the parameters and need no
    /// correction, but a short run wants a smaller decay.
    pub ema: Option<f64>,
    /// Halves where products are, if not all is computed in the model's own type, which must be f32 then.
    pub mixed: Option<Mixed>,
    /// A factor of the loss that keeps small gradients within the range of fp16.
    pub loss_scale: Option<LossScaling>,
    /// The ranks that train together.
    pub mesh: Mesh,
    /// How they exchange gradients.
    pub exchange: Exchange,
    /// Whether a step has several micro-steps, so that sums over it are kept from one to the next. Where it has one, gradients are
    /// not there while activations are being made, and lie in the arena.
    pub accumulates: bool,
    /// What the plans are for.
    pub target: &'a dyn Target,
}

/// The factor of the loss under fp16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaling {
    /// Scale of the first step.
    pub initial: f64,
    /// How it follows what the gradients can bear; without, it stays.
    pub dynamic: Option<DynamicScale>,
}

/// See [`Op::LossScale`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScale {
    /// Good steps after which the scale is doubled.
    pub window: u64,
    /// Skipped steps, the last of which halves the scale.
    pub hysteresis: u64,
    /// Smallest scale.
    pub min: f64,
}

/// How ranks exchange gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// Elements that travel at once; a larger gradient travels alone.
    pub bucket: usize,
    /// Whether a bucket leaves as soon as it is complete, rather than after the last backward op.
    pub overlap: bool,
    /// The type of gradients on their way, if not their own.
    pub wire: Option<DType>,
}

/// Large enough buckets to be worth a call, sent as soon as they are complete, as they are.
impl Default for Exchange {
    fn default() -> Self {
        Exchange { bucket: 1 << 20, overlap: true, wire: None }
    }
}

/// Which activations are computed again instead of kept.
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
    /// bf16 or f16: what products read and write.
    pub half: DType,
    /// Of the residual stream and its gradient: f32, or as `half`.
    pub residual: DType,
}
