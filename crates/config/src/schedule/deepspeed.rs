//! DeepSpeed's schedulers, after `deepspeed/runtime/lr_schedules.py` of version 0.19.2, whose rates are those of all before it;
//! OneCycle's stairs, which it ignores, are those of 0.19.4. From 0.19.3 on WarmupCosineLR stays at its lowest rate after its end.
//!
//! Its engine steps the scheduler after the optimizer, and a scheduler starts at iteration -1. So step 0 runs at the
//! initial rate, and step s at the rate of iteration s - 1: the first two steps of a warm-up have the same rate.

use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "scheduler")]
pub enum Scheduler {
    #[serde(rename = "WarmupLR")]
    WarmupLr { min: f64, max: f64, warmup: u64, ramp: Ramp },
    #[serde(rename = "WarmupDecayLR")]
    WarmupDecayLr { min: f64, max: f64, warmup: u64, ramp: Ramp, total: u64 },
    /// Ratios are of the peak.
    #[serde(rename = "WarmupCosineLR")]
    WarmupCosineLr { peak: f64, min_ratio: f64, cos_min_ratio: f64, warmup: u64, ramp: Ramp, total: u64 },
    /// Without its cycle of momentum.
    OneCycle { min: f64, max: f64, rise: Half, fall: Half, decay_rate: f64, decay_every: u64 },
    #[serde(rename = "LRRangeTest")]
    LrRangeTest { min: f64, every: u64, rate: f64, staircase: bool },
}

/// `warmup_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ramp {
    #[default]
    Log,
    Linear,
}

/// One half of OneCycle; with no stairs the rate moves at every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Half {
    pub steps: u64,
    pub stairs: u64,
}

impl Scheduler {
    pub fn at(&self, step: u64) -> f64 {
        let iteration = step.checked_sub(1);
        match *self {
            Scheduler::WarmupLr { min, max, warmup, ramp } => {
                min + (max - min) * iteration.map_or(0.0, |i| rising(i, warmup, ramp).unwrap_or(1.0))
            }
            Scheduler::WarmupDecayLr { min, max, warmup, ramp, total } => {
                let gamma = |i| rising(i, warmup, ramp).unwrap_or_else(|| left(i, warmup, total));
                min + (max - min) * iteration.map_or(0.0, gamma)
            }
            Scheduler::WarmupCosineLr { peak, min_ratio, cos_min_ratio, warmup, ramp, total } => {
                // Before its first iteration the ratio is 0, whatever `warmup_min_ratio` says.
                let Some(i) = iteration else { return 0.0 };
                let ratio = match rising(i, warmup, ramp) {
                    Some(gamma) => min_ratio + gamma * (1.0 - min_ratio),
                    None => cosine(i, warmup, total, cos_min_ratio),
                };
                peak * ratio
            }
            Scheduler::OneCycle { min, max, rise, fall, decay_rate, decay_every } => {
                match step.checked_sub(rise.steps.saturating_add(fall.steps)) {
                    None => min + (max - min) * height(step, rise, fall),
                    Some(after) if decay_every > 0 => {
                        min / (1.0 + decay_rate * (after as f64 / decay_every as f64))
                    }
                    Some(_) => min,
                }
            }
            Scheduler::LrRangeTest { min, every, rate, staircase } => {
                let intervals = step as f64 / every.max(1) as f64;
                min * (1.0 + rate * if staircase { intervals.floor() } else { intervals })
            }
        }
    }
}

/// DeepSpeed warms up over two steps at least: it divides by the logarithm of their number.
fn warmup_steps(warmup: u64) -> u64 {
    warmup.max(2)
}

/// Progress of a warm-up, from 0 to 1; nothing once it is over.
fn rising(iteration: u64, warmup: u64, ramp: Ramp) -> Option<f64> {
    let warmup = warmup_steps(warmup);
    (iteration < warmup).then(|| match ramp {
        Ramp::Log => ((iteration + 1) as f64).ln() / (warmup as f64).ln(),
        Ramp::Linear => iteration as f64 / warmup as f64,
    })
}

/// WarmupDecayLR after its warm-up.
fn left(iteration: u64, warmup: u64, total: u64) -> f64 {
    let falling = total.saturating_sub(warmup_steps(warmup)).max(1);
    total.saturating_sub(iteration) as f64 / falling as f64
}

/// WarmupCosineLR after its warm-up.
fn cosine(iteration: u64, warmup: u64, total: u64, floor: f64) -> f64 {
    let warmup = warmup_steps(warmup);
    // Past its end the cosine goes on, and the rate rises again. A run that would divide by zero here is not resolved.
    let falling = if total == warmup { 1.0 } else { total as f64 - warmup as f64 };
    let done = (iteration - warmup + 1) as f64 / falling;
    let ratio = (1.0 + (std::f64::consts::PI * done).cos()) / 2.0;
    (floor + (1.0 - floor) * ratio).max(0.0)
}

/// The height of OneCycle's triangle at a step within it, from 0 to 1.
fn height(step: u64, rise: Half, fall: Half) -> f64 {
    let (half, position) = match step.checked_sub(rise.steps) {
        None | Some(0) => (rise, step),
        Some(down) => (fall, fall.steps.saturating_sub(down)),
    };
    let (steps, position) = (half.steps.max(1) as f64, position as f64);
    match half.stairs {
        0 => position / steps,
        stairs => (position * stairs as f64 / steps).floor() / stairs as f64,
    }
}

/// A number of steps, with its unit.
fn steps(steps: u64) -> String {
    text::many(steps as usize, "step")
}

impl fmt::Display for Ramp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ramp::Log => "log",
            Ramp::Linear => "linear",
        })
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheduler::WarmupLr { min, max, warmup, ramp } => {
                write!(f, "WarmupLR: {min} to {max} over {} ({ramp}), then constant", steps(*warmup))
            }
            Scheduler::WarmupDecayLr { min, max, warmup, ramp, total } => {
                write!(f, "WarmupDecayLR: {min} to {max} over {} ({ramp}), ", steps(*warmup))?;
                write!(f, "then linear to {min} at step {total}")
            }
            Scheduler::WarmupCosineLr { peak, min_ratio, cos_min_ratio, warmup, ramp, total } => {
                write!(
                    f,
                    "WarmupCosineLR: {} to {peak} over {} ({ramp}), ",
                    min_ratio * peak,
                    steps(*warmup)
                )?;
                write!(f, "then cosine to {} at step {total}", cos_min_ratio * peak)
            }
            Scheduler::OneCycle { min, max, rise, fall, .. } => {
                write!(f, "OneCycle: {min} to {max} in {} and back in {}", steps(rise.steps), fall.steps)
            }
            Scheduler::LrRangeTest { min, every, rate, .. } => {
                write!(f, "LRRangeTest: from {min}, {rate} times that more every {}", steps(*every))
            }
        }
    }
}
