//! The account of time: nothing falls between its parts, and what is exposed and what is hidden follows from the lanes.
//!
//! Collectives take as long as a test tells them to, by sleeping much longer than a machine's noise; everything else is compared
//! with what the same run measured.

mod common;

use comm::{Activity, Call, Collective, CommError, Communicator, Engine};
use common::{Rig, compiled_with, settings, small_vit, smoothed};
use cpu::{Account, Event, Which};
use graph::op::Lane;
use graph::plan::{Plan, Step};
use graph::{Communication, DType, Mesh, Program, Settings, Zero};
use models::vit::Vit;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a call takes.
trait Pace: Send + Sync {
    fn of(&self, call: &Call) -> Duration;
}

impl Pace for Duration {
    fn of(&self, _: &Call) -> Duration {
        *self
    }
}

/// A link of so many bytes/s, in each direction.
struct Link(f64);

impl Pace for Link {
    fn of(&self, call: &Call) -> Duration {
        // Of a whole message a rank of two sends half to the other, and half as a sum.
        let sent = match call.collective {
            Collective::ReduceScatter(_) => call.bytes() / 2,
            _ => call.bytes(),
        };
        Duration::from_secs_f64(sent as f64 / self.0)
    }
}

/// Rank 0 of two; the other brings nothing, but lets it wait.
struct Dawdling<P>(P);

impl<P: Pace> Engine for Dawdling<P> {
    fn name(&self) -> &'static str {
        "dawdling"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    unsafe fn run(&self, call: &Call) -> Result<(), CommError> {
        std::thread::sleep(self.0.of(call));
        Ok(())
    }

    fn split(&self, _: usize, _: usize) -> Result<Arc<dyn Engine>, CommError> {
        Err(CommError::Misuse("not here".into()))
    }

    fn abort(&self, _: &str) {}
}

/// Large enough that its backward pass takes a few delays.
fn program(ranks: usize, communication: Communication) -> Program {
    let vit = Vit { width: 96, mlp: 384, ..small_vit(0.0) };
    let target = cpu::Target { threads: 1 };
    compiled_with(
        vit.build(192, smoothed(), DType::F32).unwrap(),
        &Settings { mesh: Mesh::of_data(ranks), communication, ..settings(&target) },
    )
}

/// Buckets of about a block.
const COMMUNICATION: Communication =
    Communication { bucket: 120_000, overlap: true, dtype: None, each_micro_step: false };

fn rig(communication: Communication, delay: Duration) -> Rig<f32> {
    let comm = Communicator::new(Arc::new(Dawdling(delay)), Arc::new(Activity::new()));
    let mut rig = Rig::among(program(2, communication), 1, Some(comm));
    // The first run touches memory for the first time.
    rig.step();
    rig.executor.take_account();
    rig
}

/// The account of one run of `last`, with its trace.
fn last(rig: &mut Rig<f32>) -> (Account, Vec<Event>) {
    let mut events = Vec::new();
    rig.executor.set_tracing(true);
    rig.fill(Which::Last);
    rig.run(Which::Last);
    rig.executor.take_trace(&mut events);
    (rig.executor.take_account(), events)
}

fn seconds(event: &Event) -> f64 {
    (event.end - event.start).as_secs_f64()
}

#[test]
fn the_parts_are_the_whole() {
    let mut rig = rig(COMMUNICATION, Duration::from_millis(2));
    in_a_quiet_run(|| {
        rig.fill(Which::Last);
        let start = Instant::now();
        rig.run(Which::Last);
        rig.run(Which::Update);
        let wall = start.elapsed().as_secs_f64();
        let account = rig.executor.take_account();
        assert!(account.compute > 0.0 && account.update > 0.0 && account.exposed > 0.0);
        assert_eq!(account.evaluation, 0.0);
        assert!(account.wall() <= wall);
        (wall - account.wall() < 0.01 * wall).then_some(()).ok_or(format!("{account:?} of {wall} s"))
    });
    rig.fill(Which::Eval);
    rig.run(Which::Eval);
    let account = rig.executor.take_account();
    assert!(account.evaluation > 0.0 && account.compute == 0.0);
    assert_eq!(rig.executor.take_account(), Account::default());
}

