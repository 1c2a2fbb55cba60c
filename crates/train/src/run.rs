//! The training loop, as every rank goes through it. Only rank 0 writes and talks.

mod output;
mod steps;

use crate::account::Step;
use crate::agree::agree;
use crate::balance::Straggler;
use crate::error::TrainError;
use crate::folder::{self, RunFolder};
use crate::gpu_log::Gpus;
use crate::record;
use crate::session::{Evaluation, Session, StepResult};
use comm::{Communicator, Member};
use config::Shares;
use config::card::Card;
use config::sets::Sets;
use config::{Precision, Resolved};
use devices::Real;
use devices::device::{Device, Seat, StepTime};
use formats::checkpoint::{Best, Checkpoint, Checkpoints, DAMAGED, Progress};
use formats::weights;
use graph::Program;
use models::names::Convention;
use output::Output;
use records::{Collective, Ended, MetricsLine, Parts};
use std::path::{Path, PathBuf};
use steps::Loop;

/// What a listener hears of a run, and what it may ask for.
pub trait Events {
    fn started(&mut self, _run: &Resolved, _program: &Program, _progress: &Progress) {}
    /// A step is done; `line` is what the metrics say of it.
    fn stepped(&mut self, _line: &MetricsLine, _result: &StepResult, _account: &Step) {}
    fn evaluated(&mut self, _step: u64, _epoch: u64, _score: &Evaluation) {}
    /// An image could not be read and was left out.
    fn skipped(&mut self, _problem: &str) {}
    fn saved(&mut self, _checkpoint: &Path) {}
    /// A rank keeps the others waiting.
    fn straggler(&mut self, _straggler: &Straggler) {}
    /// The work is divided by the ranks' speeds from now on.
    fn divided(&mut self, _shares: &Shares) {}
    /// Something that is good to know.
    fn noted(&mut self, _line: &str) {}
    /// Something that went wrong, though the run goes on.
    fn warned(&mut self, line: &str) {
        self.noted(line);
    }
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
    pub score: Option<Evaluation>,
    pub best: Option<Best>,
    /// Broken images left out, since the run began.
    pub skipped: u64,
    /// Wall time of the training steps, data included, evaluation and checkpoints not.
    pub training_seconds: f64,
    pub evaluation_seconds: f64,
    /// Memory of this rank as its plans have it: arena and states.
    pub memory_bytes: usize,
    /// Where the training time of each rank went.
    pub ranks: Vec<Parts>,
    /// The collectives of a step.
    pub collectives: Vec<Collective>,
    /// By kind of step, of training alone, on this rank.
    pub times: Vec<StepTime>,
    /// What to know of them.
    pub note_on_times: Option<String>,
    pub weights: Option<PathBuf>,
    /// What could not be written, a line each; none of it cost a result.
    pub failures: Vec<String>,
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
    mut run: Resolved,
    sets: Sets,
    member: &Member,
    events: &mut dyn Events,
) -> Result<Summary, TrainError> {
    if let (Some(folder), None, 0) = (&run.out, &run.resume, member.world.rank()) {
        folder::check_free(folder)?;
    }
    settle_shard_group(&mut run, member)?;
    // The session first: what it refuses (weights of another model, say) must not leave a folder behind.
    let session = Session::<T>::among(run, sets.clone(), Seat::of(member))?;
    train_session(session, &sets, member, events)
}

/// Puts the ranks of a host in the place of `--shard-group node`. All ranks know all, and refuse alike.
fn settle_shard_group(run: &mut Resolved, member: &Member) -> Result<(), TrainError> {
    let (world, place) = (&member.world, &member.place);
    let mine = [place.local_rank as u64, place.local_world as u64];
    let mut numbers = mine.repeat(world.size());
    if world.size() > 1 {
        world.all_gather(world.name("which ranks share a host"), &mine, &mut numbers)?;
    }
    let ranks: Vec<(usize, usize)> = numbers.chunks(2).map(|of| (of[0] as usize, of[1] as usize)).collect();
    Ok(run.settle_shard_group(&ranks)?)
}

