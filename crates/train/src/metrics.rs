//! `metrics.jsonl`: one object a line, a line for every step and every evaluation.

use crate::error::TrainError;
use crate::session::{Score, StepResult};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

pub struct Metrics {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Metrics {
    /// Creates the run's folder and its metrics; refuses a folder that has some already.
    pub fn create(folder: &Path) -> Result<Self, TrainError> {
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| TrainError::Io { path, source }
        };
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        let path = folder.join("metrics.jsonl");
        let file = File::options().write(true).create_new(true).open(&path).map_err(|source| match source
            .kind()
        {
            std::io::ErrorKind::AlreadyExists => TrainError::RunExists(folder.to_path_buf()),
            _ => TrainError::Io { path: path.clone(), source },
        })?;
        Ok(Metrics { path, file: BufWriter::new(file) })
    }

    /// Written without building the line in memory first, so that a step allocates nothing.
    pub fn step(&mut self, step: u64, epoch: u64, result: &StepResult, rate: f64) -> Result<(), TrainError> {
        let StepResult { score, learning_rate, gradient_norm, .. } = result;
        let written = writeln!(
            self.file,
            "{{\"step\":{step},\"epoch\":{epoch},\"loss\":{},\"lr\":{},\"images_per_second\":{:.2},\"grad_norm\":{},\"top1\":{}}}",
            Json(score.loss),
            Json(*learning_rate),
            rate,
            Json(*gradient_norm),
            Json(score.top1)
        );
        self.check(written)
    }

    pub fn evaluation(&mut self, step: u64, epoch: u64, score: &Score) -> Result<(), TrainError> {
        let Score { loss, top1, top5, .. } = *score;
        let written = writeln!(
            self.file,
            "{{\"step\":{step},\"epoch\":{epoch},\"eval_loss\":{},\"eval_top1\":{},\"eval_top5\":{}}}",
            Json(loss),
            Json(top1),
            Json(top5)
        );
        let flushed = written.and_then(|()| self.file.flush());
        self.check(flushed)
    }

    fn check(&self, result: std::io::Result<()>) -> Result<(), TrainError> {
        result.map_err(|source| TrainError::Io { path: self.path.clone(), source })
    }
}

/// A number as JSON has it: NaN and the infinities are null.
struct Json(f64);

impl std::fmt::Display for Json {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_finite() { write!(f, "{}", self.0) } else { f.write_str("null") }
    }
}
