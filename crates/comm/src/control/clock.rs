//! Time as a watcher counts it.

use std::time::{Duration, Instant};

/// A longer pause means that the watcher itself did not run: the others may have gone on, or were stopped with it.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Time in which the watcher ran, so that a process that was stopped and goes on doesn't find everyone silent.
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