/// The GPU of each rank.
fn gpus<T: Real>(world: &Communicator, device: &dyn Device<T>) -> Result<Gpus, TrainError> {
    let mine = device.gpu();
    if world.size() == 1 {
        return Ok(vec![mine]);
    }
    let text = serde_json::json!(mine).to_string();
    let texts = world.gather_bytes(world.name("the GPUs of all ranks"), text.as_bytes())?;
    Ok(texts.iter().map(|text| serde_json::from_slice(text).unwrap_or_default()).collect())
}

fn train_session<T: Real>(
    mut session: Session<T>,
    sets: &Sets,
    member: &Member,
    events: &mut dyn Events,
) -> Result<Summary, TrainError> {
    let world = &member.world;
    let run = session.resolved().clone();
    agree(world, &run, sets, session.device().program())?;
    let entered = enter(&run, member, events)?;
    let mut progress = begin(&mut session, &run, events)?;
    let gpus = gpus(world, session.device())?;
    let mut output = match (&run.out, entered) {
        _ if world.rank() > 0 => None,
        (_, Some(folder)) => Some(Output::resume(folder, &run, progress.step, gpus, events)?),
        (Some(folder), None) => Some(Output::create(folder, &run, gpus, events)?),
        (None, None) => None,
    };
    events.started(&run, session.device().program(), &progress);
    if let Some(line) = session.device().says() {
        events.noted(line);
    }
    for left in sets.left_out() {
        events.noted(&format!("left out: {}: {}", left.name, left.problem));
    }
    let program = session.device().program();
    if let Some(line) = run.stage_instead(program.zero) {
        events.noted(&line);
    }
    let mut summary = Summary { memory_bytes: program.bytes(), ..Summary::default() };
    let saves = saves(&session, output.is_some() && run.checkpoints)?;
    let mut training =
        Loop { member, run: &run, output: output.as_mut(), saves, summary: &mut summary, events };
    let ended = training.steps(&mut session, &mut progress);
    // What was measured stays, however the run ended; the first error is the one to report.
    let closed = output.as_mut().map_or(Ok(()), Output::finish);
    let name = || session.device().name();
    let ended = ended.map_err(|error| error.of_step(world.rank(), name, progress.step));
    if let (Err(error), Some(output)) = (&ended, &output) {
        // The error is the one to report, whatever becomes of its record.
        let _ = output.end(Ended::Failed, Some(error.to_string()), progress.step);
    }
    summary.stopped = ended?;
    summary.best = progress.best;
    summary.skipped = progress.skipped;
    let weights = match &output {
        Some(output) => output.folder.check().map(|()| saves)?,
        None => saves,
    };
    let weights = (weights && summary.stopped.is_none()).then(|| session.weights()).transpose()?;
    if let Some(output) = &mut output {
        if let Some(weights) = weights {
            let path = output.folder.path.join("weights.safetensors");
            let card = Card::of(&run.recorded(&output.folder.path));
            let config = Some(output.config.as_str());
            let saved = weights::save_as(&path, &weights, Convention::Timm, &card, config);
            summary.failures.extend(saved.as_ref().err().map(ToString::to_string));
            summary.weights = saved.is_ok().then_some(path);
        }
        let ended = match &summary.stopped {
            Some(stopped) => output.end(Ended::Stopped, Some(stopped.why.to_string()), progress.step),
            None => output.end(Ended::Finished, None, progress.step),
        };
        let failures = output.failures().chain(closed.err()).chain(ended.err());
        summary.failures.extend(failures.map(|error| error.to_string()));
    }
    session.device_mut().finish();
    Ok(summary)
}

/// Tells whether this rank takes part in saving what was trained: rank 0 does if there is a folder, the others with it where ranks divide
/// states.
fn saves<T: Real>(session: &Session<T>, mine: bool) -> Result<bool, TrainError> {
    let world = session.world();
    let mut saves = [u8::from(mine)];
    if session.is_divided() {
        world.broadcast(world.name("whether checkpoints are saved"), 0, &mut saves)?;
    }
    Ok(saves[0] == 1)
}

