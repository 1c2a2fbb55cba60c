//! A study on its way: what is left to run, in which order, and what becomes of it.

use crate::child::{self, Ended};
use crate::error::StudyError;
use crate::grid::Planned;
use crate::measure;
use crate::report;
use crate::results::{FORMAT, Outcome, Point, Results, Run};
use crate::store::{self, Plan, RESULTS, Store};
use crate::tail::last_lines;
use crate::{csv, summary};
use records::MetricsLine;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// What a listener hears of a study, and what it may ask for.
pub trait Events {
    /// Runs in all, those done before, and the seconds that the others may take.
    fn started(&mut self, _runs: usize, _done: usize, _left: Option<f64>) {}
    fn begun(&mut self, _point: &Planned, _repeat: usize) {}
    /// A run has made so many of its steps.
    fn stepped(&mut self, _step: u64, _steps: u64) {}
    /// A run ended; seconds that the others may take.
    fn ended(&mut self, _point: &Planned, _run: &Run, _left: Option<f64>) {}
    /// Tells whether the study should end now, to be resumed later.
    fn stop(&self) -> bool {
        false
    }
}

/// How a study ended.
pub enum End {
    Done(Box<Results>),
    /// It was asked to stop; so many runs are left.
    Stopped {
        left: usize,
    },
    /// Its first runs failed, all in the same way, and so would the others; none of them is on record.
    GivenUp {
        failed: usize,
        left: usize,
        error: String,
    },
}

/// First runs, of so many points, whose failure for one reason ends a study that has measured nothing.
const ALIKE: usize = 3;

/// Failures of the first runs of points, until one succeeds or fails in another way. They go on record only then, so that a study which
/// is given up is gone on with from its start.
struct Beginning {
    over: bool,
    failed: Vec<(usize, Run)>,
    /// What all of them said, but for numbers.
    said: String,
}

impl Beginning {
    fn of(points: &[Point]) -> Self {
        let over = points.iter().any(|point| point.runs.iter().any(|run| run.measured().is_some()));
        Beginning { over, failed: vec![], said: String::new() }
    }

    /// Takes a run that ended, and gives those that go on record now.
    fn take(&mut self, planned: &[Planned], at: usize, run: Run) -> Vec<(usize, Run)> {
        if !self.over {
            match &run.outcome {
                Outcome::Failed { error } => {
                    let said = without_numbers(&error.replace(&planned[at].id, ""));
                    self.over = !self.failed.is_empty() && said != self.said;
                    self.said = said;
                }
                Outcome::Done(_) => self.over = true,
            }
        }
        self.failed.push((at, run));
        if self.over { std::mem::take(&mut self.failed) } else { vec![] }
    }

    /// Why the others would fail, too.
    fn hopeless(&self, points: usize) -> Option<String> {
        let of: HashSet<usize> = self.failed.iter().map(|(at, _)| *at).collect();
        let (_, last) = self.failed.last().filter(|_| of.len() >= ALIKE.min(points))?;
        match &last.outcome {
            Outcome::Failed { error } => Some(error.clone()),
            Outcome::Done(_) => None,
        }
    }
}

