//! Batches, prepared ahead of their use.
//!
//! Threads of the loader claim groups of neighbours of an epoch's global order (samples 2k and 2k + 1 where images have one
//! label, so that mixing waits for nobody; single samples where they have masks), prepare them, and copy them into the
//! batch they belong to. Batches are handed out in the order in which they were asked for. What is in them depends on the
//! requests alone: not on the number of threads, nor on which request holds a position.
//!
//! One path serves every task: `maker` reads, skips and reports, `crew` shares the work among threads; what differs
//! (`labels`, `masks`) stands behind one trait. A [`Preparation`] may leave the last part to a device: then a batch has
//! bytes instead of images, of the same samples in the same order.
//!
//! Buffers go round: a batch that is handed out takes the place of the one before, whose memory is filled next.

mod batch;
mod crew;
mod labels;
mod maker;
mod masks;
mod preparation;

#[cfg(test)]
mod tests;

use crate::{DataError, Dataset, Sampler};
pub use batch::Batch;
use crew::{Requests, Source};
use maker::Maker;
pub use preparation::Preparation;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Settings of a loader, whatever it loads.
#[derive(Clone, Debug)]
pub struct LoaderSettings {
    /// Order of an epoch; its seed is also that of the augmentation.
    pub sampler: Sampler,
    /// Samples that a batch has room for (B).
    pub batch: usize,
    /// Threads that prepare samples. Without any, a batch is prepared when it is asked for.
    pub workers: usize,
    /// Batches that may be under way or ready.
    pub depth: usize,
    /// Leave images that can't be read out of the batch, instead of failing.
    pub skip_bad: bool,
}

/// Samples at positions `first..first + count` of an epoch's global order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub epoch: u64,
    pub first: usize,
    pub count: usize,
}

/// Reads the samples of a set and prepares them in batches.
pub struct Loader {
    source: Source,
    preparation: Preparation,
    current: Batch,
    waited: Duration,
}

impl Loader {
    /// Begins at once to work on the first `depth` of the requests.
    pub fn new(
        set: Arc<dyn Dataset>,
        preparation: impl Into<Preparation>,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Self, DataError> {
        Self::with(set, preparation.into(), settings, Box::new(requests))
    }

    fn with(
        set: Arc<dyn Dataset>,
        preparation: Preparation,
        settings: LoaderSettings,
        requests: Requests,
    ) -> Result<Self, DataError> {
        preparation.check(&*set)?;
        settings.check(set.len())?;
        let (current, group) = (preparation.batch(settings.batch), preparation.group());
        let maker = || {
            let (prepare, sampler) = (preparation.preparer()?, settings.sampler.clone());
            Ok(Maker::new(Arc::clone(&set), prepare, group, sampler, settings.skip_bad))
        };
        let source = Source::new(maker, group, &current, &settings, requests)?;
        Ok(Self { source, preparation, current, waited: Duration::ZERO })
    }

    /// The next batch, or none after the last request.
    ///
    /// Where an image can't be read and bad ones are not skipped, the error names the first of the batch; the call after
    /// that goes on with the next batch.
    pub fn next_batch(&mut self) -> Result<Option<&Batch>, DataError> {
        let start = Instant::now();
        let found = self.source.next(&mut self.current);
        self.waited += start.elapsed();
        if !found? {
            return Ok(None);
        }
        self.preparation.pad(&mut self.current);
        self.current.sort_skipped();
        Ok(Some(&self.current))
    }

    /// Seconds that [`Loader::next_batch`] took in all: what a run lost by waiting for its data.
    pub fn waited(&self) -> f64 {
        self.waited.as_secs_f64()
    }
}

impl LoaderSettings {
    /// Refuses settings that make no sense for a set of `len` images.
    fn check(&self, len: usize) -> Result<(), DataError> {
        let misused = |what, problem| Err(DataError::Call { what, problem });
        let order = self.sampler.len;
        if order > len {
            return misused("sampler", format!("an order of {order} samples for a set of {len} images"));
        }
        if self.batch == 0 {
            return Err(DataError::setting("batch-size", 0, "must be at least 1"));
        }
        if self.depth == 0 && self.workers > 0 {
            return misused("depth", "must be at least 1 for threads to work ahead".into());
        }
        Ok(())
    }
}

impl Request {
    fn check(&self, len: usize, capacity: usize) -> Result<(), DataError> {
        let &Request { first, count, .. } = self;
        if count > capacity {
            return Err(DataError::BatchOverfull { indices: count, capacity });
        }
        match first.checked_add(count) {
            Some(end) if end <= len => Ok(()),
            _ => Err(DataError::RequestOutOfRange { first, count, len }),
        }
    }
}
