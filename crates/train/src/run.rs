//! The training loop, as every rank goes through it. Only rank 0 writes and talks.

use crate::account::{Exchanged, Parts, Step};
use crate::agree::agree;
use crate::balance::{Balance, Lookout, Straggler};
use crate::checkpoint::{Best, Checkpoint, Checkpoints, Progress};
use crate::config::{Precision, Resolved};
use crate::error::TrainError;
use crate::metrics::Metrics;
use crate::real::Real;
use crate::record::{self, Launch};
use crate::session::{Score, Session, StepResult};
use crate::sets::Sets;
use crate::shares::Shares;
use crate::tensorboard::EventFile;
use crate::trace::Trace;
use crate::weights;
use comm::{Communicator, Member};
use cpu::StepTime;
use data::Skipped;
use graph::Program;
use models::names::Convention;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What a listener hears of a run, and what it may ask for.
pub trait Events {
    fn started(&mut self, _run: &Resolved, _program: &Program, _progress: &Progress) {}
    fn stepped(&mut self, _step: u64, _epoch: u64, _result: &StepResult, _account: &Step) {}
    fn evaluated(&mut self, _step: u64, _epoch: u64, _score: &Score) {}
    /// An image could not be read and was left out.
    fn skipped(&mut self, _problem: &str) {}
    fn saved(&mut self, _checkpoint: &Path) {}
    /// A rank keeps the others waiting.
    fn straggler(&mut self, _straggler: &Straggler) {}
    /// The work is divided by the ranks' speeds from now on.
    fn divided(&mut self, _shares: &Shares) {}
    fn traced(&mut self, _file: &Path) {}
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
    /// Wall time of the training steps, data included, evaluation and checkpoints not.
    pub training_seconds: f64,
    pub evaluation_seconds: f64,
    /// Where the training time of each rank went.
    pub ranks: Vec<Parts>,
    /// The collectives of a step.
    pub exchanged: Vec<Exchanged>,
    /// By kind of step, of training alone, on this rank.
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

/// Trains from the first step, or from the last checkpoint, to the last step, as one of the ranks.
pub fn train(
    run: Resolved,
    sets: Sets,
    member: &Member,
    events: &mut dyn Events,
) -> Result<Summary, TrainError> {
    match run.precision {
        Precision::Fp64 => train_in::<f64>(run, sets, member, events),
        _ => train_in::<f32>(run, sets, member, events),
    }
}

fn train_in<T: Real>(
    run: Resolved,
    sets: Sets,
    member: &Member,
    events: &mut dyn Events,
) -> Result<Summary, TrainError> {
    let world = &member.world;
    // The session first: what it refuses (weights of another model, say) must not leave a folder behind.
    let mut session = Session::<T>::among(run, sets.clone(), world.clone())?;
    let run = session.resolved().clone();
    agree(world, &run, &sets, session.executor().program())?;
    let mut progress = begin(&mut session, &run)?;
    let mut output = match (&run.out, &run.resume) {
        _ if world.rank() > 0 => None,
        (Some(folder), None) => Some(Output::create(folder, &run)?),
        (_, Some(folder)) => Some(Output::resume(folder, &run, progress.step)?),
        (None, None) => None,
    };
    events.started(&run, session.executor().program(), &progress);
    let mut summary = Summary::default();
    let mut training = Loop { member, run: &run, output: output.as_mut(), summary: &mut summary, events };
    let ended = training.steps(&mut session, &mut progress);
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

/// Where the run begins: at its first step, or after the last checkpoint. Rank 0 reads files, the others get from it what
/// they need.
fn begin<T: Real>(session: &mut Session<T>, run: &Resolved) -> Result<Progress, TrainError> {
    let world = session.world().clone();
    let mut progress = Progress::default();
    if let Some(folder) = run.resume.as_ref().filter(|_| world.rank() == 0) {
        progress = resume(session, folder)?;
    }
    if world.size() > 1 {
        let text = serde_json::json!(progress).to_string().into_bytes();
        let text = world.broadcast_bytes(world.name("where the run goes on"), 0, text)?;
        progress = serde_json::from_slice(&text).map_err(|e| TrainError::Disagree(e.to_string()))?;
        session.follow_first()?;
    }
    // A division of the work is kept if it still fits.
    if let Some(shares) = progress.shares.clone()
        && (shares.ranks(), shares.total()) == (world.size(), session.shares().total())
    {
        session.divide(shares)?;
    }
    Ok(progress)
}

/// Goes on where the last checkpoint of a run was made, if this run is the same. A run that ended before its first
/// checkpoint begins again.
fn resume<T: Real>(session: &mut Session<T>, folder: &Path) -> Result<Progress, TrainError> {
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
    same_settings(session.resolved(), &before, folder)?;
    let progress = session.restore(checkpoint)?;
    checkpoints.mend_best(&path, &progress)?;
    Ok(progress)
}

fn restart<T: Real>(session: &mut Session<T>, folder: &Path) -> Result<Progress, TrainError> {
    same_settings(session.resolved(), &record::config(folder)?, folder)?;
    session.load_init()?;
    Ok(Progress::default())
}

fn same_settings(run: &Resolved, before: &Resolved, folder: &Path) -> Result<(), TrainError> {
    let differences = run.differences(before);
    if differences.is_empty() {
        return Ok(());
    }
    Err(TrainError::OtherSettings { folder: folder.to_path_buf(), differences: differences.join("; ") })
}

/// What the steps of a run have in common.
struct Loop<'a> {
    member: &'a Member,
    run: &'a Resolved,
    output: Option<&'a mut Output>,
    summary: &'a mut Summary,
    events: &'a mut dyn Events,
}

impl Loop<'_> {
    /// Runs the steps that are left. Returns why it stopped early, if it did.
    fn steps<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
    ) -> Result<Option<Stopped>, TrainError> {
        let run = self.run;
        let (mut balance, mut lookout) = (Balance::default(), Lookout::default());
        let mut trace = self.begin_trace(session);
        session.account_mut().begin();
        while progress.step < run.steps {
            let step = progress.step;
            let epoch = step / run.steps_per_epoch;
            let began = Instant::now();
            let result = session.step(step)?;
            check(session, step, &result)?;
            let asked = self.events.stop();
            let account = session.share_account(asked.is_some())?;
            let (stop, skipped) = (account.stop, account.skipped);
            self.report(step, epoch, &result, session.account().last())?;
            if skipped > 0 {
                self.report_skipped(session, progress)?;
            }
            trace = self.follow_trace(trace, step, began, session)?;
            progress.step += 1;

            let last = progress.step == run.steps;
            let epoch_ends = progress.step.is_multiple_of(run.steps_per_epoch);
            let mut best = false;
            if last || (epoch_ends && (epoch + 1).is_multiple_of(run.eval_every)) {
                best = self.evaluate(session, progress, step, epoch)?;
                session.account_mut().begin();
            }
            // Another rank's signal stops this one too.
            let why = stop.then(|| asked.unwrap_or("a signal to another rank"));
            let due = last || best || stop || progress.step.is_multiple_of(run.checkpoint_every);
            let checkpoint = if due { self.save(session, progress, best)? } else { None };
            if let Some(why) = why.filter(|_| !last) {
                self.close(session);
                return Ok(Some(Stopped { why, step: progress.step, checkpoint }));
            }
            self.look_at_ranks(session, &mut balance, &mut lookout)?;
        }
        self.close(session);
        if let Some(trace) = trace {
            self.end_trace(trace, session)?;
        }
        Ok(None)
    }

    /// A step that is done.
    fn report(
        &mut self,
        step: u64,
        epoch: u64,
        result: &StepResult,
        account: &Step,
    ) -> Result<(), TrainError> {
        self.summary.steps += 1;
        self.summary.training_seconds += account.seconds();
        self.summary.images += result.score.samples as u64;
        if let Some(output) = &mut self.output {
            output.step(step, epoch, result, account)?;
        }
        self.events.stepped(step, epoch, result, account);
        Ok(())
    }

    /// Scores the held-out set; says whether that is the best so far.
    fn evaluate<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
        step: u64,
        epoch: u64,
    ) -> Result<bool, TrainError> {
        let start = Instant::now();
        let score = session.evaluate(|_, _| {})?;
        self.summary.evaluation_seconds += start.elapsed().as_secs_f64();
        self.report_skipped(session, progress)?;
        if let Some(output) = &mut self.output {
            output.evaluation(step, epoch, &score)?;
        }
        self.events.evaluated(step, epoch, &score);
        self.summary.score = Some(score);
        Ok(progress.note(step, &score))
    }

    fn save<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
        best: bool,
    ) -> Result<Option<PathBuf>, TrainError> {
        progress.shares = (!session.shares().is_equal()).then(|| session.shares().clone());
        let Some(output) = &mut self.output else { return Ok(None) };
        // The others wait for this, however long the disk takes.
        let _busy = self.member.watch.busy("writing a checkpoint");
        let path = output.save(session, progress, best)?;
        self.events.saved(&path);
        session.account_mut().begin();
        Ok(Some(path))
    }

    /// All ranks know that there are some, or all ask: rank 0 hears of every image left out.
    fn report_skipped<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
    ) -> Result<(), TrainError> {
        let mine: Vec<String> = session.take_skipped().into_iter().map(|s: Skipped| s.problem).collect();
        for problem in gather(session.world(), "images left out", &mine)?.into_iter().flatten() {
            progress.skipped += 1;
            self.events.skipped(&problem);
        }
        Ok(())
    }

    /// Names a straggler, or divides the work by the ranks' speeds.
    fn look_at_ranks<T: Real>(
        &mut self,
        session: &mut Session<T>,
        balance: &mut Balance,
        lookout: &mut Lookout,
    ) -> Result<(), TrainError> {
        if let Some(straggler) = lookout.after(session.account().last(), session.shares()) {
            self.events.straggler(&straggler);
        }
        if self.run.balance
            && let Some(shares) = balance.after(session.account().last(), session.shares())
        {
            self.events.divided(&shares);
            session.divide(shares)?;
            session.account_mut().begin();
            lookout.forget();
        }
        Ok(())
    }

    /// Where the time went, when the last step is done.
    fn close<T: Real>(&mut self, session: &Session<T>) {
        self.summary.ranks = session.account().totals().to_vec();
        self.summary.exchanged = session.account().exchanged().to_vec();
        self.summary.times = session.executor().training_times();
    }

    fn begin_trace<T: Real>(&self, session: &mut Session<T>) -> Option<Trace> {
        let trace = self.run.trace.as_ref().map(|path| Trace::new(path, self.run.trace_steps));
        session.executor_mut().set_tracing(trace.is_some());
        trace
    }

    /// Adds a step to the trace, and writes it when it has all it is to have.
    fn follow_trace<T: Real>(
        &mut self,
        trace: Option<Trace>,
        step: u64,
        began: Instant,
        session: &mut Session<T>,
    ) -> Result<Option<Trace>, TrainError> {
        let Some(mut trace) = trace else { return Ok(None) };
        if !trace.step(step, began, session.executor_mut()) {
            return Ok(Some(trace));
        }
        self.end_trace(trace, session)?;
        session.account_mut().begin();
        Ok(None)
    }

    fn end_trace<T: Real>(&mut self, trace: Trace, session: &mut Session<T>) -> Result<(), TrainError> {
        session.executor_mut().set_tracing(false);
        if let Some(path) = trace.write(session.world())? {
            self.events.traced(&path);
        }
        Ok(())
    }
}