/// Numbers of processes, ranks and ports differ from run to run.
fn without_numbers(text: &str) -> String {
    text.split(|c: char| c.is_ascii_digit()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("#")
}

/// Does what is left of a study. `program`: what runs are started with.
pub fn run(store: &Store, program: &Path, events: &mut dyn Events) -> Result<End, StudyError> {
    let order = order(&store.plan.points, store.plan.study.repeats, store.plan.study.seed);
    let points = store.points()?;
    let done = |at: usize, repeat: usize| points[at].runs.iter().any(|run| run.repeat == repeat);
    let left: Vec<(usize, usize)> =
        order.iter().copied().filter(|(at, repeat)| !done(*at, *repeat)).collect();
    let mut pace = Pace::of(&store.plan.points, &points);
    let mut beginning = Beginning::of(&points);
    events.started(order.len(), order.len() - left.len(), pace.left(&left));
    for (number, (at, repeat)) in left.iter().enumerate() {
        let planned = &store.plan.points[*at];
        events.begun(planned, *repeat);
        let Some(run) = run_one(store, program, planned, *repeat, events)? else {
            finish(&store.folder, &results(store)?)?;
            return Ok(End::Stopped { left: left.len() - number + beginning.failed.len() });
        };
        pace.add(*at, &run);
        events.ended(planned, &run, pace.left(&left[number + 1..]));
        for (at, run) in beginning.take(&store.plan.points, *at, run) {
            store.add(&store.plan.points[at], run)?;
        }
        if let Some(error) = beginning.hopeless(store.plan.points.len()) {
            let failed = beginning.failed.len();
            return Ok(End::GivenUp { failed, left: left.len() + failed - number - 1, error });
        }
    }
    // Failures of a study that went on after others.
    for (at, run) in beginning.failed {
        store.add(&store.plan.points[at], run)?;
    }
    let results = results(store)?;
    finish(&store.folder, &results)?;
    Ok(End::Done(Box::new(results)))
}

/// One run; none if the study is to stop.
fn run_one(
    store: &Store,
    program: &Path,
    planned: &Planned,
    repeat: usize,
    events: &mut dyn Events,
) -> Result<Option<Run>, StudyError> {
    let folder = store.run_folder(&planned.id, repeat);
    clear(&folder)?;
    let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut follow = Follow { metrics: folder.join("metrics.jsonl"), looked: Instant::now() };
    let launch = &store.plan.study.launch;
    let ended = child::command(program, launch, planned, repeat, &folder).and_then(|command| {
        child::watch(command, &folder, &store.plan.folder, child::last_signal(launch), || {
            if let Some(step) = follow.step() {
                events.stepped(step, planned.settings.steps);
            }
            events.stop()
        })
    });
    let (outcome, seconds) = match ended {
        Ok(Ended { stopped: true, .. }) => return Ok(None),
        Ok(ended) => (outcome(store, planned, &folder, &ended), ended.seconds),
        Err(error) => (Outcome::Failed { error }, 0.0),
    };
    Ok(Some(Run { repeat, started, seconds, outcome }))
}

fn outcome(store: &Store, planned: &Planned, folder: &Path, ended: &Ended) -> Outcome {
    if !ended.status.success() {
        return Outcome::Failed { error: child::last_words(folder, ended.status) };
    }
    let said = fs::read(child::beside(folder, child::STDOUT)).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    match measure::measured(folder, &said, planned, store.plan.platform.cores, ended.watched) {
        Ok(measured) => Outcome::Done(Box::new(measured)),
        Err(error) => Outcome::Failed { error },
    }
}

/// Room for the folder of a run, which makes that itself; what a killed one left there is of no use. Its process may take a moment to
/// be gone.
fn clear(folder: &Path) -> Result<(), StudyError> {
    let deadline = Instant::now() + Duration::from_secs(5);
    while folder.exists() {
        match fs::remove_dir_all(folder) {
            Ok(()) => break,
            Err(source) if Instant::now() > deadline => {
                return Err(StudyError::Io { path: folder.to_path_buf(), source });
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    let runs = folder.parent().unwrap_or(folder);
    fs::create_dir_all(runs).map_err(StudyError::io(runs))
}

/// Bytes that hold the last line of a run's metrics.
const TAIL: u64 = 4096;

/// The steps that a run has made, by its metrics.
struct Follow {
    metrics: std::path::PathBuf,
    looked: Instant,
}

impl Follow {
    fn step(&mut self) -> Option<u64> {
        if self.looked.elapsed() < Duration::from_millis(500) {
            return None;
        }
        self.looked = Instant::now();
        // Little of it, so that looking takes nothing from what is measured.
        let last = last_lines(&self.metrics, TAIL).pop()?;
        serde_json::from_str::<MetricsLine>(&last).ok().map(|line| line.step + 1)
    }
}

/// (point, repeat) of all runs: a round for each repeat, shuffled, so that drift of the machine meets all points alike, and a
/// study that is cut short has measured all of them.
fn order(points: &[Planned], repeats: usize, seed: u64) -> Vec<(usize, usize)> {
    let mut random = seed;
    let mut all = Vec::with_capacity(points.len() * repeats);
    for repeat in 0..repeats {
        let mut round: Vec<usize> = (0..points.len()).collect();
        for i in (1..round.len()).rev() {
            round.swap(i, (split_mix(&mut random) % (i as u64 + 1)) as usize);
        }
        all.extend(round.into_iter().map(|at| (at, repeat)));
    }
    all
}

/// Steele, Lea and Flood's generator.
pub(crate) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How long runs take: those of the same point as they took, others as estimated, corrected by how wrong that was so far.
struct Pace {
    estimates: Vec<Option<f64>>,
    /// Seconds and number of runs of each point.
    taken: Vec<(f64, usize)>,
}

impl Pace {
    fn of(planned: &[Planned], points: &[Point]) -> Self {
        let mut pace = Pace {
            estimates: planned.iter().map(|point| point.estimate).collect(),
            taken: vec![(0.0, 0); planned.len()],
        };
        for (at, point) in points.iter().enumerate() {
            point.runs.iter().for_each(|run| pace.add(at, run));
        }
        pace
    }

    fn add(&mut self, at: usize, run: &Run) {
        if run.measured().is_some() {
            self.taken[at].0 += run.seconds;
            self.taken[at].1 += 1;
        }
    }

    fn left(&self, runs: &[(usize, usize)]) -> Option<f64> {
        let known = self.taken.iter().zip(&self.estimates).filter(|((_, runs), _)| *runs > 0);
        let (took, expected) = known.fold((0.0, 0.0), |(took, expected), ((seconds, runs), estimate)| {
            (took + seconds, expected + estimate.unwrap_or(0.0) * *runs as f64)
        });
        let wrong = if expected > 0.0 { took / expected } else { 1.0 };
        let runs_so_far = self.taken.iter().map(|(_, runs)| runs).sum::<usize>();
        let mean = (runs_so_far > 0).then(|| took / runs_so_far as f64);
        let of = |at: usize| match (self.taken[at], self.estimates[at]) {
            ((seconds, runs), _) if runs > 0 => Some(seconds / runs as f64),
            (_, Some(estimate)) => Some(estimate * wrong),
            (_, None) => mean,
        };
        // An empty sum is -0.
        runs.iter().map(|(at, _)| of(*at)).sum::<Option<f64>>().map(|seconds| seconds.max(0.0))
    }
}

/// What the runs so far come to.
pub fn results(store: &Store) -> Result<Results, StudyError> {
    Ok(results_of(&store.plan, store.points()?))
}

/// What runs of a plan come to.
pub fn results_of(plan: &Plan, points: Vec<Point>) -> Results {
    let mut results = Results {
        serial: vec![],
        format: FORMAT,
        version: plan.version.clone(),
        name: plan.study.name.clone(),
        title: plan.study.title.clone(),
        platform: plan.platform.clone(),
        started: plan.started,
        points,
        warnings: vec![],
        summary: String::new(),
    };
    let oversubscribed = |id: &str| plan.points.iter().any(|point| point.id == id && point.oversubscribed);
    summary::complete(&mut results, &oversubscribed);
    results
}

/// Writes what a study came to: `results.json` and `results.csv`.
pub fn finish(folder: &Path, results: &Results) -> Result<(), StudyError> {
    store::write_json(&folder.join(RESULTS), results)?;
    csv::write(&folder.join("results.csv"), results)?;
    Ok(report::write(folder, std::slice::from_ref(results))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, point};

    fn planned(id: &str, estimate: Option<f64>) -> Planned {
        Planned { estimate, ..testing::planned(id, point(1, &[]).settings) }
    }

    #[test]
    fn every_round_has_every_point_in_an_order_of_its_own() {
        let points: Vec<Planned> = (0..8).map(|i| planned(&i.to_string(), None)).collect();
        let all = order(&points, 3, 5);
        assert_eq!(all, order(&points, 3, 5));
        let rounds: Vec<Vec<usize>> =
            all.chunks(8).map(|round| round.iter().map(|(at, _)| *at).collect()).collect();
        assert!(rounds[0] != rounds[1] && rounds[1] != rounds[2]);
        for mut round in rounds {
            round.sort_unstable();
            assert_eq!(round, (0..8).collect::<Vec<_>>());
        }
        assert_ne!(all, order(&points, 3, 6));
    }

    #[test]
    fn a_study_whose_first_runs_fail_alike_is_given_up() {
        let failed = |repeat, error: &str| Run {
            repeat,
            started: 0,
            seconds: 0.0,
            outcome: Outcome::Failed { error: error.into() },
        };
        let done = point(1, &[1.0]).runs[0].clone();
        let points: Vec<Planned> = (0..4).map(|i| planned(&format!("strong-r{i}"), None)).collect();
        let none = || Beginning::of(&[point(1, &[])]);
        let mut same = none();
        for at in 0..3 {
            assert_eq!(same.hopeless(4), None, "after {at}");
            let error = format!("rank {at} of runs/strong-r{at}.0, process {}: no", 77 * at);
            assert_eq!(same.take(&points, at, failed(0, &error)), []);
        }
        assert_eq!(same.hopeless(4).unwrap(), "rank 2 of runs/strong-r2.0, process 154: no");
        // Of fewer points, all of them; of one, the first run.
        let mut one = none();
        assert_eq!(one.take(&points, 0, failed(0, "no")), []);
        assert_eq!((one.hopeless(1), one.hopeless(2)), (Some("no".into()), None));
        // A point that fails again and again is one point.
        one.take(&points, 0, failed(1, "no"));
        one.take(&points, 0, failed(2, "no"));
        assert_eq!(one.hopeless(4), None);
        // Another error, or a run that succeeds, and all go on record.
        for other in [failed(0, "something else"), done] {
            let mut mixed = none();
            assert_eq!(mixed.take(&points, 0, failed(0, "no")), []);
            let on_record = mixed.take(&points, 1, other.clone());
            assert_eq!(on_record, [(0, failed(0, "no")), (1, other)]);
            for at in 0..4 {
                assert_eq!(mixed.take(&points, at, failed(1, "no")).len(), 1);
                assert_eq!(mixed.hopeless(4), None);
            }
        }
        // A study that measured something before is not at its beginning.
        let mut later = Beginning::of(&[point(1, &[1.0])]);
        assert_eq!(later.take(&points, 0, failed(0, "no")).len(), 1);
    }

    #[test]
    fn time_left_follows_what_runs_took() {
        let points = [planned("a", Some(10.0)), planned("b", Some(30.0))];
        let mut pace = Pace::of(&points, &[point(1, &[]), point(1, &[])]);
        assert_eq!(pace.left(&[(0, 0), (1, 0)]), Some(40.0));
        let run = Run { seconds: 20.0, ..point(1, &[1.0]).runs[0].clone() };
        pace.add(0, &run);
        assert_eq!(pace.left(&[(0, 1), (1, 0)]), Some(20.0 + 60.0), "twice as long as thought");
        let unknown = [planned("a", None), planned("b", None)];
        let mut pace = Pace::of(&unknown, &[point(1, &[]), point(1, &[])]);
        assert_eq!(pace.left(&[(0, 0)]), None);
        pace.add(0, &run);
        assert_eq!(pace.left(&[(0, 1), (1, 0)]), Some(40.0));
    }
}
