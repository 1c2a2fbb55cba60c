//! Clock of a control thread.

use std::time::{Duration, Instant};

/// Longest pause that counts in full: after a longer one the control thread itself did not run, and the others may have gone on or
/// been stopped with it.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Time in which the control thread ran: a process that was stopped and continues doesn't find every other rank silent.
pub(crate) struct Clock {
    last: Instant,
    now: Duration,
}

impl Clock {
    pub fn new() -> Self {
        Clock { last: Instant::now(), now: Duration::ZERO }
    }

    pub fn tick(&mut self) -> Duration {
        let pause = self.last.elapsed();
        self.last += pause;
        self.now += pause.min(LONGEST_PAUSE);
        self.now
    }
}