/// What waiting must come to, by the rules of lanes alone.
fn expected_exposed(rig: &Rig<f32>) -> f64 {
    graph::replay(&rig.executor.program().last, &rig.executor.step_seconds(Which::Last)).exposed()
}

const COMMUNICATION_WAIT: &str = "waiting for communication";
const THREADS_WAIT: &str = "waiting for other threads";

/// What a step is called in a trace.
fn name(step: &Step) -> String {
    format!("{} of {} ({})", step.phase.name(), step.layer, step.op.name())
}

/// A busy machine may hold a thread up anywhere; what it can't do is to do so every time.
fn in_a_quiet_run(mut holds: impl FnMut() -> Result<(), String>) {
    let ends: Vec<String> = (0..10).map_while(|_| holds().err()).collect();
    assert!(ends.len() < 10, "{ends:#?}");
}

#[test]
fn exposure_follows_from_the_lanes() {
    // A quarter of the time that computing takes on this machine: less than what is left of the backward pass when the first
    // collective starts, so that a good part of it can hide there.
    let mut quick = rig(COMMUNICATION, Duration::ZERO);
    let seconds = (0..5).map(|_| last(&mut quick).0.compute).fold(f64::INFINITY, f64::min) / 4.0;
    let delay = Duration::from_secs_f64(seconds);
    for overlap in [true, false] {
        let mut rig = rig(Communication { overlap, ..COMMUNICATION }, delay);
        in_a_quiet_run(|| {
            rig.executor.reset_times();
            let (account, _) = last(&mut rig);
            let collectives = rig.executor.collectives();
            assert!(collectives.len() > 2 && collectives.iter().all(|e| e.seconds >= seconds));
            assert!(collectives.iter().all(|e| e.exposed <= e.seconds));
            // One queue, so that calls don't overlap: each is partly hidden, and the rest exposed.
            let total: f64 = collectives.iter().map(|e| e.seconds).sum();
            let in_calls: f64 = collectives.iter().map(|e| e.exposed).sum();
            assert!((account.hidden + in_calls - total).abs() < 1e-6, "{account:?}, calls {total}");
            assert!(in_calls <= account.exposed + 1e-9, "waiting is for calls");

            let expected = expected_exposed(&rig);
            let holds = (account.exposed - expected).abs() < 0.1 * expected
                && account.exposed - in_calls < 0.25 * seconds
                && if overlap { account.hidden > seconds } else { account.hidden < 0.25 * seconds };
            holds.then_some(()).ok_or(format!("{account:?}, expected {expected}, in calls {in_calls}"))
        });
    }
}

/// With the steps' own durations, a replay of the plan comes to what the run took: one rank or two, communication beside the backward
/// pass or after it, a quick or a slow one.
#[test]
fn a_replay_of_a_run_takes_as_long() {
    let (quick, slow) = (Duration::ZERO, Duration::from_millis(30));
    let cases = [(1, true, quick), (2, true, quick), (2, true, slow), (2, false, slow)];
    for (ranks, overlap, delay) in cases {
        let comm = Communicator::new(Arc::new(Dawdling(delay)), Arc::new(Activity::new()));
        let program = program(ranks, Communication { overlap, ..COMMUNICATION });
        let mut rig = Rig::<f32>::among(program, 1, (ranks > 1).then_some(comm));
        rig.step();
        in_a_quiet_run(|| {
            rig.executor.reset_times();
            rig.executor.take_account();
            rig.fill(Which::Last);
            rig.run(Which::Last);
            let wall = rig.executor.take_account().wall();
            let plan = &rig.executor.program().last;
            let timeline = graph::replay(plan, &rig.executor.step_seconds(Which::Last));
            let off = (timeline.seconds() / wall - 1.0).abs();
            (off < 0.05)
                .then_some(())
                .ok_or(format!("{ranks} ranks, {overlap}: {} of {wall}", timeline.seconds()))
        });
    }
}

