//! The closed set of ops. Each has a description (`op/describe.rs`: operands, results, shapes, precision, names, what works in
//! place), a cost (`rules/cost.rs`) and, where a gradient passes through it, a backward rule (`rules/backward.rs`).
//!
//! Legend for the shapes: B batch, T tokens, N patches, C channels, H heads, D head size, K classes,
//! I and O the inner and outer width of a linear layer, `..` any leading axes.
//!
//! Learning rate, seed, step number and everything else that changes between steps is read from the run's
//! [`Header`](crate::Header), never from an op.

mod attributes;
mod describe;
mod properties;
pub mod slots;
#[cfg(test)]
mod tests;

pub use attributes::{
    AttentionDrop, CHOICES, Lane, PathDrop, Per, Pooling, Reduction, Sampling, StateId, Window,
};

use crate::flat::{Flat, Stack, Views};
use crate::mesh::Group;
use crate::types::{DType, Shape};
use crate::windows::Windows;
use attributes::{is_bilinear, is_false, is_zero};
use serde::{Deserialize, Serialize};

/// An op. [`describe`](Op::describe) has its operands and results.
///
/// Attributes of many ops, the same in all of them:
///
/// | attribute | meaning |
/// |---|---|
/// | `accumulate` | whether the result is added to a sum so far, the last operand |
/// | `add` | whether one more value is added, in the same pass |
/// | `align` | elements of which the length of a flat buffer is a multiple |
/// | `beta1`, `beta2`, `eps`, `momentum`, `nesterov`, `decay` | the optimizer's numbers, as torch names them |
/// | `bias` | whether a bias is added; of a backward op, whether its gradient is made too |
/// | `channels`, `height`, `width`, `size`, `tokens`, `start` | sizes of the result, or where it starts |
/// | `class_token` | whether a class token stands before the patches |
/// | `drop`, `rate`, `site`, `per` | dropout: its rate, the number of its random stream, what one draw decides over |
/// | `dtype`, `to`, `half` | the type of the result, or of a second result in half precision |
/// | `eps` | the number under the root of a norm |
/// | `flat`, `flats` | the pieces of the flat buffers that an update works on |
/// | `gelu`, `relu` | whether the activation is part of the op |
/// | `group`, `reduction` | the ranks that take part in a collective, and how their values become one |
/// | `heads` | heads of attention |
/// | `left_transposed`, `right_transposed` | whether a side of a matmul is read as its transpose |
/// | `kind`, `sampling`, `mixed`, `smoothing` | the form of the pooling, the resizing, the targets, the labels |
/// | `patch`, `window`, `windows`, `pretrained` | geometry of patches, convolutions and attention windows |
/// | `shape`, `shapes` | the shape of the result, where it doesn't follow from the operands |
/// | `stacks` | the matrices in a flat buffer, those of one shape together |
/// | `state` | the state that is read or written |
/// | `views` | the tensors of a flat buffer that is one message: they lie in it, without a copy |
/// | `sum` | whether column sums of the first result are made too: the gradient of a bias |
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
// Of the fields of variants: the table above and the text of each variant name them, which a test sees to.
#[allow(missing_docs)]
pub enum Op {
    // ---- the border of a graph -------------------------------------------------------------------------------
    /// A value the host fills before the plan runs.
    Input,
    /// The state as it was when the plan started.
    Read { state: StateId },
    /// The one write of a state: (value) → nothing.
    Assign { state: StateId },
    /// The gradient of the loss with respect to itself: () → \[\]; 1, or under fp16 the loss scale: (scale \[3\]) → \[\].
    Seed { dtype: DType },

    // ---- images ----------------------------------------------------------------------------------------------
    /// Preparation of images from bytes, as `data::Finish` does it on the host: pixels u8 (P,h,w,ch), choices i32
    /// (B,[`CHOICES`]), levels f32 (ch,256), what each byte becomes [, taps i32 (rows,2+K), the weights of the
    /// resizing] → (B,ch,size,size). Each row of the choices says which of the pixels it is about, and what happens to
    /// them.
    Prepare { size: usize },

