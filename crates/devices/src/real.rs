//! The numbers of a run: f32, or f64 to check with.

use crate::device::{Device, Seat};
use crate::error::DeviceError;
use crate::gpu::Gpu;
use comm::Element;
use config::{NO_FP64, Resolved};
use cpu::Float;
use formats::tensors::Stored;
use graph::{DType, Program};
use std::borrow::Cow;

/// What the host computes with, ranks exchange and files hold.
pub trait Real: Float + Stored + Element {
    const DTYPE: DType;

    /// Numbers as f32, copied only if they are others.
    fn singles(values: Cow<'_, [Self]>) -> Cow<'_, [f32]>
    where
        [Self]: ToOwned;

    /// Opens a GPU, which was found to be there.
    fn on_cuda(run: &Resolved, program: Program, seat: &Seat) -> Result<Box<dyn Device<Self>>, DeviceError>;
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;

    fn singles(values: Cow<'_, [f32]>) -> Cow<'_, [f32]> {
        values
    }

    fn on_cuda(run: &Resolved, program: Program, seat: &Seat) -> Result<Box<dyn Device<f32>>, DeviceError> {
        Ok(Box::new(Gpu::open(run, program, seat)?))
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;

    fn singles(values: Cow<'_, [f64]>) -> Cow<'_, [f32]> {
        values.iter().map(|x| *x as f32).collect()
    }

    fn on_cuda(run: &Resolved, _program: Program, _seat: &Seat) -> Result<Box<dyn Device<f64>>, DeviceError> {
        Err(DeviceError::setting("precision", run.precision, NO_FP64))
    }
}

/// Copies images and weights, which are read as f32.
pub fn copy<T: Real>(from: &[f32], into: &mut [T]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = T::from_f64(f64::from(*from));
    }
}