/// A step of a program whose states are divided, over such a link.
fn divided<P: Pace + 'static>(zero: Zero, pace: P) -> Rig<f32> {
    let vit = Vit { width: 96, mlp: 384, ..small_vit(0.0) };
    let target = cpu::Target { threads: 1 };
    let (mesh, communication) = (Mesh::of_data(2), COMMUNICATION);
    let program = compiled_with(
        vit.build(192, smoothed(), DType::F32).unwrap(),
        &Settings { mesh, communication, zero, ..settings(&target) },
    );
    assert_eq!(program.zero, zero);
    let comm = Communicator::new(Arc::new(Dawdling(pace)), Arc::new(Activity::new()));
    let mut rig = Rig::among(program, 1, Some(comm));
    // The first run touches memory for the first time.
    rig.step();
    rig
}

/// What communication costs a step that nothing hides, measured and as the lanes have it: gathers that an update leaves under way are
/// waited for in the next forward pass.
fn exposed(rig: &mut Rig<f32>) -> (f64, f64) {
    const STEPS: usize = 3;
    // Drawing inputs takes time, behind which gathers would hide.
    rig.fill(Which::Last);
    let labels = rig.executor.labels(Which::Last).unwrap().to_vec();
    let inputs =
        ["images", "weights"].map(|name| (name, rig.executor.input(Which::Last, name).unwrap().to_vec()));
    rig.run(Which::Last);
    rig.executor.take_account();
    rig.executor.reset_times();
    for _ in 0..STEPS {
        rig.run(Which::Update);
        rig.executor.labels(Which::Last).unwrap().copy_from_slice(&labels);
        for (name, values) in &inputs {
            rig.executor.input(Which::Last, name).unwrap().copy_from_slice(values);
        }
        rig.run(Which::Last);
    }
    let measured = rig.executor.take_account().exposed / STEPS as f64;
    let of = |which: Which| -> Vec<f64> {
        rig.executor.step_seconds(which).iter().map(|seconds| seconds / STEPS as f64).collect()
    };
    let (update, last) = (of(Which::Update), of(Which::Last));
    let program = rig.executor.program();
    let mut plans: Vec<(&Plan, &[f64])> = vec![(&program.last, &last)];
    for _ in 0..STEPS {
        plans.extend([(&program.update, &update[..]), (&program.last, &last[..])]);
    }
    let expected: f64 = graph::replay_all(&plans)[1..].iter().map(graph::Timeline::exposed).sum();
    (measured, expected / STEPS as f64)
}

/// On a slow link stage 1 exposes less than plain data parallelism: half of what it sends hides behind the next forward pass.
#[test]
fn exposure_of_stages_follows_from_the_lanes() {
    // Sending all gradients takes as long as computing a step.
    let mut quick = divided(Zero::Stage0, Duration::ZERO);
    let seconds = (0..5).map(|_| last(&mut quick).0.compute).fold(f64::INFINITY, f64::min);
    let bytes: usize = quick.executor.collectives().iter().map(|call| call.bytes).sum();
    in_a_quiet_run(|| {
        let mut exposures = vec![];
        for zero in Zero::ALL {
            let mut rig = divided(zero, Link(bytes as f64 / seconds));
            let (measured, expected) = exposed(&mut rig);
            if (measured - expected).abs() > 0.1 * expected {
                return Err(format!("stage {zero}: {measured} s, {expected} by the lanes"));
            }
            exposures.push(measured);
        }
        (exposures[1] < 0.9 * exposures[0]).then_some(()).ok_or(format!("{exposures:?} of {seconds} s"))
    });
}

