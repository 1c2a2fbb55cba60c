//! Reductions over the ranks' elements: the same code for every host engine, so that all get the same bits.
//!
//! Elements are combined in the order of the ranks, in a wider type where there is one, and rounded once at the end.

use crate::element::{ElementType, Reduction};
use half::{bf16, f16};
use std::mem::MaybeUninit;

/// Number of elements combined at a time: with two sources they stay in the L1 cache.
const CHUNK: usize = 2048;

/// Combines `len` elements from each of `ranks` sources, and writes the result to each of `copies` places.
///
/// # Safety
/// `source(rank)` is readable and `place(copy)` writable for `len` elements of the kind, aligned for it, and nobody else
/// writes the former or touches the latter meanwhile. A place may be a source; otherwise they don't overlap.
pub(crate) unsafe fn reduce(
    kind: ElementType,
    reduction: Reduction,
    ranks: usize,
    len: usize,
    source: &dyn Fn(usize) -> *const u8,
    copies: usize,
    place: &dyn Fn(usize) -> *mut u8,
) {
    let job = Job { ranks, len, source, copies, place };
    // SAFETY: passed on to the caller.
    unsafe {
        match kind {
            ElementType::F32 => job.run::<f32>(reduction),
            ElementType::F64 => job.run::<f64>(reduction),
            ElementType::Bf16 => job.run::<bf16>(reduction),
            ElementType::F16 => job.run::<f16>(reduction),
            ElementType::U8 => job.run::<u8>(reduction),
            ElementType::I32 => job.run::<i32>(reduction),
            ElementType::I64 => job.run::<i64>(reduction),
            ElementType::U64 => job.run::<u64>(reduction),
        }
    }
}

/// Element type with the type in which it is accumulated.
trait Number: Copy {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// The greater one; NaN if one is, so that a maximum doesn't hide it.
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(a: Self::Wide, ranks: usize) -> Self::Wide;
}

macro_rules! float {
    ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Number for $type {
            type Wide = $wide;

            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }

            #[inline(always)]
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }

            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide {
                if b > a || b.is_nan() { b } else { a }
            }

            #[inline(always)]
            fn divide(a: $wide, ranks: usize) -> $wide {
                a / ranks as $wide
            }
        }
    };
}

macro_rules! integer {
    ($type:ty, $wide:ty) => {
        impl Number for $type {
            type Wide = $wide;

            #[inline(always)]
            fn widen(self) -> $wide {
                <$wide>::from(self)
            }

            #[inline(always)]
            fn narrow(wide: $wide) -> $type {
                wide as $type
            }

            #[inline(always)]
            fn add(a: $wide, b: $wide) -> $wide {
                a.wrapping_add(b)
            }

            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide {
                a.max(b)
            }

            #[inline(always)]
            fn divide(a: $wide, ranks: usize) -> $wide {
                a / ranks as $wide
            }
        }
    };
}

float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(bf16, f32, widen_bf16, narrow_bf16);
float!(f16, f32, widen_f16, narrow_f16);
integer!(u8, u32);
integer!(i32, i64);
integer!(i64, i64);
integer!(u64, u64);

// The conversions of `half` ask for the processor's features at every element; these are plain arithmetic that
// the compiler can do many at a time.

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[inline(always)]
fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let even = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if x.is_nan() { bits >> 16 | 0x40 } else { even } as u16)
}

#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    // The exponent's bias differs by 112; multiplying sets it right for denormal numbers too.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let unbounded = if bits & 0x7c00 == 0x7c00 { 0xff << 23 } else { 0 };
    f32::from_bits(magnitude.to_bits() | unbounded | (bits & 0x8000) << 16)
}

#[inline(always)]
fn narrow_f16(x: f32) -> f16 {
    let sign = x.to_bits() & 0x8000_0000;
    let bits = x.to_bits() ^ sign;
    // Adding this puts the bits of a number too small for an exponent where they belong, rounded to even.
    let denormal = f32::from_bits((127 - 15 + 23 - 10 + 1) << 23);
    let small = (f32::from_bits(bits) + denormal).to_bits().wrapping_sub(denormal.to_bits());
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
    let unbounded = if bits > 0xff << 23 { 0x7e00 } else { 0x7c00 };
    let magnitude = if bits >= (127 + 16) << 23 {
        unbounded
    } else if bits < (127 - 14) << 23 {
        small
    } else {
        normal
    };
    f16::from_bits((magnitude | sign >> 16) as u16)
}

#[derive(Clone, Copy)]
struct Job<'a> {
    ranks: usize,
    len: usize,
    source: &'a dyn Fn(usize) -> *const u8,
    copies: usize,
    place: &'a dyn Fn(usize) -> *mut u8,
}

