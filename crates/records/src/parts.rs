//! The account of time: where the seconds of a rank went.

use crate::metrics::Metric;
use serde::{Deserialize, Serialize};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

/// Seconds of one rank, of a step or of many. All but `hidden` sum to the wall time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parts {
    /// Forward and backward.
    pub compute: f64,
    /// Communication that nothing hides: gradients are communicated, and nothing else is left to do.
    #[serde(rename = "exchange")]
    pub communication: f64,
    /// Waiting for slower ranks to enter a collective.
    pub wait: f64,
    /// Waiting for images, and copying them, while nothing else runs.
    pub data: f64,
    /// Norm, clipping and optimizer.
    #[serde(alias = "update")]
    pub optimizer: f64,
    /// The rest: between the steps of a plan, and on the host.
    pub idle: f64,
    /// Communication behind compute. Part of the others.
    #[serde(alias = "hidden_exchange")]
    pub hidden: f64,
}

/// How one of the parts is called, and where it is shown.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// In legends and texts.
    pub name: &'static str,
    /// At the head of a column.
    pub short: &'static str,
    /// In a bar of a table in a terminal; hidden communication has none.
    pub glyph: Option<char>,
    /// Its mean over the ranks, in a line of metrics.
    pub metric: Metric,
    pub of: fn(&Parts) -> f64,
}

/// All parts, in the order in which tables and files list them; the last is not part of the sum.
pub const PARTS: [Part; 7] = [
    part("compute", "compute", Some('█'), Metric::ComputeSeconds, |p| p.compute),
    part("communication", "comm", Some('▒'), Metric::CommunicationSeconds, |p| p.communication),
    part("wait for ranks", "wait", Some('░'), Metric::WaitSeconds, |p| p.wait),
    part("data", "data", Some('·'), Metric::DataSeconds, |p| p.data),
    part("optimizer", "optimizer", Some('▓'), Metric::OptimizerSeconds, |p| p.optimizer),
    part("idle", "idle", Some('·'), Metric::IdleSeconds, |p| p.idle),
    part("hidden communication", "hidden", None, Metric::HiddenSeconds, |p| p.hidden),
];

const fn part(
    name: &'static str,
    short: &'static str,
    glyph: Option<char>,
    metric: Metric,
    of: fn(&Parts) -> f64,
) -> Part {
    Part { name, short, glyph, metric, of }
}

impl Parts {
    /// Applies `f` to each part of `self` and `other`.
    fn zip(self, other: Parts, f: impl Fn(f64, f64) -> f64) -> Parts {
        Parts {
            compute: f(self.compute, other.compute),
            communication: f(self.communication, other.communication),
            wait: f(self.wait, other.wait),
            data: f(self.data, other.data),
            optimizer: f(self.optimizer, other.optimizer),
            idle: f(self.idle, other.idle),
            hidden: f(self.hidden, other.hidden),
        }
    }

    /// Applies `f` to each part.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Parts {
        self.zip(self, |x, _| f(x))
    }

    /// Makes each part by itself: `of` gives the value for a part.
    pub fn from_fn(of: impl Fn(fn(&Parts) -> f64) -> f64) -> Parts {
        Parts {
            compute: of(|p| p.compute),
            communication: of(|p| p.communication),
            wait: of(|p| p.wait),
            data: of(|p| p.data),
            optimizer: of(|p| p.optimizer),
            idle: of(|p| p.idle),
            hidden: of(|p| p.hidden),
        }
    }

    /// The wall time: the sum of all parts but hidden communication.
    pub fn wall(&self) -> f64 {
        self.compute + self.communication + self.wait + self.data + self.optimizer + self.idle
    }

    /// What a rank does by itself: all but communication and waiting for others.
    pub fn own(&self) -> f64 {
        self.compute + self.data + self.optimizer + self.idle
    }

    /// The mean of each part over ranks, steps or runs; zeros of none.
    pub fn mean(all: &[Parts]) -> Parts {
        let sum: Parts = all.iter().copied().sum();
        sum.map(|seconds| seconds / all.len().max(1) as f64)
    }
}

impl Add for Parts {
    type Output = Parts;

    fn add(self, other: Parts) -> Parts {
        self.zip(other, |a, b| a + b)
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Parts) {
        *self = *self + other;
    }
}

impl Sum for Parts {
    fn sum<I: Iterator<Item = Parts>>(all: I) -> Parts {
        all.fold(Parts::default(), Add::add)
    }
}

impl Mul<f64> for Parts {
    type Output = Parts;

    fn mul(self, factor: f64) -> Parts {
        self.map(|seconds| factor * seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_under_all_names_they_had() {
        let text = r#"{"compute":1,"exchange":2,"wait":3,"data":4,"optimizer":5,"idle":6,"hidden":7}"#;
        let parts: Parts = serde_json::from_str(text).unwrap();
        assert_eq!(PARTS.map(|part| (part.of)(&parts)), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(parts.wall(), 21.0);
        // As `ranks.jsonl` and as the closing summary of schema 0 have them.
        let others = [("optimizer", "update"), ("hidden", "hidden_exchange")];
        for (now, once) in others {
            assert_eq!(serde_json::from_str::<Parts>(&text.replace(now, once)).unwrap(), parts);
        }
        let written: Parts = serde_json::from_str(&serde_json::to_string(&parts).unwrap()).unwrap();
        assert_eq!(written, parts);
    }

    #[test]
    fn a_mean_is_taken_part_by_part() {
        let one = Parts { compute: 1.0, hidden: 4.0, ..Parts::default() };
        let two = Parts { compute: 2.0, idle: 3.0, ..Parts::default() };
        let mean = Parts { compute: 1.5, idle: 1.5, hidden: 2.0, ..Parts::default() };
        assert_eq!(Parts::mean(&[one, two]), mean);
        assert_eq!(Parts::mean(&[]), Parts::default());
        assert_eq!(one * 2.0, Parts::from_fn(|of| 2.0 * of(&one)));
    }
}
