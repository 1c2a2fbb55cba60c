//! Random numbers that are functions of what they are for, rather than of when they were drawn.

/// Odd, with well-spread bits: the step of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output bit.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// One key made of several parts; the order of the parts matters.
pub(crate) fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(GOLDEN, |key, &part| mix(key.wrapping_add(GOLDEN) ^ mix(part.wrapping_add(GOLDEN))))
}

/// A uniform value in -1..1 for each `counter`. 32 bits wide so that a loop over pixels vectorises.
#[inline]
pub(crate) fn noise(counter: u32) -> f32 {
    let mut x = counter;
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    x = (x ^ (x >> 15)).wrapping_mul(0x735a_2d97);
    x ^= x >> 15;
    (x as i32 >> 8) as f32 * (1.0 / (1 << 23) as f32)
}

/// A stream of random numbers that starts from a key.
pub(crate) struct Stream(u64);

impl Stream {
    pub(crate) fn new(key: u64) -> Self {
        Self(key)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Uniform in `low..high`.
    pub(crate) fn between(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.bits() >> 40) as f32 * (1.0 / (1 << 24) as f32);
        low + (high - low) * unit
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    /// Uniform in `0..1`, with all 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in `0..n`; the part by which some values come more often than others is below n / 2⁶⁴.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_every_part_and_on_their_order() {
        assert_ne!(key(&[1, 2]), key(&[2, 1]));
        assert_ne!(key(&[1, 2]), key(&[1, 3]));
        assert_ne!(key(&[1]), key(&[1, 0]));
    }

    #[test]
    fn streams_stay_in_range_and_fill_it() {
        let mut stream = Stream::new(3);
        let draws: Vec<f32> = (0..10_000).map(|_| stream.between(-2.0, 6.0)).collect();
        assert!(draws.iter().all(|x| (-2.0..6.0).contains(x)));
        let mean = draws.iter().sum::<f32>() / draws.len() as f32;
        assert!((mean - 2.0).abs() < 0.1, "mean {mean}");
    }

    #[test]
    fn whole_numbers_below_a_bound_are_equally_frequent() {
        let mut stream = Stream::new(5);
        let mut seen = [0; 7];
        (0..70_000).for_each(|_| seen[stream.below(7) as usize] += 1);
        assert!(seen.iter().all(|n| (9_600..10_400).contains(n)), "{seen:?}");
    }

    #[test]
    fn noise_is_centred_and_uniform() {
        let draws: Vec<f32> = (0..100_000).map(noise).collect();
        assert!(draws.iter().all(|x| (-1.0..1.0).contains(x)));
        let mean = draws.iter().sum::<f32>() / draws.len() as f32;
        let variance = draws.iter().map(|x| x * x).sum::<f32>() / draws.len() as f32;
        assert!(mean.abs() < 0.01, "mean {mean}");
        assert!((variance - 1.0 / 3.0).abs() < 0.01, "variance {variance}");
    }
}
