//! Account of a run's time.
//!
//! The thread that walks a plan marks the end of everything it does, and what lies between two marks belongs to what it
//! did: nothing falls between. Collectives run beside it; what of them falls into its waiting is exposed, the rest
//! hidden.

use comm::Timing;
use graph::graph::Phase;
use graph::op::Lane;
use graph::run::{Account, CollectiveTime, Event, Which};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The end of something that the walking thread did in a flow: a step, or waiting for others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub step: Option<usize>,
    pub end: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Interval {
    start: Instant,
    end: Instant,
}

impl Interval {
    fn seconds(&self) -> f64 {
        self.end.saturating_duration_since(self.start).as_secs_f64()
    }

    /// Seconds that this shares with intervals that don't meet each other.
    fn shared(&self, others: &[Interval]) -> f64 {
        let common = |other: &Interval| {
            let (start, end) = (self.start.max(other.start), self.end.min(other.end));
            end.saturating_duration_since(start)
        };
        others.iter().map(common).sum::<Duration>().as_secs_f64()
    }
}

/// The marks of the thread that walks. With timing off no clock is read.
pub(crate) struct Clock {
    timing: bool,
    tracing: bool,
    mark: Instant,
    total: Account,
    /// Waits in the present run.
    waits: Vec<Interval>,
    events: Vec<Event>,
    waiting: Arc<str>,
    joining: Arc<str>,
}

impl Clock {
    pub fn new() -> Self {
        Clock {
            timing: true,
            tracing: false,
            mark: Instant::now(),
            total: Account::default(),
            waits: Vec::new(),
            events: Vec::new(),
            waiting: Arc::from("waiting for communication"),
            joining: Arc::from("waiting for other threads"),
        }
    }

    pub fn set_timing(&mut self, on: bool) {
        self.timing = on;
    }

    pub fn set_tracing(&mut self, on: bool) {
        self.tracing = on;
    }

    pub fn take(&mut self) -> Account {
        std::mem::take(&mut self.total)
    }

    pub fn take_events(&mut self, into: &mut Vec<Event>) {
        into.append(&mut self.events);
    }

    /// A run of a plan begins.
    pub fn begin(&mut self, steps: usize) {
        if !self.timing {
            return;
        }
        self.waits.clear();
        self.waits.reserve(steps + 1);
        if self.tracing {
            // Each step, and perhaps a wait before it.
            self.events.reserve(2 * steps + 1);
        }
        self.mark = Instant::now();
    }

    /// Interval between the last mark and this one.
    fn lap(&mut self) -> Option<Interval> {
        if !self.timing {
            return None;
        }
        let end = Instant::now();
        let start = std::mem::replace(&mut self.mark, end);
        Some(Interval { start, end })
    }

    fn part(&mut self, which: Which) -> &mut f64 {
        match which {
            Which::First | Which::Micro | Which::Last => &mut self.total.compute,
            Which::Update => &mut self.total.update,
            Which::Eval => &mut self.total.evaluation,
        }
    }

    /// A step was computed; returns its nanoseconds.
    pub fn computed(&mut self, which: Which, name: &Arc<str>, phase: Phase) -> u64 {
        let Some(lap) = self.lap() else { return 0 };
        *self.part(which) += lap.seconds();
        if self.tracing {
            let Interval { start, end } = lap;
            self.events.push(Event { name: Arc::clone(name), lane: Lane::Compute, phase, start, end });
        }
        lap.end.saturating_duration_since(lap.start).as_nanos() as u64
    }

    /// Steps were computed together, in which the walking thread did as `marks` say; returns their nanoseconds.
    pub fn flowed<'a>(
        &mut self,
        which: Which,
        marks: &[Mark],
        of: impl Fn(usize) -> (&'a Arc<str>, Phase),
    ) -> u64 {
        let Some(lap) = self.lap() else { return 0 };
        *self.part(which) += lap.seconds();
        if self.tracing {
            self.events.reserve(marks.len() + 1);
            let mut start = lap.start;
            for mark in marks.iter().chain(&[Mark { step: None, end: lap.end }]) {
                let (name, phase) = match mark.step {
                    Some(step) => of(step),
                    None => (&self.joining, Phase::Backward),
                };
                let (name, end) = (Arc::clone(name), mark.end);
                self.events.push(Event { name, lane: Lane::Compute, phase, start, end });
                start = end;
            }
        }
        lap.end.saturating_duration_since(lap.start).as_nanos() as u64
    }

