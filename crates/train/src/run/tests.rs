//! The loop over a device that tells late what a step came to.

mod late;

use super::*;
use config::sets;
use config::{LossScale, Raw};
use cpu::{Executor, Options};
use devices::device::Outcome;
use devices::program::program;
use late::{LOST, Late};
use std::collections::BTreeMap;
use testing::Folder;

/// Writes down what it hears, and asks to stop when it has heard of a step.
#[derive(Default)]
struct Listener {
    heard: Vec<String>,
    saved: Vec<String>,
    noted: Vec<String>,
    stop_after: Option<u64>,
    stops: bool,
}

impl Events for Listener {
    fn stepped(&mut self, line: &MetricsLine, result: &StepResult, _account: &Step) {
        let MetricsLine { step, epoch, .. } = line;
        self.heard.push(format!("step {step} of epoch {epoch}: {result:?}"));
        self.stops |= self.stop_after == Some(*step);
    }

    fn evaluated(&mut self, step: u64, epoch: u64, score: &Evaluation) {
        self.heard.push(format!("evaluation after {step} of epoch {epoch}: {score:?}"));
    }

    fn saved(&mut self, checkpoint: &Path) {
        self.saved.push(checkpoint.file_name().unwrap().display().to_string());
    }

    fn noted(&mut self, line: &str) {
        self.noted.push(line.to_string());
    }

    fn stop(&self) -> Option<&'static str> {
        self.stops.then_some("a test")
    }
}

/// Seven steps an epoch: evaluations after 7, 14 and 17 steps, checkpoints after every fourth.
fn raw(folder: &Folder, run: &str) -> Raw {
    Raw {
        model: Some("vit-nano/8".into()),
        batch_size: Some(4),
        threads: Some(1),
        train_samples: Some(28),
        test_samples: Some(4),
        steps: Some(17),
        checkpoint_every: Some(4),
        keep: Some(100),
        out: Some(folder.0.join(run)),
        ..Raw::default()
    }
}

fn as_told(_: u64, _: &mut Outcome) {}

/// Trains with so many steps in flight.
fn train_late(
    raw: &Raw,
    depth: usize,
    scale: Option<LossScale>,
    change: fn(u64, &mut Outcome),
    listener: &mut Listener,
) -> Result<Summary, TrainError> {
    let (mut run, sets) = sets::resolve(raw, 1)?;
    // The CPU has no loss scale: this device only says that it has one.
    let program = program::<f32>(&run, run.batch)?;
    run.loss_scale = scale;
    let alone = comm::Options { comm: Some(comm::Backend::Threads), ranks: Some(1), timeout: None };
    let Ok(comm::Start::Threads(members)) = comm::start(&alone, |_| {}) else { panic!("one rank") };
    let executor = Executor::new(program, Options::alone(1, run.seed))?;
    let device = Late::new(executor, depth, change);
    let shares = Shares::equal(run.batch, 1);
    let session = Session::over(run, sets.clone(), members[0].world.clone(), shares, Box::new(device));
    train_session(session, &sets, &members[0], listener)
}

/// A run's metrics without its times.
fn metrics(folder: &Folder, run: &str) -> Vec<BTreeMap<String, serde_json::Value>> {
    let text = std::fs::read_to_string(folder.0.join(run).join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut line: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        line.retain(|name, _| !name.ends_with("second") && !name.ends_with("seconds"));
        line
    };
    text.lines().map(line).collect()
}

/// The steps of a run's checkpoints, and the bits of all that they hold.
fn checkpoints(folder: &Folder, run: &str) -> BTreeMap<u64, BTreeMap<String, Vec<u32>>> {
    let Ok(files) = std::fs::read_dir(folder.0.join(run).join("checkpoints")) else { return BTreeMap::new() };
    let mut found = BTreeMap::new();
    for file in files {
        let path = file.unwrap().path();
        let mut states = BTreeMap::new();
        let reader = formats::tensors::Reader::open(&path).unwrap();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        reader.each(|name, _, values| drop(states.insert(name, bits(values)))).unwrap();
        found.insert(Checkpoint::open(&path).unwrap().progress.step, states);
    }
    found
}

