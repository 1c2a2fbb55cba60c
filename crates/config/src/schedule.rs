//! Learning rate by step.
//!
//! Ours are a linear warm-up that ends at the peak, then a shape. DeepSpeed's schedulers are repeated to the step, so
//! that a run from its JSON sees the same rates.

mod deepspeed;

pub use deepspeed::{Half, Ramp, Scheduler};

use serde::{Deserialize, Serialize};
use std::fmt;
use text::many;

/// Course of the learning rate over a run. Steps are counted from 0; all rates are the optimizer's, before any group's factor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Schedule {
    /// Half a cosine from the peak down to `min` at step `total`.
    Cosine {
        peak: f64,
        min: f64,
        warmup: u64,
        total: u64,
    },
    /// A straight line from the peak down to `min` at step `total`.
    Linear {
        peak: f64,
        min: f64,
        warmup: u64,
        total: u64,
    },
    /// (1 - done)^power from the peak down to `min` at step `total`.
    Poly {
        peak: f64,
        min: f64,
        power: f64,
        warmup: u64,
        total: u64,
    },
    /// The peak, times `gamma` every so many steps. Steps count from the start of the run, warm-up included.
    Step {
        peak: f64,
        gamma: f64,
        drops: Drops,
        warmup: u64,
    },
    Constant {
        peak: f64,
        warmup: u64,
    },
    DeepSpeed(Scheduler),
}

/// Steps at which a stepwise schedule drops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Drops {
    Every(u64),
    /// In rising order.
    At(Vec<u64>),
}

impl Drops {
    fn before(&self, step: u64) -> u64 {
        match self {
            Drops::Every(steps) => step / steps.max(&1),
            Drops::At(milestones) => milestones.iter().filter(|m| **m <= step).count() as u64,
        }
    }
}

impl Schedule {
    /// The rate of step `step`.
    pub fn at(&self, step: u64) -> f64 {
        match *self {
            Schedule::Cosine { peak, min, warmup, total } => {
                let done = |done: f64| min + (peak - min) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
                warmed_up(step, peak, warmup, total, done)
            }
            Schedule::Linear { peak, min, warmup, total } => {
                warmed_up(step, peak, warmup, total, |done| min + (peak - min) * (1.0 - done))
            }
            Schedule::Poly { peak, min, power, warmup, total } => {
                warmed_up(step, peak, warmup, total, |done| min + (peak - min) * (1.0 - done).powf(power))
            }
            Schedule::Step { peak, gamma, ref drops, warmup } => {
                warmed_up(step, peak, warmup, u64::MAX, |_| peak * gamma.powf(drops.before(step) as f64))
            }
            Schedule::Constant { peak, warmup } => warmed_up(step, peak, warmup, u64::MAX, |_| peak),
            Schedule::DeepSpeed(ref scheduler) => scheduler.at(step),
        }
    }
}

