//! Single-threaded kernels on slices: the arithmetic between the matmuls.
//!
//! Arrays are row-major; `cols` is the length of the last axis and there are `len / cols` rows. Functions ending in
//! an `…_acc` argument add to it. Every kernel sums in an order fixed by the shapes and the instruction set alone,
//! so that a run repeats bit for bit on the same kind of machine.

mod batch_norm;
mod elementwise;
mod erf;
mod float;
mod gelu;
mod half_precision;
mod lanes;
mod level;
mod loss;
mod norm;
mod online;
mod optimize;
mod patches;
mod resample;
mod scaling;
mod softmax;
#[cfg(test)]
pub(crate) mod testing;
mod transpose;
mod unfold;
mod windows;

pub use batch_norm::{Moments, batch_norm, batch_norm_grad, batch_norm_sums, shifted_sums};
pub use elementwise::{add, add_assign, add_bias, column_sum, scale, sum_squares};
pub use float::Float;
pub use gelu::{bias_gelu, gelu, gelu_grad, gelu_grad_bias, gelu_grad_in_place};
pub use half_precision::{from_bf16, from_f16, to_bf16, to_f16};
#[cfg(test)]
pub(crate) use level::best;
pub use level::{Level, check_level, level, limit};
pub use loss::{Target, cross_entropy_grad_row, cross_entropy_row, pixel_grad, pixel_loss};
pub use norm::{add_layer_norm, layer_norm, layer_norm_grad, norm_add, norm_add_grad};
pub use online::{softmax_and_grad, softmax_range};
pub use optimize::{AdamW, Lamb, Sgd, adamw, ema, lamb_apply, lamb_moments_and_norms, sgd};
pub use optimize::{muon_apply, muon_momentum, newton_schulz};
pub use patches::{PatchGrid, patches, unpatches};
pub use resample::{Axis, Taps, weigh};
pub use scaling::{layer_scale, layer_scale_grad, swiglu, swiglu_grad};
pub use softmax::{BiasAndMasks, biased_softmax_from_lse, biased_softmax_rows, softmax_grad_acc};
pub use softmax::{row_dot, softmax_from_lse, softmax_grad, softmax_rows};
pub use transpose::transpose;
pub use unfold::Unfold;
pub use windows::{hidden_rows, normalise_grad, normalise_rows, sixteen_sigmoid};