    /// A collective was handed over, or something else was done that is no step.
    pub fn idled(&mut self) {
        if let Some(lap) = self.lap() {
            self.total.idle += lap.seconds();
        }
    }

    /// A collective was waited for.
    pub fn waited(&mut self) {
        let Some(lap) = self.lap() else { return };
        self.total.exposed += lap.seconds();
        self.waits.push(lap);
        if self.tracing {
            let (name, Interval { start, end }) = (Arc::clone(&self.waiting), lap);
            self.events.push(Event { name, lane: Lane::Compute, phase: Phase::Communication, start, end });
        }
    }

    /// Settles the collectives of a run that is over, in the order in which they were started.
    pub fn settle<'a>(&mut self, calls: impl Iterator<Item = (&'a mut CollectiveTime, Timing)>) {
        let mut counted_until: Option<Instant> = None;
        for (time, Timing { started, finished }) in calls {
            let call = Interval { start: started, end: finished };
            (time.calls, time.seconds, time.exposed) = (1, call.seconds(), call.shared(&self.waits));
            // The union of all: what an earlier one covers is not counted again.
            let start = counted_until.map_or(started, |until| until.max(started));
            let fresh = Interval { start, end: finished };
            self.total.hidden += (fresh.seconds() - fresh.shared(&self.waits)).max(0.0);
            counted_until = Some(counted_until.map_or(finished, |until| until.max(finished)));
            if self.tracing {
                let (name, phase) = (Arc::clone(&time.layer), Phase::Communication);
                self.events.push(Event { name, lane: Lane::Comm, phase, start: started, end: finished });
            }
        }
        self.idled();
    }

    pub fn is_tracing(&self) -> bool {
        self.tracing
    }

    pub fn is_timing(&self) -> bool {
        self.timing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(base: Instant, start: u64, end: u64) -> Interval {
        Interval { start: base + Duration::from_millis(start), end: base + Duration::from_millis(end) }
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    fn settled(waits: &[(u64, u64)], calls: &[(u64, u64)]) -> (Account, Vec<(f64, f64)>) {
        let base = Instant::now();
        let mut clock = Clock::new();
        clock.waits = waits.iter().map(|(s, e)| at(base, *s, *e)).collect();
        let time = CollectiveTime::new("x", "all_reduce", 0, 2);
        let mut times = vec![time; calls.len()];
        let timings = calls.iter().map(|(s, e)| at(base, *s, *e));
        let timings = timings.map(|i| Timing { started: i.start, finished: i.end });
        clock.settle(times.iter_mut().zip(timings));
        (clock.take(), times.iter().map(|t| (t.seconds, t.exposed)).collect())
    }

    #[test]
    fn what_falls_into_a_wait_is_exposed() {
        // Three calls, one after the other; the walking thread waits from 25 to 45.
        let (account, times) = settled(&[(25, 45)], &[(0, 10), (10, 30), (30, 45)]);
        assert!(near(account.hidden, 0.025), "{account:?}");
        assert_eq!(times.len(), 3);
        assert!(near(times[0].1, 0.0) && near(times[1].1, 0.005) && near(times[2].1, 0.015), "{times:?}");
    }

    #[test]
    fn calls_of_two_lanes_that_overlap_are_counted_once() {
        let (account, times) = settled(&[(30, 40)], &[(0, 20), (10, 35), (12, 18), (50, 60)]);
        assert!(near(account.hidden, 0.030 + 0.010), "{account:?}");
        assert!(near(times[1].0, 0.025) && near(times[1].1, 0.005));
    }

    #[test]
    fn several_waits_add_up() {
        let (account, times) = settled(&[(0, 5), (10, 15), (90, 95)], &[(2, 12)]);
        assert!(near(times[0].1, 0.005) && near(account.hidden, 0.005), "{account:?} {times:?}");
    }
}
