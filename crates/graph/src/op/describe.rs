//! Every op, described once: its operands and results, their shapes, precision and names, what may work in place.
//!
//! Shape rule, arity, names of values, dtypes under mixed precision and in-place pairs all follow from this. Beside it an op has
//! its cost (`rules/cost.rs`) and its backward rule (`rules/backward.rs`). All three match without a default, so that
//! an op with a rule missing doesn't compile.

mod dense;
mod fp8;
#[cfg(test)]
mod tests;
mod update;
mod windows;

use super::slots::Class::{
    self, Branch, Compute, Exactly, Float, Full, Gradient, Joined, Like, LikeResult, Stream,
};
use super::slots::{Description, require};
use super::{CHOICES, Op};
use crate::types::DType;

impl Op {
    /// Description of the op with that many operands; of some ops, the number selects the form.
    pub fn describe(&self, operands: usize) -> Description {
        let op = Description::none();
        match self {
            // ---- the border of a graph
            Op::Input | Op::Read { .. } => op,
            Op::Assign { .. } => op.takes("value", "*", Class::State),
            Op::Seed { dtype } => {
                op.takes_if(operands > 0, "loss scale", "3", Full).gives("", "", Exactly(*dtype))
            }

            // ---- images
            Op::Prepare { size } => prepare(*size, operands),
            Op::Patches { patch } => patches(*patch),
            Op::Unpatches { patch, channels, height, width } => {
                let (grid, features) = ((height / patch) * (width / patch), channels * patch * patch);
                op.with("N", grid)
                    .with("F", features)
                    .with("ch", *channels)
                    .with("height", *height)
                    .with("width", *width)
                    .takes("x", "B,N,F", Float)
                    .gives("", "B,ch,height,width", Like(0))
            }

            // ---- linear layers
            Op::Linear { bias, gelu } => op
                .takes("x", "..,I", Compute)
                .takes("weight", "O,*I", Compute)
                .takes_if(*bias, "bias", "O", LikeResult)
                .gives("", "..,O", Compute)
                .gives_if(*gelu, "pre", "..,O", Compute)
                .multiplies(),
            Op::LinearGradX { gelu } => op
                .takes("dy", "..,O", Compute)
                .takes("weight", "O,*I", Compute)
                .takes_if(*gelu, "pre", "..,I", Compute)
                .gives("x", "..,I", Compute)
                .gives_if(*gelu, "bias", "I", Gradient)
                .multiplies(),
            Op::LinearGradW { shape, accumulate } => op
                .takes("dy", "..,O", Compute)
                .takes("x", "..,I", Compute)
                .takes_if(*accumulate, "sum so far", "O,*I", Full)
                .gives_shape("weight", shape, "O,*I", Gradient)
                .over_if(*accumulate, 2)
                .multiplies(),
            Op::ColumnSum { accumulate } => op
                .takes("x", "..,C", Compute)
                .takes_if(*accumulate, "sum so far", "C", Full)
                .gives("bias", "C", Gradient)
                .over_if(*accumulate, 1),
            Op::Gelu => op.takes("x", "..", Compute).gives("", "..", Compute),
            Op::GeluGrad { bias } => op
                .takes("pre", "..,C", Compute)
                .takes("dy", "..,C", Compute)
                .gives("pre", "..,C", Compute)
                .gives_if(*bias, "bias", "C", Gradient),
            Op::SwiGlu => op.takes("x", "..,2H", Compute).gives("", "..,H", Compute),
            Op::SwiGluGrad { sum } => op
                .takes("x", "..,2H", Compute)
                .takes("dy", "..,H", Compute)
                .gives("x", "..,2H", Compute)
                .gives_if(*sum, "sum", "2H", Gradient),

            // ---- tokens
            Op::Embed { class_token } => embed(*class_token),
            Op::EmbedGrad { class_token } => {
                let prefix = usize::from(*class_token);
                op.takes("dtokens", "B,T,C", Float)
                    .set("N", move |l| l.get("T").checked_sub(prefix).ok_or("has no token".into()))
                    .gives("patches", "B,N,C", Compute)
                    .gives_if(*class_token, "cls_token", "1,1,C", Gradient)
                    .gives("pos_embed", "1,T,C", Gradient)
            }
            Op::Prepend => prepend(operands),
            Op::TokenSum { start, tokens } => {
                let (start, tokens) = (*start, *tokens);
                op.with("n", tokens)
                    .takes("x", "B,T,C", Float)
                    .check(move |l| {
                        let fits = start.checked_add(tokens).is_some_and(|end| end <= l.get("T"));
                        require(fits, || format!("{} has no {tokens} tokens from {start} on", l.operand(0)))
                    })
                    .gives("", "1,n,C", Gradient)
            }
            Op::LayerNorm { add: false, .. } => op
                .takes("x", "..,C", Float)
                .takes("weight", "C", Full)
                .takes("bias", "C", Full)
                .gives("", "..,C", Compute)
                .gives("mean", "..", Full)
                .gives("rstd", "..", Full),
            Op::LayerNorm { add: true, .. } => op
                .takes("x", "..,C", Stream)
                .takes("residual", "..,C", Float)
                .takes("weight", "C", Full)
                .takes("bias", "C", Full)
                .gives("sum", "..,C", Stream)
                .gives("", "..,C", Compute)
                .gives("mean", "..", Full)
                .gives("rstd", "..", Full),
            Op::LayerNormGrad { add, sum, half } => {
                let op = op
                    .takes("x", "..,C", Float)
                    .takes("mean", "..", Full)
                    .takes("rstd", "..", Full)
                    .takes("weight", "C", Full)
                    .takes("dy", "..,C", Float)
                    .takes_if(*add, "gradient to add", "..,C", Like(0))
                    .gives("x", "..,C", Like(0))
                    .gives("weight", "C", Gradient)
                    .gives("bias", "C", Gradient)
                    .gives_if(*sum, "sum", "C", Gradient);
                half_copy(op, *half)
            }
            Op::LayerScale => {
                op.takes("x", "..,C", Compute).takes("gamma", "C", Full).gives("", "..,C", Compute)
            }
            Op::LayerScaleGrad { sum } => op
                .takes("x", "..,C", Compute)
                .takes("gamma", "C", Full)
                .takes("dy", "..,C", Float)
                .gives("x", "..,C", Compute)
                .gives("gamma", "C", Gradient)
                .gives_if(*sum, "sum", "C", Gradient),
            Op::Attention { heads, .. } => {
                attention(*heads).gives("", "B,T,C", Compute).gives("lse", "B,H,T", Full)
            }
            Op::AttentionGrad { heads, sum, .. } => attention(*heads)
                .takes("out", "B,T,C", Compute)
                .takes("lse", "B,H,T", Full)
                .takes("dout", "B,T,C", Compute)
                .gives("", "B,T,3C", Compute)
                .gives_if(*sum, "sum", "3C", Gradient),
            Op::Drop { .. } => op.takes("x", "..", Float).gives("", "..", Branch),
            Op::Add => op.takes("x", "..", Float).takes("y", "..", Float).gives("", "..", Joined),
            Op::Scale { .. } => op.takes("x", "..", Float).gives("", "..", Like(0)),
            Op::Pool { .. } => op.takes("x", "B,T,C", Float).gives("", "B,C", Like(0)),
            Op::PoolGrad { tokens, .. } => {
                op.with("T", *tokens).takes("dy", "B,C", Float).gives("", "B,T,C", Like(0))
            }
            Op::Reshape { shape } => {
                let (count, to) = (shape.count(), shape.clone());
                op.takes("x", "*", Float)
                    .check(move |l| {
                        let x = l.operand(0);
                        require(x.shape.count() == count, || format!("{x} has not the elements of {to}"))
                    })
                    .gives_shape("", shape, "*", Like(0))
                    .over(0)
            }
            Op::CrossEntropy { mixed, .. } => targets(*mixed).gives("", "", Full).gives("stats", "4", Full),
            Op::CrossEntropyGrad { mixed, .. } => {
                targets(*mixed).takes("dloss", "", Full).gives("", "..,K", Compute)
            }

            // ---- Swin Transformer V2
            Op::WindowAttention { heads, windows } => windows::attention(*heads, *windows),
            Op::WindowAttentionGrad { heads, windows } => windows::attention_grad(*heads, *windows),
            Op::PositionBias { window, pretrained } => windows::position_bias(*window, *pretrained),
            Op::PositionBiasGrad { window, pretrained } => windows::position_bias_grad(*window, *pretrained),
            Op::NormAdd { half, .. } => windows::norm_add(*half),
            Op::NormAddGrad { .. } => windows::norm_add_grad(),
            Op::MergePatches => windows::merge_patches(),
            Op::SplitPatches { height, width } => windows::split_patches(*height, *width),

            // ---- accumulation and update
            Op::Accumulate => {
                op.takes("sum so far", "..", Full).takes("x", "..", Full).gives("", "..", Full).over(0)
            }
            Op::AddUp { starts } => update::add_up(starts, operands),
            Op::SumSquares { flats } => update::sum_squares(flats),
            Op::Clip { scaled, .. } => op
                .takes("statistics", "4", Full)
                .takes_if(*scaled, "loss scale", "3", Full)
                .takes("sums of squares", "chunks", Exactly(DType::F64))
                .gives("", "3", Full),
            Op::Advance => {
                op.takes("applied steps", "1", Full).takes("control", "3", Full).gives("", "1", Full).over(0)
            }
            Op::AdamW { flat, .. } => update::optimizer(&["m", "v"], flat, operands),
            Op::Sgd { flat, .. } => update::optimizer(&["momentum"], flat, operands),
            Op::LambMoments { flat, .. } => update::lamb_moments(flat),
            Op::LambApply { flat, .. } => update::lamb_apply(flat, operands),
            Op::MuonMomentum { to, stacks, flat, .. } => update::muon_momentum(*to, stacks, flat),
            Op::MuonApply { stacks, flat, .. } => update::muon_apply(stacks, flat, operands),
            Op::Matmul { left_transposed, right_transposed } => op
                .takes("left", if *left_transposed { "B,K,M" } else { "B,M,K" }, Compute)
                .takes("right", if *right_transposed { "B,N,K" } else { "B,K,N" }, Compute)
                .gives("", "B,M,N", Compute)
                .multiplies(),
            Op::UnitTrace { .. } => {
                op.takes("gram", "B,N,N", Compute).gives("", "B,N,N", Compute).gives("norm", "B", Full)
            }
            Op::NewtonSchulz { .. } => op
                .takes("gram", "B,N,N", Compute)
                .takes("square", "B,N,N", Compute)
                .takes_if(operands > 2, "norm", "B", Full)
                .gives("", "B,N,N", Compute),
            Op::Ema { .. } => op
                .takes("average", "..", Full)
                .takes("parameter", "..", Full)
                .takes("control", "3", Full)
                .gives("ema", "..", Full)
                .over(0),
            Op::LossScale { .. } => {
                op.takes("loss scale", "3", Full).takes("control", "3", Full).gives("", "3", Full).over(0)
            }
            Op::Commit => update::commit(operands),

            // ---- communication
            Op::Pack { align, to } => update::pack(*align, *to, operands),
            Op::Unpack { shapes, to, over } => update::unpack(shapes, *to, *over),
            Op::AllReduce { .. } => update::all_reduce(operands),
            Op::ReduceScatter { group, views, .. } => update::reduce_scatter(group.ranks(), views.as_ref()),
            Op::AllGather { group, views } => update::all_gather(group.ranks(), views.as_ref()),
            Op::Cast { to } => op.takes("x", "..", Float).gives("", "..", Exactly(*to)),

            // ---- matmuls in fp8
            Op::Quantize { to, transposed, accumulate } => fp8::quantize(*to, *transposed, *accumulate),
            Op::ScaledMatmul { to, bias, accumulate } => fp8::scaled_matmul(*to, *bias, *accumulate),
            Op::Rescale { to, .. } => fp8::rescale(*to),

            // ---- dense prediction
            Op::Conv { window, bias } => dense::conv(*window, *bias),
            Op::ConvGradX { window, height, width } => dense::conv_grad_x(*window, *height, *width),
            Op::ConvGradW { window, shape, accumulate } => dense::conv_grad_w(*window, shape, *accumulate),
            Op::Moments => op.takes("x", "..,C", Compute).gives("moments", "3,C", Full),
            Op::JoinMoments => dense::join_moments(),
            Op::BatchNorm { .. } => dense::normalised().gives("", "..,C", Compute),
            Op::BatchNormSums { .. } => {
                dense::normalised().takes("dy", "..,C", Compute).gives("sums", "2,C", Full)
            }
            Op::BatchNormGrad { .. } => dense::normalised()
                .takes("dy", "..,C", Compute)
                .takes("sums", "2,C", Full)
                .gives("x", "..,C", Compute),
            Op::RunningMoments { .. } => dense::running_moments(),
            Op::Resize { height, width, .. } | Op::ResizeGrad { height, width, .. } => {
                dense::resize(*height, *width)
            }
            Op::Concat => dense::concat(operands),
            Op::Slice { start, channels } => dense::slice(*start, *channels),
            Op::ResizedCrossEntropy { .. } => {
                dense::pixels().gives("", "", Full).gives("stats", "4", Full).gives("lse", "B,h',w'", Full)
            }
            Op::ResizedCrossEntropyGrad { .. } => dense::pixels()
                .takes("lse", "B,h',w'", Full)
                .takes("dloss", "", Full)
                .gives("", "B,h,w,K", Compute),
            Op::Grid { height, width } => dense::grid(*height, *width),
            Op::Ungrid { tokens } => dense::ungrid(*tokens),
        }
    }
}