    // ---- ViT, forward and backward ---------------------------------------------------------------------------
    /// (B,ch,height,width) → (B,N,ch·patch²), features ordered as a flattened convolution weight.
    Patches { patch: usize },
    /// Inverse of `patches`.
    Unpatches { patch: usize, channels: usize, height: usize, width: usize },
    /// x (..,I), w (O,I), \[b (O)\] → y (..,O) [, pre (..,O) before the GELU].
    Linear {
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        gelu: bool,
    },
    /// dy (..,O), w (O,I) → dx (..,I). With `gelu` also through the GELU before the layer:
    /// dy, w, pre (..,I) → dpre (..,I), column sums of dpre (I).
    LinearGradX {
        #[serde(default, skip_serializing_if = "is_false")]
        gelu: bool,
    },
    /// dy (..,O), x (..,I) [, sum so far] → dw (of `shape`, O first).
    LinearGradW {
        shape: Shape,
        #[serde(default, skip_serializing_if = "is_false")]
        accumulate: bool,
    },
    /// x (..,C) [, sum so far (C)] → (C).
    ColumnSum {
        #[serde(default, skip_serializing_if = "is_false")]
        accumulate: bool,
    },
    /// Exact GELU, x·Φ(x).
    Gelu,
    /// pre, dy → dx [, column sums of dx (C)].
    GeluGrad {
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
    },
    /// A gated unit: x (..,2H), of which the first half opens the second, → silu(x₁)·x₂ (..,H).
    #[serde(rename = "swiglu")]
    SwiGlu,
    /// x (..,2H), dy (..,H) → dx (..,2H) [, its column sums (2H)].
    #[serde(rename = "swiglu_grad")]
    SwiGluGrad {
        #[serde(default, skip_serializing_if = "is_false")]
        sum: bool,
    },
    /// patches (B,N,C) [, class token (1,1,C)], positions (1,T,C) → tokens (B,T,C).
    Embed {
        #[serde(default, skip_serializing_if = "is_false")]
        class_token: bool,
    },
    /// dtokens (B,T,C) → dpatches (B,N,C) [, dclass (1,1,C)], dpositions (1,T,C).
    EmbedGrad {
        #[serde(default, skip_serializing_if = "is_false")]
        class_token: bool,
    },
    /// Tokens before others: x (B,N,C), any number of prefixes (1,n,C) → (B,Σn+N,C), the prefixes of every sample first.
    Prepend,
    /// Some tokens of every sample, from `start` on, summed over the batch: x (B,T,C) → (1,tokens,C).
    TokenSum { start: usize, tokens: usize },
    /// x (..,C) [, r (..,C)], γ (C), β (C) → [x+r,] y, mean (..), 1/σ (..).
    LayerNorm {
        eps: f64,
        #[serde(default, skip_serializing_if = "is_false")]
        add: bool,
    },
    /// x, mean, 1/σ, γ, dy [, a gradient to add to dx] → dx, dγ, dβ [, column sums of dx (C)] [, dx once more, in half
    /// precision for matmuls].
    LayerNormGrad {
        #[serde(default, skip_serializing_if = "is_false")]
        add: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        sum: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        half: Option<DType>,
    },
    /// LayerScale: x (..,C), γ (C) → γ·x.
    LayerScale,
    /// x, γ, dy → dx, dγ [, column sums of dx (C)].
    LayerScaleGrad {
        #[serde(default, skip_serializing_if = "is_false")]
        sum: bool,
    },
    /// Softmax attention: qkv (B,T,3C) → out (B,T,C), log-sum-exp (B,H,T).
    Attention {
        heads: usize,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drop: Option<AttentionDrop>,
    },
    /// qkv, out, log-sum-exp, dout → dqkv [, its column sums (3C)].
    AttentionGrad {
        heads: usize,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drop: Option<AttentionDrop>,
        #[serde(default, skip_serializing_if = "is_false")]
        sum: bool,
    },
    /// Dropout or stochastic depth; linear in x, so it is its own backward op.
    Drop { rate: f64, site: u32, per: Per },
    /// x, y → x + y.
    Add,
    /// x → `factor`·x.
    Scale { factor: f64 },
    /// (B,T,C) → (B,C).
    Pool { kind: Pooling },
    /// (B,C) → (B,T,C).
    PoolGrad { kind: Pooling, tokens: usize },
    /// logits (..,K), labels (..), weights (..) → loss \[\] = Σ weight·loss / nominal count,
    /// stats \[4\] = Σ weight × (loss, 1, top-1 hit, top-5 hit). A row is a sample, or a pixel (B,h,w,K). Both are at
    /// least f32, since half precision can't count to a batch of pixels.
    ///
    /// `mixed` (mixup, cutmix) takes two more inputs, partners (..) and mix (..): the target is mix·onehot(label) +
    /// (1-mix)·onehot(partner), and hits count against the one with the larger share, the label if they are equal.
    CrossEntropy {
        smoothing: f64,
        #[serde(default, skip_serializing_if = "is_false")]
        mixed: bool,
    },
    /// logits, labels, weights [, partners, mix], dloss → dlogits.
    CrossEntropyGrad {
        smoothing: f64,
        #[serde(default, skip_serializing_if = "is_false")]
        mixed: bool,
    },

