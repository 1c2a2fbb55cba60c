//! The steps of a run, and what comes between them.

use super::output::Output;
use super::{Events, Stopped, Summary};
use crate::account::Step;
use crate::balance::{Balance, Lookout, Straggler};
use crate::error::TrainError;
use crate::metrics;
use crate::saver::Saver;
use crate::session::{Finished, Session, StepResult};
use crate::trace::Trace;
use crate::updates::Before;
use comm::{Communicator, Member, Reduction};
use config::Shares;
use config::{LEAST_NORMALISED, LossScale, Resolved};
use data::Skipped;
use devices::Real;
use devices::device::Origin;
use formats::checkpoint::Progress;
use records::{Metric, MetricsLine};
use std::time::Instant;

/// What the steps of a run have in common.
pub(super) struct Loop<'a> {
    pub member: &'a Member,
    pub run: &'a Resolved,
    pub output: Option<&'a mut Output>,
    /// This rank takes part in saving checkpoints.
    pub saves: bool,
    pub summary: &'a mut Summary,
    pub events: &'a mut dyn Events,
}

/// Whether as many evaluations as `--early-stop` waits for followed the best one.
fn has_settled(run: &Resolved, progress: &Progress) -> bool {
    let (Some(patience), Some(best)) = (run.early_stop, progress.best) else { return false };
    let since = (best.step + 2..=progress.step).filter(|step| run.evaluates_after(*step)).count();
    since as u64 >= patience
}

/// What is watched from step to step, and what came of it that waits for a moment with no step in flight.
struct Watch<T: Real> {
    /// Checkpoints on their way, where this rank takes part in saving them.
    saver: Option<Saver<T>>,
    /// States are copied for checkpoints while steps are in flight, on all ranks that do.
    copies_beside: bool,
    /// Steps before the last copy, on this rank or on another.
    copied: Option<u64>,
    /// Weights before a step whose update is to be measured.
    before: Option<Before<T>>,
    balance: Balance,
    lookout: Lookout,
    trace: Option<Trace>,
    /// Why the run is to stop.
    stop: Option<&'static str>,
    straggler: Option<Straggler>,
    /// How to divide the work from now on.
    shares: Option<Shares>,
    /// Steps skipped one after the other while the loss scale could fall no further.
    overflowed: u64,
}

