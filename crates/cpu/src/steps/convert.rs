//! Numbers from one type to another: values on their way to other ranks, end to end in one buffer, and the operands of steps
//! that are stored in another precision than the executor computes in.

use super::{Context, PIECE};
use crate::executor::Operand;
use crate::kernels::{self, Float};
use crate::memory::View;
use graph::DType;
use graph::fp8::Format;
use std::ops::Range;

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn pack<T: Float>(cx: &Context<'_, T>) {
    let flat = cx.output(0);
    let values = &cx.step.inputs;
    each_range(cx, values, |value, r, at| {
        // SAFETY: passed on to the caller; each range has a part of the buffer to itself.
        unsafe { convert((value, r.start), (flat, at), r.len()) };
    });
    cx.each(1, |_, _| {
        let filled = values.iter().map(|value| value.shape.count()).sum::<usize>() * flat.dtype.bytes();
        // SAFETY: what is left of the buffer is this step's own; zero has the same bits in every type.
        unsafe { flat.stored.part(filled..flat.stored.len()).write() }.fill(0);
    });
}

pub unsafe fn unpack<T: Float>(cx: &Context<'_, T>) {
    let flat = cx.input(0);
    each_range(cx, &cx.step.outputs, |value, r, at| {
        // SAFETY: passed on to the caller; ranges don't overlap, and the buffer is only read.
        unsafe { convert((flat, at), (value, r.start), r.len()) };
    });
}

/// Runs `task(value, range of its elements, where that begins if all values lie end to end)` on pieces of values.
fn each_range<T: Float>(
    cx: &Context<'_, T>,
    values: &[Operand<T>],
    task: impl Fn(&Operand<T>, Range<usize>, usize) + Sync,
) {
    let pieces = |value: &Operand<T>| value.shape.count().div_ceil(PIECE);
    cx.each(values.iter().map(pieces).sum(), |mut piece, _| {
        let mut at = 0;
        for value in values {
            let len = value.shape.count();
            if piece < pieces(value) {
                let r = piece * PIECE..((piece + 1) * PIECE).min(len);
                return task(value, r.clone(), at + r.start);
            }
            (piece, at) = (piece - pieces(value), at + len);
        }
    });
}

/// One value as another, whose type may be another.
pub unsafe fn cast<T: Float>(cx: &Context<'_, T>) {
    let (from, to) = (cx.input(0), cx.output(0));
    cx.ranges(to.shape.count(), PIECE, |r, _| {
        // SAFETY: passed on to the caller; pieces don't overlap.
        unsafe { convert((from, r.start), (to, r.start), r.len()) };
    });
}

/// The operands that are stored in another type, as numbers to compute with.
pub unsafe fn widen<T: Float>(cx: &Context<'_, T>) {
    for operand in &cx.step.widened {
        cx.ranges(operand.data.len(), PIECE, |r, _| {
            // SAFETY: pieces don't overlap; what is stored is only read.
            unsafe { load(operand.stored, operand.dtype, r.clone(), operand.data.part(r).write()) };
        });
    }
}

/// The results that are stored in another type, each rounded to it.
pub unsafe fn round<T: Float>(cx: &Context<'_, T>) {
    for operand in &cx.step.rounded {
        cx.ranges(operand.data.len(), PIECE, |r, _| {
            // SAFETY: pieces don't overlap, and the kernel is done.
            unsafe { store(operand.data.part(r.clone()).read(), operand.stored, operand.dtype, r) };
        });
    }
}

/// Numbers that [`convert`] has in hand between two types that are both not the executor's.
const CHUNK: usize = 256;