/// A linear warm-up whose last step reaches the peak, then `after`, which is given how much of the rest is done (0 to 1).
fn warmed_up(step: u64, peak: f64, warmup: u64, total: u64, after: impl Fn(f64) -> f64) -> f64 {
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let left = total.saturating_sub(warmup).max(1) as f64;
    after(((step - warmup) as f64 / left).min(1.0))
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let warmup = |f: &mut fmt::Formatter<'_>, steps: u64| match steps {
            0 => Ok(()),
            _ => write!(f, "warm-up over {}, then ", many(steps as usize, "step")),
        };
        match self {
            Schedule::Cosine { peak, min, warmup: steps, total } => {
                warmup(f, *steps)?;
                write!(f, "cosine from {peak} to {min} at step {total}")
            }
            Schedule::Linear { peak, min, warmup: steps, total } => {
                warmup(f, *steps)?;
                write!(f, "linear from {peak} to {min} at step {total}")
            }
            Schedule::Poly { peak, min, power, warmup: steps, total } => {
                warmup(f, *steps)?;
                write!(f, "polynomial of power {power} from {peak} to {min} at step {total}")
            }
            Schedule::Step { peak, gamma, drops, warmup: steps } => {
                warmup(f, *steps)?;
                write!(f, "{peak}, times {gamma} ")?;
                match drops {
                    Drops::Every(steps) => write!(f, "every {}", many(*steps as usize, "step")),
                    Drops::At(milestones) => write!(f, "at steps {milestones:?}"),
                }
            }
            Schedule::Constant { peak, warmup: steps } => {
                warmup(f, *steps)?;
                write!(f, "constant at {peak}")
            }
            Schedule::DeepSpeed(scheduler) => scheduler.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Schedule = Schedule::Cosine { peak: 1.0, min: 0.0, warmup: 10, total: 110 };

    #[test]
    fn rises_then_falls_to_nothing() {
        assert_eq!(PLAIN.at(0), 0.1);
        assert_eq!(PLAIN.at(9), 1.0);
        assert_eq!(PLAIN.at(10), 1.0);
        assert!((PLAIN.at(60) - 0.5).abs() < 1e-12);
        assert!(PLAIN.at(109) < 1e-3 && PLAIN.at(500) < 1e-12);
    }

    /// The formula of the first version, which had no lowest rate: runs of then must come out bit for bit.
    #[test]
    fn the_plain_cosine_keeps_its_bits() {
        let (peak, warmup, total) = (1e-3, 46, 939u64);
        let first_version = |step: u64| {
            if step < warmup {
                return peak * (step + 1) as f64 / warmup as f64;
            }
            let left = total.saturating_sub(warmup).max(1) as f64;
            let done = ((step - warmup) as f64 / left).min(1.0);
            peak * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
        };
        let schedule = Schedule::Cosine { peak, min: 0.0, warmup, total };
        for step in 0..1000 {
            assert_eq!(schedule.at(step).to_bits(), first_version(step).to_bits(), "step {step}");
        }
    }

    /// The fixtures are made by scripts beside them from PyTorch's and DeepSpeed's own schedulers. DeepSpeed's go on past their
    /// ends.
    #[test]
    fn rates_are_those_of_pytorch_and_deepspeed() {
        let fixtures = [
            include_str!("../tests/fixtures/schedules.json"),
            include_str!("../tests/fixtures/deepspeed_schedules.json"),
        ];
        let fixtures = fixtures
            .map(|text| serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).unwrap());
        let fixture: serde_json::Map<_, _> = fixtures.into_iter().flatten().collect();
        let cases = cases();
        assert_eq!(cases.len(), fixture.len(), "every scheduler of the fixture is tested");
        for (name, schedule) in cases {
            for (step, expected) in fixture[name].as_array().unwrap().iter().enumerate() {
                let (found, expected) = (schedule.at(step as u64), expected.as_f64().unwrap());
                // PyTorch multiplies factors step by step, which rounds a little differently.
                let near = (found - expected).abs() <= 1e-12 * expected.abs().max(1e-3);
                assert!(near, "{name}, step {step}: {found} should be {expected}");
            }
        }
    }

    fn cases() -> Vec<(&'static str, Schedule)> {
        use Schedule::{Constant, Cosine, Linear, Poly, Step};
        use Scheduler::{LrRangeTest, OneCycle, WarmupCosineLr, WarmupDecayLr, WarmupLr};
        let ds = Schedule::DeepSpeed;
        let (peak, warmup, total) = (0.1, 0, 20);
        let step = |drops| Step { peak, gamma: 0.3, drops, warmup };
        let ramped = |min, max, warmup, ramp| WarmupLr { min, max, warmup, ramp };
        let decayed = |min, ramp, total| WarmupDecayLr { min, max: 0.02, warmup: 6, ramp, total };
        let cosine = |min_ratio, cos_min_ratio, ramp, total| WarmupCosineLr {
            peak,
            min_ratio,
            cos_min_ratio,
            warmup: 6,
            ramp,
            total,
        };
        let one_step =
            WarmupCosineLr { peak, min_ratio: 0.0, cos_min_ratio: 0.0001, warmup: 1, ramp: Ramp::Log, total };
        let half = |steps, stairs| Half { steps, stairs };
        let cycle = |rise, fall, decay_rate, decay_every| OneCycle {
            min: 0.01,
            max: 0.2,
            rise,
            fall,
            decay_rate,
            decay_every,
        };
        let range = |staircase| LrRangeTest { min: 0.001, every: 5, rate: 2.0, staircase };
        assert_eq!(Constant { peak, warmup: 2 }.at(0), 0.05);
        assert_eq!(Constant { peak, warmup: 2 }.at(7), 0.1);
        vec![
            ("cosine", Cosine { peak, min: 0.01, warmup, total }),
            ("linear", Linear { peak, min: 0.01, warmup, total }),
            ("poly", Poly { peak, min: 0.0, power: 0.9, warmup, total }),
            ("step", step(Drops::Every(7))),
            ("milestones", step(Drops::At(vec![3, 11]))),
            ("warmup_cosine", Cosine { peak, min: 0.0, warmup: 5, total }),
            ("WarmupLR_log", ds(ramped(0.001, 0.02, 6, Ramp::Log))),
            ("WarmupLR_linear", ds(ramped(0.001, 0.02, 6, Ramp::Linear))),
            ("WarmupLR_defaults", ds(ramped(0.0, peak, 1000, Ramp::Log))),
            ("WarmupLR_one_step", ds(ramped(0.0, 0.02, 1, Ramp::Log))),
            ("WarmupDecayLR_log", ds(decayed(0.001, Ramp::Log, total))),
            ("WarmupDecayLR_linear", ds(decayed(0.0, Ramp::Linear, total))),
            ("WarmupDecayLR_short", ds(decayed(0.0, Ramp::Log, 4))),
            ("WarmupDecayLR_equal", ds(decayed(0.0, Ramp::Log, 6))),
            ("WarmupCosineLR_log", ds(cosine(0.1, 0.05, Ramp::Log, total))),
            ("WarmupCosineLR_linear", ds(cosine(0.1, 0.05, Ramp::Linear, total))),
            ("WarmupCosineLR_short", ds(cosine(0.0, 0.0001, Ramp::Log, 4))),
            ("WarmupCosineLR_one_step", ds(one_step)),
            ("OneCycle_no_decay", ds(cycle(half(7, 0), half(7, 0), 0.0, 0))),
            ("OneCycle", ds(cycle(half(5, 0), half(8, 0), 0.5, 3))),
            ("OneCycle_stairs", ds(cycle(half(6, 2), half(9, 3), 0.0, 0))),
            ("LRRangeTest", ds(range(false))),
            ("LRRangeTest_stairs", ds(range(true))),
        ]
    }
}