/// The folder of a run that is continued, which nobody else works in from here on. Rank 0 has it.
fn enter(run: &Resolved, member: &Member, events: &mut dyn Events) -> Result<Option<RunFolder>, TrainError> {
    let Some(folder) = run.resume.as_ref().filter(|_| member.world.rank() == 0) else { return Ok(None) };
    // The others wait for this, however long it takes.
    let _busy = member.monitor.busy("looking who works in the run's folder");
    RunFolder::enter(folder, run.force, events).map(Some)
}

/// Where the run begins: at its first step, or after the last checkpoint. Rank 0 reads files, the others get from it what
/// they need.
fn begin<T: Real>(
    session: &mut Session<T>,
    run: &Resolved,
    events: &mut dyn Events,
) -> Result<Progress, TrainError> {
    let world = session.world().clone();
    let mut progress = Progress::default();
    if let Some(folder) = run.resume.as_ref().filter(|_| world.rank() == 0) {
        progress = resume(session, folder, events)?;
    }
    if world.size() > 1 {
        // While rank 0 reads a checkpoint, the others take their parts of it.
        session.follow_first()?;
        let text = serde_json::json!(progress).to_string().into_bytes();
        let text = world.broadcast_bytes(world.name("where the run goes on"), 0, text)?;
        progress = serde_json::from_slice(&text).map_err(|e| TrainError::Disagree(e.to_string()))?;
    }
    // A division of the work is kept if it still fits.
    if let Some(shares) = progress.shares.clone()
        && (shares.ranks(), shares.total()) == (world.size(), session.shares().total())
    {
        session.divide(shares)?;
    }
    Ok(progress)
}

/// Goes on where the last checkpoint of a run was made, if this run is the same. One that is damaged is set aside, and the one before it
/// taken. A run that ended before its first checkpoint begins again.
fn resume<T: Real>(
    session: &mut Session<T>,
    folder: &Path,
    events: &mut dyn Events,
) -> Result<Progress, TrainError> {
    let checkpoints = Checkpoints::of_run(folder, session.resolved().keep);
    checkpoints.remove_unfinished()?;
    let candidates = checkpoints.newest_first()?;
    let mut damaged: Vec<(PathBuf, TrainError)> = Vec::new();
    for path in &candidates {
        let (progress, before) = match restore(session, folder, path) {
            Err(error) if error.is_damage() => {
                damaged.push((path.clone(), error));
                continue;
            }
            restored => restored?,
        };
        if !damaged.is_empty() {
            let damaged = damaged.into_iter().map(|(path, error)| (path, error.to_string())).collect();
            let errors = checkpoints.set_aside_with_best(damaged)?;
            let path = path.display();
            events.warned(&format!("{errors} (now named *{DAMAGED}); going on from {path}"));
        }
        checkpoints.mend_best(path, &progress)?;
        if let Some(line) = divided_anew(session.resolved(), &before) {
            events.noted(&line);
        }
        return Ok(progress);
    }
    match damaged.into_iter().next() {
        Some((_, error)) => Err(TrainError::NoneWhole(Box::new(error))),
        None => restart(session, folder),
    }
}

/// How the images of a step are divided, if that is not as before.
fn divided_anew(run: &Resolved, before: &Resolved) -> Option<String> {
    let (now, then) = (division(run), division(before));
    let images = run.global_batch();
    (now != then).then(|| format!("a step has the same {images} images, divided as {now}, before as {then}"))
}

fn division(run: &Resolved) -> String {
    let shares = run.shares();
    let micro_steps = if run.accumulate == 1 { "micro-step" } else { "micro-steps" };
    let images = match (shares.smallest(), shares.largest()) {
        (least, most) if least == most => most.to_string(),
        (least, most) => format!("{least} to {most}"),
    };
    let ranks = if run.world == 1 { "rank" } else { "ranks" };
    format!("{} {ranks} × {images} × {} {micro_steps}", run.world, run.accumulate)
}

fn restore<T: Real>(
    session: &mut Session<T>,
    folder: &Path,
    path: &Path,
) -> Result<(Progress, Resolved), TrainError> {
    let checkpoint = Checkpoint::open(path)?;
    let before = Resolved::from_json(&path.display().to_string(), &checkpoint.config)?;
    same_settings(session.resolved(), &before, folder)?;
    Ok((session.restore(checkpoint)?, before))
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

#[cfg(test)]
mod tests;
