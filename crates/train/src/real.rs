//! The numbers of a run: f32, or f64 to check with.

use crate::tensors::Stored;
use comm::Element;
use cpu::Float;
use graph::DType;

/// What the executor computes with, ranks exchange and files hold.
pub trait Real: Float + Stored + Element {
    const DTYPE: DType;
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;
}

/// Copies images and weights, which are read as f32.
pub fn copy<T: Real>(from: &[f32], into: &mut [T]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = T::from_f64(f64::from(*from));
    }
}
