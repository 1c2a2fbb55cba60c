//! What a run leaves in its folder.

use super::Events;
use crate::account::Step;
use crate::error::TrainError;
use crate::folder::RunFolder;
use crate::gpu_log::{GpuLog, Gpus};
use crate::metrics::{self, Metrics};
use crate::record;
use crate::saver::Order;
use crate::session::{Evaluation, Session};
use crate::side_output::SideOutput;
use crate::tensorboard::EventFile;
use config::Resolved;
use devices::Real;
use formats::checkpoint::{Checkpoints, Progress};
use records::{Ended, MetricsLine};
use std::path::Path;

/// The folder of a run.
pub(super) struct Output {
    pub folder: RunFolder,
    metrics: Metrics,
    board: SideOutput<EventFile>,
    checkpoints: Checkpoints,
    pub config: String,
    gpus: SideOutput<GpuLog>,
    /// The algorithms of matmuls and attention, as the folder has them.
    choices: Option<serde_json::Value>,
}

impl Output {
    pub fn create(
        folder: &Path,
        run: &Resolved,
        gpus: Gpus,
        events: &mut dyn Events,
    ) -> Result<Self, TrainError> {
        let (config, launch) = (run.record(folder)?, record::launch());
        let folder = RunFolder::start(folder, run.force, events, |folder| {
            metrics::begin(folder)?;
            record::create(folder, &config, &launch, run.typed.as_ref())
        })?;
        let metrics = Metrics::open(&folder.path)?;
        Self::with(folder, run, config, metrics, gpus, 0)
    }

    pub fn resume(
        folder: RunFolder,
        run: &Resolved,
        step: u64,
        gpus: Gpus,
        events: &mut dyn Events,
    ) -> Result<Self, TrainError> {
        let config = run.record(&folder.path)?;
        let (metrics, lost) = Metrics::resume(&folder.path, step)?;
        lost.iter().for_each(|line| events.warned(line));
        record::continue_with(&folder.path, &record::launch(), run.typed.as_ref())?;
        Self::with(folder, run, config, metrics, gpus, step)
    }

    fn with(
        folder: RunFolder,
        run: &Resolved,
        config: String,
        metrics: Metrics,
        gpus: Gpus,
        step: u64,
    ) -> Result<Self, TrainError> {
        let mut board = EventFile::create(&folder.path, step)?;
        board.text(step, "config", &config)?;
        let checkpoints = Checkpoints::of_run(&folder.path, run.keep);
        let (board, gpus) =
            (SideOutput::new(board), SideOutput::new(GpuLog::open(&folder.path, gpus, step)?));
        Ok(Output { folder, metrics, board, checkpoints, config, gpus, choices: None })
    }

    /// Writes a step.
    pub fn step(&mut self, line: &MetricsLine, account: &Step) -> Result<(), TrainError> {
        self.folder.check_quickly()?;
        self.metrics.step(line, account)?;
        self.gpus.with(|gpus| gpus.step(line.step, line.epoch, account));
        self.board.with(|board| board.draw(line));
        Ok(())
    }

    /// Writes an evaluation after step `step`, to which it belongs.
    pub fn evaluation(&mut self, step: u64, epoch: u64, score: &Evaluation) -> Result<(), TrainError> {
        let line = metrics::evaluation_line(step, epoch, score);
        self.metrics.evaluation(&line)?;
        self.board.with(|board| board.draw(&line).and_then(|()| board.flush()));
        match score {
            Evaluation::Images(_) => Ok(()),
            Evaluation::Pixels(score) => self.metrics.classes(step, epoch, &score.confusion.by_class()),
        }
    }

    /// What is to be written with the states after the last step that is known.
    pub fn order<T: Real>(
        &mut self,
        session: &Session<T>,
        progress: &Progress,
        best: bool,
    ) -> Result<Order, TrainError> {
        self.folder.check()?;
        let metrics = self.metrics.unsynced()?;
        self.board.with(EventFile::flush);
        // A run that goes on from a checkpoint uses the algorithms it used before.
        let choices = session.device().choices().filter(|choices| self.choices.as_ref() != Some(choices));
        self.choices = choices.clone().or(self.choices.take());
        let choices = choices.map(|choices| (self.folder.path.clone(), choices));
        let (checkpoints, progress, config) =
            (self.checkpoints.clone(), progress.clone(), self.config.clone());
        Ok(Order { checkpoints, progress, config, best, metrics, choices })
    }

    pub fn finish(&mut self) -> Result<(), TrainError> {
        self.gpus.with(GpuLog::end_epoch);
        self.board.with(EventFile::flush);
        self.metrics.sync()
    }

    /// Notes how the run ended, unless the folder is another's by now.
    pub fn end(&self, how: Ended, why: Option<String>, steps: u64) -> Result<(), TrainError> {
        self.folder.check()?;
        record::end(&self.folder.path, how, why, steps)
    }

    /// Why something beside the results could not be written, for whatever failed since this was asked last.
    pub fn failures(&mut self) -> impl Iterator<Item = TrainError> {
        [self.metrics.failure(), self.board.failure.take(), self.gpus.failure.take()].into_iter().flatten()
    }
}