/// A result once more in half precision, for matmuls.
fn half_copy(op: Description, half: Option<DType>) -> Description {
    match half {
        Some(dtype) => op.gives("half", "..,C", Exactly(dtype)),
        None => op,
    }
}

fn prepare(size: usize, operands: usize) -> Description {
    Description::none()
        .with("numbers", CHOICES)
        .with("size", size)
        .takes("pixels", "?,?,?,ch", Exactly(DType::U8))
        .takes("choices", "B,numbers", Exactly(DType::I32))
        .takes("levels", "ch,256", Exactly(DType::F32))
        .takes_if(operands > 3, "taps", "?,taps", Exactly(DType::I32))
        .check(move |l| {
            let has_weights = operands <= 3 || l.get("taps") > 2;
            require(has_weights, || format!("needs the weights of a resizing, got {}", l.operand(3)))
        })
        .gives("", "B,ch,size,size", Exactly(DType::F32))
}

fn patches(patch: usize) -> Description {
    Description::none()
        .takes("x", "B,ch,h,w", Float)
        .set("N", move |l| {
            let (h, w) = (l.get("h"), l.get("w"));
            let divides = patch > 0 && h % patch == 0 && w % patch == 0;
            require(divides, || format!("patch {patch} doesn't divide the {h}×{w} image"))?;
            Ok((h / patch) * (w / patch))
        })
        .set("F", move |l| Ok(l.get("ch") * patch * patch))
        .gives("", "B,N,F", Compute)
}