#[test]
fn late_results_belong_to_their_steps_and_checkpoints_to_theirs() {
    let folder = Folder::new("late");
    let mut listeners = [1, 2, 3].map(|depth| {
        let mut listener = Listener::default();
        let run = depth.to_string();
        let summary = train_late(&raw(&folder, &run), depth, None, as_told, &mut listener).unwrap();
        assert_eq!((summary.steps, summary.images), (17, 17 * 4));
        let line = "training waits for checkpoints: there is no room for a copy of the states (7.0 GB)";
        assert_eq!(listener.noted.iter().filter(|noted| *noted == line).count(), usize::from(depth == 2));
        // When they are written is another matter than which.
        let kept = checkpoints(&folder, &run).into_keys();
        assert!(kept.map(|step| format!("step-{step:08}.safetensors")).eq(listener.saved), "depth {depth}");
        listener.heard
    });
    let [one, two, three] = &mut listeners;
    assert_eq!(one.len(), 17 + 3, "{one:#?}");
    assert_eq!(one, two);
    assert_eq!(one, three);
    assert_eq!(metrics(&folder, "1"), metrics(&folder, "3"));
    assert_eq!(metrics(&folder, "1").len(), 17 + 3);
    let kept = checkpoints(&folder, "1");
    assert!([4, 7, 8, 12, 16, 17].iter().all(|step| kept.contains_key(step)), "{:?}", kept.keys());
    assert_eq!(kept, checkpoints(&folder, "3"));
    assert_ne!(kept[&4]["head.weight"], kept[&8]["head.weight"]);
}

/// However few steps lie between checkpoints: fewer than are in flight, as many, or more.
#[test]
fn checkpoints_may_follow_each_other_closer_than_results() {
    let folder = Folder::new("late-often");
    for every in [1, 2, 3, 5] {
        let [alone, ahead, further] = [1, 3, 4].map(|depth| {
            let run = format!("{every}-{depth}");
            let often = Raw { checkpoint_every: Some(every), ..raw(&folder, &run) };
            let mut listener = Listener::default();
            train_late(&often, depth, None, as_told, &mut listener).unwrap();
            (checkpoints(&folder, &run), listener.heard)
        });
        assert!((1..=17).filter(|step| step % every == 0).all(|step| alone.0.contains_key(&step)));
        assert!(alone == ahead && alone == further, "every {every}");
    }
}

/// The ratios in the metrics are those of the weights in the checkpoints before and after the step, whatever is in flight.
#[test]
fn update_ratios_are_those_of_the_checkpoints() {
    let folder = Folder::new("update-ratios");
    for depth in [1, 3] {
        let name = depth.to_string();
        let sampled = Raw { update_ratios: true, log_every: Some(5), ..raw(&folder, &name) };
        let sampled = Raw { checkpoint_every: Some(if depth == 1 { 1 } else { 100 }), ..sampled };
        train_late(&sampled, depth, None, as_told, &mut Listener::default()).unwrap();
    }
    let kept = checkpoints(&folder, "1");
    let norm = |values: Vec<f64>| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let values = |step: u64, name: &str| -> Vec<f64> {
        kept[&step][name].iter().map(|bits| f64::from(f32::from_bits(*bits))).collect()
    };
    let lines = metrics(&folder, "1");
    assert_eq!(lines, metrics(&folder, "3"), "steps in flight change nothing");
    let mut steps = vec![];
    for line in lines.iter().filter(|line| line.contains_key("update_ratios")) {
        let step = line["step"].as_u64().unwrap();
        let ratios = line["update_ratios"].as_object().unwrap();
        let mut expected = vec![];
        for (layer, ratio) in ratios {
            let name = if kept[&1].contains_key(layer) { layer.clone() } else { format!("{layer}.weight") };
            let (old, new) = (values(step, &name), values(step + 1, &name));
            let moved = norm(new.iter().zip(&old).map(|(new, old)| new - old).collect());
            expected.push(moved / norm(old));
            let ratio = ratio.as_f64().unwrap();
            assert!((ratio - moved / norm(values(step, &name))).abs() < 1e-12, "{layer}: {ratio}");
        }
        expected.sort_by(f64::total_cmp);
        let close = |key: &str, x: f64| (line[key].as_f64().unwrap() - x).abs() < 1e-12;
        assert!(close("update_ratio", expected[expected.len() - 1]));
        assert!(close("update_ratio_median", expected[(expected.len() - 1) / 2]));
        assert!(ratios.contains_key("head") && ratios.contains_key("blocks.0.attn.qkv"), "{ratios:?}");
        steps.push(step);
    }
    assert_eq!(steps, [4, 9, 14]);
}

