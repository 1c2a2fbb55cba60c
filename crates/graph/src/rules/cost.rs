//! Cost of an op: floating-point operations and bytes moved, before any cache.

use crate::op::{Lane, Op};
use crate::types::{Shape, Type};
use crate::windows::{Offsets, Windows};
use serde::Serialize;

/// Cost of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
}

/// Measured peak rates of a device, which those of a step are compared with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Floating-point operations/s of matmuls.
    pub flops: f64,
    /// Bytes/s, read and written by copying.
    pub bytes: f64,
}

impl Ceilings {
    /// Share of the seconds taken that would be enough at these rates. Over 1 where less was moved than the cost says:
    /// what was written just before is still in a cache.
    pub fn share(&self, cost: Cost, seconds: f64) -> f64 {
        (cost.flops / self.flops).max(cost.bytes / self.bytes) / seconds
    }
}

/// Cost of one run of `op`. Transcendentals count as 10 operations, a multiply-add as two. The bytes of a collective
/// are those of the whole message; how often they are sent, and the adding, are the backend's.
pub fn cost(op: &Op, inputs: &[&Type], outputs: &[&Type]) -> Cost {
    let of = |types: &[&Type]| types.iter().map(|t| t.bytes()).sum::<usize>();
    let bytes = match op {
        _ if op.lane() == Lane::Comm => of(inputs).max(of(outputs)),
        // Of a set that lies on the device, as many images as a batch has.
        Op::Prepare { .. } => {
            let images = |t: &Type| t.shape.0[0].max(1);
            let read = inputs[0].bytes() / images(inputs[0]) * images(outputs[0]);
            read + of(&inputs[1..]) + of(outputs)
        }
        _ => of(inputs) + of(outputs),
    };
    Cost { flops: flops(op, inputs, outputs), bytes: bytes as f64 }
}

