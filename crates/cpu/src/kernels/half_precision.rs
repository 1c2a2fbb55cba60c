//! Conversion to and from 16 bits: communication of gradients, and storage of plans in half precision.

use super::float::Float;
use super::level::simd;
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

simd! {
    /// Rounds to the nearest bf16, ties to even; NaN stays NaN.
    pub fn to_bf16<T, FMA>(x: &[T], out: &mut [u16]) {
        assert_eq!(x.len(), out.len(), "to_bf16: lengths differ");
        for (out, &x) in out.iter_mut().zip(x) {
            let bits = (x.to_f64() as f32).to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *out = (if is_nan { bits | 0x0040_0000 } else { rounded } >> 16) as u16;
        }
    }

    pub fn from_bf16<T, FMA>(x: &[u16], out: &mut [T]) {
        assert_eq!(x.len(), out.len(), "from_bf16: lengths differ");
        for (out, &x) in out.iter_mut().zip(x) {
            *out = T::from_f64(f64::from(f32::from_bits(u32::from(x) << 16)));
        }
    }
}

/// Elements converted at once: the crate has instructions for slices of `f32`.
const CHUNK: usize = 256;

/// Rounds to the nearest f16, ties to even; beyond its range, infinity.
pub fn to_f16<T: Float>(x: &[T], out: &mut [u16]) {
    assert_eq!(x.len(), out.len(), "to_f16: lengths differ");
    let mut floats = [0f32; CHUNK];
    for (x, out) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        floats.iter_mut().zip(x).for_each(|(float, x)| *float = x.to_f64() as f32);
        out.reinterpret_cast_mut::<f16>().convert_from_f32_slice(&floats[..x.len()]);
    }
}

pub fn from_f16<T: Float>(x: &[u16], out: &mut [T]) {
    assert_eq!(x.len(), out.len(), "from_f16: lengths differ");
    let mut floats = [0f32; CHUNK];
    for (x, out) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        x.reinterpret_cast::<f16>().convert_to_f32_slice(&mut floats[..x.len()]);
        out.iter_mut().zip(&floats).for_each(|(out, float)| *out = T::from_f64(f64::from(*float)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::level::forced::at_every_level;
    use half::bf16;

    fn samples() -> Vec<f32> {
        let some = [0.0, -0.0, 1.0, -1.5, 1e-40, 3.4e38, 65504.0, 65520.0, 1e-8, f32::INFINITY];
        let ties = (0..4000u32).map(|i| f32::from_bits(0x3f80_0000 + i * 0x1000));
        some.into_iter().chain(ties).chain((0..999).map(|i| (i as f32 - 500.0) * 0.0173)).collect()
    }

    #[test]
    fn halves_are_those_of_the_half_crate() {
        let x = samples();
        let doubles: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let bf16: Vec<u16> = x.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        let f16: Vec<u16> = x.iter().map(|x| half::f16::from_f32(*x).to_bits()).collect();
        at_every_level(|level| {
            let mut out = vec![0; x.len()];
            to_bf16(&x, &mut out);
            assert!(out == bf16, "{level:?}");
            to_bf16(&doubles, &mut out);
            assert!(out == bf16, "{level:?}");
            to_f16(&x, &mut out);
            assert!(out == f16, "{level:?}");
        });
    }

    #[test]
    fn there_and_back_is_exact() {
        let every: Vec<u16> = (0..=u16::MAX).filter(|h| !half::f16::from_bits(*h).is_nan()).collect();
        let (mut floats, mut back) = (vec![0f32; every.len()], vec![0; every.len()]);
        from_f16(&every, &mut floats);
        to_f16(&floats, &mut back);
        assert!(back == every);
        let every: Vec<u16> = (0..=u16::MAX).filter(|h| !bf16::from_bits(*h).is_nan()).collect();
        let (mut doubles, mut back) = (vec![0f64; every.len()], vec![0; every.len()]);
        from_bf16(&every, &mut doubles);
        to_bf16(&doubles, &mut back);
        assert!(back == every);
    }

    #[test]
    fn nan_stays_nan() {
        let mut out = [0; 2];
        to_bf16(&[f32::NAN, f32::from_bits(0x7f80_0001)], &mut out);
        assert!(out.iter().all(|h| bf16::from_bits(*h).is_nan()));
        to_f16(&[f32::NAN, -f32::NAN], &mut out);
        assert!(out.iter().all(|h| half::f16::from_bits(*h).is_nan()));
    }
}