#[test]
fn a_run_that_is_stopped_ends_after_the_steps_in_flight() {
    let folder = Folder::new("late-stop");
    let stop = |run: &str, depth| {
        let mut listener = Listener { stop_after: Some(1), ..Listener::default() };
        let raw = Raw { checkpoint_every: Some(100), ..raw(&folder, run) };
        let summary = train_late(&raw, depth, None, as_told, &mut listener).unwrap();
        summary.stopped.unwrap().step
    };
    // The step is heard of when two more are in flight; the signal is seen with the next.
    assert_eq!((stop("1", 1), stop("3", 3)), (3, 5));
    let saved = checkpoints(&folder, "3");
    assert_eq!(saved.keys().copied().collect::<Vec<_>>(), [5]);
    // It holds what a run that goes on has after as many steps; and a run that stopped goes on to the same end.
    let resumed = Raw { resume: Some(None), ..raw(&folder, "1") };
    train_late(&resumed, 2, None, as_told, &mut Listener::default()).unwrap();
    let whole = Raw { checkpoint_every: Some(1), ..raw(&folder, "whole") };
    train_late(&whole, 3, None, as_told, &mut Listener::default()).unwrap();
    assert_eq!(saved[&5], checkpoints(&folder, "whole")[&5]);
    assert_eq!(checkpoints(&folder, "1")[&17], checkpoints(&folder, "whole")[&17]);
}

/// Step 5 has a gradient that is not finite; the device applied two more before anyone knew.
#[test]
fn a_step_that_is_not_finite_is_named_and_nothing_after_it_is_kept() {
    let folder = Folder::new("late-bad");
    let fail = |step: u64, outcome: &mut Outcome| {
        if step == 5 {
            outcome.control = [0.0, 0.0, f64::NAN];
            outcome.stats[0] = f64::NAN;
        }
    };
    let failure = |run: &str, depth| {
        let mut listener = Listener::default();
        let error = train_late(&raw(&folder, run), depth, None, fail, &mut listener).unwrap_err();
        assert_eq!((listener.heard.len(), listener.saved.len()), (5, 1), "five steps and a checkpoint");
        error.to_string()
    };
    let one = failure("1", 1);
    assert!(one.starts_with("step 5: loss is NaN; every gradient is finite, but"), "{one}");
    assert_eq!(
        failure("3", 3),
        "step 5: loss is NaN; gone through again after one more step, it is finite",
        "the last of an epoch waits for what is in flight"
    );
    for run in ["1", "3"] {
        let steps: Vec<u64> =
            metrics(&folder, run).iter().map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [0, 1, 2, 3, 4]);
        assert_eq!(checkpoints(&folder, run).keys().copied().collect::<Vec<_>>(), [4]);
    }

    // Where nothing behind it was applied, late or not is the same.
    let diverge = |depth: usize| {
        let nothing = Raw { out: None, checkpoint_every: None, keep: None, ..raw(&folder, "") };
        let raw = Raw { lr: Some(1e25), warmup_steps: Some(config::Span::Steps(0)), ..nothing };
        train_late(&raw, depth, None, as_told, &mut Listener::default()).unwrap_err().to_string()
    };
    assert_eq!(diverge(1), diverge(3));
    assert!(diverge(3).ends_with("parameters are as before the step"));
}

