//! Which image comes when.
//!
//! The order of an epoch is a permutation that is computed, not stored: a rank that trains on
//! position p of epoch e asks for it alone, and a resumed run asks for what it would have had.

use crate::random::{key, mix};

/// Four rounds already hide the structure of the input; two more cost nothing beside an image.
const ROUNDS: u64 = 6;

/// The order in which the images of a set are visited, epoch by epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sampler {
    pub len: usize,
    pub seed: u64,
    /// Without it every epoch visits the images in the order of their indices.
    pub shuffle: bool,
}

impl Sampler {
    /// The image at `position` of `epoch`: for each epoch a bijection of `0..len`.
    ///
    /// # Panics
    ///
    /// When `position` is not below `len`, as a slice would.
    pub fn index(&self, epoch: u64, position: usize) -> usize {
        let len = self.len;
        assert!(position < len, "position {position} of an epoch of {len} images");
        if self.shuffle { permute(position, len, key(&[self.seed, epoch])) } else { position }
    }
}

/// The image of `position` under a permutation of `0..len` chosen by `key`.
///
/// A Feistel network permutes the smallest even number of bits that covers `len`. Where it lands
/// outside, it is applied again: following the cycle back into `0..len` is still a bijection, and
/// since at least a quarter of the points are inside, takes four steps or fewer on average.
pub(crate) fn permute(position: usize, len: usize, key: u64) -> usize {
    debug_assert!(position < len);
    let bits = usize::BITS - (len - 1).leading_zeros();
    let half = bits.div_ceil(2);
    let mut point = position as u64;
    loop {
        point = feistel(point, half, key);
        if point < len as u64 {
            return point as usize;
        }
    }
}

/// A bijection of `2 * half` bits.
fn feistel(point: u64, half: u32, key: u64) -> u64 {
    let mask = (1 << half) - 1;
    let (mut left, mut right) = (point >> half, point & mask);
    for round in 0..ROUNDS {
        let scrambled = mix(mix(key.wrapping_add(round)) ^ right) & mask;
        (left, right) = (right, left ^ scrambled);
    }
    left << half | right
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
        let sampler = Sampler { len, seed, shuffle: true };
        (0..len).map(|p| sampler.index(epoch, p)).collect()
    }

    #[test]
    fn every_epoch_visits_every_image_once() {
        let sizes = (1..=300).chain([1023, 1024, 1025, 4096, 4097, 50_000, 65_537]);
        for len in sizes {
            for epoch in [0, 1, u64::MAX] {
                let mut visited = order(len, 7, epoch);
                visited.sort_unstable();
                assert!(visited.into_iter().eq(0..len), "{len} images, epoch {epoch}");
            }
        }
    }

    #[test]
    fn order_depends_on_epoch_and_seed_alone() {
        let first = order(1000, 7, 0);
        assert_eq!(first, order(1000, 7, 0));
        assert_ne!(first, order(1000, 7, 1));
        assert_ne!(first, order(1000, 8, 0));
    }

    #[test]
    fn without_shuffling_the_order_is_that_of_the_indices() {
        let sampler = Sampler { len: 5, seed: 1, shuffle: false };
        assert!((0..5).map(|p| sampler.index(9, p)).eq(0..5));
    }

    /// Over many epochs each image should come equally often at each position. With 16 images and
    /// 16,000 epochs a cell expects 1000 ± 31.
    #[test]
    fn every_position_sees_every_image_equally_often() {
        let len = 16;
        let mut seen = vec![0usize; len * len];
        for epoch in 0..16_000 {
            for (position, image) in order(len, 7, epoch).into_iter().enumerate() {
                seen[position * len + image] += 1;
            }
        }
        assert!(
            seen.iter().all(|&n| (850..1150).contains(&n)),
            "counts from {:?} to {:?}",
            seen.iter().min(),
            seen.iter().max()
        );
    }

    #[test]
    fn neighbours_part_ways() {
        let order = order(10_000, 7, 0);
        let stayed = order.windows(2).filter(|w| w[0].abs_diff(w[1]) < 10).count();
        assert!(stayed < 60, "{stayed} of 9999 neighbours stayed within ten places; about 19 expected");
    }
}
