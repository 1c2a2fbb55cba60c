//! Where the efficiency of a point went, as the POP model divides it: computation scaling × load balance × synchronisation × transfer.
//!
//! Of a run, with u the useful work of a rank in a mean step (all but communication and waiting: compute, optimizer, waiting for images,
//! idling), w its waiting for other ranks, T the step, and R the rank seconds that an image takes:
//!
//! - load balance = mean u / max u: a rank that is slow over all steps;
//! - synchronisation = max u / max (u + w): whoever is slow in a step alone;
//! - transfer = max (u + w) / T: communication that nothing hides;
//! - computation scaling = U of the base / U, where U = R · mean u / T is the useful work that an image takes.
//!
//! The first three multiply to mean u / T, the parallel efficiency. Each is divided by the base's own, which is 1 for a base of one
//! rank. All four then multiply to R of the base / R, which is the efficiency, whatever the account holds.

use crate::results::{Estimate, Measured, Point};
use crate::stats::{interval, median, ratio};
use records::{FACTORS, Factors, Slowest};

/// Share of the steps from which on the rank that is slowest in them is a straggler that stays.
const LASTING: f64 = 2.0 / 3.0;
/// Steps of a run below which nobody is slowest most of the time but by chance.
const FEW_STEPS: u64 = 8;
/// Waiting for other ranks takes a share worth a sentence.
const WORTH: f64 = 0.02;

/// Runs whose images/s are the median: one, or the two beside it.
pub(crate) fn middle_runs(point: &Point) -> Vec<&Measured> {
    let mut runs = measured(point);
    runs.sort_by(|a, b| a.images_per_second.total_cmp(&b.images_per_second));
    match runs.len() {
        0 => vec![],
        n => runs[(n - 1) / 2..n / 2 + 1].to_vec(),
    }
}

fn measured(point: &Point) -> Vec<&Measured> {
    point.runs.iter().filter_map(|run| run.measured()).collect()
}

/// A mean step as the model divides it.
#[derive(Clone, Copy, Debug)]
struct Divided {
    /// Useful work that an image takes, in seconds of ranks.
    useful: f64,
    balance: f64,
    synchronisation: f64,
    transfer: f64,
}

impl Divided {
    /// Of some runs, which did so many images/s; none where they have no account.
    fn of(runs: &[&Measured], images_per_second: f64) -> Option<Self> {
        let mean = |f: fn(&Measured) -> f64| runs.iter().map(|run| f(run)).sum::<f64>() / runs.len() as f64;
        let ranks = runs.first()?.ranks.len() as f64;
        let work =
            mean(|run| run.ranks.iter().map(|parts| parts.own()).sum::<f64>() / run.ranks.len() as f64);
        let most = mean(|run| run.ranks.iter().map(|parts| parts.own()).fold(0.0, f64::max));
        // What a step would take if nothing had to be communicated: the rank that is in communication for the shortest time shows it.
        let without = mean(|run| run.ranks.iter().map(|parts| parts.own() + parts.wait).fold(0.0, f64::max));
        let step = mean(|run| run.step_seconds.iter().sum::<f64>() / run.step_seconds.len() as f64);
        let divided = Divided {
            useful: ranks / images_per_second * work / step,
            balance: work / most,
            synchronisation: most / without,
            transfer: without / step,
        };
        let all = [divided.useful, divided.balance, divided.synchronisation, divided.transfer];
        all.iter().all(|x| x.is_finite() && *x > 0.0).then_some(divided)
    }

    /// The typical one of a point, whose images/s are the median, and one for every run.
    fn of_point(point: &Point) -> Option<(Self, Vec<Self>)> {
        let rates: Vec<f64> = measured(point).iter().map(|run| run.images_per_second).collect();
        let typical = Self::of(&middle_runs(point), median(&rates))?;
        let each = measured(point).into_iter().map(|run| Self::of(&[run], run.images_per_second));
        Some((typical, each.collect::<Option<Vec<_>>>()?))
    }
}

