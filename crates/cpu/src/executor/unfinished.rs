//! Collectives that plans have left under way when they ended. They work in the executor's memory, so nobody touches what they work
//! on, and the memory stays, until they are done.

use comm::{CommError, Communicator, Ticket};
use graph::StateId;

/// Collectives that are still running between plans.
#[derive(Default)]
pub(super) struct Unfinished {
    /// All ranks; groups share its queue.
    world: Option<Communicator>,
    /// Each with the states that it works on.
    calls: Vec<(Vec<StateId>, Ticket)>,
}

impl Unfinished {
    pub fn new(world: Option<Communicator>) -> Self {
        Unfinished { world, calls: vec![] }
    }

    /// Notes down a call that a plan leaves.
    pub fn push(&mut self, states: &[StateId], ticket: Ticket) {
        // The one of an earlier run is before it in the queue.
        self.calls.retain(|(of, _)| of != states);
        self.calls.push((states.to_vec(), ticket));
    }

    /// Waits for those that work on one of these states; whether there were any.
    pub fn wait_for(&mut self, states: &[StateId]) -> Result<bool, CommError> {
        let works_on = |(of, _): &(Vec<StateId>, Ticket)| of.iter().any(|state| states.contains(state));
        let (now, later) = std::mem::take(&mut self.calls).into_iter().partition(works_on);
        self.calls = later;
        self.wait_each(&now)?;
        Ok(!now.is_empty())
    }

    /// Waits for all, before the host reads or writes states. A call that fails is reported by the next run.
    pub fn finish(&self) {
        let _ = self.wait_each(&self.calls);
    }

    fn wait_each(&self, calls: &[(Vec<StateId>, Ticket)]) -> Result<(), CommError> {
        let Some(world) = &self.world else { return Ok(()) };
        calls.iter().try_for_each(|(_, ticket)| world.wait(*ticket).map(|_| ()))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.finish();
    }
}
