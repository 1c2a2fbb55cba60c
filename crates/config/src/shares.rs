//! How the images of a step are divided among the ranks.

use data::Request;
use serde::{Deserialize, Serialize};

/// Images of each rank in a micro-step. Rank r takes those after the images of the ranks before it, so that the samples
/// of a step, and their numbers in it, are the same for any division.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shares(Vec<usize>);

impl Shares {
    pub fn equal(batch: usize, ranks: usize) -> Self {
        Shares(vec![batch; ranks])
    }

    /// Divides `total` images as equally as groups of `unit` allow, which stay on one rank; the first ranks have one group more.
    pub fn even(total: usize, ranks: usize, unit: usize) -> Self {
        let groups = total / unit;
        Shares((0..ranks).map(|rank| unit * (groups / ranks + usize::from(rank < groups % ranks))).collect())
    }

    /// Divides `total` images so that ranks of these speeds (images/s) end together, as far as whole pairs allow:
    /// partners that are mixed stay on one rank.
    pub fn by_speed(total: usize, speeds: &[f64]) -> Self {
        let unit = if total.is_multiple_of(2) && total / 2 >= speeds.len() { 2 } else { 1 };
        let mut shares = vec![unit; speeds.len()];
        // Each unit goes to the rank that would be done with it first.
        for _ in speeds.len()..total / unit {
            let done = |rank: usize| (shares[rank] + unit) as f64 / speeds[rank];
            let next = (0..speeds.len()).min_by(|a, b| done(*a).total_cmp(&done(*b))).unwrap_or(0);
            shares[next] += unit;
        }
        Shares(shares)
    }

    pub fn ranks(&self) -> usize {
        self.0.len()
    }

    pub fn of(&self, rank: usize) -> usize {
        self.0[rank]
    }

    pub fn smallest(&self) -> usize {
        self.0.iter().copied().min().unwrap_or(0)
    }

    pub fn largest(&self) -> usize {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// Images of a micro-step that belong to the ranks before this one.
    pub fn before(&self, rank: usize) -> usize {
        self.0[..rank].iter().sum()
    }

    /// Images of a micro-step, over all ranks.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }

    pub fn is_equal(&self) -> bool {
        self.0.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Images that a rank reads of a micro-step that begins at image `start` of an epoch of `images`.
    pub fn request(&self, rank: usize, epoch: u64, start: usize, images: usize) -> Request {
        let first = (start + self.before(rank)).min(images);
        Request { epoch, first, count: self.of(rank).min(images - first) }
    }

    /// Images that a rank reads of a set of `images` that is gone through once, in order; as many requests on every rank.
    pub fn once(&self, rank: usize, images: usize) -> impl Iterator<Item = Request> + Send + 'static {
        let (shares, total) = (self.clone(), self.total());
        (0..images.div_ceil(total)).map(move |chunk| shares.request(rank, 0, chunk * total, images))
    }
}

impl std::fmt::Display for Shares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts: Vec<String> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&counts.join(" + "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_cover_everything_once() {
        for shares in [Shares::equal(8, 1), Shares::equal(3, 4), Shares(vec![5, 2, 1])] {
            for images in [0, 1, 7, 12, 24, 25, 100] {
                let mut seen = vec![0; images];
                for rank in 0..shares.ranks() {
                    for Request { first, count, .. } in shares.once(rank, images) {
                        seen[first..first + count].iter_mut().for_each(|n| *n += 1);
                    }
                }
                assert!(seen.iter().all(|n| *n == 1), "{images} images by {shares}");
                let lens = (0..shares.ranks()).map(|r| shares.once(r, images).count());
                assert_eq!(lens.collect::<std::collections::HashSet<_>>().len(), 1);
            }
        }
    }

    #[test]
    fn equal_speeds_divide_as_equally_as_groups_allow() {
        assert_eq!(Shares::even(24, 3, 1), Shares::equal(8, 3));
        assert_eq!(Shares::even(24, 5, 1), Shares(vec![5, 5, 5, 5, 4]));
        assert_eq!(Shares::even(150, 2, 1), Shares(vec![75, 75]));
        assert_eq!(Shares::even(150, 2, 2), Shares(vec![76, 74]), "pairs stay together");
    }

    #[test]
    fn speeds_divide_pairs() {
        assert_eq!(Shares::by_speed(64, &[1.0; 4]), Shares(vec![16; 4]));
        assert_eq!(Shares::by_speed(64, &[10.0, 10.0, 10.0, 5.0]), Shares(vec![20, 18, 18, 8]));
        assert_eq!(Shares::by_speed(8, &[1.0, 1e9]), Shares(vec![2, 6]), "nobody is left without work");
        assert_eq!(Shares::by_speed(5, &[1.0, 3.0]), Shares(vec![1, 4]), "an odd total divides singly");
        assert_eq!(Shares::by_speed(3, &[1.0, 1.0]).total(), 3);
    }
}
