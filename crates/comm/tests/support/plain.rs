//! What each collective should give, written down as plainly as can be.

use comm::{Element, Reduction};
use half::{bf16, f16};
use testing::Random;

/// An element that the tests can make up, compare to the bit, and reduce.
pub trait Sample: Element + std::fmt::Debug + Default {
    fn sample(rng: &mut Random) -> Self;
    fn bits(self) -> u64;
    fn reduce(values: &[Self], reduction: Reduction) -> Self;
}

macro_rules! float {
    ($type:ty, $bits:ty, $wide:ty, $from:expr, $to:expr) => {
        impl Sample for $type {
            fn sample(rng: &mut Random) -> Self {
                let from: fn($wide) -> $type = $from;
                from((rng.real() * f64::powi(2.0, rng.below(12) as i32)) as $wide)
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }

            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let (to, from): (fn($type) -> $wide, fn($wide) -> $type) = ($to, $from);
                let mut result = to(values[0]);
                for &value in &values[1..] {
                    match reduction {
                        Reduction::Sum | Reduction::Mean => result += to(value),
                        Reduction::Max => result = result.max(to(value)),
                    }
                }
                from(if reduction == Reduction::Mean { result / values.len() as $wide } else { result })
            }
        }
    };
}

float!(f32, u32, f32, |x| x, |x| x);
float!(f64, u64, f64, |x| x, |x| x);
float!(bf16, u16, f32, bf16::from_f32, bf16::to_f32);
float!(f16, u16, f32, f16::from_f32, f16::to_f32);

macro_rules! integer {
    ($type:ty, $sample:expr) => {
        impl Sample for $type {
            fn sample(rng: &mut Random) -> Self {
                let sample: fn(u64) -> $type = $sample;
                sample(rng.next())
            }

            fn bits(self) -> u64 {
                self as u64
            }

            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let sum: i128 = values.iter().map(|&v| v as i128).sum();
                match reduction {
                    Reduction::Sum => sum as $type,
                    Reduction::Mean => (sum / values.len() as i128) as $type,
                    Reduction::Max => values.iter().copied().max().unwrap(),
                }
            }
        }
    };
}

// Sums of the first two wrap; a mean of 64 bits is only defined while the sum does not.
integer!(u8, |x| x as u8);
integer!(i32, |x| x as i32);
integer!(i64, |x| x as i64 >> 4);
integer!(u64, |x| x >> 4);

pub fn bits<E: Sample>(values: &[E]) -> Vec<u64> {
    values.iter().map(|v| v.bits()).collect()
}

/// What all ranks have, made up from a seed: every rank knows all of it.
pub fn inputs<E: Sample>(seed: u64, ranks: usize, len: impl Fn(usize) -> usize) -> Vec<Vec<E>> {
    (0..ranks)
        .map(|rank| {
            let mut rng = Random::seeded(seed ^ (rank as u64 + 1) << 40);
            (0..len(rank)).map(|_| E::sample(&mut rng)).collect()
        })
        .collect()
}

pub fn reduced<E: Sample>(inputs: &[Vec<E>], reduction: Reduction) -> Vec<E> {
    let column = |i: usize| inputs.iter().map(|input| input[i]).collect::<Vec<_>>();
    (0..inputs[0].len()).map(|i| E::reduce(&column(i), reduction)).collect()
}
