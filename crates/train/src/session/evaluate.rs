//! Evaluation of the validation set.

use super::{Score, Session};
use crate::error::TrainError;
use crate::segmentation::PixelScore;
use comm::Reduction;
use config::Task;
use data::{Batch, Dataset, Loader, Preparation, Sampler};
use devices::Real;
use devices::device::{Which, planned};
use graph::Header;
use std::sync::Arc;

/// What an evaluation came to, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum Evaluation {
    Images(Score),
    Pixels(PixelScore),
}

impl Evaluation {
    pub fn loss(&self) -> f64 {
        match self {
            Evaluation::Images(score) => score.loss,
            Evaluation::Pixels(score) => score.loss,
        }
    }

    /// The score that the best evaluation has most of: top-1 accuracy, or the mean IoU.
    pub fn merit(&self) -> f64 {
        match self {
            Evaluation::Images(score) => score.top1,
            Evaluation::Pixels(score) => score.confusion.scores().mean_iou,
        }
    }
}

/// Nothing in an evaluation depends on a step.
pub(crate) fn header(nominal: f64) -> Header {
    Header { seed: 0, step: 0, first_sample: 0, learning_rate: 0.0, nominal }
}

impl<T: Real> Session<T> {
    /// Evaluates the validation set, by the task of the run.
    pub fn validate(&mut self) -> Result<Evaluation, TrainError> {
        Ok(match self.run.task() {
            Task::Classify => Evaluation::Images(self.evaluate(|_, _| {})?),
            Task::Segment => Evaluation::Pixels(self.evaluate_pixels(|_| Ok(()))?),
        })
    }

    /// Evaluated batches will have images, even if the device makes its own.
    pub fn show_images(&mut self) {
        self.shows_images = true;
    }

    /// Scores the validation set, each image on one rank; `each` sees every batch of this rank and its logits, those of
    /// padding left out. The score is that of all ranks.
    pub fn evaluate(&mut self, mut each: impl FnMut(&Batch, &[T])) -> Result<Score, TrainError> {
        self.device.before_evaluation()?;
        let set = Arc::clone(&self.sets.test);
        let transform = self.run.augmentation.evaluation(&self.run.network);
        let sampler = Sampler { len: set.len(), seed: 0, shuffle: false };
        let settings = self.loading(sampler, self.run.data.workers);
        let requests = || self.shares.once(self.world.rank(), set.len());
        let finish = self.finishing.as_ref().map(|finishing| Arc::clone(&finishing.eval));
        let mut shown = match finish.as_ref().filter(|_| self.shows_images) {
            Some(_) => Some(Loader::new(set.clone(), transform.clone(), settings.clone(), requests())?),
            None => None,
        };
        let preparation = Preparation::Labels { transform, finish };
        let mut loader = Loader::new(set.clone(), preparation, settings, requests())?;
        let nominal = self.run.batch as f64;
        let header = header(nominal);
        let mut sums: Vec<[f64; 4]> = Vec::new();
        while let Some(batch) = loader.next_batch()? {
            self.skipped.extend_from_slice(&batch.skipped);
            self.device.load(Which::Eval, &batch.into())?;
            self.device.run(Which::Eval, &header)?;
            let stats = planned(self.device.output(Which::Eval, "loss.stats")?);
            sums.push(std::array::from_fn(|i| stats[i].to_f64()));
            let logits = planned(self.device.output(Which::Eval, "head")?);
            let batch = match &mut shown {
                Some(shown) => planned(shown.next_batch()?),
                None => batch,
            };
            each(batch, &logits[..batch.request.count * self.run.network.classes()]);
        }
        self.total(&sums)
    }

    /// The sums of all batches of all ranks, added in the order of the batches: the same for any number of ranks.
    fn total(&self, mine: &[[f64; 4]]) -> Result<Score, TrainError> {
        let (ranks, rank) = (self.world.size(), self.world.rank());
        let mut all = vec![0.0; mine.len() * ranks * 4];
        for (chunk, sums) in mine.iter().enumerate() {
            all[(chunk * ranks + rank) * 4..][..4].copy_from_slice(sums);
        }
        self.world.all_reduce(self.world.name("evaluation"), Reduction::Sum, &mut all)?;
        let mut total = [0.0; 4];
        for batch in all.as_chunks::<4>().0 {
            total.iter_mut().zip(batch).for_each(|(total, x)| *total += x);
        }
        Ok(Score::of(total))
    }

    pub fn test_set(&self) -> &dyn Dataset {
        &*self.sets.test
    }
}
