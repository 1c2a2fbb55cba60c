//! Operands in memory, and what a step borrows beside the plan's memory.
//!
//! An executor computes in one type. What a plan stores in another (half precision; f32, where doubles are computed) is
//! widened before its step runs, and rounded to its type behind it: kernels know one type, and every plan can run. The wide
//! numbers, and working memory that a plan doesn't have, lie in a block that the executor holds beside the arena and the
//! states, as large as the step that needs most. All such steps use the same block, so that each of them runs alone.

use super::bind::Bound;
use crate::error::CpuError;
use crate::kernels::Float;
use crate::memory::{Block, View};
use graph::ALIGN;
use graph::{DType, Shape, Type};

/// A value of a bound plan: where it is and how it is shaped.
#[derive(Clone)]
pub(crate) struct Operand<T> {
    /// The numbers that kernels see: those that are stored, if they are of type `T`, else what they are widened to.
    pub data: View<T>,
    /// The same, of whole numbers.
    pub ints: View<i32>,
    /// The same, of sums in double precision, which are never rounded.
    pub doubles: View<f64>,
    /// Bytes in the plan's memory.
    pub stored: View<u8>,
    pub dtype: DType,
    pub shape: Shape,
}

impl<T: Float> Operand<T> {
    pub fn new(name: &str, ty: &Type, stored: View<u8>, sums: bool) -> Result<Self, CpuError> {
        if !sums {
            check_dtype::<T>(name, ty)?;
        }
        let Type { dtype, shape } = ty.clone();
        let count = shape.count();
        let data = if dtype == own::<T>() { stored.cast(count) } else { View::EMPTY };
        let ints = if dtype == DType::I32 { stored.cast(count) } else { View::EMPTY };
        let doubles = if dtype == DType::F64 { stored.cast(count) } else { View::EMPTY };
        Ok(Operand { data, ints, doubles, stored, dtype, shape })
    }

    /// True for operands that are stored in the type they are computed in.
    pub fn is_own(&self) -> bool {
        self.dtype == own::<T>()
    }

    /// True for floats that are stored in another type.
    fn is_foreign(&self) -> bool {
        !self.is_own() && !matches!(self.dtype, DType::I32 | DType::U8 | DType::F64)
    }

    fn lies_with(&self, other: &Self) -> bool {
        self.stored.same_place(&other.stored) && self.stored.len() == other.stored.len()
    }
}

/// The type that an executor computes in.
pub(super) fn own<T: Float>() -> DType {
    if size_of::<T>() == size_of::<f64>() { DType::F64 } else { DType::F32 }
}

/// Refuses f64 in an executor of f32, except sums that a kernel takes as f64: nothing is rounded in silence.
pub(super) fn check_dtype<T: Float>(name: &str, ty: &Type) -> Result<(), CpuError> {
    let computes = own::<T>();
    if ty.dtype == DType::F64 && computes != DType::F64 {
        return Err(CpuError::DType { name: name.to_string(), ty: ty.clone(), computes });
    }
    Ok(())
}

/// Parts of a block, one behind the other; without a block they are only counted.
struct Parts<'a> {
    block: Option<&'a Block>,
    bytes: usize,
}

impl Parts<'_> {
    fn take<U>(&mut self, count: usize) -> View<U> {
        let offset = self.bytes;
        self.bytes += (count * size_of::<U>()).next_multiple_of(ALIGN);
        self.block.map_or(View::EMPTY, |block| block.view(offset, count))
    }
}

impl<T: Float> Bound<T> {
    /// Gives the step what it needs beside the plan's memory, or without a block, counts it: the bytes.
    pub fn borrow(&mut self, block: Option<&Block>) -> usize {
        let mut parts = Parts { block, bytes: 0 };
        if self.scratch.len() < self.kernel.scratch {
            self.scratch = parts.take(self.kernel.scratch);
        }
        if !self.kernel.reads_stored {
            // An operand that lies where another does is the same numbers, or is written over them: so it is, too, when wide.
            let mut wide: Vec<Operand<T>> = vec![];
            for operand in self.inputs.iter_mut().chain(&mut self.outputs).filter(|o| o.is_foreign()) {
                operand.data = match wide.iter().find(|other| other.lies_with(operand)) {
                    Some(other) => other.data,
                    None => parts.take(operand.shape.count()),
                };
                wide.push(operand.clone());
            }
            self.widened = distinct(&self.inputs);
            self.rounded = distinct(&self.outputs);
        }
        self.borrowed = parts.bytes;
        parts.bytes
    }
}

/// Operands that are stored in another type, each place once.
fn distinct<T: Float>(operands: &[Operand<T>]) -> Vec<Operand<T>> {
    let mut found: Vec<Operand<T>> = vec![];
    for operand in operands.iter().filter(|o| o.is_foreign()) {
        if !found.iter().any(|other| other.lies_with(operand)) {
            found.push(operand.clone());
        }
    }
    found
}
