//! One call at a time, and what the rank's activity shows of it.

use super::*;
use crate::activity::Snapshot;
use crate::call::{Collective, Span};
use crate::communicator::Communicator;
use crate::element::ElementType;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Engine that counts calls made concurrently.
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
        self.work();
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.fails { Err(CommError::Misuse("on purpose".into())) } else { Ok(()) }
    }

    fn enqueues(&self) -> bool {
        self.enqueues
    }

    fn split(&self, _: usize, _: usize) -> Result<Arc<dyn Engine>, CommError> {
        self.work();
        Err(CommError::Misuse("a test".into()))
    }

    fn abort(&self, _: &str) {}
}

impl Alone {
    fn work(&self) {
        self.clashes.fetch_add(u64::from(self.busy.swap(true, Ordering::SeqCst)), Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(50));
        self.busy.store(false, Ordering::SeqCst);
    }
}

fn queue() -> (CallQueue, Call) {
    let activity = Arc::new(Activity::new());
    let (span, name) = (Span::EMPTY, activity.name("test"));
    let call =
        Call { collective: Collective::Barrier, kind: ElementType::U8, send: span, receive: span, name };
    (CallQueue::new(activity), call)
}

#[test]
fn calls_of_several_threads_are_made_one_at_a_time() {
    let engine = Arc::new(Alone::default());
    let (queue, call) = queue();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (queue, call) = (&queue, &call);
            let engine = Arc::clone(&engine);
            scope.spawn(move || {
                for round in 0..50 {
                    // SAFETY: the spans are empty.
                    unsafe {
                        if (thread + round) % 2 == 0 {
                            queue.run(&*engine, call).unwrap();
                        } else {
                            queue
                                .wait(
                                    queue
                                        .start(&(Arc::clone(&engine) as Arc<dyn Engine>), call.clone())
                                        .unwrap(),
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

/// Groups that were split off share the queue: their calls run in one order.
#[test]
fn calls_of_several_groups_have_one_order() {
    let engines: Vec<Arc<dyn Engine>> = (0..3).map(|_| Arc::new(Alone::default()) as _).collect();
    let (queue, call) = queue();
    // SAFETY: the spans are empty.
    let start = |round: usize| unsafe { queue.start(&engines[round % 3], call.clone()) }.unwrap();
    let tickets: Vec<Ticket> = (0..30).map(start).collect();
    let times: Vec<Timing> = tickets.into_iter().map(|ticket| queue.wait(ticket).unwrap()).collect();
    assert!(times.windows(2).all(|pair| pair[0].finished <= pair[1].started));
}

#[test]
fn a_device_with_a_queue_of_its_own_needs_no_thread() {
    let engine = Arc::new(Alone { enqueues: true, ..Alone::default() });
    let (queue, call) = queue();
    // SAFETY: the spans are empty.
    let ticket = unsafe { queue.start(&(Arc::clone(&engine) as Arc<dyn Engine>), call) }.unwrap();
    queue.wait(ticket).unwrap();
    assert!(queue.worker.lock().unwrap().is_none() && engine.calls.load(Ordering::SeqCst) == 1);
}

/// Otherwise a rank that captures again would seem to have made other calls.
#[test]
fn calls_in_a_device_queue_are_not_part_of_the_digest() {
    let engine = Arc::new(Alone { enqueues: true, ..Alone::default() });
    let (queue, call) = queue();
    queue.activity.doing(queue.activity.name("capture"));
    let before = queue.activity.snapshot();
    // SAFETY: the spans are empty.
    unsafe { queue.run(&*engine, &call) }.unwrap();
    let after = queue.activity.snapshot();
    assert!(after.progress > before.progress, "it is progress");
    assert_eq!(Snapshot { progress: before.progress, ..after }, before);
}

#[test]
fn a_failing_device_fails_the_rank_s_communication() {
    let engine = Arc::new(Alone { enqueues: true, fails: true, ..Alone::default() });
    let (queue, call) = queue();
    // SAFETY: the spans are empty.
    let error = unsafe { queue.run(&*engine, &call) }.unwrap_err();
    assert_eq!(queue.activity.failure(), Some(&error));
    assert_eq!(&*queue.activity.snapshot().doing, "test", "where it failed");
}

/// Ranks talk to each other to split a group, so that it has its place among calls.
#[test]
fn a_group_is_split_after_the_calls_before() {
    let engine = Arc::new(Alone::default());
    let world = Communicator::new(Arc::clone(&engine) as Arc<dyn Engine>, Arc::new(Activity::new()));
    let (_, call) = queue();
    let splits = [
        Communicator::beside,
        |world: &Communicator| world.split(0, 0),
        |world: &Communicator| world.split_sharing_queue(0, 0),
    ];
    for split in splits {
        // SAFETY: the spans are empty.
        let tickets: Vec<Ticket> = (0..20).map(|_| unsafe { world.start(call.clone()) }.unwrap()).collect();
        assert!(split(&world).is_err(), "this engine has no groups");
        assert!(tickets.into_iter().all(|ticket| world.is_done(ticket)));
    }
    assert_eq!((engine.calls.load(Ordering::SeqCst), engine.clashes.load(Ordering::SeqCst)), (60, 0));
}