    // ---- Swin Transformer V2, channels-last (B,h,w,C) --------------------------------------------------------
    /// Scaled cosine attention within windows of T tokens, which may be shifted: qkv (B,h,w,3C) without bias, the biases
    /// of queries (C) and values (C), logit scale (H,1,1), position bias (H,T,T) → out (B,h,w,C), log-sum-exp
    /// (B,windows,H,T). Scores are exp(min(scale, ln 100))·cos(q,k) + bias, and 100 less where a shifted window's tokens
    /// aren't neighbours. Padding is tokens whose qkv is 0.
    WindowAttention { heads: usize, windows: Windows },
    /// The inputs of `window_attention`, out, log-sum-exp, dout → the gradients of its inputs.
    WindowAttentionGrad { heads: usize, windows: Windows },
    /// The continuous position bias: w1 (N,2), b1 (N), w2 (H,N) → 16·sigmoid(w2·relu(w1·offset + b1)) (H,T,T), where the
    /// log-spaced offset between two tokens of a window is measured against the window of pre-training, if there is another.
    PositionBias {
        window: [usize; 2],
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pretrained: Option<[usize; 2]>,
    },
    /// w1, b1, w2, dbias → dw1, db1, dw2.
    PositionBiasGrad {
        window: [usize; 2],
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pretrained: Option<[usize; 2]>,
    },
    /// The residual after a norm: y (..,C), shortcut (..,C), γ (C), β (C) → shortcut + norm(y), mean (..), 1/σ (..) [,
    /// the sum once more, in half precision for matmuls]. With `drop`, the norm of a sample counts for nothing or
    /// 1/(1-rate).
    NormAdd {
        eps: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drop: Option<PathDrop>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        half: Option<DType>,
    },
    /// y, mean, 1/σ, γ, dout → dy, dγ, dβ; the gradient of the shortcut is dout itself.
    NormAddGrad {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drop: Option<PathDrop>,
    },
    /// Blocks of 2×2 tokens side by side, down the columns first: (B,h,w,C) → (B,⌈h/2⌉,⌈w/2⌉,4C), with zeros where the map
    /// ends.
    MergePatches,
    /// The transpose of `merge_patches`: (B,h',w',4C) → (B,height,width,C).
    SplitPatches { height: usize, width: usize },
    /// The same numbers in another shape. Costs nothing where it may work in place.
    Reshape { shape: Shape },