fn embed(class_token: bool) -> Description {
    let prefix = usize::from(class_token);
    Description::none()
        .takes("patches", "B,N,C", Float)
        .takes_if(class_token, "class token", "1,1,C", Full)
        .takes("positions", "1,T,C", Full)
        .check(move |l| {
            let (tokens, positions) = (l.get("N") + prefix, l.get("T"));
            require(tokens == positions, || format!("has {tokens} tokens, but {positions} positions"))
        })
        .gives("", "B,T,C", Stream)
}

fn prepend(operands: usize) -> Description {
    let op = Description::none().takes("tokens", "B,N,C", Stream);
    let op = (1..operands).fold(op, |op, _| op.takes("prefix", "1,?,C", Full));
    op.set("T", |l| Ok(l.operands().iter().map(|t| t.shape.0.get(1).copied().unwrap_or(0)).sum()))
        .gives("", "B,T,C", Stream)
}

/// Queries, keys and values, packed.
fn attention(heads: usize) -> Description {
    Description::none()
        .with("H", heads)
        .takes("qkv", "B,T,3C", Compute)
        .check(move |l| whole_heads(l.get("C"), heads))
}

/// Checks that heads divide the channels.
fn whole_heads(channels: usize, heads: usize) -> Result<(), String> {
    require(heads > 0 && channels.is_multiple_of(heads), || {
        format!("{channels} channels are not {heads} heads of a whole size")
    })
}

/// Operands of a loss.
fn targets(mixed: bool) -> Description {
    let whole = Exactly(DType::I32);
    Description::none()
        .takes("logits", "..,K", Float)
        .takes("labels", "..", whole)
        .takes("weights", "..", Full)
        .takes_if(mixed, "partners", "..", whole)
        .takes_if(mixed, "shares", "..", Full)
        .check(|l| require(l.leading() > 0, || format!("logits are {}: no axis of classes", l.operand(0))))
}