/// Lines that the ranks have, in their order, on every rank.
fn gather(world: &Communicator, what: &str, mine: &[String]) -> Result<Vec<Vec<String>>, TrainError> {
    if world.size() == 1 {
        return Ok(vec![mine.to_vec()]);
    }
    let text = serde_json::json!(mine).to_string();
    let texts = world.gather_bytes(world.name(what), text.as_bytes())?;
    Ok(texts.iter().map(|text| serde_json::from_slice(text).unwrap_or_default()).collect())
}

/// A step whose gradient is not finite ends the run; the same step is gone through again to say where that began. All ranks
/// come here together, as they have the same gradients.
fn check<T: Real>(session: &mut Session<T>, step: u64, result: &StepResult) -> Result<(), TrainError> {
    if result.applied {
        return Ok(());
    }
    if result.score.samples == 0.0 {
        return Err(TrainError::NoSamples { step });
    }
    let mine: Vec<String> = session.first_bad_value(step)?.iter().map(ToString::to_string).collect();
    let world = session.world();
    let found = gather(world, "the first bad value", &mine)?.into_iter().enumerate();
    let culprit = found.filter_map(|(rank, lines)| Some((rank, lines.into_iter().next()?))).next();
    let culprit = culprit.map(|(rank, line)| match world.size() {
        1 => line,
        _ => format!("on rank {rank}, {line}"),
    });
    Err(TrainError::NotFinite { step, loss: result.score.loss, culprit })
}