/// Floating-point operations.
fn flops(op: &Op, inputs: &[&Type], outputs: &[&Type]) -> f64 {
    let count = |t: &Type| t.shape.count() as f64;
    let first = inputs.first().map_or(0.0, |t| count(t));
    let written: f64 = outputs.iter().map(|t| count(t)).sum();
    match op {
        Op::Linear { gelu, .. } => {
            let y = count(outputs[0]);
            2.0 * y * inputs[0].shape.last() as f64 + if *gelu { 16.0 * y } else { 0.0 }
        }
        Op::LinearGradX { gelu } => {
            let dx = count(outputs[0]);
            2.0 * dx * inputs[0].shape.last() as f64 + if *gelu { 30.0 * dx } else { 0.0 }
        }
        Op::ScaledMatmul { .. } => 2.0 * written * inputs[0].shape.last() as f64,
        Op::LinearGradW { .. } => 2.0 * first * inputs[1].shape.last() as f64,
        Op::Conv { .. } => 2.0 * count(outputs[0]) * of_channel(&inputs[1].shape),
        Op::ConvGradX { .. } => 2.0 * first * of_channel(&inputs[1].shape),
        Op::ConvGradW { shape, .. } => 2.0 * first * of_channel(shape),
        Op::Attention { .. } => attention_products(inputs[0], outputs[1]) * 2.0 + 14.0 * scores(outputs[1]),
        Op::AttentionGrad { .. } => attention_products(inputs[0], inputs[2]) * 5.0 + 16.0 * scores(inputs[2]),
        Op::WindowAttention { heads, windows } => {
            window_products(inputs[0], *windows, 2.0, 14.0 * *heads as f64)
        }
        Op::WindowAttentionGrad { heads, windows } => {
            window_products(inputs[0], *windows, 5.0, 18.0 * *heads as f64)
        }
        Op::PositionBias { window, .. } => 2.0 * hidden(inputs[2], *window),
        Op::PositionBiasGrad { window, .. } => 6.0 * hidden(inputs[2], *window),
        Op::Gelu => 16.0 * first,
        Op::SwiGlu => 8.0 * first,
        Op::SwiGluGrad { .. } => 12.0 * first,
        Op::LayerScale => first,
        Op::LayerScaleGrad { .. } => 3.0 * first,
        Op::GeluGrad { .. } => 30.0 * first,
        Op::LayerNorm { .. } => 8.0 * first,
        Op::LayerNormGrad { .. } | Op::NormAddGrad { .. } => 14.0 * first,
        Op::NormAdd { .. } => 9.0 * first,
        Op::CrossEntropy { .. } | Op::CrossEntropyGrad { .. } => 14.0 * first,
        // For each class of a pixel: four taps, and an exponential.
        Op::ResizedCrossEntropy { .. } => 22.0 * count(inputs[1]) * inputs[0].shape.last() as f64,
        Op::ResizedCrossEntropyGrad { .. } => 26.0 * count(inputs[1]) * inputs[0].shape.last() as f64,
        Op::AdamW { .. } => 14.0 * first,
        Op::LambMoments { .. } => 16.0 * first,
        Op::LambApply { .. } => 6.0 * first,
        Op::Sgd { .. } => 6.0 * first,
        Op::MuonMomentum { .. } => 5.0 * first,
        Op::MuonApply { .. } => 4.0 * first,
        Op::Matmul { left_transposed, .. } => {
            let k = inputs[0].shape.0[if *left_transposed { 1 } else { 2 }];
            2.0 * written * k as f64
        }
        Op::UnitTrace { .. } => 2.0 * first,
        Op::NewtonSchulz { .. } => 4.0 * first,
        Op::Ema { .. } | Op::Quantize { .. } => 3.0 * first,
        Op::SumSquares { .. } => 2.0 * inputs.iter().map(|t| count(t)).sum::<f64>(),
        Op::Moments | Op::BatchNorm { .. } => 4.0 * first,
        Op::BatchNormSums { .. } => 6.0 * first,
        Op::BatchNormGrad { .. } => 8.0 * first,
        // Rows first, then columns: a few taps each.
        Op::Resize { .. } | Op::ResizeGrad { .. } => 4.0 * first.max(written),
        // A few taps of each pass, and a place in the table.
        Op::Prepare { .. } => 16.0 * written,
        // One operation for each element that is written.
        Op::ColumnSum { .. } | Op::Embed { .. } | Op::EmbedGrad { .. } | Op::Drop { .. } | Op::Add => written,
        Op::TokenSum { tokens, .. } => (inputs[0].shape.0[0] * tokens * inputs[0].shape.last()) as f64,
        Op::Scale { .. } | Op::Pool { .. } | Op::PoolGrad { .. } | Op::Accumulate | Op::Cast { .. } => {
            written
        }
        Op::AddUp { .. } => written,
        Op::Clip { .. } | Op::Advance | Op::LossScale { .. } => written,
        Op::JoinMoments | Op::RunningMoments { .. } | Op::Rescale { .. } => written,
        // Bytes alone.
        Op::Input | Op::Read { .. } | Op::Assign { .. } | Op::Seed { .. } | Op::Reshape { .. } => 0.0,
        Op::Patches { .. } | Op::Unpatches { .. } | Op::MergePatches | Op::SplitPatches { .. } => 0.0,
        Op::Concat | Op::Slice { .. } | Op::Grid { .. } | Op::Ungrid { .. } | Op::Commit => 0.0,
        Op::Pack { .. } | Op::Unpack { .. } | Op::Prepend => 0.0,
        Op::AllReduce { .. } | Op::ReduceScatter { .. } | Op::AllGather { .. } => 0.0,
    }
}

/// Number of multiply-adds for each element of a convolution's result: the weight of one output channel.
fn of_channel(weight: &Shape) -> f64 {
    weight.count() as f64 / weight.0[0] as f64
}

/// Elements of the position bias's hidden layer, times its heads.
fn hidden(w2: &Type, window: [usize; 2]) -> f64 {
    w2.shape.count() as f64 * Offsets::new(window, None).count() as f64
}

/// `count` matmuls such as queries × keys over all windows, padding included, and `each` operations for every pair of tokens.
fn window_products(qkv: &Type, windows: Windows, count: f64, each: f64) -> f64 {
    let [b, h, w, c3] = qkv.shape.0[..] else { return 0.0 };
    let t = windows.tokens() as f64;
    let pairs = (b * windows.count([h, w])) as f64 * t * t;
    pairs * (count * 2.0 * (c3 / 3) as f64 + each)
}

/// Operations of one of attention's matmuls, such as queries × keys, over all heads.
fn attention_products(qkv: &Type, lse: &Type) -> f64 {
    let tokens = lse.shape.last() as f64;
    2.0 * qkv.shape.count() as f64 / 3.0 * tokens
}

fn scores(lse: &Type) -> f64 {
    (lse.shape.count() * lse.shape.last()) as f64
}
