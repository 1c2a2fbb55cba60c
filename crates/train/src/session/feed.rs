//! Batches for the device, whatever the data has labels for.

use super::Session;
use crate::error::TrainError;
use config::Resolved;
use config::Shares;
use config::sets::Sets;
use data::segment::MaskLoader;
use data::{Dataset, Finish, Loader, LoaderSettings, Request, Sampler, Skipped, Transform};
use devices::Real;
use devices::device::Inputs;
use std::sync::Arc;

/// Batches under way: enough that a slow image doesn't stop the step, few enough that memory stays small.
const DEPTH: usize = 4;

/// Reads ahead.
pub(super) enum Feed {
    Images(Loader),
    Masks(MaskLoader),
}

impl Feed {
    /// The next batch, and what could not be read of it.
    pub fn next(&mut self) -> Result<Option<(Inputs<'_>, &[Skipped])>, TrainError> {
        Ok(match self {
            Feed::Images(loader) => loader.next_batch()?.map(|batch| (batch.into(), &batch.skipped[..])),
            Feed::Masks(loader) => loader.next_batch()?.map(|batch| (batch.into(), &batch.skipped[..])),
        })
    }
}

impl<T: Real> Session<T> {
    /// Reads this rank's micro-batches of all steps from `step` on.
    pub(super) fn training_feed(&self, step: u64, workers: usize) -> Result<Feed, TrainError> {
        let images = self.run.data.train_images();
        let settings = self.loading(Sampler { len: images, seed: self.run.seed, shuffle: true }, workers);
        let requests = requests(&self.run, &self.shares, self.world.rank(), step);
        match (&self.sets, self.run.mask_transform()) {
            (Sets::Masked(sets), Some(transform)) => {
                let loader = MaskLoader::new(Arc::clone(&sets.train), transform, settings, requests)?;
                Ok(Feed::Masks(loader))
            }
            (Sets::Images(sets), None) => {
                let (set, transform) =
                    (Arc::clone(&sets.train), self.run.augmentation.training(&self.run.network));
                let finish = self.finishing.as_ref().and_then(|finishing| finishing.train.as_ref());
                Ok(Feed::Images(self.loader(set, transform, finish, settings, requests)?))
            }
            _ => unreachable!("a run is resolved for the kind of data that it has"),
        }
    }

    /// Reads samples as the device takes them.
    pub(super) fn loader(
        &self,
        set: Arc<dyn Dataset>,
        transform: Transform,
        finish: Option<&Arc<Finish>>,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Loader, TrainError> {
        Ok(match finish {
            Some(finish) => Loader::unfinished(set, transform, Arc::clone(finish), settings, requests)?,
            None => Loader::new(set, transform, settings, requests)?,
        })
    }

    pub(super) fn loading(&self, sampler: Sampler, workers: usize) -> LoaderSettings {
        let (batch, skip_bad) = (self.shares.of(self.world.rank()), self.run.data.skip_bad_images);
        LoaderSettings { sampler, batch, workers, depth: DEPTH, skip_bad }
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
