//! What an op costs: floating-point operations and bytes moved, before any cache.

use super::{dense, windows};
use crate::op::{Lane, Op};
use crate::types::Type;
use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    pub flops: f64,
    pub bytes: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
}

/// Rates that a device was seen to reach: what those of a step are held against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Operations a second, of products.
    pub flops: f64,
    /// Bytes a second, read and written by copying.
    pub bytes: f64,
}

impl Ceilings {
    /// Of the seconds that work took, the part that would be enough at these rates. Over 1 where less was moved than the cost
    /// says: what was written just before is still in a cache.
    pub fn share(&self, cost: Cost, seconds: f64) -> f64 {
        (cost.flops / self.flops).max(cost.bytes / self.bytes) / seconds
    }
}

/// Cost of one run of `op`. Transcendentals count as 10 operations, a multiply-add as two. Of a collective, the bytes
/// are those of the whole message; how often they travel is the engine's affair, and so is the adding.
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
    let first = inputs.first().map_or(0.0, |t| t.shape.count() as f64);
    let written: f64 = outputs.iter().map(|t| t.shape.count() as f64).sum();
    let flops = match op {
        Op::Linear { gelu, .. } => {
            let y = outputs[0].shape.count() as f64;
            2.0 * y * inputs[0].shape.last() as f64 + if *gelu { 16.0 * y } else { 0.0 }
        }
        Op::LinearGradX { gelu } => {
            let dx = outputs[0].shape.count() as f64;
            2.0 * dx * inputs[0].shape.last() as f64 + if *gelu { 30.0 * dx } else { 0.0 }
        }
        Op::LinearGradW { .. } => 2.0 * first * inputs[1].shape.last() as f64,
        Op::Attention { .. } => attention_products(inputs[0], outputs[1]) * 2.0 + 14.0 * scores(outputs[1]),
        Op::AttentionGrad { .. } => attention_products(inputs[0], inputs[2]) * 5.0 + 16.0 * scores(inputs[2]),
        Op::Gelu => 16.0 * first,
        Op::GeluGrad { .. } => 30.0 * first,
        Op::LayerNorm { .. } => 8.0 * first,
        Op::LayerNormGrad { .. } => 14.0 * first,
        Op::CrossEntropy { .. } | Op::CrossEntropyGrad { .. } => 14.0 * first,
        Op::AdamW { .. } => 14.0 * first,
        Op::Lamb { .. } => 22.0 * first,
        Op::Sgd { .. } => 6.0 * first,
        Op::Ema { .. } => 3.0 * first,
        Op::SumSquares => 2.0 * inputs.iter().map(|t| t.shape.count() as f64).sum::<f64>(),
        // A few taps of each pass, and a place in the table.
        Op::Prepare { .. } => 16.0 * written,
        Op::Input | Op::Read { .. } | Op::Assign { .. } | Op::Patches { .. } | Op::Unpatches { .. } => 0.0,
        Op::Pack { .. } | Op::Unpack { .. } | Op::Seed { .. } => 0.0,
        Op::AllReduce { .. } | Op::ReduceScatter { .. } | Op::AllGather { .. } => 0.0,
        _ => {
            let known = dense::flops(op, inputs, outputs).or_else(|| windows::flops(op, inputs));
            known.unwrap_or(written)
        }
    };
    Cost { flops, bytes: bytes as f64 }
}

/// Operations of one of attention's products, such as queries × keys, over all heads.
fn attention_products(qkv: &Type, lse: &Type) -> f64 {
    let tokens = lse.shape.last() as f64;
    2.0 * qkv.shape.count() as f64 / 3.0 * tokens
}

fn scores(lse: &Type) -> f64 {
    (lse.shape.count() * lse.shape.last()) as f64
}
