//! Batches for the device, whatever the data has labels for.

use super::Session;
use crate::error::TrainError;
use config::Resolved;
use config::Shares;
use data::segment::MaskTransform;
use data::{Finish, Loader, LoaderSettings, Preparation, Request, Sampler, Transform};
use devices::Real;
use std::sync::Arc;

/// Batches under way: enough that a slow image doesn't stop the step, few enough that memory stays small.
const DEPTH: usize = 4;

impl<T: Real> Session<T> {
    /// Reads this rank's micro-batches of all steps from `step` on.
    pub(super) fn training_feed(&self, step: u64, workers: usize) -> Result<Loader, TrainError> {
        let images = self.run.data.train_images();
        let settings = self.loading(Sampler { len: images, seed: self.run.seed, shuffle: true }, workers);
        let requests = requests(&self.run, &self.shares, self.world.rank(), step);
        let finish = self.finishing.as_ref().and_then(|finishing| finishing.train.clone());
        let class_weights = self.run.weights_of_classes(&*self.sets.train)?;
        let preparation = training(&self.run, finish, class_weights);
        Ok(Loader::new(Arc::clone(&self.sets.train), preparation, settings, requests)?)
    }

    /// Settings of a loader for this rank.
    pub(super) fn loading(&self, sampler: Sampler, workers: usize) -> LoaderSettings {
        let (batch, skip_bad) = (self.shares.of(self.world.rank()), self.run.data.skip_bad_images);
        LoaderSettings { sampler, batch, workers, depth: DEPTH, skip_bad }
    }
}

/// Preparation of training samples, of which a device does what `finish` says.
fn training(run: &Resolved, finish: Option<Arc<Finish>>, class_weights: Vec<f32>) -> Preparation {
    match run.mask_transform() {
        Some(transform) => MaskTransform { class_weights, ..transform }.into(),
        None => {
            let transform = Transform { class_weights, ..run.augmentation.training(&run.network) };
            Preparation::Labels { transform, finish }
        }
    }
}

/// A rank's micro-batches of every step from `step` to the last, one after the other; of `step` itself in any case.
fn requests(
    run: &Resolved,
    shares: &Shares,
    rank: usize,
    step: u64,
) -> impl Iterator<Item = Request> + Send + 'static {
    let (accumulate, global, shares) = (run.accumulate, run.global_batch(), shares.clone());
    let (per_epoch, images) = (run.steps_per_epoch, run.data.train_images());
    let steps = step..run.steps.max(step + 1);
    steps.flat_map(move |step| (0..accumulate).map(move |micro| (step, micro))).map(move |(step, micro)| {
        let (epoch, in_epoch) = (step / per_epoch, (step % per_epoch) as usize);
        shares.request(rank, epoch, in_epoch * global + micro * shares.total(), images)
    })
}
