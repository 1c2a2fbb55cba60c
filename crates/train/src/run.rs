//! The training loop.

use crate::checkpoint::{Best, Checkpoint, Checkpoints, Progress};
use crate::config::Resolved;
use crate::error::TrainError;
use crate::metrics::Metrics;
use crate::record::{self, Launch};
use crate::session::{Score, Session, StepResult};
use crate::sets::Sets;
use crate::tensorboard::EventFile;
use crate::weights;
use cpu::StepTime;
use data::Skipped;
use models::names::Convention;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What a listener hears of a run, and what it may ask for.
pub trait Events {
    fn started(&mut self, _session: &Session, _progress: &Progress) {}
    fn stepped(&mut self, _step: u64, _epoch: u64, _result: &StepResult, _images_per_second: f64) {}
    fn evaluated(&mut self, _step: u64, _epoch: u64, _score: &Score) {}
    /// An image could not be read and was left out.
    fn skipped(&mut self, _skipped: &Skipped) {}
    fn saved(&mut self, _checkpoint: &Path) {}
    /// Why the run should end after this step, if it should.
    fn stop(&self) -> Option<&'static str> {
        None
    }
}

/// How a run ended, and where its time went.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Steps made by this process.
    pub steps: u64,
    pub images: u64,
    /// Of the last evaluation, unless this process made none.
    pub score: Option<Score>,
    pub best: Option<Best>,
    /// Broken images left out, since the run began.
    pub skipped: u64,
    /// Wall time of the training steps, data included, evaluation not.
    pub training_seconds: f64,
    pub evaluation_seconds: f64,
    pub data_seconds: f64,
    /// By kind of step, of training alone.
    pub times: Vec<StepTime>,
    pub weights: Option<PathBuf>,
    /// Set if the run was asked to stop before its last step.
    pub stopped: Option<Stopped>,
}

#[derive(Clone, Debug)]
pub struct Stopped {
    pub why: &'static str,
    /// The step to go on with.
    pub step: u64,
    pub checkpoint: Option<PathBuf>,
}

impl Summary {
    pub fn images_per_second(&self) -> f64 {
        if self.training_seconds > 0.0 { self.images as f64 / self.training_seconds } else { 0.0 }
    }
}

/// Trains from the first step, or from the last checkpoint, to the last step.
pub fn train(run: Resolved, sets: Sets, events: &mut dyn Events) -> Result<Summary, TrainError> {
    // The session first: what it refuses (weights of another model, say) must not leave a folder behind.
    let mut session = Session::new(run, sets)?;
    let run = session.resolved().clone();
    let mut progress = Progress::default();
    if let Some(folder) = &run.resume {
        progress = resume(&mut session, folder)?;
    }
    let mut output = match (&run.out, &run.resume) {
        (Some(folder), None) => Some(Output::create(folder, &run)?),
        (_, Some(folder)) => Some(Output::resume(folder, &run, progress.step)?),
        (None, None) => None,
    };
    events.started(&session, &progress);
    let mut summary = Summary::default();
    let ended = steps(&mut session, &mut progress, &mut output, &mut summary, events);
    // What was measured stays, however the run ended; the first error is the one to report.
    let closed = output.as_mut().map_or(Ok(()), Output::flush);
    summary.stopped = ended?;
    closed?;
    summary.best = progress.best;
    summary.skipped = progress.skipped;
    if let (Some(output), None) = (&output, &summary.stopped) {
        let path = output.folder.join("weights.safetensors");
        weights::save_as(&path, &session.weights(), Convention::Timm, Some(&output.config))?;
        summary.weights = Some(path);
    }
    Ok(summary)
}

/// Goes on where the last checkpoint of a run was made, if this run is the same. A run that ended before its first
/// checkpoint begins again.
fn resume(session: &mut Session, folder: &Path) -> Result<Progress, TrainError> {
    let checkpoints = Checkpoints::of_run(folder, session.resolved().keep);
    let path = match checkpoints.latest() {
        Err(TrainError::NothingToResume(_)) => return restart(session, folder),
        found => found?,
    };
    let checkpoint = Checkpoint::open(&path).map_err(|error| match checkpoints.other_than(&path) {
        Some(other) => TrainError::BrokenCheckpoint { error: Box::new(error), other },
        None => error,
    })?;
    let before = Resolved::from_json(&path.display().to_string(), &checkpoint.config)?;
    same_settings(session, &before, folder)?;
    let progress = session.restore(checkpoint)?;
    checkpoints.mend_best(&path, &progress)?;
    Ok(progress)
}

fn restart(session: &mut Session, folder: &Path) -> Result<Progress, TrainError> {
    same_settings(session, &record::config(folder)?, folder)?;
    session.load_init()?;
    Ok(Progress::default())
}

fn same_settings(session: &Session, before: &Resolved, folder: &Path) -> Result<(), TrainError> {
    let differences = session.resolved().differences(before);
    if differences.is_empty() {
        return Ok(());
    }
    Err(TrainError::OtherSettings { folder: folder.to_path_buf(), differences: differences.join("; ") })
}