impl Job<'_> {
    /// # Safety
    /// As [`reduce`], for elements of type `T`.
    unsafe fn run<T: Number>(self, reduction: Reduction) {
        // SAFETY: passed on to the caller.
        unsafe {
            match reduction {
                Reduction::Sum => self.at_level::<T>(T::add, |x, _| x),
                Reduction::Mean => self.at_level::<T>(T::add, T::divide),
                Reduction::Max => self.at_level::<T>(T::max, |x, _| x),
            }
        }
    }

    /// Runs the loops compiled for the best instruction set that this machine has.
    ///
    /// # Safety
    /// As [`reduce`], for elements of type `T`.
    #[inline(always)]
    unsafe fn at_level<T: Number>(
        self,
        combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        end: impl Fn(T::Wide, usize) -> T::Wide + Copy,
    ) {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2")]
            unsafe fn avx512<T: Number>(
                job: Job<'_>,
                combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
                end: impl Fn(T::Wide, usize) -> T::Wide + Copy,
            ) {
                // SAFETY: passed on to the caller.
                unsafe { job.chunks::<T>(combine, end) }
            }

            #[target_feature(enable = "avx2")]
            unsafe fn avx2<T: Number>(
                job: Job<'_>,
                combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
                end: impl Fn(T::Wide, usize) -> T::Wide + Copy,
            ) {
                // SAFETY: passed on to the caller.
                unsafe { job.chunks::<T>(combine, end) }
            }

            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
            {
                // SAFETY: the processor has every feature named above; the rest is passed on to the caller.
                return unsafe { avx512::<T>(self, combine, end) };
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has AVX2; the rest is passed on to the caller.
                return unsafe { avx2::<T>(self, combine, end) };
            }
        }
        // SAFETY: passed on to the caller.
        unsafe { self.chunks::<T>(combine, end) }
    }

    /// # Safety
    /// As [`reduce`], for elements of type `T`.
    #[inline(always)]
    unsafe fn chunks<T: Number>(
        self,
        combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        end: impl Fn(T::Wide, usize) -> T::Wide + Copy,
    ) {
        let mut room = [const { MaybeUninit::<T::Wide>::uninit() }; CHUNK];
        let mut at = 0;
        while at < self.len {
            let len = CHUNK.min(self.len - at);
            let room = &mut room[..len];
            // SAFETY: `at` and the chunk's length stay within `len`, for which the caller vouches.
            let source = |rank: usize| unsafe {
                std::slice::from_raw_parts((self.source)(rank).cast::<T>().add(at), len)
            };
            // SAFETY: as above.
            let place = |copy: usize| unsafe { (self.place)(copy).cast::<T>().add(at) };
            if self.ranks == 1 {
                room.iter_mut().zip(source(0)).for_each(|(sum, a)| _ = sum.write(a.widen()));
            } else {
                let pairs = source(0).iter().zip(source(1));
                let both = |(a, b): (&T, &T)| combine(a.widen(), b.widen());
                room.iter_mut().zip(pairs).for_each(|(sum, pair)| _ = sum.write(both(pair)));
            }
            // SAFETY: every element of the chunk was just written.
            let sums = unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast::<T::Wide>(), len) };
            for rank in 2..self.ranks {
                sums.iter_mut().zip(source(rank)).for_each(|(sum, a)| *sum = combine(*sum, a.widen()));
            }
            // SAFETY: the slices of the sources have ended, so a place that was one of them may be written.
            let first = unsafe { std::slice::from_raw_parts_mut(place(0), len) };
            let ranks = self.ranks;
            first.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(end(*sum, ranks)));
            for copy in 1..self.copies {
                // SAFETY: places don't overlap, by the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(place(0), place(copy), len) };
            }
            at += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_floats_convert_as_the_library_does() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            if h.is_nan() {
                assert!(widen_f16(h).is_nan());
            } else {
                assert_eq!(widen_f16(h).to_bits(), h.to_f32().to_bits(), "{bits:04x}");
            }
            if b.is_nan() {
                assert!(widen_bf16(b).is_nan());
            } else {
                assert_eq!(widen_bf16(b).to_bits(), b.to_f32().to_bits(), "{bits:04x}");
            }
        }
        // Every exponent and sign with mantissas around where rounding changes.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                if x.is_nan() {
                    assert!(narrow_f16(x).is_nan() && narrow_bf16(x).is_nan());
                } else {
                    assert_eq!(narrow_f16(x).to_bits(), f16::from_f32(x).to_bits(), "{x:e}");
                    assert_eq!(narrow_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn places_may_be_sources_and_chunks_join() {
        for len in [0, 1, 63, CHUNK, CHUNK + 1, 5000] {
            let mut data: Vec<Vec<f32>> =
                (0..3).map(|r| (0..len).map(|i| (r * 1000 + i) as f32).collect()).collect();
            let at: Vec<*mut u8> = data.iter_mut().map(|d| d.as_mut_ptr().cast()).collect();
            // SAFETY: three buffers of `len` that nobody else has.
            unsafe { reduce(ElementType::F32, Reduction::Sum, 3, len, &|r| at[r], 3, &|c| at[(c + 1) % 3]) };
            let expected: Vec<f32> = (0..len).map(|i| (3000 + 3 * i) as f32).collect();
            assert!(data.iter().all(|d| *d == expected), "{len}");
        }
    }

    #[test]
    fn a_maximum_keeps_nan_and_a_mean_does_not_overflow() {
        let floats = [[1.0f32, f32::NAN], [f32::NAN, 2.0]];
        let mut out = [0.0f32; 2];
        let into = out.as_mut_ptr();
        // SAFETY: buffers of two.
        unsafe {
            reduce(ElementType::F32, Reduction::Max, 2, 2, &|r| floats[r].as_ptr().cast(), 1, &|_| {
                into.cast()
            });
        }
        assert!(out.iter().all(|x| x.is_nan()));
        let bytes = [[200u8], [100]];
        let mut out = [0u8];
        let into = out.as_mut_ptr();
        // SAFETY: buffers of one.
        unsafe { reduce(ElementType::U8, Reduction::Mean, 2, 1, &|r| bytes[r].as_ptr(), 1, &|_| into) };
        assert_eq!(out, [150]);
        // SAFETY: as above.
        unsafe { reduce(ElementType::U8, Reduction::Sum, 2, 1, &|r| bytes[r].as_ptr(), 1, &|_| into) };
        assert_eq!(out, [44]);
    }
}
