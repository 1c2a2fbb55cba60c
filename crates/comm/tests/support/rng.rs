//! A small deterministic generator (splitmix64), so that a failure names a seed that repeats it.

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// A length: none, one, odd, around the limits that engines have, or anything.
    pub fn length(&mut self) -> usize {
        const KNOWN: [usize; 14] = [0, 1, 2, 3, 63, 65, 255, 257, 1000, 2047, 2049, 4097, 8193, 20_011];
        match self.below(3) {
            0 => self.below(3000),
            _ => KNOWN[self.below(KNOWN.len())],
        }
    }
}