    // ---- accumulation and update -----------------------------------------------------------------------------
    /// sum so far, x → sum; the header says whether this is the first micro-step, which starts anew.
    Accumulate,
    /// n values of which steps have left partial sums, sums so far → n sums. The results numbered by `starts` go on from a sum so far,
    /// in their order. Of each of the n, the place is that of its first part: see [`crate::plan::Step::parts`].
    AddUp { starts: Vec<usize> },
    /// Any number of flat gradients → the sums of their squares, an f64 for each [`CHUNK`](crate::flat::CHUNK), one buffer after the
    /// other. A rank leaves 0 for what it doesn't hold: ranks that hold parts add theirs up, which rounds nothing.
    SumSquares { flats: Vec<Flat> },
    /// stats \[4\] [, loss scale \[3\]], sums of squares (chunks) → control \[3\] = (factor for every gradient, 1 or 0 for apply or
    /// skip, gradient norm). The factor holds nominal/actual count, the loss scale, if the gradients are `scaled` by one, and the clipping
    /// to `max_norm`.
    Clip {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_norm: Option<f64>,
        #[serde(default, skip_serializing_if = "is_false")]
        scaled: bool,
    },
    /// applied steps \[1\], control → applied steps \[1\].
    Advance,
    /// w, dw, m, v, control, applied steps [, a copy of w in half precision] → w, m, v [, the copy]. torch.optim.AdamW's
    /// numerics.
    #[serde(rename = "adamw")]
    AdamW {
        beta1: f64,
        beta2: f64,
        eps: f64,
        #[serde(flatten)]
        flat: Flat,
    },
    /// w, dw, momentum, control, applied steps [, copy] → w, momentum [, copy]. torch.optim.SGD's numerics.
    Sgd {
        momentum: f64,
        nesterov: bool,
        #[serde(flatten)]
        flat: Flat,
    },
    /// The first half of DeepSpeed's FusedLamb: w, dw, m, v, control, applied steps → m, v, (segments,2) = Σ w², Σ update² of each
    /// [segment](crate::flat::Segment) of the buffer as f64, 0 for those that the rank doesn't hold.
    LambMoments {
        beta1: f64,
        beta2: f64,
        eps: f64,
        #[serde(flatten)]
        flat: Flat,
    },
    /// The second half: w, m, v, (segments,2), control, applied steps [, copy] → w [, copy]. A tensor's trust ratio, ‖w‖ / ‖update‖,
    /// is kept within [`min_coeff`, `max_coeff`].
    LambApply {
        beta1: f64,
        beta2: f64,
        eps: f64,
        min_coeff: f64,
        max_coeff: f64,
        #[serde(flatten)]
        flat: Flat,
    },
    /// The first part of Muon: dw, momentum, control → momentum, and for each stack the directions (matrices,rows,columns) to
    /// orthogonalise, as `to` if that is given. The momentum is a moving average; with `nesterov` a direction is as the next would be.
    /// Zeros if the step is skipped.
    MuonMomentum {
        momentum: f64,
        nesterov: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<DType>,
        stacks: Vec<Stack>,
        #[serde(flatten)]
        flat: Flat,
    },
    /// The last part of Muon: w, control, orthogonal directions of each stack [, copy] → w [, copy]. The step of a matrix is the
    /// learning rate times `rms`·√max(rows, columns).
    MuonApply {
        rms: f64,
        stacks: Vec<Stack>,
        #[serde(flatten)]
        flat: Flat,
    },
    /// Matrices by matrices: left (B,M,K), right (B,K,N), each as it lies or transposed, → (B,M,N).
    Matmul {
        #[serde(default, skip_serializing_if = "is_false")]
        left_transposed: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        right_transposed: bool,
    },
    /// Gram matrices (B,N,N) → the same over their traces, roots of these (B): of X, those of X/‖X‖ and ‖X‖. Roots are at least `eps`.
    UnitTrace { eps: f64 },
    /// A (B,N,N), A² [, norms (B)] → a + b·A + c·A² [, over the norm], a, b and c being the `coefficients`: what an iteration of
    /// Newton–Schulz multiplies by.
    NewtonSchulz { coefficients: [f64; 3] },
    /// average, w as updated, control → average: decay·average + (1-decay)·w, or as it was on a skipped step.
    Ema { decay: f64 },

    // ---- collectives ------------------------------------------------------------------------------------------
    /// Values end to end in one flat buffer, zero-padded to a multiple of `align`; `to` is the type there, if another.
    Pack {
        align: usize,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<DType>,
    },
    /// Inverse of `pack`: flat [, with `over` the values that it may write over] → values of `shapes`.
    Unpack {
        shapes: Vec<Shape>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<DType>,
        #[serde(default, skip_serializing_if = "is_false")]
        over: bool,
    },
    /// Any number of values → as many, each reduced over the ranks of the group. They lie side by side and are one
    /// message.
    AllReduce { reduction: Reduction, group: Group },
    /// flat (n) → (n/ranks), of as many ranks as the group has. With `views`, the tensors of a flat buffer instead of the buffer.
    ReduceScatter {
        reduction: Reduction,
        group: Group,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        views: Option<Views>,
    },
    /// (n,..) → (n·ranks,..): what the ranks of the group have, one after the other. With `views`, the tensors in it.
    AllGather {
        group: Group,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        views: Option<Views>,
    },
    /// The same numbers as another type.
    Cast { to: DType },
    /// scale \[3\] = (scale, good steps since it changed, skipped steps it still bears), control → scale \[3\]. DeepSpeed's
    /// dynamic loss scale: doubled after `window` good steps; halved, but not below `min`, at a skipped step once
    /// `hysteresis` - 1 of them were borne.
    LossScale { window: u64, hysteresis: u64, min: f64 },

