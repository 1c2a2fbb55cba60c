//! A step ends, and is told of, while the gathers that its update left are under way.

use super::zero_tests::{Case, among, raw, session, steps};
use comm::{Call, Collective, CommError, Communicator, Engine};
use graph::Zero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Where gathers of parameters wait until they are let through.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
    /// Gathers that waited, and whether one waited until it had enough.
    held: AtomicUsize,
    late: AtomicBool,
}

impl Gate {
    fn set(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let closed = self.closed.lock().unwrap();
        self.held.fetch_add(usize::from(*closed), SeqCst);
        let (mut closed, waited) =
            self.changed.wait_timeout_while(closed, Duration::from_secs(20), |closed| *closed).unwrap();
        self.late.fetch_or(waited.timed_out(), SeqCst);
        *closed &= !waited.timed_out();
    }
}

/// An engine with a gate.
struct Gated(Arc<dyn Engine>, Arc<Gate>);

impl Engine for Gated {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    unsafe fn run(&self, call: &Call) -> Result<(), CommError> {
        if matches!(call.collective, Collective::AllGather) && call.kind == comm::ElementType::F32 {
            self.1.pass();
        }
        // SAFETY: passed on to the caller.
        unsafe { self.0.run(call) }
    }

    fn split(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError> {
        self.0.split(colour, key)
    }

    fn abort(&self, why: &str) {
        self.0.abort(why);
    }
}

#[test]
fn gathers_under_way_hold_up_neither_results_nor_the_account() {
    let case = Case { raw: raw("adamw"), mixed: None };
    let undisturbed = among(2, |world| steps(&mut session(&case, Zero::Stage0, world), 0..3));
    let losses = among(2, |world| {
        let gate = Arc::new(Gate::default());
        let gated = Gated(Arc::clone(world.engine()), Arc::clone(&gate));
        let rank = world.rank();
        let world = Communicator::new(Arc::new(gated), Arc::clone(world.activity()));
        let mut session = session(&case, Zero::Stage1, world);
        let mut losses = steps(&mut session, 0..1);

        let barrier = session.world().name("the gathers of the first step");
        session.world().barrier(barrier).unwrap();
        gate.set(true);
        session.step(1).unwrap();
        session.post_account(rank == 1).unwrap();
        // The next step may begin before the others' numbers are here.
        assert_eq!((session.in_flight(), session.depth()), (1, 2));
        while gate.held.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert!(!gate.late.load(SeqCst), "the step waited for gathers that the next one needs");
        gate.set(false);

        session.step(2).unwrap();
        session.post_account(false).unwrap();
        for (step, stops) in [(1, true), (2, false)] {
            let finished = session.result().unwrap().unwrap();
            let account = session.share_account(false).unwrap();
            assert_eq!((finished.step, account.parts.len(), account.stop), (step, 2, stops));
            assert!(finished.began < finished.ended);
            losses.push(finished.result.score.loss);
        }
        assert!(session.result().unwrap().is_none());
        losses
    });
    assert_eq!(losses, undisturbed);
}

/// Those too that an evaluation waits for, and those that the last update leaves to nobody.
#[test]
fn every_collective_is_counted() {
    for ema in [Some(0.9), None] {
        let case = Case { raw: config::Raw { ema, ..raw("adamw") }, mixed: None };
        let counted = among(2, |world| {
            let mut session = session(&case, Zero::Stage1, world.clone());
            steps(&mut session, 0..2);
            session.validate().unwrap();
            session.device_mut().forget_time();
            steps(&mut session, 2..5);
            session.finish_collectives().unwrap();
            let program = session.device().program();
            let of_step = program.last.collectives().count() + program.update.collectives().count();
            let counted = session.account().collectives().iter().map(|one| (one.times, one.seconds));
            let counted: Vec<_> = counted.filter(|(times, _)| *times > 0).collect();
            assert_eq!(counted.len(), of_step);
            counted
        });
        for (times, seconds) in counted.into_iter().flatten() {
            assert_eq!(times, 5);
            assert!(seconds.is_finite());
        }
    }
}
