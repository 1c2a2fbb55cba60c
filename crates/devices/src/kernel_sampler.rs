//! Times of single kernels, from a few sampled steps of a run on a GPU.
//!
//! A captured graph gives its own duration only. So a few steps after the first run kernel by kernel with events between: they
//! give the share of each kind of work in the time of the whole run.

use crate::device::{Event, StepTime, Which};
use cuda::Traced;
use graph::Lane;
use graph::graph::Phase;
use std::ops::Range;

/// Sampled steps, counted from the first of this process: by then the GPU has a queue of work, and is clocked up.
const SAMPLED: Range<u64> = 6..9;

/// Durations of kernels by kind, and events for a trace.
#[derive(Default)]
pub(crate) struct KernelSampler {
    /// Flag: a few steps are sampled.
    enabled: bool,
    /// Flag: every step is traced.
    tracing: bool,
    steps: u64,
    /// Sampled runs: of forward and backward, and of the update.
    runs: [u64; 2],
    kinds: Vec<StepTime>,
    events: Vec<Event>,
}

fn is_update(phase: Phase) -> bool {
    phase == Phase::Update
}

impl KernelSampler {
    /// Samples a few of the next steps.
    pub fn begin(&mut self) {
        self.enabled = true;
    }

    /// Turns tracing of every step on or off.
    pub fn trace(&mut self, on: bool) {
        self.tracing = on;
    }

    /// Returns whether the step that is being queued runs kernel by kernel.
    pub fn samples(&self) -> bool {
        self.tracing || (self.enabled && SAMPLED.contains(&self.steps))
    }

    /// Counts a queued step.
    pub fn step_ended(&mut self) {
        self.steps += 1;
    }

    /// Adds the actions of sampled runs.
    pub fn take_in(&mut self, runs: Vec<Vec<Traced>>) {
        for first in runs.iter().filter_map(|run| run.first()) {
            self.runs[usize::from(first.which == Which::Update)] += 1;
        }
        for action in runs.into_iter().flatten() {
            // Communication has an account of its own.
            if action.lane != Lane::Comm {
                self.add(&action);
            }
            if self.tracing {
                let Traced { op, layer, phase, what, lane, start, end, .. } = action;
                let name = format!("{} of {layer} ({op}): {what}", phase.name()).into();
                self.events.push(Event { name, lane, phase, start, end });
            }
        }
    }

    fn add(&mut self, action: &Traced) {
        let Traced { op, phase, flops, bytes, .. } = action;
        let position = self.kinds.iter().position(|kind| kind.op == *op && kind.phase == *phase);
        let kind = match position {
            Some(position) => &mut self.kinds[position],
            None => {
                let (op, phase, is_matmul) = (op.clone(), *phase, op.starts_with("linear"));
                self.kinds.push(StepTime { op, phase, is_matmul, seconds: 0.0, flops: 0.0, bytes: 0.0 });
                let last = self.kinds.len() - 1;
                &mut self.kinds[last]
            }
        };
        kind.seconds += action.seconds();
        kind.flops += flops;
        kind.bytes += bytes;
    }

    /// Moves the events of traced steps into a list.
    pub fn take_events(&mut self, into: &mut Vec<Event>) {
        into.append(&mut self.events);
    }

    /// Seconds of each kind, longest first, from the seconds of all forward and backward passes and of all updates. None if
    /// nothing was sampled.
    pub fn times(&self, spent: [f64; 2], runs: [u64; 2]) -> Option<Vec<StepTime>> {
        let sum = |update: bool| -> f64 {
            self.kinds.iter().filter(|kind| is_update(kind.phase) == update).map(|kind| kind.seconds).sum()
        };
        let sums = [sum(false), sum(true)];
        if sums.contains(&0.0) {
            return None;
        }
        let scaled = |kind: &StepTime| {
            let part = usize::from(is_update(kind.phase));
            let of_all = |x: f64| x * runs[part] as f64 / self.runs[part] as f64;
            let seconds = kind.seconds / sums[part] * spent[part];
            StepTime { seconds, flops: of_all(kind.flops), bytes: of_all(kind.bytes), ..kind.clone() }
        };
        let mut times: Vec<StepTime> = self.kinds.iter().map(scaled).collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Some(times)
    }

    /// Explanation of where these times come from.
    pub fn note(&self) -> Option<String> {
        (self.runs[1] > 0).then(|| {
            format!(
                "kinds by their shares of {} steps that were run kernel by kernel with a mark around each; kernels of two lanes run \
                 beside each other, and small ones may have waited for the host",
                self.runs[1]
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn traced(which: Which, op: &str, phase: Phase, milliseconds: u64) -> Traced {
        let start = Instant::now();
        Traced {
            which,
            op: op.into(),
            layer: "head".into(),
            phase,
            what: "a kernel".into(),
            lane: Lane::Compute,
            start,
            end: start + Duration::from_millis(milliseconds),
            flops: 10.0,
            bytes: 0.0,
        }
    }

    #[test]
    fn shares_of_a_few_steps_divide_the_time_of_all() {
        let mut sampler = KernelSampler::default();
        assert!(
            sampler.times([1.0, 1.0], [1, 1]).is_none() && sampler.note().is_none() && !sampler.samples()
        );
        sampler.begin();
        let looked: Vec<u64> = (0..20)
            .filter(|_| {
                let samples = sampler.samples();
                sampler.step_ended();
                samples
            })
            .collect();
        assert_eq!(looked, [6, 7, 8]);
        let step = || {
            let last = vec![
                traced(Which::Last, "linear", Phase::Forward, 10),
                traced(Which::Last, "attention", Phase::Forward, 20),
                traced(Which::Last, "linear", Phase::Forward, 10),
            ];
            vec![last, vec![traced(Which::Update, "adamw", Phase::Update, 5)]]
        };
        sampler.take_in(step());
        sampler.take_in([step(), step()].concat());
        let times = sampler.times([8.0, 1.0], [100, 100]).unwrap();
        let of = |op: &str| times.iter().find(|time| time.op == op).unwrap();
        assert!((of("linear").seconds - 4.0).abs() < 1e-9 && (of("attention").seconds - 4.0).abs() < 1e-9);
        assert!((of("adamw").seconds - 1.0).abs() < 1e-9);
        assert_eq!((of("linear").flops, of("adamw").flops), (2000.0, 1000.0));
        assert!(of("linear").is_matmul && sampler.note().unwrap().contains("3 steps"));
        let mut events = Vec::new();
        sampler.take_events(&mut events);
        assert!(events.is_empty(), "nobody asked for a trace");
        sampler.trace(true);
        sampler.take_in(step());
        sampler.take_events(&mut events);
        assert_eq!(&*events[0].name, "forward of head (linear): a kernel");
        assert_eq!(events.len(), 4);
    }
}