/// Copies `len` elements from one operand, from an element on, to another, as its type has them.
///
/// # Safety
/// The ranges are apart, and nobody else touches the second.
unsafe fn convert<T: Float>(
    (from, from_at): (&Operand<T>, usize),
    (to, to_at): (&Operand<T>, usize),
    len: usize,
) {
    let (same, bytes) = (from.dtype == to.dtype, from.dtype.bytes());
    let (f, t) = (from_at..from_at + len, to_at..to_at + len);
    // SAFETY: passed on to the caller.
    unsafe {
        if same {
            let [f, t] = [f, t].map(|r| r.start * bytes..r.end * bytes);
            to.stored.part(t).write().copy_from_slice(from.stored.part(f).read());
        } else if from.is_own() {
            store(from.data.part(f).read(), to.stored, to.dtype, t);
        } else if to.is_own() {
            load(from.stored, from.dtype, f, to.data.part(t).write());
        } else {
            let mut numbers = [T::ZERO; CHUNK];
            for at in (0..len).step_by(CHUNK) {
                let numbers = &mut numbers[..CHUNK.min(len - at)];
                load(from.stored, from.dtype, f.start + at..f.start + at + numbers.len(), numbers);
                store(numbers, to.stored, to.dtype, t.start + at..t.start + at + numbers.len());
            }
        }
    }
}

/// Elements of what is stored as numbers to compute with.
///
/// # Safety
/// Nobody writes them meanwhile.
pub(crate) unsafe fn load<T: Float>(stored: View<u8>, dtype: DType, range: Range<usize>, out: &mut [T]) {
    /// # Safety
    /// Conditions of [`load`].
    unsafe fn elements<'a, U: 'static>(stored: View<u8>, range: Range<usize>) -> &'a [U] {
        // SAFETY: passed on to the caller.
        unsafe { stored.cast::<U>(stored.len() / size_of::<U>()).part(range).read() }
    }
    fn each<T: Float, U: Copy>(x: &[U], out: &mut [T], number: impl Fn(U) -> f64) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = T::from_f64(number(*x)));
    }
    // SAFETY: passed on to the caller.
    unsafe {
        match dtype {
            DType::Bf16 => kernels::from_bf16(elements(stored, range), out),
            DType::F16 => kernels::from_f16(elements(stored, range), out),
            DType::F32 => each(elements::<f32>(stored, range), out, f64::from),
            DType::F64 => each(elements::<f64>(stored, range), out, |x| x),
            DType::E4M3 => each(elements(stored, range), out, |bits| Format::E4M3.decode(bits)),
            DType::E5M2 => each(elements(stored, range), out, |bits| Format::E5M2.decode(bits)),
            DType::I32 => each(elements::<i32>(stored, range), out, f64::from),
            DType::U8 => each(elements::<u8>(stored, range), out, f64::from),
        }
    }
}

/// Numbers as elements of another type, each rounded to the nearest.
///
/// # Safety
/// Nobody else touches the elements meanwhile.
pub(crate) unsafe fn store<T: Float>(x: &[T], stored: View<u8>, dtype: DType, range: Range<usize>) {
    /// # Safety
    /// Conditions of [`store`].
    unsafe fn elements<'a, U: 'static>(stored: View<u8>, range: Range<usize>) -> &'a mut [U] {
        // SAFETY: passed on to the caller.
        unsafe { stored.cast::<U>(stored.len() / size_of::<U>()).part(range).write() }
    }
    fn each<T: Float, U>(x: &[T], out: &mut [U], number: impl Fn(f64) -> U) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = number(x.to_f64()));
    }
    // SAFETY: passed on to the caller.
    unsafe {
        match dtype {
            DType::Bf16 => kernels::to_bf16(x, elements(stored, range)),
            DType::F16 => kernels::to_f16(x, elements(stored, range)),
            DType::F32 => each(x, elements::<f32>(stored, range), |x| x as f32),
            DType::F64 => each(x, elements::<f64>(stored, range), |x| x),
            DType::E4M3 => each(x, elements(stored, range), |x| Format::E4M3.encode(x)),
            DType::E5M2 => each(x, elements(stored, range), |x| Format::E5M2.encode(x)),
            DType::I32 => each(x, elements::<i32>(stored, range), |x| x as i32),
            DType::U8 => each(x, elements::<u8>(stored, range), |x| x as u8),
        }
    }
}
