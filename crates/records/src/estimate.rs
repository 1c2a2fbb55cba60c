//! A number that is measured several times.

use serde::{Deserialize, Serialize};

/// A median of `samples` runs; an interval from five of them on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    pub median: f64,
    /// The 95% interval of the median.
    pub interval: Option<(f64, f64)>,
    /// One a run, in the order of the runs.
    pub samples: Vec<f64>,
}
