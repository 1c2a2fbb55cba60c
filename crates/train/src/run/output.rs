//! What a run leaves in its folder.

use crate::account::Step;
use crate::checkpoint::{Checkpoints, Progress};
use crate::config::Resolved;
use crate::error::TrainError;
use crate::gpu_log::{GpuLog, Gpus};
use crate::metrics::Metrics;
use crate::real::Real;
use crate::record::{self, Launch};
use crate::sensors::Sensors;
use crate::session::{Evaluation, Session, StepResult};
use crate::tensorboard::EventFile;
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
    pub folder: PathBuf,
    metrics: Metrics,
    board: EventFile,
    checkpoints: Checkpoints,
    pub config: String,
    gpus: GpuLog,
    /// How products are made, as the folder has it.
    choices: Option<cuda::Choices>,
}

impl Output {
    pub fn create(folder: &Path, run: &Resolved, gpus: Gpus) -> Result<Self, TrainError> {
        let config = run.record(folder)?;
        let metrics = Metrics::create(folder)?;
        record::create(folder, &config, &Launch::now())?;
        Self::with(folder, run, config, metrics, GpuLog::open(folder, gpus, 0)?, 0)
    }

    pub fn resume(folder: &Path, run: &Resolved, step: u64, gpus: Gpus) -> Result<Self, TrainError> {
        let config = run.record(folder)?;
        let metrics = Metrics::resume(folder, step)?;
        record::continue_with(folder, &Launch::now())?;
        Self::with(folder, run, config, metrics, GpuLog::open(folder, gpus, step)?, step)
    }

    fn with(
        folder: &Path,
        run: &Resolved,
        config: String,
        metrics: Metrics,
        gpus: GpuLog,
        step: u64,
    ) -> Result<Self, TrainError> {
        let mut board = EventFile::create(folder, step)?;
        board.text(step, "config", &config)?;
        let checkpoints = Checkpoints::of_run(folder, run.keep);
        let folder = folder.to_path_buf();
        Ok(Output { folder, metrics, board, checkpoints, config, gpus, choices: None })
    }

    pub fn step(
        &mut self,
        step: u64,
        epoch: u64,
        result: &StepResult,
        account: &Step,
    ) -> Result<(), TrainError> {
        self.metrics.step(step, epoch, result, account)?;
        self.gpus.step(step, epoch, account)?;
        let StepResult { score, learning_rate, gradient_norm, loss_scale, .. } = result;
        self.board.scalar(step, "train/loss", score.loss)?;
        self.board.scalar(step, "train/top1", score.top1)?;
        self.board.scalar(step, "train/learning_rate", *learning_rate)?;
        self.board.scalar(step, "train/gradient_norm", *gradient_norm)?;
        if let Some(scale) = loss_scale {
            self.board.scalar(step, "train/loss_scale", *scale)?;
        }
        self.board.scalar(step, "train/images_per_second", result.images / account.seconds())?;
        let mean = account.mean();
        for (name, seconds) in BOARD.into_iter().zip(mean.named()).map(|(name, (_, s))| (name, s)) {
            self.board.scalar(step, name, seconds)?;
        }
        self.board.scalar(step, "seconds/hidden_exchange", mean.hidden)?;
        let Sensors { load, memory_used, temperature, power, .. } = Sensors::mean(&account.sensors);
        for (name, x) in GPU_BOARD.into_iter().zip([load, memory_used, temperature, power]) {
            if x.is_finite() {
                self.board.scalar(step, name, x)?;
            }
        }
        Ok(())
    }

    pub fn evaluation(&mut self, step: u64, epoch: u64, score: &Evaluation) -> Result<(), TrainError> {
        self.metrics.evaluation(step, epoch, score)?;
        self.board.scalar(step, "eval/loss", score.loss())?;
        match score {
            Evaluation::Images(score) => {
                self.board.scalar(step, "eval/top1", score.top1)?;
                self.board.scalar(step, "eval/top5", score.top5)?;
            }
            Evaluation::Pixels(score) => {
                let scores = score.confusion.scores();
                self.board.scalar(step, "eval/miou", scores.mean_iou)?;
                self.board.scalar(step, "eval/pixel_accuracy", scores.pixel_accuracy)?;
                self.metrics.classes(step, epoch, &score.confusion.by_class())?;
            }
        }
        self.board.flush()
    }

    /// Metrics first: no run must go on from a step whose metrics are lost.
    pub fn save<T: Real>(
        &mut self,
        session: &Session<T>,
        progress: &Progress,
        best: bool,
    ) -> Result<PathBuf, TrainError> {
        self.metrics.sync()?;
        self.board.flush()?;
        self.keep_choices(session.device().choices())?;
        session.save(&self.checkpoints, progress, &self.config, best)
    }

    /// A run that goes on from a checkpoint makes products as it did before.
    fn keep_choices(&mut self, choices: Option<cuda::Choices>) -> Result<(), TrainError> {
        if let Some(new) = choices.as_ref().filter(|_| choices != self.choices) {
            record::write_algorithms(&self.folder, new)?;
            self.choices = choices;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> Result<(), TrainError> {
        self.gpus.end_epoch()?;
        self.metrics.sync()?;
        self.board.flush()
    }
}