/// The parts of a step's time as TensorBoard has them, in the order of [`Parts::named`].
const BOARD: [&str; 6] = [
    "seconds/compute",
    "seconds/exchange",
    "seconds/wait_for_ranks",
    "seconds/data",
    "seconds/optimizer",
    "seconds/idle",
];

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

    fn step(&mut self, step: u64, epoch: u64, result: &StepResult, account: &Step) -> Result<(), TrainError> {
        self.metrics.step(step, epoch, result, account)?;
        let StepResult { score, learning_rate, gradient_norm, .. } = result;
        self.board.scalar(step, "train/loss", score.loss)?;
        self.board.scalar(step, "train/top1", score.top1)?;
        self.board.scalar(step, "train/learning_rate", *learning_rate)?;
        self.board.scalar(step, "train/gradient_norm", *gradient_norm)?;
        self.board.scalar(step, "train/images_per_second", score.samples / account.seconds())?;
        let mean = account.mean();
        for (name, seconds) in BOARD.into_iter().zip(mean.named()).map(|(name, (_, s))| (name, s)) {
            self.board.scalar(step, name, seconds)?;
        }
        self.board.scalar(step, "seconds/hidden_exchange", mean.hidden)
    }

    fn evaluation(&mut self, step: u64, epoch: u64, score: &Score) -> Result<(), TrainError> {
        self.metrics.evaluation(step, epoch, score)?;
        self.board.scalar(step, "eval/loss", score.loss)?;
        self.board.scalar(step, "eval/top1", score.top1)?;
        self.board.scalar(step, "eval/top5", score.top5)?;
        self.board.flush()
    }

    /// Metrics first: no run must go on from a step whose metrics are lost.
    fn save<T: Real>(
        &mut self,
        session: &Session<T>,
        progress: &Progress,
        best: bool,
    ) -> Result<PathBuf, TrainError> {
        self.metrics.sync()?;
        self.board.flush()?;
        self.checkpoints.save(&session.lasting(), progress, &self.config, best)
    }

    fn flush(&mut self) -> Result<(), TrainError> {
        self.metrics.sync()?;
        self.board.flush()
    }
}