/// Runs the steps that are left. Returns why it stopped early, if it did.
fn steps(
    session: &mut Session,
    progress: &mut Progress,
    output: &mut Option<Output>,
    summary: &mut Summary,
    events: &mut dyn Events,
) -> Result<Option<Stopped>, TrainError> {
    let run = session.resolved().clone();
    while progress.step < run.steps {
        let step = progress.step;
        let epoch = step / run.steps_per_epoch;
        let start = Instant::now();
        let result = session.step(step)?;
        let seconds = start.elapsed().as_secs_f64();
        report_skipped(session, progress, events);
        check(session, step, &result)?;
        summary.steps += 1;
        summary.training_seconds += seconds;
        summary.images += result.score.samples as u64;
        let rate = result.score.samples / seconds;
        if let Some(output) = output {
            output.step(step, epoch, &result, rate)?;
        }
        events.stepped(step, epoch, &result, rate);
        progress.step += 1;

        let last = progress.step == run.steps;
        if last {
            summary.times = session.executor().training_times();
            summary.data_seconds = session.data_seconds();
        }
        let epoch_ends = progress.step.is_multiple_of(run.steps_per_epoch);
        let mut best = false;
        if last || (epoch_ends && (epoch + 1).is_multiple_of(run.eval_every)) {
            let start = Instant::now();
            let score = session.evaluate(|_, _| {})?;
            summary.evaluation_seconds += start.elapsed().as_secs_f64();
            report_skipped(session, progress, events);
            if let Some(output) = output {
                output.evaluation(step, epoch, &score)?;
            }
            events.evaluated(step, epoch, &score);
            best = progress.note(step, &score);
            summary.score = Some(score);
        }
        let why = events.stop();
        let due = last || best || why.is_some() || progress.step.is_multiple_of(run.checkpoint_every);
        let mut checkpoint = None;
        if let Some(output) = output.as_mut().filter(|_| due) {
            let path = output.save(session, progress, best)?;
            events.saved(&path);
            checkpoint = Some(path);
        }
        if let Some(why) = why.filter(|_| !last) {
            summary.times = session.executor().training_times();
            summary.data_seconds = session.data_seconds();
            return Ok(Some(Stopped { why, step: progress.step, checkpoint }));
        }
    }
    Ok(None)
}

fn report_skipped(session: &mut Session, progress: &mut Progress, events: &mut dyn Events) {
    for skipped in session.take_skipped() {
        progress.skipped += 1;
        events.skipped(&skipped);
    }
}

/// A step whose gradient is not finite ends the run; the same step is gone through again to say where that began.
fn check(session: &mut Session, step: u64, result: &StepResult) -> Result<(), TrainError> {
    if result.applied {
        return Ok(());
    }
    if result.score.samples == 0.0 {
        return Err(TrainError::NoSamples { step });
    }
    let culprit = session.first_bad_value(step)?.map(Box::new);
    Err(TrainError::NotFinite { step, loss: result.score.loss, culprit })
}

/// The folder of a run.
struct Output {
    folder: PathBuf,
    metrics: Metrics,
    board: EventFile,
    checkpoints: Checkpoints,
    config: String,
}

impl Output {
    fn create(folder: &Path, run: &Resolved) -> Result<Self, TrainError> {
        let config = run.to_json()?;
        let metrics = Metrics::create(folder)?;
        record::create(folder, &config, &Launch::now())?;
        Self::with(folder, run.keep, config, metrics, 0)
    }

    fn resume(folder: &Path, run: &Resolved, step: u64) -> Result<Self, TrainError> {
        let config = run.to_json()?;
        let metrics = Metrics::resume(folder, step)?;
        record::continue_with(folder, &Launch::now())?;
        Self::with(folder, run.keep, config, metrics, step)
    }

    fn with(
        folder: &Path,
        keep: usize,
        config: String,
        metrics: Metrics,
        step: u64,
    ) -> Result<Self, TrainError> {
        let mut board = EventFile::create(folder, step)?;
        board.text(step, "config", &config)?;
        let checkpoints = Checkpoints::of_run(folder, keep);
        Ok(Output { folder: folder.to_path_buf(), metrics, board, checkpoints, config })
    }

    fn step(&mut self, step: u64, epoch: u64, result: &StepResult, rate: f64) -> Result<(), TrainError> {
        self.metrics.step(step, epoch, result, rate)?;
        let StepResult { score, learning_rate, gradient_norm, .. } = result;
        self.board.scalar(step, "train/loss", score.loss)?;
        self.board.scalar(step, "train/top1", score.top1)?;
        self.board.scalar(step, "train/learning_rate", *learning_rate)?;
        self.board.scalar(step, "train/gradient_norm", *gradient_norm)?;
        self.board.scalar(step, "train/images_per_second", rate)
    }

    fn evaluation(&mut self, step: u64, epoch: u64, score: &Score) -> Result<(), TrainError> {
        self.metrics.evaluation(step, epoch, score)?;
        self.board.scalar(step, "eval/loss", score.loss)?;
        self.board.scalar(step, "eval/top1", score.top1)?;
        self.board.scalar(step, "eval/top5", score.top5)?;
        self.board.flush()
    }

    /// Metrics first: no run must go on from a step whose metrics are lost.
    fn save(&mut self, session: &Session, progress: &Progress, best: bool) -> Result<PathBuf, TrainError> {
        self.metrics.sync()?;
        self.board.flush()?;
        self.checkpoints.save(&session.lasting(), progress, &self.config, best)
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        self.metrics.sync()?;
        self.board.flush()
    }
}
