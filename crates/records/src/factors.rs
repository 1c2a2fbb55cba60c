//! Where the efficiency of a point went: the factors of the POP model, which multiply to it.

use crate::estimate::Estimate;
use serde::{Deserialize, Serialize};

/// Factors of a point's efficiency, each against the point that it is compared with. Their values are those of the run whose images/s
/// are the median, so that they multiply to the efficiency; samples are one a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Factors {
    /// Useful work that an image takes: the base's over the point's. Absent where there is no base: the other three then multiply to
    /// the point's own parallel efficiency.
    pub computation_scaling: Option<Estimate>,
    /// Useful work of the mean rank over that of the rank with the most, by means over all steps.
    pub load_balance: Estimate,
    /// Useful work of the rank with the most over a step without transfer.
    pub synchronisation: Estimate,
    /// A step without transfer over the step.
    pub transfer: Estimate,
    /// Absent for one rank, for few steps, and in results of versions that did not count it.
    #[serde(default)]
    pub slowest: Option<Slowest>,
}

/// Which rank is the last to be ready, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slowest {
    /// The rank that leads in most runs; absent where each run has another.
    pub rank: Option<usize>,
    /// Share of a run's steps in which one and the same rank is the slowest: the median over runs.
    pub steps: f64,
    /// The same rank in most steps: a straggler that stays. Otherwise jitter, which passes.
    pub lasting: bool,
}

/// How one of the factors is called, and where it is found.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// In legends and texts.
    pub name: &'static str,
    /// At the head of a column.
    pub short: &'static str,
    /// In `results.csv`, and in `results.json`.
    pub key: &'static str,
    pub of: fn(&Factors) -> Option<&Estimate>,
}

/// All factors, in the order in which they are lost.
pub const FACTORS: [Factor; 4] = [
    factor("computation scaling", "compute", "computation_scaling", |f| f.computation_scaling.as_ref()),
    factor("load balance", "balance", "load_balance", |f| Some(&f.load_balance)),
    factor("synchronisation", "sync", "synchronisation", |f| Some(&f.synchronisation)),
    factor("transfer", "transfer", "transfer", |f| Some(&f.transfer)),
];

const fn factor(
    name: &'static str,
    short: &'static str,
    key: &'static str,
    of: fn(&Factors) -> Option<&Estimate>,
) -> Factor {
    Factor { name, short, key, of }
}

impl Factors {
    /// What all of them multiply to: the efficiency, or without a base the parallel efficiency.
    pub fn product(&self) -> f64 {
        FACTORS.iter().filter_map(|factor| (factor.of)(self)).map(|estimate| estimate.median).product()
    }
}