    // ---- matmuls in fp8 --------------------------------------------------------------------------------------
    /// x (..,C), scale (S) = (scale, largest values of the last steps) [, largest so far \[1\]] → x·scale in `to`, E4M3 or E5M2
    /// [, if `transposed` once more as (C,rows)], the largest |x| \[1\]. What is too large becomes the largest number there is. With
    /// `accumulate` the largest is that of all micro-steps so far; infinite, if a number is not finite.
    Quantize {
        to: DType,
        #[serde(default, skip_serializing_if = "is_false")]
        transposed: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        accumulate: bool,
    },
    /// a (..,K), b (N,K), both fp8, scale of a (S), scale of b (R) [, bias (N)] [, sum so far (..,N)] → a·bᵀ / (scales) + bias
    /// (..,N) in `to`. On the copies that `quantize` makes it is all three matmuls of a linear layer.
    ScaledMatmul {
        to: DType,
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        accumulate: bool,
    },
    /// scale (S), largest \[1\] → scale (S): the history with the newest in place of the oldest, and the scale that brings the
    /// largest of it to the largest number of `to`, divided by two `margin` times. As it was, if the newest is not finite.
    Rescale {
        to: DType,
        #[serde(default, skip_serializing_if = "is_zero")]
        margin: u32,
    },

    // ---- dense prediction: images are channels-last, (B,h,w,C) -----------------------------------------------
    /// x (B,h,w,I), weight (O,kh,kw,I) [, bias (O)] → y (B,h',w',O).
    Conv {
        window: Window,
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
    },
    /// dy, weight → dx (B,height,width,I).
    ConvGradX { window: Window, height: usize, width: usize },
    /// dy, x [, sum so far] → dweight of `shape`.
    ConvGradW {
        window: Window,
        shape: Shape,
        #[serde(default, skip_serializing_if = "is_false")]
        accumulate: bool,
    },
    /// x (..,C) → (3,C): mean, Σ (x-mean)², count.
    Moments,
    /// Moments of several parts, one below the other (3·parts,C) → those of all together (3,C).
    JoinMoments,
    /// x (..,C), moments (3,C) or, with `running`, running moments (3,C), γ (C), β (C) → y; with `relu`, 0 where y is
    /// negative.
    BatchNorm {
        eps: f64,
        #[serde(default, skip_serializing_if = "is_false")]
        relu: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        running: bool,
    },
    /// x, moments, γ, β, dy → (2,C): Σ dy, Σ dy·x̂, with dy as it is before the ReLU. Summed over this rank they are
    /// the gradients of β and γ; over all ranks, what `batch_norm_grad` takes.
    BatchNormSums {
        eps: f64,
        #[serde(default, skip_serializing_if = "is_false")]
        relu: bool,
    },
    /// x, moments, γ, β, dy, sums → dx, through the moments too.
    BatchNormGrad {
        eps: f64,
        #[serde(default, skip_serializing_if = "is_false")]
        relu: bool,
    },
    /// running (3,C) = (mean, unbiased variance, batches seen), moments (3,C) → running.
    RunningMoments { momentum: f64 },
    /// control, n old values, n new values → n values: the new, or the old on a skipped step.
    Commit,
    /// (B,h,w,C) → (B,height,width,C).
    Resize {
        height: usize,
        width: usize,
        #[serde(default, skip_serializing_if = "is_bilinear")]
        sampling: Sampling,
    },
    /// dy (B,h',w',C) → dx (B,height,width,C): the transpose of `resize`, which is not a resize.
    ResizeGrad {
        height: usize,
        width: usize,
        #[serde(default, skip_serializing_if = "is_bilinear")]
        sampling: Sampling,
    },
    /// Any number of values (..,C) → (..,ΣC), channels side by side.
    Concat,
    /// (..,C) → (..,channels): some of the channels, from `start` on.
    Slice { start: usize, channels: usize },
    /// The cross-entropy of pixels whose logits are resized on the way, bilinearly: logits (B,h,w,K), labels (B,h',w'), weights
    /// (B,h',w') → loss and stats as `cross_entropy` has them, log-sum-exp (B,h',w') of the resized logits. Those
    /// themselves are nowhere.
    ResizedCrossEntropy { smoothing: f64 },
    /// logits, labels, weights, log-sum-exp, dloss → dlogits (B,h,w,K).
    ResizedCrossEntropyGrad { smoothing: f64 },
    /// Tokens (B,T,C) → (B,height,width,C): the last ones, row by row; a class token before them is left out.
    Grid { height: usize, width: usize },
    /// Inverse of `grid`: (B,h,w,C) → (B,tokens,C), 0 for what `grid` leaves out.
    Ungrid { tokens: usize },
}
