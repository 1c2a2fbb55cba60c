//! Ranks of unequal speed: noticing them, and dividing the work by what they can do.

use crate::account::Step;
use config::Shares;
use records::Parts;

/// Steps before measuring: the first ones touch memory for the first time.
const SETTLE: u64 = 2;
/// Steps that are measured before the work is divided.
const MEASURED: u64 = 4;
/// Divisions tried: what an image costs depends a little on how many there are.
const ROUNDS: u32 = 3;
/// A new division must promise at least this much less time.
const WORTH: f64 = 0.02;
/// Steps over which a straggler is looked for.
const WINDOW: u64 = 10;
/// How much slower than the median rank a straggler is.
const SLOWER: f64 = 1.25;

/// Sums of the ranks' own work since a moment.
#[derive(Clone, Debug, Default)]
struct Window {
    sums: Vec<Parts>,
    steps: u64,
}

impl Window {
    fn add(&mut self, step: &Step) {
        self.sums.resize(step.parts.len(), Parts::default());
        self.sums.iter_mut().zip(&step.parts).for_each(|(sum, parts)| *sum += *parts);
        self.steps += 1;
    }

    fn clear(&mut self) {
        self.sums.iter_mut().for_each(|sum| *sum = Parts::default());
        self.steps = 0;
    }
}

/// Divides the work once the ranks' speeds are known. All ranks see the same numbers, so all come to the same division.
#[derive(Clone, Debug, Default)]
pub struct Balance {
    seen: u64,
    rounds: u32,
    window: Window,
}

impl Balance {
    /// Takes in a step; a better division, if it shows one.
    pub fn after(&mut self, step: &Step, shares: &Shares) -> Option<Shares> {
        if self.rounds == ROUNDS || shares.ranks() == 1 {
            return None;
        }
        self.seen += 1;
        if self.seen <= SETTLE {
            return None;
        }
        self.window.add(step);
        if self.window.steps < MEASURED {
            return None;
        }
        let seconds: Vec<f64> = self.window.sums.iter().map(|sum| sum.compute + sum.data).collect();
        (self.seen, self.rounds) = (0, self.rounds + 1);
        self.window.clear();
        if seconds.iter().any(|s| *s <= 0.0) {
            return None;
        }
        let speeds: Vec<f64> = seconds.iter().enumerate().map(|(r, s)| shares.of(r) as f64 / s).collect();
        let longest = |shares: &Shares| {
            speeds.iter().enumerate().map(|(r, speed)| shares.of(r) as f64 / speed).fold(0.0, f64::max)
        };
        let better = Shares::by_speed(shares.total(), &speeds);
        (longest(&better) < (1.0 - WORTH) * longest(shares)).then_some(better)
    }
}

/// A rank that the others wait for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    pub rank: usize,
    /// How much longer it takes for an image than the median rank.
    pub slower: f64,
    /// The share of their time that the others wait.
    pub waiting: f64,
}

/// Looks for stragglers.
#[derive(Clone, Debug, Default)]
pub struct Lookout {
    window: Window,
    named: Option<usize>,
    seen: u64,
}

impl Lookout {
    /// Takes in a step; a straggler, when one is found that was not named yet.
    pub fn after(&mut self, step: &Step, shares: &Shares) -> Option<Straggler> {
        if shares.ranks() == 1 {
            return None;
        }
        self.seen += 1;
        if self.seen <= SETTLE {
            return None;
        }
        self.window.add(step);
        if self.window.steps < WINDOW {
            return None;
        }
        let found = straggler(&self.window.sums, shares);
        self.window.clear();
        if found.map(|s| s.rank) == self.named {
            return None;
        }
        self.named = found.map(|s| s.rank);
        found
    }

    /// The work was divided otherwise; what was seen before says nothing now.
    pub fn forget(&mut self) {
        *self = Lookout::default();
    }
}

/// The rank whose share takes much longer than the median rank's. With shares by speed, a slow rank is none: it takes no
/// longer than the others for what it has.
fn straggler(sums: &[Parts], shares: &Shares) -> Option<Straggler> {
    let own = |rank: usize| sums[rank].compute + sums[rank].data;
    let mut sorted: Vec<f64> = (0..sums.len()).map(own).collect();
    sorted.sort_by(f64::total_cmp);
    let rank = (0..sums.len()).max_by(|a, b| own(*a).total_cmp(&own(*b)))?;
    // The lower median, so that of two ranks the faster one is the measure.
    let median = sorted[(sorted.len() - 1) / 2];
    if median <= 0.0 || own(rank) < SLOWER * median {
        return None;
    }
    let typical = (0..sums.len()).find(|r| own(*r) == median)?;
    let per_image = |r: usize| own(r) / shares.of(r) as f64;
    let others = || (0..sums.len()).filter(|r| *r != rank);
    let waiting = others().map(|r| sums[r].wait).sum::<f64>() / others().map(|r| sums[r].wall()).sum::<f64>();
    Some(Straggler { rank, slower: per_image(rank) / per_image(typical), waiting })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of ranks that take these seconds for an image, and wait for the slowest.
    fn step(per_image: &[f64], shares: &Shares) -> Step {
        let own: Vec<f64> = per_image.iter().enumerate().map(|(r, s)| s * shares.of(r) as f64).collect();
        let longest = own.iter().copied().fold(0.0, f64::max);
        let parts = own.iter().map(|s| Parts { compute: *s, wait: longest - s, ..Parts::default() });
        Step { parts: parts.collect(), ..Step::default() }
    }

    fn settle(per_image: &[f64], shares: &mut Shares, steps: usize) -> usize {
        let mut balance = Balance::default();
        let mut changes = 0;
        for _ in 0..steps {
            if let Some(better) = balance.after(&step(per_image, shares), shares) {
                (*shares, changes) = (better, changes + 1);
            }
        }
        changes
    }

    #[test]
    fn a_slow_rank_gets_less() {
        let mut shares = Shares::equal(16, 4);
        let total = shares.total();
        assert_eq!(settle(&[1.0, 1.0, 1.0, 2.0], &mut shares, 100), 1);
        assert_eq!((shares.of(0), shares.of(3), shares.total()), (20, 8, total));
    }

    #[test]
    fn equal_ranks_are_left_alone() {
        let mut shares = Shares::equal(16, 4);
        assert_eq!(settle(&[1.0, 1.01, 0.99, 1.0], &mut shares, 100), 0);
        assert_eq!(shares, Shares::equal(16, 4));
    }

    #[test]
    fn a_straggler_is_named_once() {
        let shares = Shares::equal(16, 4);
        let mut lookout = Lookout::default();
        let mut found: Vec<Straggler> =
            (0..100).filter_map(|_| lookout.after(&step(&[1.0, 1.0, 1.9, 1.0], &shares), &shares)).collect();
        assert_eq!(found.len(), 1);
        let Straggler { rank, slower, waiting } = found.remove(0);
        assert!(rank == 2 && (slower - 1.9).abs() < 1e-9 && (waiting - 0.9 / 1.9).abs() < 1e-9);
        let mut lookout = Lookout::default();
        let equal = step(&[1.0, 1.1, 1.2, 1.0], &shares);
        assert!((0..100).all(|_| lookout.after(&equal, &shares).is_none()));
    }

    #[test]
    fn of_two_ranks_the_slower_one_is_named() {
        let shares = Shares::equal(4, 2);
        let mut lookout = Lookout::default();
        let mut found = (0..20).filter_map(|_| lookout.after(&step(&[2.0, 1.0], &shares), &shares));
        assert_eq!(found.next().map(|s| (s.rank, s.slower)), Some((0, 2.0)));
    }
}