#[test]
fn calls_that_take_no_time_are_all_but_hidden() {
    let mut rig = rig(COMMUNICATION, Duration::ZERO);
    in_a_quiet_run(|| {
        let (account, _) = last(&mut rig);
        (account.exposed < 0.05 * account.compute).then_some(()).ok_or(format!("{account:?}"))
    });
}

#[test]
fn a_trace_has_every_step_and_call_in_its_place() {
    let mut rig = rig(COMMUNICATION, Duration::from_millis(1));
    let (account, events) = last(&mut rig);
    let plan = rig.executor.program().last.clone();
    let steps = |lane: Lane| plan.steps.iter().filter(move |s| s.lane == lane);
    let of = |lane: Lane| events.iter().filter(move |e| e.lane == lane).collect::<Vec<_>>();
    assert_eq!(of(Lane::Comm).len(), steps(Lane::Comm).count());
    let mut found: HashSet<String> = of(Lane::Compute).iter().map(|e| e.name.to_string()).collect();
    assert!([COMMUNICATION_WAIT, THREADS_WAIT].iter().all(|wait| found.remove(*wait)));
    assert_eq!(found, steps(Lane::Compute).map(name).collect(), "every step is in it, and nothing else");
    for lane in [Lane::Compute, Lane::Comm] {
        assert!(of(lane).windows(2).all(|w| w[0].end <= w[1].start), "one after the other");
    }
    let computed: f64 = of(Lane::Compute).into_iter().map(seconds).sum();
    assert!((computed - account.compute - account.exposed).abs() < 1e-6);
    let (first, step) = (of(Lane::Comm)[0], plan.steps.iter().position(|s| s.lane == Lane::Comm).unwrap());
    assert_eq!(*first.name, *plan.steps[step].layer);
    let before: HashSet<String> = plan.steps[..step].iter().map(name).collect();
    let mut bucket = events.iter().filter(|e| before.contains(&*e.name));
    assert!(bucket.all(|e| e.end <= first.start), "after what completes its bucket");

    let mut again = Vec::new();
    rig.executor.take_trace(&mut again);
    assert!(again.is_empty());
    rig.executor.set_tracing(false);
    rig.run(Which::Update);
    rig.executor.take_trace(&mut again);
    assert!(again.is_empty());
}

#[test]
fn without_timing_nothing_is_measured_and_nothing_changes() {
    let run = |timing: bool| {
        let mut rig = rig(COMMUNICATION, Duration::ZERO);
        rig.executor.set_timing(timing);
        rig.executor.reset_times();
        rig.step();
        let measured = rig.executor.training_times().iter().map(|t| t.seconds).sum::<f64>() > 0.0;
        (rig.tensors(|_| true), rig.executor.take_account() != Account::default(), measured)
    };
    let (with, without) = (run(true), run(false));
    assert!(with.0 == without.0);
    assert_eq!((with.1, with.2), (true, true));
    assert_eq!((without.1, without.2), (false, false));
}

#[test]
fn the_exchange_is_in_the_times_by_kind() {
    let mut rig = rig(COMMUNICATION, Duration::from_millis(20));
    rig.executor.reset_times();
    rig.step();
    let account = rig.executor.take_account();
    let times = rig.executor.training_times();
    let communication = times.iter().find(|t| t.op == "all_reduce").unwrap();
    let in_calls: f64 = rig.executor.collectives().iter().map(|e| e.exposed).sum();
    assert!((communication.seconds - in_calls).abs() < 1e-6, "{} and {in_calls}", communication.seconds);
    let bytes: usize = rig.executor.collectives().iter().map(|e| e.bytes).sum();
    let gradients: f64 = communication.bytes;
    assert!(gradients <= bytes as f64 && (bytes as f64) < gradients * 1.05, "padding travels along");
    let all: f64 = times.iter().map(|t| t.seconds).sum();
    assert!((all - (account.compute + account.update + in_calls)).abs() < 1e-4, "{all}, {account:?}");
}
