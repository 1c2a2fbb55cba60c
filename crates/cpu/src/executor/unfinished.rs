//! Collectives that plans have left under way when they ended. They work in the executor's memory, so nobody touches what they work
//! on, and the memory stays, until they are done.

use super::bind::BoundPlan;
use crate::memory::View;
use comm::{CommError, Communicator, Ticket, Timing};
use graph::StateId;
use graph::run::CollectiveTime;
use std::ops::Range;

/// A collective that its plan leaves.
pub(super) struct Left {
    /// States that it works on, and where they lie.
    states: Vec<StateId>,
    memory: Vec<Range<usize>>,
    /// Its plan and its number there.
    pub plan: usize,
    pub call: usize,
    /// Ticket of the present run, until it was waited for.
    ticket: Option<Ticket>,
    /// When it ran, until that was accounted for.
    timing: Option<Timing>,
    /// The times that follow.
    pub time: CollectiveTime,
}

/// Collectives that may still be running between plans.
#[derive(Default)]
pub(super) struct Unfinished {
    /// All ranks; groups share its queue.
    world: Option<Communicator>,
    calls: Vec<Left>,
}

impl Unfinished {
    /// Of plans that were just bound; numbers the calls that they leave.
    pub fn of<T>(world: Option<Communicator>, plans: &mut [BoundPlan<T>], views: &[View<u8>]) -> Self {
        let mut calls = vec![];
        for (plan, bound) in plans.iter_mut().enumerate() {
            for (call, one) in bound.calls.iter_mut().enumerate() {
                if let Some(states) = &one.left {
                    one.number = calls.len();
                    let (states, time) = (states.clone(), bound.collectives[call].clone());
                    let memory = states.iter().map(|state| addresses(views[state.index()])).collect();
                    calls.push(Left { states, memory, plan, call, ticket: None, timing: None, time });
                }
            }
        }
        Unfinished { world, calls }
    }

    /// Notes down a call that a plan leaves. The one of an earlier run is before it in the queue.
    pub fn push(&mut self, number: usize, ticket: Ticket) {
        self.calls[number].ticket = Some(ticket);
    }

    /// Waits for those that work on one of these states; whether there were any.
    pub fn wait_for(&mut self, states: &[StateId]) -> Result<bool, CommError> {
        self.wait_if(|left| left.states.iter().any(|of| states.contains(of)))
    }

    /// Waits for all; whether there were any.
    pub fn wait_for_all(&mut self) -> Result<bool, CommError> {
        self.wait_if(|_| true)
    }

    fn wait_if(&mut self, is_waited_for: impl Fn(&Left) -> bool) -> Result<bool, CommError> {
        let Some(world) = &self.world else { return Ok(false) };
        let mut any = false;
        for left in self.calls.iter_mut().filter(|left| is_waited_for(left)) {
            if let Some(ticket) = left.ticket.take() {
                left.timing = Some(world.wait(ticket)?);
                any = true;
            }
        }
        Ok(any)
    }

    /// Waits for all, before the host writes states. A call that fails is reported by the next run.
    pub fn finish(&self) {
        self.finish_if(|_| true);
    }

    /// Waits for those that work on any of this memory, before the host reads it: what a step came to is known while others go on.
    pub fn finish_in(&self, view: View<u8>) {
        let here = addresses(view);
        let meets = |there: &Range<usize>| there.start < here.end && here.start < there.end;
        self.finish_if(|left| left.memory.iter().any(meets));
    }

    fn finish_if(&self, works_there: impl Fn(&Left) -> bool) {
        let Some(world) = &self.world else { return };
        for ticket in self.calls.iter().filter(|left| works_there(left)).filter_map(|left| left.ticket) {
            if world.wait(ticket).is_err() {
                return;
            }
        }
    }

    /// Those that were waited for since this was last asked, each with the times to be filled in.
    pub fn waited(&mut self) -> impl Iterator<Item = (&mut CollectiveTime, Timing)> {
        self.calls.iter_mut().filter_map(|left| Some((&mut left.time, left.timing.take()?)))
    }

    /// Whether there are any of those.
    pub fn has_waited(&self) -> bool {
        self.calls.iter().any(|left| left.timing.is_some())
    }

    /// Those whose times were filled in, which are then forgotten.
    pub fn settled(&mut self) -> impl Iterator<Item = &mut Left> {
        self.calls.iter_mut().filter(|left| left.time.calls > 0)
    }
}

fn addresses(view: View<u8>) -> Range<usize> {
    let start = view.address() as usize;
    start..start + view.len()
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.finish();
    }
}
