//! What a run leaves in its folder.

use super::Events;
use crate::account::Step;
use crate::error::TrainError;
use crate::folder::RunFolder;
use crate::gpu_log::{GpuLog, Gpus};
use crate::metrics::{self, Metrics};
use crate::record::{self, Launch};
use crate::session::{Evaluation, Session, StepResult};
use crate::side_output::SideOutput;
use crate::tensorboard::EventFile;
use config::Resolved;
use devices::Real;
use devices::sensors::Sensors;
use formats::checkpoint::{Checkpoints, Progress};
use std::path::{Path, PathBuf};

/// The parts of a step's time as TensorBoard has them, in the order of [`Parts::named`].
const BOARD: [&str; 6] = [
    "seconds/compute",
    "seconds/exchange",
    "seconds/wait_for_ranks",
    "seconds/data",
    "seconds/optimizer",
    "seconds/idle",
];

/// What sensors of GPUs say, as TensorBoard has it.
const GPU_BOARD: [&str; 4] = ["gpu/load", "gpu/memory_used", "gpu/temperature", "gpu/power"];

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
        let (config, launch) = (run.record(folder)?, Launch::now());
        let folder = RunFolder::start(folder, run.force, events, |folder| {
            metrics::begin(folder)?;
            record::create(folder, &config, &launch)
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
        record::continue_with(&folder.path, &Launch::now())?;
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

    pub fn step(
        &mut self,
        step: u64,
        epoch: u64,
        result: &StepResult,
        account: &Step,
    ) -> Result<(), TrainError> {
        self.folder.check_quickly()?;
        self.metrics.step(step, epoch, result, account)?;
        self.gpus.with(|gpus| gpus.step(step, epoch, account));
        self.board.with(|board| draw_step(board, step, result, account));
        Ok(())
    }

    pub fn evaluation(&mut self, step: u64, epoch: u64, score: &Evaluation) -> Result<(), TrainError> {
        self.metrics.evaluation(step, epoch, score)?;
        self.board.with(|board| draw_evaluation(board, step, score));
        match score {
            Evaluation::Images(_) => Ok(()),
            Evaluation::Pixels(score) => self.metrics.classes(step, epoch, &score.confusion.by_class()),
        }
    }

    /// Metrics first: no run must go on from a step whose metrics are lost.
    pub fn save<T: Real>(
        &mut self,
        session: &Session<T>,
        progress: &Progress,
        best: bool,
    ) -> Result<PathBuf, TrainError> {
        self.folder.check()?;
        self.metrics.sync()?;
        self.board.with(EventFile::flush);
        self.keep_choices(session.device().choices())?;
        session.save(&self.checkpoints, progress, &self.config, best)
    }

    /// A run that goes on from a checkpoint uses the algorithms it used before.
    fn keep_choices(&mut self, choices: Option<serde_json::Value>) -> Result<(), TrainError> {
        if let Some(new) = choices.as_ref().filter(|_| choices != self.choices) {
            devices::write_algorithms(&self.folder.path, new)?;
            self.choices = choices;
        }
        Ok(())
    }

    pub fn finish(&mut self) -> Result<(), TrainError> {
        self.gpus.with(GpuLog::end_epoch);
        self.board.with(EventFile::flush);
        self.metrics.sync()
    }

    /// Why something beside the results could not be written, for whatever failed since this was asked last.
    pub fn failures(&mut self) -> impl Iterator<Item = TrainError> {
        [self.metrics.failure(), self.board.failure.take(), self.gpus.failure.take()].into_iter().flatten()
    }
}

fn draw_step(
    board: &mut EventFile,
    step: u64,
    result: &StepResult,
    account: &Step,
) -> Result<(), TrainError> {
    let StepResult { score, learning_rate, gradient_norm, loss_scale, .. } = result;
    board.scalar(step, "train/loss", score.loss)?;
    board.scalar(step, "train/top1", score.top1)?;
    board.scalar(step, "train/learning_rate", *learning_rate)?;
    board.scalar(step, "train/gradient_norm", *gradient_norm)?;
    if let Some(scale) = loss_scale {
        board.scalar(step, "train/loss_scale", *scale)?;
    }
    board.scalar(step, "train/images_per_second", result.images / account.seconds())?;
    let mean = account.mean();
    for (name, seconds) in BOARD.into_iter().zip(mean.named()).map(|(name, (_, s))| (name, s)) {
        board.scalar(step, name, seconds)?;
    }
    board.scalar(step, "seconds/hidden_exchange", mean.hidden)?;
    let Sensors { load, memory_used, temperature, power, .. } = Sensors::mean(&account.sensors);
    for (name, x) in GPU_BOARD.into_iter().zip([load, memory_used, temperature, power]) {
        if x.is_finite() {
            board.scalar(step, name, x)?;
        }
    }
    Ok(())
}

fn draw_evaluation(board: &mut EventFile, step: u64, score: &Evaluation) -> Result<(), TrainError> {
    board.scalar(step, "eval/loss", score.loss())?;
    match score {
        Evaluation::Images(score) => {
            board.scalar(step, "eval/top1", score.top1)?;
            board.scalar(step, "eval/top5", score.top5)?;
        }
        Evaluation::Pixels(score) => {
            let scores = score.confusion.scores();
            board.scalar(step, "eval/miou", scores.mean_iou)?;
            board.scalar(step, "eval/pixel_accuracy", scores.pixel_accuracy)?;
        }
    }
    board.flush()
}
