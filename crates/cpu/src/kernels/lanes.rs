//! Reductions in a fixed number of lanes, so that they vectorise and always sum in the same order.

use super::float::Float;

/// Four 256-bit or two 512-bit registers of `f32`: enough independent sums to hide the latency of an addition.
pub const LANES: usize = 32;

/// Weights of the last N values of a row: 0 for those that whole blocks of N from the left have covered, 1 for the
/// others. A multiplication by these stays a vector instruction where a comparison of indices turns into jumps.
#[inline(always)]
pub fn leftover_weights<T: Float, const N: usize>(row_len: usize) -> [T; N] {
    let (mut weights, left_over) = ([T::ZERO; N], row_len % N);
    weights.copy_from_slice(&Steps::<T>::TABLE[LANES - N + left_over..LANES + left_over]);
    weights
}

struct Steps<T>(std::marker::PhantomData<T>);

impl<T: Float> Steps<T> {
    /// Table of [`LANES`] zeros, then as many ones.
    const TABLE: [T; 2 * LANES] = {
        let mut table = [T::ZERO; 2 * LANES];
        let mut i = LANES;
        while i < 2 * LANES {
            table[i] = T::ONE;
            i += 1;
        }
        table
    };
}

/// Σ term(a[i], b[i]). A ragged end is read as one whole block that overlaps the block before it.
#[inline(always)]
pub fn sum_pairs<T: Float>(a: &[T], b: &[T], term: impl Fn(T, T) -> T) -> T {
    let (Some(a_end), Some(b_end)) = (a.last_chunk::<LANES>(), b.last_chunk::<LANES>()) else {
        return a.iter().zip(b).fold(T::ZERO, |sum, (&a, &b)| sum + term(a, b));
    };
    let mut sums = [T::ZERO; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            sums[i] += term(a[i], b[i]);
        }
    }
    if !a.len().is_multiple_of(LANES) {
        let weights = leftover_weights::<T, LANES>(a.len());
        for i in 0..LANES {
            sums[i] += term(a_end[i], b_end[i]) * weights[i];
        }
    }
    sum_lanes(sums)
}

#[inline(always)]
pub fn sum<T: Float>(x: &[T]) -> T {
    sum_pairs(x, x, |x, _| x)
}

/// Σ x² in double precision.
#[inline(always)]
pub fn squares<T: Float, const FMA: bool>(x: &[T]) -> f64 {
    let mut sums = [0.0; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            let x = block[i].to_f64();
            sums[i] = Float::mul_add::<FMA>(x, x, sums[i]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x.to_f64() * x.to_f64();
    }
    sum_lanes(sums)
}

#[inline(always)]
pub fn sum_lanes<T: Float, const N: usize>(lanes: [T; N]) -> T {
    join_lanes(lanes, |a, b| a + b)
}

/// Joins the lanes pairwise, in an order that depends on N alone.
///
/// The opaque references keep LLVM from seeing this tree and the loop before it as one: it would shape the registers
/// of the loop after the tree's pairs, in odd pieces, instead of keeping whole vectors.
#[inline(always)]
pub fn join_lanes<T: Float, const N: usize>(lanes: [T; N], join: impl Fn(T, T) -> T) -> T {
    const { assert!(N >= 16 && N.is_multiple_of(16)) };
    let lanes = std::hint::black_box(&lanes);
    let mut sixteen: [T; 16] = std::array::from_fn(|i| lanes[i]);
    for others in lanes[16..].as_chunks::<16>().0 {
        for i in 0..16 {
            sixteen[i] = join(sixteen[i], others[i]);
        }
    }
    let sixteen = if N == 16 { &sixteen } else { std::hint::black_box(&sixteen) };
    let eight: [T; 8] = std::array::from_fn(|i| join(sixteen[i], sixteen[i + 8]));
    let four: [T; 4] = std::array::from_fn(|i| join(eight[i], eight[i + 4]));
    join(join(four[0], four[2]), join(four[1], four[3]))
}
