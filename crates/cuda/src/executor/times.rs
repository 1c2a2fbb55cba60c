//! Times of collectives, and of the compute lane's waits for them, by the GPU's clock.
//!
//! Kernels of one thread record the time before and after every collective in the comm lane, and before and after every place
//! where the compute lane waits for some. The times are read back with a step's other numbers, so that each step has its own, however many
//! are in flight. Through the host a collective begins when its data leaves the GPU and ends when the result is back.

use crate::collectives::TimeNotes;
use crate::driver::{Block, Context, Pinned};
use crate::error::CudaError;
use graph::run::{EachPlan, Which};
use std::sync::Arc;

/// Times of the collectives of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CollectiveTimes {
    /// Each that ends with its plan, in the order of the plans.
    pub calls: Vec<CallTime>,
    /// Seconds that the compute lane waited for collectives, in all plans of the step.
    pub exposed: f64,
    /// Seconds of those in `update`.
    pub exposed_in_update: f64,
    /// Seconds in which collectives ran and the compute lane did something else.
    pub hidden: f64,
}

/// Time of one collective in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallTime {
    /// Runs of its plan.
    pub calls: u32,
    /// Seconds of those from its start on this rank to its end, the wait for other ranks included.
    pub seconds: f64,
    /// Seconds of those that the compute lane waited.
    pub exposed: f64,
}

/// Recorded times of each list, one list's behind another's.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NotesOfLists(Vec<(Which, TimeNotes)>);

impl NotesOfLists {
    pub fn push(&mut self, which: Which, notes: TimeNotes) {
        self.0.push((which, notes));
    }

    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(_, notes)| notes.bytes()).sum()
    }

    /// Times of a step that has run each plan so often. Of several runs of a plan the last stands for all.
    pub fn settle(&self, mut bytes: &[u8], runs: &EachPlan<u32>) -> CollectiveTimes {
        let mut times = CollectiveTimes::default();
        for (which, notes) in &self.0 {
            let (own, rest) = bytes.split_at(notes.bytes().min(bytes.len()));
            bytes = rest;
            let calls = runs[*which];
            if calls == 0 {
                times.calls.extend((0..notes.calls).map(|_| CallTime::default()));
                continue;
            }
            let (of, runs) = (settle(own, *notes), f64::from(calls));
            times.exposed += runs * of.exposed;
            times.hidden += runs * of.hidden;
            let all = |call: CallTime| CallTime {
                calls,
                seconds: runs * call.seconds,
                exposed: runs * call.exposed,
            };
            times.calls.extend(of.calls.into_iter().map(all));
            if *which == Which::Update {
                times.exposed_in_update = runs * of.exposed;
            }
        }
        times
    }
}

/// Device memory of recorded times, and host memory for those of each step in flight.
pub(super) struct Times {
    pub block: Block,
    pub host: Pinned,
    /// Bytes of a step.
    pub bytes: usize,
    pub notes: NotesOfLists,
    /// How often each step in flight has run each plan.
    pub runs: Vec<EachPlan<u32>>,
}

impl Times {
    /// Allocates for so many steps in flight; `None` where there is nothing to record.
    pub fn new(
        context: &Arc<Context>,
        notes: &NotesOfLists,
        steps: usize,
    ) -> Result<Option<Self>, CudaError> {
        let (bytes, notes) = (notes.bytes(), notes.clone());
        if bytes == 0 {
            return Ok(None);
        }
        let (block, host) = (Block::new(context, bytes, "times")?, Pinned::new(context, steps * bytes)?);
        // What a list that never ran has recorded is never read.
        let runs = (0..steps).map(|_| EachPlan::default()).collect();
        Ok(Some(Times { block, host, bytes, notes, runs }))
    }
}

/// Interval in nanoseconds.
type Interval = (u64, u64);

fn seconds((from, to): Interval) -> f64 {
    to.saturating_sub(from) as f64 / 1e9
}

/// Seconds that an interval shares with others, which are disjoint.
fn shared((from, to): Interval, others: &[Interval]) -> f64 {
    others.iter().map(|(start, end)| seconds((from.max(*start), to.min(*end)))).sum()
}

