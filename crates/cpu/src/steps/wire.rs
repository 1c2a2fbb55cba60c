//! Values on their way to other ranks: end to end in one buffer, perhaps of another type.

use super::{Context, PIECE};
use crate::executor::Operand;
use crate::kernels::{self, Float};
use graph::DType;

/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn pack<T: Float>(cx: &Context<'_, T>) {
    let flat = cx.output(0);
    let mut at = 0;
    for value in &cx.step.inputs {
        let len = value.shape.count();
        // SAFETY: passed on to the caller; each value has a part of the buffer to itself.
        unsafe { convert(cx, (value, 0), (flat, at), len) };
        at += len;
    }
    // SAFETY: what is left of the buffer is this step's own; zero has the same bits in every type.
    unsafe {
        flat.data.part(at.min(flat.data.len())..flat.data.len()).write().fill(T::ZERO);
        flat.halves.part(at.min(flat.halves.len())..flat.halves.len()).write().fill(0);
    }
}

pub unsafe fn unpack<T: Float>(cx: &Context<'_, T>) {
    let flat = cx.input(0);
    let mut at = 0;
    for value in &cx.step.outputs {
        let len = value.shape.count();
        // SAFETY: passed on to the caller; the buffer is only read.
        unsafe { convert(cx, (flat, at), (value, 0), len) };
        at += len;
    }
}

pub unsafe fn cast<T: Float>(cx: &Context<'_, T>) {
    let (from, to) = (cx.input(0), cx.output(0));
    // SAFETY: passed on to the caller.
    unsafe { convert(cx, (from, 0), (to, 0), to.shape.count()) };
}

/// Copies `len` elements from one operand, from an element on, to another, as its type has them.
///
/// # Safety
/// The ranges are apart, and nobody else touches the second.
unsafe fn convert<T: Float>(
    cx: &Context<'_, T>,
    (from, from_at): (&Operand<T>, usize),
    (to, to_at): (&Operand<T>, usize),
    len: usize,
) {
    let own = |dtype: DType| !dtype.is_half();
    cx.ranges(len, PIECE, |r, _| {
        let (f, t) = (from_at + r.start..from_at + r.end, to_at + r.start..to_at + r.end);
        // SAFETY: pieces don't overlap; the rest is passed on to the caller.
        unsafe {
            match (from.dtype, to.dtype) {
                (a, b) if own(a) && own(b) => {
                    to.data.part(t).write().copy_from_slice(from.data.part(f).read());
                }
                (_, DType::Bf16) => kernels::to_bf16(from.data.part(f).read(), to.halves.part(t).write()),
                (_, DType::F16) => kernels::to_f16(from.data.part(f).read(), to.halves.part(t).write()),
                (DType::Bf16, _) => kernels::from_bf16(from.halves.part(f).read(), to.data.part(t).write()),
                _ => kernels::from_f16(from.halves.part(f).read(), to.data.part(t).write()),
            }
        }
    });
}
