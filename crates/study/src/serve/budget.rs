//! What the live page may take of the machine: less than 5% of one core, however often it is asked. A run that is watched is to be as
//! fast as one that is not.
//!
//! What is drawn is kept, and drawn again only after a pause that is as many times longer as drawing takes a share of its budget; whoever
//! asks meanwhile gets what is kept. Drawing is timed by the clock, which is never less than the time on a core. An answer
//! that is kept costs about a tenth of a millisecond to send, so connections are accepted at a limited rate.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of one core, for drawing.
const DRAWING: f64 = 0.03;
/// Between two drawings, at least: a browser asks every two seconds.
const LEAST: Duration = Duration::from_secs(1);
/// Connections a second, and how many may come at once.
const RATE: f64 = 50.0;
const AT_ONCE: f64 = 50.0;

/// The time since some moment.
pub trait Clock: Send + Sync {
    fn now(&self) -> Duration;
    fn sleep(&self, time: Duration);
}

pub struct RealClock(Instant);

impl RealClock {
    pub fn start() -> Self {
        RealClock(Instant::now())
    }
}

impl Clock for RealClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// An answer, and until when it is given.
#[derive(Default)]
pub struct Kept(Option<(Arc<[u8]>, Duration)>);

impl Kept {
    /// What is kept, or what is drawn now.
    pub fn answer(&mut self, clock: &dyn Clock, draw: impl FnOnce() -> String) -> Arc<[u8]> {
        let start = clock.now();
        if let Some((answer, _)) = self.0.as_ref().filter(|kept| start < kept.1) {
            return Arc::clone(answer);
        }
        let answer: Arc<[u8]> = draw().into_bytes().into();
        let end = clock.now();
        let pause = end.saturating_sub(start).mul_f64(1.0 / DRAWING - 1.0).max(LEAST);
        self.0 = Some((Arc::clone(&answer), end + pause));
        answer
    }
}

/// Connections as they may be accepted.
pub struct Pace {
    free: f64,
    at: Duration,
}

impl Pace {
    pub fn start(clock: &dyn Clock) -> Self {
        Pace { free: AT_ONCE, at: clock.now() }
    }

    /// Waits until one more may be accepted.
    pub fn next(&mut self, clock: &dyn Clock) {
        let now = clock.now();
        self.free = (self.free + RATE * now.saturating_sub(self.at).as_secs_f64()).min(AT_ONCE) - 1.0;
        self.at = now;
        if self.free < 0.0 {
            clock.sleep(Duration::from_secs_f64(-self.free / RATE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A clock that moves by hand.
    struct Told(Mutex<Duration>);

    impl Clock for Told {
        fn now(&self) -> Duration {
            *self.0.lock().unwrap()
        }

        fn sleep(&self, time: Duration) {
            *self.0.lock().unwrap() += time;
        }
    }

    /// Asked a thousand times a second for ten minutes, whatever a drawing takes: what it takes in all is within its budget, but for
    /// the first, and what is shown is as new as that allows.
    #[test]
    fn drawing_takes_its_share_and_no_more_however_often_it_is_asked() {
        for cost in [0.0001, 0.002, 0.04, 0.5, 3.0] {
            let clock = Told(Mutex::default());
            let (mut kept, mut drawn, mut oldest) = (Kept::default(), 0u32, Duration::ZERO);
            let whole = Duration::from_secs(600);
            while clock.now() < whole {
                let answer = kept.answer(&clock, || {
                    drawn += 1;
                    clock.sleep(Duration::from_secs_f64(cost));
                    clock.now().as_nanos().to_string()
                });
                let made: u64 = std::str::from_utf8(&answer).unwrap().parse().unwrap();
                oldest = oldest.max(clock.now() - Duration::from_nanos(made));
                clock.sleep(Duration::from_millis(1));
            }
            let share = f64::from(drawn - 1) * cost / clock.now().as_secs_f64();
            assert!(share <= DRAWING, "{cost} s: {drawn} times, {share}");
            let expected = Duration::from_secs_f64((cost / DRAWING).max(1.0) + 0.01);
            assert!(oldest <= expected, "{cost} s: {oldest:?} old");
            assert!(drawn >= (600.0 / expected.as_secs_f64()) as u32, "{cost} s: {drawn} times");
        }
    }

    #[test]
    fn connections_come_at_a_limited_rate() {
        let clock = Told(Mutex::default());
        let mut pace = Pace::start(&clock);
        for _ in 0..50 {
            pace.next(&clock);
        }
        assert_eq!(clock.now(), Duration::ZERO, "a browser that opens many is not held up");
        for _ in 0..1000 {
            pace.next(&clock);
        }
        assert!((clock.now().as_secs_f64() - 20.0).abs() < 1e-6, "{:?}", clock.now());
        clock.sleep(Duration::from_secs(600));
        let before = clock.now();
        (0..50).for_each(|_| pace.next(&clock));
        assert_eq!(clock.now(), before);
    }
}