impl Loop<'_> {
    /// Runs the steps that are left. Returns why it stopped early, if it did. However it ends, checkpoints are whole then.
    pub fn steps<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
    ) -> Result<Option<Stopped>, TrainError> {
        let saver = self.saves.then(|| Saver::new(session)).transpose()?;
        let copies_beside = saver.as_ref().is_none_or(Saver::takes_in_flight);
        let mut watch = Watch {
            saver,
            copies_beside: on_all_ranks(session.world(), copies_beside)?,
            copied: None,
            before: None,
            balance: Balance::default(),
            lookout: Lookout::default(),
            trace: self.begin_trace(session),
            stop: None,
            straggler: None,
            shares: None,
            overflowed: 0,
        };
        if let Some(note) = watch.saver.as_ref().and_then(Saver::note) {
            self.events.noted(&note);
        }
        if self.run.breakdown && self.run.account {
            session.device_mut().sample_kernels();
        }
        let ended = self.steps_until(session, progress, &mut watch);
        let saved = self.finish_saving(&mut watch, true);
        let why = ended.and_then(|why| saved.map(|()| why))?;
        session.finish_collectives()?;
        self.close(session);
        if let Some(trace) = watch.trace {
            self.end_trace(trace, session)?;
        }
        let checkpoint = watch.saver.and_then(|mut saver| saver.written.take());
        Ok(why.map(|why| Stopped { why, step: progress.step, checkpoint }))
    }

    /// The same; a last checkpoint may be on its way still.
    ///
    /// A device may have several steps in flight, so results are taken in as they come. Whatever reads or changes states, or
    /// how steps are made, waits until none is in flight: then the last step made is the last step there is. Not so copies of states for
    /// checkpoints, on devices that take them in their turn.
    fn steps_until<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
        watch: &mut Watch<T>,
    ) -> Result<Option<&'static str>, TrainError> {
        let run = self.run;
        session.account_mut().begin();
        let mut next = progress.step;
        let mut settled = has_settled(run, progress);
        while next < run.steps && !settled {
            let sampled = run.update_ratios && (next + 1).is_multiple_of(run.log_every);
            if sampled {
                self.take_in(session, progress, watch, 0)?;
                watch.before = Some(session.before_update(next)?);
                session.account_mut().begin();
            }
            session.step(next)?;
            session.post_account(self.events.stop().is_some())?;
            next += 1;
            let evaluates = run.evaluates_after(next);
            let kept = next.is_multiple_of(run.checkpoint_every);
            let beside = kept && !evaluates && watch.copies_beside;
            if beside {
                self.copy_states(session, progress, watch, next)?;
            }
            let waits = evaluates || sampled || kept && !beside;
            self.take_in(session, progress, watch, if waits { 0 } else { session.depth() - 1 })?;
            if watch.stop.is_some() || watch.shares.is_some() {
                self.take_in(session, progress, watch, 0)?;
            }

            let mut best = false;
            if evaluates {
                best = self.evaluate(session, progress)?;
                settled = has_settled(run, progress);
                session.account_mut().begin();
            }
            let last = next == run.steps || settled;
            if last {
                self.take_in(session, progress, watch, 0)?;
            }
            if last || best || kept && !beside || watch.stop.is_some() {
                self.copy_states(session, progress, watch, next)?;
                self.write_states(session, progress, watch, best)?;
            }
            self.finish_saving(watch, false)?;
            if let Some(why) = watch.stop.filter(|_| !last) {
                return Ok(Some(why));
            }
            self.look_at_ranks(session, watch)?;
        }
        Ok(None)
    }

    /// Takes in results, in order, until this many steps are in flight. All ranks have the same steps in flight and the same
    /// results, so all come to the same.
    fn take_in<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
        watch: &mut Watch<T>,
        in_flight: usize,
    ) -> Result<(), TrainError> {
        while session.in_flight() > in_flight {
            let Some(finished) = session.result()? else { break };
            let Finished { step, result, .. } = finished;
            if !watch.bears(self.run.loss_scale, &result) {
                check(session, step, &result)?;
            }
            let asked = self.events.stop();
            let account = session.share_account(asked.is_some())?;
            let waited = watch.saver.as_mut().map_or(0.0, |saver| std::mem::take(&mut saver.seconds));
            let (stop, skipped) = (account.stop, account.skipped);
            let mut line =
                metrics::step_line(step, step / self.run.steps_per_epoch, &result, session.account().last());
            line.set(Metric::CheckpointSeconds, Some(waited).filter(|waited| *waited > 0.0));
            if let Some(before) = watch.before.take_if(|before| before.step == step) {
                let ratios = session.update_ratios(before)?;
                line.set(Metric::UpdateRatioMedian, ratios.median());
                line.set_layers(Metric::UpdateRatio, ratios);
                session.account_mut().begin();
            }
            self.report(&line, &result, session.account().last())?;
            if skipped > 0 {
                self.report_skipped(session, progress)?;
            }
            watch.trace = self.follow_trace(watch.trace.take(), &finished, session)?;
            progress.step = step + 1;
            self.write_states(session, progress, watch, false)?;
            // Another rank's signal stops this one too.
            let why = stop.then(|| asked.unwrap_or("a signal to another rank"));
            watch.stop = watch.stop.or(why);
            watch.after(session.account().last(), session.shares(), self.run);
        }
        Ok(())
    }

    /// A step that is done.
    fn report(&mut self, line: &MetricsLine, result: &StepResult, account: &Step) -> Result<(), TrainError> {
        self.summary.steps += 1;
        self.summary.training_seconds += account.seconds();
        self.summary.images += result.images as u64;
        if let Some(output) = &mut self.output {
            output.step(line, account)?;
            for failure in output.failures() {
                self.summary.failures.push(failure.to_string());
                self.events.warned(&format!("{failure}; the run goes on without it"));
            }
        }
        self.events.stepped(line, result, account);
        Ok(())
    }

    /// Scores the validation set after the last step; says whether that is the best so far.
    fn evaluate<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
    ) -> Result<bool, TrainError> {
        let step = progress.step - 1;
        let epoch = step / self.run.steps_per_epoch;
        let start = Instant::now();
        let score = session.validate()?;
        // No part of a step.
        session.device_mut().forget_time();
        self.summary.evaluation_seconds += start.elapsed().as_secs_f64();
        self.report_skipped(session, progress)?;
        if let Some(output) = &mut self.output {
            output.evaluation(step, epoch, &score)?;
        }
        self.events.evaluated(step, epoch, &score);
        let best = progress.note(step, score.merit(), score.loss());
        self.summary.score = Some(score);
        Ok(best)
    }

    /// Copies the states after so many steps, which are all that were handed to the device. A checkpoint that is being written is waited for.
    fn copy_states<T: Real>(
        &mut self,
        session: &mut Session<T>,
        progress: &mut Progress,
        watch: &mut Watch<T>,
        step: u64,
    ) -> Result<(), TrainError> {
        if watch.saver.as_ref().is_some_and(|saver| saver.has(step)) {
            return Ok(());
        }
        if let Some(copied) = watch.copied {
            // The copy before may belong to a step whose result isn't known yet: it is written as soon as it is. Were more taken in, a copy
            // of the last step would have nobody left to write it.
            self.take_in(session, progress, watch, (step - copied) as usize)?;
        }
        watch.copied = Some(step);
        let began = Instant::now();
        self.finish_saving(watch, true)?;
        let Some(saver) = &mut watch.saver else { return Ok(()) };
        saver.take(session, step)?;
        saver.seconds += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// Begins to write the checkpoint of the states that were copied, if all steps before it are known.
    fn write_states<T: Real>(
        &mut self,
        session: &Session<T>,
        progress: &mut Progress,
        watch: &mut Watch<T>,
        best: bool,
    ) -> Result<(), TrainError> {
        let Some(saver) = watch.saver.as_mut().filter(|saver| saver.holds(progress.step)) else {
            return Ok(());
        };
        let began = Instant::now();
        progress.shares = (!session.shares().is_equal()).then(|| session.shares().clone());
        let order = self.output.as_mut().map(|output| output.order(session, progress, best)).transpose()?;
        // Without a copy the others wait for this, however long the disk takes.
        let _busy = self.member.monitor.busy("writing a checkpoint");
        let written = saver.write(session, order)?;
        written.iter().for_each(|path| self.events.saved(path));
        saver.seconds += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// Hears of a checkpoint that was written, or waits for it.
    fn finish_saving<T: Real>(&mut self, watch: &mut Watch<T>, wait: bool) -> Result<(), TrainError> {
        let Some(saver) = watch.saver.as_mut().filter(|saver| saver.is_writing()) else { return Ok(()) };
        let _busy = wait.then(|| self.member.monitor.busy("writing a checkpoint"));
        let written = saver.finish(wait);
        if let (Err(_), Some(output)) = (&written, &self.output) {
            // A folder that is gone, or another's, is the reason to tell.
            output.folder.check()?;
        }
        written?.iter().for_each(|path| self.events.saved(path));
        Ok(())
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
        watch: &mut Watch<T>,
    ) -> Result<(), TrainError> {
        if let Some(straggler) = watch.straggler.take() {
            self.events.straggler(&straggler);
        }
        if let Some(shares) = watch.shares.take() {
            self.events.divided(&shares);
            session.divide(shares)?;
            session.account_mut().begin();
            watch.lookout.forget();
        }
        Ok(())
    }

    /// Where the time went, when the last step is done.
    fn close<T: Real>(&mut self, session: &Session<T>) {
        self.summary.ranks = session.account().totals().to_vec();
        self.summary.collectives = session.account().collectives().to_vec();
        self.summary.times = session.device().training_times();
        self.summary.note_on_times = session.device().note_on_times();
    }

    fn begin_trace<T: Real>(&self, session: &mut Session<T>) -> Option<Trace> {
        let trace = self.run.trace.as_ref().map(|path| Trace::new(path, self.run.trace_steps));
        session.device_mut().set_tracing(trace.is_some());
        trace
    }

    /// Adds a step to the trace, and writes it when it has all it is to have.
    fn follow_trace<T: Real>(
        &mut self,
        trace: Option<Trace>,
        finished: &Finished,
        session: &mut Session<T>,
    ) -> Result<Option<Trace>, TrainError> {
        let Some(mut trace) = trace else { return Ok(None) };
        if !trace.step(finished, session.device_mut()) {
            return Ok(Some(trace));
        }
        self.end_trace(trace, session)?;
        session.account_mut().begin();
        Ok(None)
    }

    fn end_trace<T: Real>(&mut self, trace: Trace, session: &mut Session<T>) -> Result<(), TrainError> {
        session.device_mut().set_tracing(false);
        match trace.write(session.world()) {
            Ok(path) => path.iter().for_each(|path| self.events.traced(path)),
            // A trace is no reason to lose a run.
            Err(failure @ TrainError::Io { .. }) => {
                self.summary.failures.push(failure.to_string());
                self.events.warned(&format!("{failure}; the run goes on without its trace"));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl<T: Real> Watch<T> {
    /// Whether a step was skipped as it should be: its gradients overflowed, and the loss scale falls. As in DeepSpeed a run ends
    /// when that doesn't help any more.
    fn bears(&mut self, scale: Option<LossScale>, result: &StepResult) -> bool {
        let Some(LossScale { dynamic: true, min, hysteresis, .. }) = scale else { return false };
        let exhausted = result.loss_scale.is_none_or(|scale| scale <= min);
        self.overflowed = if !result.applied && exhausted { self.overflowed + 1 } else { 0 };
        !result.applied && result.score.samples > 0.0 && self.overflowed <= hysteresis
    }

    /// Takes in the account of a step.
    fn after(&mut self, step: &Step, shares: &Shares, run: &Resolved) {
        if let Some(straggler) = self.lookout.after(step, shares) {
            self.straggler = Some(straggler);
        }
        // Steps that were in flight when the work was to be divided otherwise say nothing new.
        if run.balance && self.shares.is_none() {
            let least = if run.network.normalises_batches() { LEAST_NORMALISED } else { 1 };
            self.shares = self.balance.after(step, shares).filter(|shares| shares.smallest() >= least);
        }
    }
}

/// Tells whether something holds on all ranks.
fn on_all_ranks(world: &Communicator, here: bool) -> Result<bool, TrainError> {
    let mut not = [f64::from(u8::from(!here))];
    if world.size() > 1 {
        world.all_reduce(world.name("how states are copied"), Reduction::Max, &mut not)?;
    }
    Ok(not[0] == 0.0)
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
/// come here together, as they have the same gradients. What was in flight behind it is waited for and not kept.
fn check<T: Real>(session: &mut Session<T>, step: u64, result: &StepResult) -> Result<(), TrainError> {
    if result.applied {
        return Ok(());
    }
    if result.score.samples == 0.0 {
        return Err(TrainError::NoSamples { step });
    }
    let mut later = 0;
    while let Some(finished) = session.result()? {
        later += u64::from(finished.result.applied);
    }
    let bad = session.first_bad_value(step)?;
    // What was there before the step comes before what a step made of it, maybe on a rank that gathered it.
    let from = bad.iter().map(|bad| usize::from(matches!(bad.origin, Origin::Step { .. })).to_string());
    let mine: Vec<String> = from.chain(bad.iter().map(ToString::to_string)).collect();
    let world = session.world();
    let found = gather(world, "the first bad value", &mine)?.into_iter().enumerate();
    let found = found.filter_map(|(rank, lines)| match &lines[..] {
        [from, line] => Some((rank, from.clone(), line.clone())),
        _ => None,
    });
    let culprit = found.min_by(|(_, one, _), (_, other, _)| one.cmp(other));
    let culprit = culprit.map(|(rank, _, line)| (rank, line));
    let culprit = culprit.map(|(rank, line)| match world.size() {
        1 => line,
        _ => format!("on rank {rank}, {line}"),
    });
    Err(TrainError::NotFinite { step, loss: result.score.loss, culprit, later })
}