#[test]
fn a_lost_gpu_is_named_and_the_run_goes_on_from_its_last_checkpoint() {
    let folder = Folder::new("late-lost");
    let lose = |step: u64, outcome: &mut Outcome| {
        if step == 6 {
            outcome.control = LOST;
        }
    };
    let error = train_late(&raw(&folder, "a"), 3, None, lose, &mut Listener::default()).unwrap_err();
    assert!(error.loses_device());
    assert_eq!(
        error.to_string(),
        "rank 0 lost GPU 0 (a CPU in truth) in step 6: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure \
         (while waiting for a step's numbers)"
    );
    assert_eq!(checkpoints(&folder, "a").keys().copied().collect::<Vec<_>>(), [4]);
    let resumed = Raw { resume: Some(None), ..raw(&folder, "a") };
    train_late(&resumed, 3, None, as_told, &mut Listener::default()).unwrap();
    train_late(&raw(&folder, "whole"), 3, None, as_told, &mut Listener::default()).unwrap();
    assert_eq!(checkpoints(&folder, "a")[&17], checkpoints(&folder, "whole")[&17]);
}

/// A dynamic loss scale takes skipped steps with it, until it can fall no further.
#[test]
fn a_loss_scale_bears_skipped_steps_until_it_is_at_its_least() {
    fn overflow(step: u64, outcome: &mut Outcome) {
        let skipped = (2..4).contains(&step) || step >= 9;
        outcome.scale = Some([if step < 9 { 4.0 } else { 1.0 }, 0.0, 0.0]);
        if skipped {
            outcome.control = [0.0, 0.0, f64::INFINITY];
        }
    }
    let folder = Folder::new("late-scale");
    let scale = LossScale { initial: 4.0, ..LossScale::default() };
    let mut listener = Listener::default();
    let error = train_late(&raw(&folder, "a"), 3, Some(scale), overflow, &mut listener).unwrap_err();
    assert!(matches!(error, TrainError::NotFinite { step: 11, .. }), "{error}");
    let lines = metrics(&folder, "a");
    assert_eq!(lines.iter().filter(|line| line.contains_key("loss_scale")).count(), 11);

    let fixed = LossScale { dynamic: false, ..scale };
    let error = train_late(&raw(&folder, "b"), 3, Some(fixed), overflow, &mut Listener::default());
    assert!(matches!(error, Err(TrainError::NotFinite { step: 2, .. })));
}

/// A learning rate that moves nothing: the first evaluation stays the best.
#[test]
fn a_run_ends_early_when_evaluations_get_no_better() {
    let folder = Folder::new("early-stop");
    let idle = |early_stop, resume| Raw {
        lr: Some(1e-30),
        weight_decay: Some(0.0),
        eval_every: Some(config::Every::Steps(2)),
        checkpoint_every: Some(100),
        early_stop,
        resume,
        ..raw(&folder, "run")
    };
    let steps = |raw: &Raw| train_late(raw, 1, None, as_told, &mut Listener::default()).unwrap().steps;
    assert_eq!(steps(&idle(Some(2), None)), 6, "evaluations after 2, 4 and 6 steps");
    assert!(
        checkpoints(&folder, "run").contains_key(&6) && folder.0.join("run/weights.safetensors").exists()
    );
    assert_eq!(steps(&idle(Some(2), Some(None))), 0, "it was done");
    assert_eq!(steps(&idle(Some(3), Some(None))), 2, "with more patience it goes on");
    let refused = idle(Some(0), None).resolve_without_data(1).unwrap_err().to_string();
    assert_eq!(refused, "--early-stop 0: must be at least 1");
}
