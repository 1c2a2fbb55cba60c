//! Batches, prepared ahead of their use.
//!
//! Threads of the loader claim pairs of samples (2k and 2k + 1 of an epoch's global order, so that mixing waits for
//! nobody), prepare them, and copy them into the batch they belong to. Batches are handed out in the order in which they
//! were asked for. What is in them depends on the requests alone: not on the number of threads, nor on which request
//! holds a position.
//!
//! A loader finishes samples, or leaves the last part to a device ([`Loader::unfinished`]): then a batch has bytes and choices
//! instead of images, of the same samples in the same order.
//!
//! Buffers go round: a batch that is handed out takes the place of the one before, whose memory is filled next.

mod crew;
mod pair;

#[cfg(test)]
mod tests;

use crate::augment::{CHOICES, Finish};
use crate::{DataError, Dataset, Preparer, Sampler, Transform};
pub(crate) use crew::{Fill, Problem, Requests, Source, Work, caught};
use pair::Maker;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct LoaderSettings {
    /// The order of an epoch; its seed is also that of the augmentation.
    pub sampler: Sampler,
    /// How many samples a batch has room for (B).
    pub batch: usize,
    /// Threads that prepare samples. Without any, a batch is prepared when it is asked for.
    pub workers: usize,
    /// How many batches may be under way or ready.
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

/// A batch (B). Every list has the length B; from `request.count` on it is padding with weight 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadedBatch {
    pub request: Request,
    /// (B, C, S, S); none where a device is to make them.
    pub images: Vec<f32>,
    /// What a device makes them of, with the choices: see [`Finish`]. None where all of the set lies there.
    pub pixels: Vec<u8>,
    pub choices: Vec<i32>,
    pub labels: Vec<i32>,
    /// The label of the sample that was mixed in, or the sample's own.
    pub partners: Vec<i32>,
    /// λ, the share of the sample's own label; 1 where nothing was mixed in.
    pub mix: Vec<f32>,
    /// 1 for a sample, 0 for padding and for an image that was skipped.
    pub weights: Vec<f32>,
    /// Numbers of the images in their set.
    pub indices: Vec<usize>,
    pub skipped: Vec<Skipped>,
}

/// An image that could not be read; its place in the batch has weight 0 and pixels 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub index: usize,
    pub name: String,
    pub problem: String,
}

pub struct Loader {
    source: Source<Maker>,
    finish: Option<Arc<Finish>>,
    current: LoadedBatch,
    waited: Duration,
}

impl Loader {
    /// Begins at once to work on the first `depth` of the requests.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        transform: Transform,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Self, DataError> {
        Self::with(dataset, transform, None, settings, Box::new(requests))
    }

    /// Leaves to a device what `finish` says, which is [`Finish::of`] the same set and transform.
    pub fn unfinished(
        dataset: Arc<dyn Dataset>,
        transform: Transform,
        finish: Arc<Finish>,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Self, DataError> {
        Self::with(dataset, transform, Some(finish), settings, Box::new(requests))
    }

    fn with(
        dataset: Arc<dyn Dataset>,
        transform: Transform,
        finish: Option<Arc<Finish>>,
        settings: LoaderSettings,
        requests: Requests,
    ) -> Result<Self, DataError> {
        check(&*dataset, &transform, &settings)?;
        let current = match &finish {
            None => LoadedBatch::with_room(settings.batch, transform.sample_len()),
            Some(finish) => LoadedBatch::for_device(settings.batch, finish),
        };
        let maker = || {
            let (dataset, finish) = (Arc::clone(&dataset), finish.clone());
            let preparer = Preparer::new(transform.clone())?;
            Ok::<_, DataError>(Maker::new(
                dataset,
                preparer,
                finish,
                settings.sampler.clone(),
                settings.skip_bad,
            ))
        };
        let source = Source::new(maker, &current, &settings, requests)?;
        Ok(Self { source, finish, current, waited: Duration::ZERO })
    }

    /// The next batch, or none after the last request.
    ///
    /// Where an image can't be read and bad ones are not skipped, the error names the first of the batch; the call after
    /// that goes on with the next batch.
    pub fn next_batch(&mut self) -> Result<Option<&LoadedBatch>, DataError> {
        let start = Instant::now();
        let found = self.source.next(&mut self.current);
        self.waited += start.elapsed();
        Ok(if found? { Some(self.seal()) } else { None })
    }

    /// Seconds that [`Loader::next_batch`] took in all: what a run lost by waiting for its data.
    pub fn waited(&self) -> f64 {
        self.waited.as_secs_f64()
    }

    /// Pads what the request leaves of the batch. Until here only places with a sample were written.
    fn seal(&mut self) -> &LoadedBatch {
        let batch = &mut self.current;
        let (count, capacity) = (batch.request.count, batch.labels.len());
        let sample = batch.images.len() / capacity;
        batch.images[count * sample..].fill(0.0);
        if let Some(finish) = &self.finish {
            let rows = batch.choices.as_chunks_mut::<CHOICES>().0;
            rows[count..].iter_mut().for_each(|row| finish.write_blank(row));
        }
        batch.labels[count..].fill(0);
        batch.partners[count..].fill(0);
        batch.mix[count..].fill(1.0);
        batch.weights[count..].fill(0.0);
        batch.indices[count..].fill(0);
        batch
    }
}

impl LoadedBatch {
    fn with_room(capacity: usize, sample: usize) -> Self {
        Self {
            images: vec![0.0; capacity * sample],
            labels: vec![0; capacity],
            partners: vec![0; capacity],
            mix: vec![1.0; capacity],
            weights: vec![0.0; capacity],
            indices: vec![0; capacity],
            ..Self::default()
        }
    }

    fn for_device(capacity: usize, finish: &Finish) -> Self {
        let pixels = if finish.resident.is_some() { 0 } else { finish.images(capacity) * finish.image_len() };
        Self { pixels: vec![0; pixels], choices: vec![0; capacity * CHOICES], ..Self::with_room(capacity, 0) }
    }
}

fn check(dataset: &dyn Dataset, transform: &Transform, settings: &LoaderSettings) -> Result<(), DataError> {
    transform.check()?;
    let (found, expected) = (dataset.channels(), transform.channels);
    if found != expected {
        return Err(DataError::setting("channels", expected, format!("the images have {found}")));
    }
    settings.check(dataset.len())
}

impl LoaderSettings {
    /// For a set of `len` images.
    pub(crate) fn check(&self, len: usize) -> Result<(), DataError> {
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

impl Fill for LoadedBatch {
    fn begin(&mut self, request: Request) {
        self.skipped.clear();
        self.request = request;
    }

    fn end(&mut self) {
        let Self { request, indices, skipped, .. } = self;
        sort_skipped(request, indices, skipped);
    }
}

/// Threads name them as they finish; a reader finds them in the order of the batch.
pub(crate) fn sort_skipped(request: &Request, indices: &[usize], skipped: &mut [Skipped]) {
    let position =
        |index| indices[..request.count.min(indices.len())].iter().position(|&other| other == index);
    skipped.sort_unstable_by_key(|skipped| position(skipped.index));
}

impl Request {
    /// Pairs of the global order that hold its samples.
    fn pairs(&self) -> std::ops::Range<usize> {
        if self.count == 0 { 0..0 } else { self.first / 2..(self.first + self.count).div_ceil(2) }
    }

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
