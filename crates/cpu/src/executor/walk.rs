//! Walks a plan: computes its steps, those that flow together (`flow.rs`) and others one by one, hands collectives over to the
//! communicator, whose queue is the comm lane, and waits for them where a step needs their results.

use super::bind::{BoundCall, BoundPlan, Work};
use super::flow::Stretch;
use super::unfinished::Unfinished;
use super::{Executor, Which};
use crate::account::Clock;
use crate::error::CpuError;
use crate::kernels::Float;
use crate::steps::{self, Team};
use calls::PlanCommunicators;
use comm::{CommError, Ticket, Timing};
use graph::{Header, Op};
use std::time::Instant;

/// Collectives that were started. They work in the executor's memory, so that nobody goes on before they are done, whatever
/// happens.
struct UnderWay<'a> {
    groups: Option<&'a PlanCommunicators>,
    last: Option<Ticket>,
}

impl<'a> UnderWay<'a> {
    fn new(groups: Option<&'a PlanCommunicators>) -> Self {
        UnderWay { groups, last: None }
    }

    /// # Safety
    /// The call's memory is that of the executor, and no step touches it before it was waited for. Who starts one that is left notes that
    /// down.
    unsafe fn start(&mut self, bound: &BoundCall) -> Result<Ticket, CommError> {
        // SAFETY: passed on to the caller; this value waits for it before it goes out of scope.
        let ticket = unsafe { bound.comm.start(bound.call.clone()) }?;
        // What is left is the executor's to wait for.
        if bound.left.is_none() {
            self.last = Some(ticket);
        }
        Ok(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<Timing, CommError> {
        // PlanCommunicators share a queue. Plans with collectives are refused when they are bound without other ranks.
        let alone = || CommError::Misuse("a collective without a communicator".into());
        self.groups.ok_or_else(alone)?.world().wait(ticket)
    }

    /// Waits for all; whether there were any.
    fn finish(&mut self) -> Result<bool, CommError> {
        match self.last.take() {
            Some(last) => self.wait(last).map(|_| true),
            None => Ok(false),
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

impl<T> BoundPlan<T> {
    /// Settles the times of a run's collectives, and of those of earlier plans that it waited for.
    fn settle(&mut self, under_way: &UnderWay<'_>, unfinished: &mut Unfinished, clock: &mut Clock) {
        if !clock.is_timing() {
            return;
        }
        let timing = |call: &BoundCall| under_way.wait(call.ticket.filter(|_| call.left.is_none())?).ok();
        let calls = self.collectives.iter_mut().zip(&self.calls);
        let calls = calls.filter_map(|(time, call)| Some((time, timing(call)?)));
        clock.settle(unfinished.waited().chain(calls));
        for at in 0..self.calls.len() {
            if self.calls[at].left.is_none() {
                let (seconds, exposed) = (self.collectives[at].seconds, self.collectives[at].exposed);
                self.count(at, seconds, exposed);
            }
        }
    }

    /// Adds the time of a collective, and of waiting for it, to those of its step.
    pub(super) fn count(&mut self, at: usize, seconds: f64, exposed: f64) {
        let call = &mut self.calls[at];
        call.seconds += seconds;
        self.steps[call.step].nanoseconds += (exposed * 1e9) as u64;
    }
}

impl<T: Float> Executor<T> {
    /// Runs a plan from its first step to its last.
    pub fn run(&mut self, which: Which, header: &Header) -> Result<(), CpuError> {
        self.begin(which)?;
        self.made.begin();
        let Executor { plans, groups, clock, pool, slowdown, unfinished, made, .. } = self;
        let plan = &mut plans[which as usize];
        let mut under_way = UnderWay::new(groups.as_ref());
        plan.runs += 1;
        clock.begin(plan.steps.len());
        for stretch in &plan.stretches {
            let steps = stretch.steps();
            match plan.steps[steps.start].work {
                Work::Call(number) => {
                    let bound = &mut plan.calls[number];
                    // SAFETY: steps that come before in the plan are done, and those after wait for the call where
                    // they touch its memory; `&mut self` keeps the host away.
                    let ticket = unsafe { under_way.start(bound) }?;
                    bound.ticket = Some(ticket);
                    if bound.left.is_some() {
                        unfinished.push(bound.number, ticket);
                    }
                    clock.idled();
                    continue;
                }
                Work::Compute { after } => {
                    if let Some(ticket) = after.and_then(|number| plan.calls[number].ticket) {
                        under_way.wait(ticket)?;
                        clock.waited();
                    }
                    if unfinished.wait_for(&plan.steps[steps.start].after)? {
                        clock.waited();
                    }
                }
            }
            let activity = groups.as_ref().map(|groups| &**groups.world().activity());
            match (stretch, &mut *slowdown) {
                (Stretch::Flow(flow), None) => {
                    flow.run(&plan.steps, header, pool, activity, clock);
                    let of = |step: usize| (&plan.steps[step].name, plan.steps[step].phase);
                    let took = clock.flowed(which, &flow.trace(), of);
                    plan.idle_nanoseconds += flow.settle(&mut plan.steps, took, pool.threads());
                }
                // A rank that is slow on purpose sleeps after each step, while nobody does its work.
                (_, slowdown) => {
                    for step in &mut plan.steps[steps] {
                        if let (Some(activity), Some(name)) = (activity, step.doing) {
                            activity.doing(name);
                        }
                        let team = Team::All(pool);
                        // SAFETY: the plan gives each step its own outputs and scratch and orders every reader after
                        // its writer; `&mut self` keeps the host away.
                        unsafe { steps::run(&steps::Context { team, header, step, matmuls_only: false }) };
                        if let Some(slowdown) = slowdown {
                            slowdown.pay();
                        }
                        step.nanoseconds += clock.computed(which, &step.name, step.phase);
                    }
                }
            }
        }
        let any = under_way.finish()?;
        if any {
            clock.waited();
        }
        if any || unfinished.has_waited() {
            plan.settle(&under_way, unfinished, clock);
            made.add(which as usize, plan);
            for left in unfinished.settled() {
                plans[left.plan].count(left.call, left.time.seconds, left.time.exposed);
                made.add_left(left);
            }
        }
        Ok(())
    }

    /// Runs a plan without collectives on one thread, its flows in any order that they allow: of the parts that may come next,
    /// always the one of `choose(how many there are)`. For tests of what waits for what.
    #[doc(hidden)]
    pub fn run_in_any_order(
        &mut self,
        which: Which,
        header: &Header,
        choose: &mut dyn FnMut(usize) -> usize,
    ) -> Result<(), CpuError> {
        self.begin(which)?;
        for index in 0..self.plans[which as usize].stretches.len() {
            let plan = &self.plans[which as usize];
            match &plan.stretches[index] {
                Stretch::Step(step) => self.run_step(which, *step, header)?,
                Stretch::Flow(flow) => {
                    flow.run_in_any_order(&plan.steps, header, self.pool.threads(), choose)
                }
            }
        }
        Ok(())
    }

    /// Does one step, and waits for it.
    pub(crate) fn run_step(&mut self, which: Which, index: usize, header: &Header) -> Result<(), CpuError> {
        let plan = &self.plans[which as usize];
        let step = &plan.steps[index];
        self.unfinished.wait_for(&step.after)?;
        if let Work::Call(number) = step.work {
            let mut under_way = UnderWay::new(self.groups.as_ref());
            // SAFETY: nothing else runs, and the call is waited for at once.
            let ticket = unsafe { under_way.start(&plan.calls[number]) }?;
            under_way.wait(ticket)?;
            return Ok(());
        }
        // SAFETY: as in `run`.
        unsafe {
            steps::run(&steps::Context { team: Team::All(&self.pool), header, step, matmuls_only: false })
        };
        Ok(())
    }

    /// Runs only the matmuls of a plan (those inside attention too), without epilogues, and returns the seconds they
    /// take: the ceiling the whole plan is measured against. Results are garbage.
    pub fn run_matmuls(&mut self, which: Which, header: &Header) -> f64 {
        self.refresh();
        let start = Instant::now();
        for step in &self.plans[which as usize].steps {
            let attention = matches!(step.op, Op::Attention { .. } | Op::AttentionGrad { .. });
            if step.is_matmul || attention {
                let team = Team::All(&self.pool);
                let context = steps::Context { team, header, step, matmuls_only: true };
                // SAFETY: as in `run`.
                unsafe { steps::run(&context) };
            }
        }
        start.elapsed().as_secs_f64()
    }
}
