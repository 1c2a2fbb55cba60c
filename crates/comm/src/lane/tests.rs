//! One call at a time, and what of it the pulse shows.

use super::*;
use crate::call::{Collective, Span};
use crate::element::Kind;
use crate::pulse::Snapshot;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// An engine that notices when two calls are made at once.
#[derive(Default)]
struct Alone {
    busy: AtomicBool,
    clashes: AtomicU64,
    calls: AtomicU64,
    enqueues: bool,
    fails: bool,
}

impl Engine for Alone {
    fn name(&self) -> &'static str {
        "alone"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    unsafe fn run(&self, _: &Call) -> Result<(), CommError> {
        self.clashes.fetch_add(u64::from(self.busy.swap(true, Ordering::SeqCst)), Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(50));
        self.busy.store(false, Ordering::SeqCst);
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.fails { Err(CommError::Misuse("on purpose".into())) } else { Ok(()) }
    }

    fn enqueues(&self) -> bool {
        self.enqueues
    }

    fn split(&self, _: usize, _: usize) -> Result<Arc<dyn Engine>, CommError> {
        Err(CommError::Misuse("a test".into()))
    }

    fn abort(&self, _: &str) {}
}

fn lane() -> (Lane, Call) {
    let pulse = Arc::new(Pulse::new());
    let (span, name) = (Span::EMPTY, pulse.name("test"));
    let call = Call { collective: Collective::Barrier, kind: Kind::U8, send: span, receive: span, name };
    (Lane::new(pulse), call)
}

#[test]
fn calls_of_several_threads_are_made_one_at_a_time() {
    let engine = Arc::new(Alone::default());
    let (lane, call) = lane();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (lane, call) = (&lane, &call);
            let engine = Arc::clone(&engine);
            scope.spawn(move || {
                for round in 0..50 {
                    // SAFETY: the spans are empty.
                    unsafe {
                        if (thread + round) % 2 == 0 {
                            lane.run(&*engine, call).unwrap();
                        } else {
                            lane.wait(
                                lane.start(&(Arc::clone(&engine) as Arc<dyn Engine>), call.clone()).unwrap(),
                            )
                            .unwrap();
                        }
                    }
                }
            });
        }
    });
    assert_eq!((engine.calls.load(Ordering::SeqCst), engine.clashes.load(Ordering::SeqCst)), (200, 0));
}

/// Groups that were split off share the queue: their calls are done in the order of all.
#[test]
fn calls_of_several_groups_have_one_order() {
    let engines: Vec<Arc<dyn Engine>> = (0..3).map(|_| Arc::new(Alone::default()) as _).collect();
    let (lane, call) = lane();
    // SAFETY: the spans are empty.
    let start = |round: usize| unsafe { lane.start(&engines[round % 3], call.clone()) }.unwrap();
    let tickets: Vec<Ticket> = (0..30).map(start).collect();
    let times: Vec<Timing> = tickets.into_iter().map(|ticket| lane.wait(ticket).unwrap()).collect();
    assert!(times.windows(2).all(|pair| pair[0].finished <= pair[1].started));
}

#[test]
fn a_device_with_a_queue_of_its_own_needs_no_thread() {
    let engine = Arc::new(Alone { enqueues: true, ..Alone::default() });
    let (lane, call) = lane();
    // SAFETY: the spans are empty.
    let ticket = unsafe { lane.start(&(Arc::clone(&engine) as Arc<dyn Engine>), call) }.unwrap();
    lane.wait(ticket).unwrap();
    assert!(lane.worker.lock().unwrap().is_none() && engine.calls.load(Ordering::SeqCst) == 1);
}

/// Else ranks of which one captures anew would seem to have made other calls.
#[test]
fn what_a_device_queues_is_no_part_of_the_digest() {
    let engine = Arc::new(Alone { enqueues: true, ..Alone::default() });
    let (lane, call) = lane();
    lane.pulse.doing(lane.pulse.name("capture"));
    let before = lane.pulse.snapshot();
    // SAFETY: the spans are empty.
    unsafe { lane.run(&*engine, &call) }.unwrap();
    let after = lane.pulse.snapshot();
    assert!(after.progress > before.progress, "it is a sign of life");
    assert_eq!(Snapshot { progress: before.progress, ..after }, before);
}

#[test]
fn a_device_that_fails_breaks_the_rank_s_exchange() {
    let engine = Arc::new(Alone { enqueues: true, fails: true, ..Alone::default() });
    let (lane, call) = lane();
    // SAFETY: the spans are empty.
    let error = unsafe { lane.run(&*engine, &call) }.unwrap_err();
    assert_eq!(lane.pulse.broken(), Some(&error));
    assert_eq!(&*lane.pulse.snapshot().doing, "test", "where it failed");
}
