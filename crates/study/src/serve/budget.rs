//! What the live page may take of the machine: less than 5% of one core, however often it is asked. A run that is watched is to be as
//! fast as one that is not.
//!
//! Time for drawing comes at a steady rate, and is saved up for a moment. A drawing is paid for when it is done, and until that is made up
//! nothing is drawn again; whoever asks meanwhile gets what was drawn last. What counts is the time on a core. All pages of a
//! server share one budget. An answer that is kept costs about a tenth of a millisecond to send, so connections are accepted at
//! a limited rate.

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of one core, for drawing.
const DRAWING: f64 = 0.03;
/// Between two drawings, at least: a browser asks every two seconds.
const LEAST: Duration = Duration::from_secs(1);
/// Seconds of drawing that may be saved up, and the debt in which a page may still be drawn for the first time.
const SAVED: f64 = 0.3;
const DEBT: f64 = 0.3;
/// Connections a second, and how many may come at once.
const RATE: f64 = 50.0;
const AT_ONCE: f64 = 50.0;

/// The time since some moment.
pub trait Clock: Send + Sync {
    fn now(&self) -> Duration;

    /// Time that this thread has spent on a core; where that can't be told, the time, which is never less.
    fn spent(&self) -> Duration {
        self.now()
    }

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

    fn spent(&self) -> Duration {
        // Nanoseconds on a core are the first number. Waiting for a core, or for a slow disk, costs the run nothing.
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let nanoseconds = text.split_whitespace().next().and_then(|word| word.parse().ok());
        nanoseconds.map_or_else(|| self.now(), Duration::from_nanos)
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Time for drawing.
pub struct Budget {
    /// Seconds; less than 0 until what was drawn is made up for.
    left: f64,
    at: Duration,
}

impl Budget {
    pub fn start(clock: &dyn Clock) -> Self {
        Budget { left: 0.0, at: clock.now() }
    }

    fn earn(&mut self, now: Duration) {
        self.left = (self.left + DRAWING * now.saturating_sub(self.at).as_secs_f64()).min(SAVED);
        self.at = now;
    }
}

/// An answer, and until when it is given in any case.
#[derive(Default)]
pub struct Kept(Option<(Arc<[u8]>, Duration)>);

impl Kept {
    /// What is kept, or what is drawn now. What was never drawn may go into debt a little further; none beyond that.
    pub fn answer(
        &mut self,
        clock: &dyn Clock,
        budget: &mut Budget,
        draw: impl FnOnce() -> String,
    ) -> Option<Arc<[u8]>> {
        let start = clock.now();
        budget.earn(start);
        match &self.0 {
            Some((answer, until)) if start < *until || budget.left < 0.0 => return Some(Arc::clone(answer)),
            None if budget.left < -DEBT => return None,
            _ => {}
        }
        let before = clock.spent();
        let answer: Arc<[u8]> = draw().into_bytes().into();
        budget.left -= clock.spent().saturating_sub(before).as_secs_f64();
        self.0 = Some((Arc::clone(&answer), clock.now() + LEAST));
        Some(answer)
    }

    /// Lets the next answer be drawn, whatever it costs.
    pub fn forget(&mut self, budget: &mut Budget) {
        self.0 = None;
        budget.left = budget.left.max(0.0);
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

    /// Asked a thousand times a second for ten minutes, whatever a drawing takes, for one page or for five: what it takes in all is within its
    /// budget, but for the first of each, and what is shown is as new as that allows.
    #[test]
    fn drawing_takes_its_share_and_no_more_however_often_it_is_asked() {
        for (cost, pages) in [(0.0001, 1), (0.002, 1), (0.04, 1), (0.5, 1), (3.0, 1), (0.04, 5), (0.5, 5)] {
            let clock = Told(Mutex::default());
            let (mut kept, mut drawn, mut oldest) = ([(); 5].map(|()| Kept::default()), 0u32, Duration::ZERO);
            let mut budget = Budget::start(&clock);
            let whole = Duration::from_secs(600);
            while clock.now() < whole {
                for page in &mut kept[..pages] {
                    let answer = page.answer(&clock, &mut budget, || {
                        drawn += 1;
                        clock.sleep(Duration::from_secs_f64(cost));
                        clock.now().as_nanos().to_string()
                    });
                    let Some(answer) = answer else { continue };
                    let made: u64 = std::str::from_utf8(&answer).unwrap().parse().unwrap();
                    oldest = oldest.max(clock.now() - Duration::from_nanos(made));
                }
                clock.sleep(Duration::from_millis(1));
            }
            let spent = f64::from(drawn) * cost - (cost + DEBT + SAVED);
            assert!(spent <= DRAWING * clock.now().as_secs_f64(), "{cost} s: {drawn} times, {spent} s");
            if pages == 1 {
                let expected = Duration::from_secs_f64((cost / DRAWING).max(1.0) + 0.01);
                assert!(oldest <= expected, "{cost} s: {oldest:?} old");
                assert!(drawn >= (600.0 / expected.as_secs_f64()) as u32, "{cost} s: {drawn} times");
            }
        }
    }

    #[test]
    fn a_page_that_nobody_has_seen_is_drawn_at_once_unless_many_were() {
        let clock = Told(Mutex::default());
        let mut budget = Budget::start(&clock);
        let draw = || {
            clock.sleep(Duration::from_millis(100));
            String::new()
        };
        let mut new = || Kept::default().answer(&clock, &mut budget, draw).is_some();
        assert_eq!((0..8).filter(|_| new()).count(), 4);
        clock.sleep(Duration::from_secs(4));
        assert!(new() && !new());
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