/// Computes times from records as [`crate::collectives::timed`] has them made.
fn settle(notes: &[u8], marks: TimeNotes) -> CollectiveTimes {
    let words: Vec<u64> = notes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let intervals: Vec<Interval> = words.as_chunks::<2>().0.iter().map(|pair| (pair[0], pair[1])).collect();
    let (calls, waits) = intervals.split_at(marks.calls.min(intervals.len()));
    let mut times =
        CollectiveTimes { exposed: waits.iter().copied().map(seconds).sum(), ..Default::default() };
    let mut counted_until = 0;
    for call in calls {
        times.calls.push(CallTime { calls: 1, seconds: seconds(*call), exposed: shared(*call, waits) });
        // The union of all: what an earlier one covers is not counted again.
        let fresh = (call.0.max(counted_until), call.1);
        times.hidden += (seconds(fresh) - shared(fresh, waits)).max(0.0);
        counted_until = counted_until.max(call.1);
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(calls: &[Interval], waits: &[Interval]) -> CollectiveTimes {
        let words = calls.iter().chain(waits).flat_map(|(from, to)| [*from, *to]);
        let notes: Vec<u8> = words.flat_map(|ms| (1_000_000_000 + ms * 1_000_000).to_le_bytes()).collect();
        settle(&notes, TimeNotes { calls: calls.len(), waits: waits.len() })
    }

    /// Plans that a step runs several times count as often; each has its own place.
    #[test]
    fn times_of_a_step_are_those_of_its_plans() {
        let mut notes = NotesOfLists::default();
        notes.push(Which::First, TimeNotes { calls: 0, waits: 1 });
        notes.push(Which::Micro, TimeNotes { calls: 1, waits: 1 });
        notes.push(Which::Last, TimeNotes { calls: 1, waits: 0 });
        notes.push(Which::Update, TimeNotes { calls: 1, waits: 1 });
        let intervals = [(0, 5), (10, 20), (15, 20), (30, 40), (50, 60), (50, 52)];
        let words = intervals.iter().flat_map(|(from, to): &(u64, u64)| [*from, *to]);
        let bytes: Vec<u8> = words.flat_map(|ms| (1_000_000_000 + ms * 1_000_000).to_le_bytes()).collect();
        assert_eq!(notes.bytes(), bytes.len());
        let mut runs = EachPlan::default();
        (runs[Which::First], runs[Which::Micro], runs[Which::Last], runs[Which::Update]) = (1, 2, 1, 1);
        let times = notes.settle(&bytes, &runs);
        assert!(near(times.exposed, 0.005 + 2.0 * 0.005 + 0.002), "{times:?}");
        assert!(
            near(times.exposed_in_update, 0.002) && near(times.hidden, 2.0 * 0.005 + 0.010 + 0.008),
            "{times:?}"
        );
        let told = |times: &CollectiveTimes| -> Vec<(u32, u32, u32)> {
            let ms = |seconds: f64| (1e3 * seconds).round() as u32;
            times.calls.iter().map(|call| (call.calls, ms(call.seconds), ms(call.exposed))).collect()
        };
        assert_eq!(told(&times), [(2, 20, 10), (1, 10, 0), (1, 10, 2)]);
        runs[Which::Micro] = 0;
        let times = notes.settle(&bytes, &runs);
        assert!(near(times.exposed, 0.007), "{times:?}");
        assert_eq!(told(&times), [(0, 0, 0), (1, 10, 0), (1, 10, 2)]);
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn what_falls_into_a_wait_is_exposed() {
        let times = settled(&[(0, 10), (10, 30), (30, 45)], &[(25, 45)]);
        assert!(near(times.exposed, 0.020) && near(times.hidden, 0.025), "{times:?}");
        let [first, second, third] = times.calls[..] else { panic!("{times:?}") };
        assert!(near(first.seconds, 0.010) && near(first.exposed, 0.0));
        assert!(near(second.seconds, 0.020) && near(second.exposed, 0.005));
        assert!(near(third.seconds, 0.015) && near(third.exposed, 0.015));
    }

    #[test]
    fn through_the_host_collectives_overlap_and_are_counted_once() {
        let times = settled(&[(0, 20), (10, 35), (12, 18), (50, 60)], &[(30, 40)]);
        assert!(near(times.hidden, 0.030 + 0.010), "{times:?}");
        let none = settled(&[], &[]);
        assert_eq!(none, CollectiveTimes::default());
    }
}