/// Divides the efficiency of a point. `base` is the point that it is compared with, which may be itself.
pub fn factors(point: &Point, base: Option<&Point>) -> Option<Factors> {
    let here = Divided::of_point(point)?;
    let there = base.and_then(Divided::of_point);
    let own = base.is_some_and(|base| base.id == point.id);
    let of = |f: fn(&Divided) -> f64| against(&here, there.as_ref(), own, f);
    Some(Factors {
        computation_scaling: there.is_some().then(|| of(|divided| 1.0 / divided.useful)),
        load_balance: of(|divided| divided.balance),
        synchronisation: of(|divided| divided.synchronisation),
        transfer: of(|divided| divided.transfer),
        slowest: slowest(point),
    })
}

type Of = (Divided, Vec<Divided>);

/// A number of a point over the base's, or by itself where there is none.
fn against(here: &Of, there: Option<&Of>, own: bool, f: fn(&Divided) -> f64) -> Estimate {
    let unit = there.map_or(1.0, |(typical, _)| f(typical));
    let value = f(&here.0) / unit;
    let samples: Vec<f64> = here.1.iter().map(|one| f(one) / unit).collect();
    let ends = match there {
        Some((_, each)) if !own => {
            let base: Vec<f64> = each.iter().map(|one| f(one) / unit).collect();
            ratio(&base, &samples).interval
        }
        Some(_) => None,
        None => interval(&samples),
    };
    // The typical run's number is not the median of all; an interval that lacks its own estimate helps nobody.
    let interval = ends.map(|(low, high)| (low.min(value), high.max(value)));
    Estimate { median: value, interval, samples }
}

/// Who is slowest in most steps of each run.
fn slowest(point: &Point) -> Option<Slowest> {
    let mut leads = vec![];
    for run in measured(point) {
        let steps: u64 = run.slowest_steps.iter().sum();
        let lead = run.slowest_steps.iter().enumerate().max_by_key(|(_, steps)| **steps);
        if let Some((rank, most)) = lead.filter(|_| run.slowest_steps.len() > 1 && steps >= FEW_STEPS) {
            leads.push((rank, *most as f64 / steps as f64));
        }
    }
    let steps = median(&leads.iter().map(|lead| lead.1).collect::<Vec<_>>());
    let runs_of = |rank: usize| leads.iter().filter(|lead| lead.0 == rank).count();
    let rank = leads.iter().map(|lead| lead.0).find(|rank| 2 * runs_of(*rank) > leads.len());
    (!leads.is_empty()).then_some(Slowest { rank, steps, lasting: steps >= LASTING })
}

/// What ranks wait for, where that takes a share worth a sentence: a straggler that stays, or jitter that passes.
pub fn waits_for(factors: &Factors) -> Option<String> {
    let Slowest { rank, steps, lasting } = factors.slowest?;
    let (balance, synchronisation) = (factors.load_balance.median, factors.synchronisation.median);
    let steps = format!("{:.0}% of the steps", 100.0 * steps);
    if balance * synchronisation > 1.0 - WORTH {
        return None;
    }
    let who = match (rank, lasting) {
        (Some(rank), true) => format!("a lasting straggler: rank {rank} is the slowest in {steps}"),
        (None, true) => {
            format!("a lasting straggler: one rank is the slowest in {steps} of a run, in each run another")
        }
        // Several ranks that stay slow take turns at being the slowest.
        _ if balance < synchronisation => {
            format!(
                "a lasting imbalance: some ranks have more to do than others, the same one is the slowest in {steps}"
            )
        }
        _ => format!("passing jitter: the slowest rank changes, the same one in no more than {steps}"),
    };
    Some(format!(
        "{who} (load balance {:.0}%, synchronisation {:.0}%)",
        100.0 * balance,
        100.0 * synchronisation
    ))
}

/// What is left of 100% after each factor: (name, from, to), the last `to` being the efficiency. None without a base.
pub fn waterfall(factors: &Factors) -> Option<Vec<(&'static str, f64, f64)>> {
    factors.computation_scaling.as_ref()?;
    let mut left = 1.0;
    let steps = FACTORS.iter().filter_map(|factor| {
        let from = left;
        left *= (factor.of)(factors)?.median;
        Some((factor.name, from, left))
    });
    Some(steps.collect())
}

#[cfg(test)]
mod tests;
