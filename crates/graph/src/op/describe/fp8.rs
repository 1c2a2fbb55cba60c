//! Matmuls in fp8, and the scales of their operands.

use crate::op::slots::Class::{Exactly, Float, Fp8, Full, LikeResult};
use crate::op::slots::{Description, require};
use crate::types::DType;

pub(super) fn quantize(to: DType, transposed: bool, accumulate: bool) -> Description {
    Description::none()
        .takes("x", "..,C", Float)
        .takes("scale", "S", Full)
        .takes_if(accumulate, "largest so far", "1", Full)
        .check(move |l| is_format(to).and_then(|()| has_history(l.get("S"))))
        .set("rows", |l| Ok(l.operand(0).shape.rows()))
        .gives("", "..,C", Exactly(to))
        .gives_if(transposed, "transposed", "C,rows", Exactly(to))
        .gives("largest", "1", Full)
        .over_if(accumulate, 2)
}

pub(super) fn scaled_matmul(to: DType, bias: bool, accumulate: bool) -> Description {
    let in_full = matches!(to, DType::F32 | DType::F64);
    Description::none()
        .takes("a", "..,K", Fp8)
        .takes("b", "N,K", Fp8)
        .takes("scale of a", "S", Full)
        .takes("scale of b", "R", Full)
        .takes_if(bias, "bias", "N", LikeResult)
        .takes_if(accumulate, "sum so far", "..,N", Full)
        .check(move |_| require(to.is_float(), || format!("can't give {to}")))
        .check(move |_| require(in_full || !accumulate, || format!("can't add up in {to}")))
        .gives("", "..,N", Exactly(to))
        .over_if(accumulate, 4 + usize::from(bias))
        .multiplies()
}

pub(super) fn rescale(to: DType) -> Description {
    Description::none()
        .takes("scale", "S", Full)
        .takes("largest", "1", Full)
        .check(move |l| is_format(to).and_then(|()| has_history(l.get("S"))))
        .gives("", "S", Full)
        .over(0)
}

fn is_format(to: DType) -> Result<(), String> {
    require(to.is_fp8(), || format!("scales numbers of 8 bits, not {to}"))
}

/// A scale follows at least one largest value.
fn has_history(numbers: usize) -> Result<(), String> {
    require(numbers > 1, || "needs a scale and the largest values that it follows".to_string())
}
