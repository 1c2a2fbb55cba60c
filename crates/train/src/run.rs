//! The training loop.

use crate::config::Resolved;
use crate::error::TrainError;
use crate::metrics::Metrics;
use crate::session::{Score, Session, StepResult};
use crate::weights;
use cpu::StepTime;
use models::names::Convention;
use std::path::PathBuf;
use std::time::Instant;

/// What a listener hears of a run.
pub trait Events {
    fn started(&mut self, session: &Session);
    fn stepped(&mut self, step: u64, epoch: u64, result: &StepResult, images_per_second: f64);
    fn evaluated(&mut self, step: u64, epoch: u64, score: &Score);
}

/// How a run ended, and where its time went.
#[derive(Clone, Debug)]
pub struct Summary {
    pub steps: u64,
    pub images: u64,
    pub score: Score,
    /// Wall time of the training steps, data included, evaluation not.
    pub training_seconds: f64,
    pub evaluation_seconds: f64,
    pub data_seconds: f64,
    /// By kind of step, of training alone.
    pub times: Vec<StepTime>,
    pub weights: Option<PathBuf>,
}

impl Summary {
    pub fn images_per_second(&self) -> f64 {
        self.images as f64 / self.training_seconds
    }
}

/// Trains from the first step to the last, with an evaluation after every epoch, or every few.
pub fn train(run: Resolved, events: &mut dyn Events) -> Result<Summary, TrainError> {
    // The session first: what it refuses (weights of another model, say) must not leave a folder behind.
    let mut session = Session::new(run.clone())?;
    let mut metrics = run.out.as_deref().map(Metrics::create).transpose()?;
    events.started(&session);

    let mut summary = Summary {
        steps: run.steps,
        images: 0,
        score: Score::default(),
        training_seconds: 0.0,
        evaluation_seconds: 0.0,
        data_seconds: 0.0,
        times: vec![],
        weights: None,
    };
    for step in 0..run.steps {
        let start = Instant::now();
        let result = session.step(step)?;
        if !result.applied {
            return Err(TrainError::NotFinite { step, loss: result.score.loss });
        }
        let seconds = start.elapsed().as_secs_f64();
        summary.training_seconds += seconds;
        summary.images += result.score.samples as u64;
        let (epoch, rate) = (step / run.steps_per_epoch, result.score.samples / seconds);
        if let Some(metrics) = &mut metrics {
            metrics.step(step, epoch, &result, rate)?;
        }
        events.stepped(step, epoch, &result, rate);

        let last = step + 1 == run.steps;
        if last {
            summary.times = session.executor().training_times();
            summary.data_seconds = session.data_seconds();
        }
        if last || (step + 1).is_multiple_of(run.steps_per_epoch.saturating_mul(run.eval_every)) {
            let start = Instant::now();
            summary.score = session.evaluate(|_, _| {})?;
            summary.evaluation_seconds += start.elapsed().as_secs_f64();
            if let Some(metrics) = &mut metrics {
                metrics.evaluation(step, epoch, &summary.score)?;
            }
            events.evaluated(step, epoch, &summary.score);
        }
    }
    if let Some(folder) = &run.out {
        let path = folder.join("weights.safetensors");
        weights::save_as(&path, &session.weights(), Convention::Timm)?;
        summary.weights = Some(path);
    }
    Ok(summary)
}
