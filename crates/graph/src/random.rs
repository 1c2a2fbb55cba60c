//! Counter-based random numbers: Philox 4x32-10 (Salmon et al., 2011).
//!
//! Every draw is a pure function of what it is for, so that recompute, fusion, sharding, the number of ranks and
//! the number of threads change nothing. The executors of all devices use these same functions.

use crate::graph::Init;

const MULTIPLIERS: (u32, u32) = (0xD251_1F53, 0xCD9E_8D57);
const WEYL: (u32, u32) = (0x9E37_79B9, 0xBB67_AE85);

/// Four random words for a 128-bit counter under a 64-bit key.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLIERS.0) * u64::from(c0);
        let p1 = u64::from(MULTIPLIERS.1) * u64::from(c2);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL.0);
        k1 = k1.wrapping_add(WEYL.1);
    }
    [c0, c1, c2, c3]
}

/// The draws of one random op for one sample: a function of (seed, step, site, sample).
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: [u32; 2],
    site: u32,
    sample: u32,
}

impl Stream {
    /// The draws of a sample at a site, in a step.
    pub fn new(seed: u64, step: u64, site: u32, sample: u64) -> Self {
        // The high half of the sample number and the step are folded into the key, which the seed spreads.
        let key = seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (sample >> 32).rotate_left(48);
        Stream { key: [key as u32, (key >> 32) as u32], site, sample: sample as u32 }
    }

    /// Four words for channels 4·`block` to 4·`block`+3 of `token`.
    #[inline(always)]
    pub fn words(&self, token: u32, block: u32) -> [u32; 4] {
        philox([block, token, self.sample, self.site], self.key)
    }

    /// One word for the whole sample (stochastic depth).
    pub fn word(&self) -> u32 {
        self.words(0, 0)[0]
    }
}

/// The threshold under which a word means "dropped", for a rate in [0, 1).
pub fn drop_threshold(rate: f64) -> u32 {
    (rate * 4_294_967_296.0).min(4_294_967_295.0) as u32
}

/// A sequence of numbers for one purpose, such as the initial values of one tensor.
pub struct Sequence {
    key: [u32; 2],
    site: u32,
    block: u32,
    words: [u32; 4],
    used: usize,
}

impl Sequence {
    /// A sequence of its own for every seed and site.
    pub fn new(seed: u64, site: u32) -> Self {
        Sequence { key: [seed as u32, (seed >> 32) as u32], site, block: 0, words: [0; 4], used: 4 }
    }

    fn word(&mut self) -> u32 {
        if self.used == 4 {
            self.words = philox([self.block, 0, 0, self.site], self.key);
            self.block += 1;
            self.used = 0;
        }
        self.used += 1;
        self.words[self.used - 1]
    }

    /// Uniform in (0, 1).
    pub fn uniform(&mut self) -> f64 {
        let bits = (u64::from(self.word()) << 20) ^ u64::from(self.word() >> 12);
        (bits as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

/// The next first value of a parameter that starts as `init` says.
pub fn initial(init: Init, random: &mut Sequence) -> f64 {
    match init {
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
        Init::Constant { value } => value,
        Init::Normal { std } => std * random.normal(),
        Init::TruncatedNormal { std } => loop {
            let draw = std * random.normal();
            if draw.abs() <= 2.0 {
                break draw;
            }
        },
        Init::Uniform { bound } => bound * (2.0 * random.uniform() - 1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn sequences_have_the_right_moments() {
        let mut sequence = Sequence::new(7, 3);
        let n = 100_000;
        let draws: Vec<f64> = (0..n).map(|_| sequence.normal()).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn streams_differ_by_seed_step_site_and_sample() {
        let base = Stream::new(1, 2, 3, 4).word();
        for other in [
            Stream::new(2, 2, 3, 4),
            Stream::new(1, 3, 3, 4),
            Stream::new(1, 2, 4, 4),
            Stream::new(1, 2, 3, 5),
            Stream::new(1, 2, 3, 4 + (1 << 32)),
        ] {
            assert_ne!(base, other.word());
        }
    }
}
