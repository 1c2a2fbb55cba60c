//! Computing more slowly on purpose, to see what a slow rank does to the others.

use std::time::{Duration, Instant};

/// Makes the walking thread sleep so that computing takes a multiple of its own time. It counts the time the thread spent on
/// a core, so that ranks that share cores are slowed down by what they did, not by what the others did.
#[derive(Debug)]
pub struct Slowdown {
    /// Seconds to sleep for every second computed.
    extra: f64,
    counted: f64,
    debt: f64,
}

/// Sleeping for less than this costs more than it lasts.
const WORTH: f64 = 1e-3;

impl Slowdown {
    /// None for a factor of 1.
    pub fn by(factor: f64) -> Option<Self> {
        (factor > 1.0).then(|| Slowdown { extra: factor - 1.0, counted: on_core(), debt: 0.0 })
    }

    pub fn pay(&mut self) {
        let now = on_core();
        self.debt += (now - self.counted) * self.extra;
        self.counted = now;
        if self.debt > WORTH {
            let start = Instant::now();
            std::thread::sleep(Duration::from_secs_f64(self.debt));
            self.debt -= start.elapsed().as_secs_f64();
        }
    }
}

/// Seconds that this thread has spent on a core.
fn on_core() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists wherever threads do, and `time` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
