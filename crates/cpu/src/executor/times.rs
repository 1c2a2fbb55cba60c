//! Measurements: the account of time, by part and by kind of step.

use super::Executor;
use crate::error::CpuError;
use crate::kernels::Float;
use graph::graph::Phase;
use graph::op::Lane;
use graph::plan::{Plan, Step};
use graph::run::{Account, CollectiveTime, Event, StepTime, Which};

/// Threads with nothing to do while others work: no step, but a part of the time.
const IDLE: &str = "waiting for threads";

impl<T: Float> Executor<T> {
    /// Account of time since the last call.
    pub fn take_account(&mut self) -> Account {
        self.made.tell();
        self.clock.take()
    }

    /// Forgets the time since the last call; collectives that were waited for meanwhile count in the next step.
    pub fn forget_time(&mut self) {
        self.clock.take();
    }

    /// Waits for what the last update has left under way. Returns the collectives of all plans that train, as they ran since the account was
    /// taken last.
    pub fn finish_collectives(&mut self) -> Result<&[CollectiveTime], CpuError> {
        let Executor { plans, clock, unfinished, made, .. } = self;
        made.begin();
        if unfinished.wait_for_all()? && clock.is_timing() {
            clock.settle(unfinished.waited());
            for left in unfinished.settled() {
                plans[left.plan].count(left.call, left.time.seconds, left.time.exposed);
                made.add_left(left);
            }
        }
        made.tell();
        Ok(made.times())
    }

    /// The collectives of all plans that train, as they ran since the account was taken before last. What a plan leaves under way counts
    /// when a later one has waited for it.
    pub fn collectives(&self) -> &[CollectiveTime] {
        self.made.times()
    }

    /// Turns measuring on, as it is from the start, or off; without, no clock is read.
    pub fn set_timing(&mut self, on: bool) {
        self.clock.set_timing(on);
    }

    /// Turns recording every step and collective for a trace on or off; needs timing.
    pub fn set_tracing(&mut self, on: bool) {
        self.clock.set_tracing(on);
    }

    /// Adds what happened since this was last asked, in the order in which it ended on each lane.
    pub fn take_trace(&mut self, into: &mut Vec<Event>) {
        self.clock.take_events(into);
    }

    /// Forgets the times measured so far, by kind of step.
    pub fn reset_times(&mut self) {
        self.past.clear();
        for plan in &mut self.plans {
            (plan.runs, plan.idle_nanoseconds) = (0, 0);
            plan.steps.iter_mut().for_each(|step| step.nanoseconds = 0);
            plan.calls.iter_mut().for_each(|call| call.seconds = 0.0);
        }
    }

    /// Seconds of every step of a plan, over all its runs since the last reset: what [`graph::replay()`] takes. What threads spent
    /// waiting for each other is part of the steps they were at.
    pub fn step_seconds(&self, which: Which) -> Vec<f64> {
        let bound = &self.plans[which as usize];
        let mut seconds: Vec<f64> = bound.steps.iter().map(|step| step.nanoseconds as f64 / 1e9).collect();
        bound.calls.iter().for_each(|call| seconds[call.step] = 0.0);
        let computing: f64 = seconds.iter().sum();
        let waiting = bound.idle_nanoseconds as f64 / 1e9 / computing.max(f64::MIN_POSITIVE);
        seconds.iter_mut().for_each(|step| *step *= 1.0 + waiting);
        bound.calls.iter().for_each(|call| seconds[call.step] = call.seconds);
        seconds
    }

    /// Times of training (everything but `eval`) since the last reset, by kind of step, longest first.
    pub fn training_times(&self) -> Vec<StepTime> {
        let mut times = self.past.clone();
        for which in Which::TRAINING {
            let (plan, bound) = (self.plan(which), &self.plans[which as usize]);
            for (step, timed) in plan.steps.iter().zip(&bound.steps) {
                // A collective that nobody had to wait for is worth its line.
                if timed.nanoseconds > 0 || (step.lane == Lane::Comm && bound.runs > 0) {
                    add_time(&mut times, plan, step, timed.nanoseconds as f64 / 1e9, bound.runs as f64);
                }
            }
        }
        let idle: u64 = Which::TRAINING.map(|which| self.plans[which as usize].idle_nanoseconds).iter().sum();
        if idle > 0 {
            add(&mut times, IDLE, Phase::Backward, false).seconds += idle as f64 / 1e9;
        }
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        times
    }
}

fn add_time(times: &mut Vec<StepTime>, plan: &Plan, step: &Step, seconds: f64, runs: f64) {
    let cost = plan.cost_of(step);
    let time = add(times, &step.op.name(), step.phase, step.op.is_matmul());
    time.seconds += seconds;
    time.flops += cost.flops * runs;
    time.bytes += cost.bytes * runs;
}

/// Entry of a kind of step.
fn add<'a>(times: &'a mut Vec<StepTime>, op: &str, phase: Phase, is_matmul: bool) -> &'a mut StepTime {
    let index = times.iter().position(|t| t.op == op && t.phase == phase).unwrap_or_else(|| {
        let op = op.to_string();
        times.push(StepTime { op, phase, is_matmul, seconds: 0.0, flops: 0.0, bytes: 0.0 });
        times.len() - 1
    });
    &mut times[index]
}
