//! Batches of images and masks, prepared ahead of their use.
//!
//! As [`crate::loader`], sample by sample: nothing is mixed here.

use super::{IGNORED, MaskFinish, MaskPreparer, MaskTransform, MaskedSet, Pair};
use crate::loader::{Fill, Problem, Source, Work, caught, sort_skipped};
use crate::{DataError, LoaderSettings, Request, Sampler, Skipped};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A batch (B) of samples of one size. From `request.count` on it is padding with weight 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MaskBatch {
    pub request: Request,
    /// (B, C, H, W), with labels and weights (B, H, W): of an ignored pixel both are 0. None where a device is to make them.
    pub images: Vec<f32>,
    pub labels: Vec<i32>,
    pub weights: Vec<f32>,
    /// What a device makes them of, by [`MaskFinish`]: (B, H, W, C), with labels (B, H, W), 255 of an ignored pixel, and for
    /// each sample the rows and columns that are image (B, 2).
    pub pixels: Vec<u8>,
    pub masks: Vec<u8>,
    pub extents: Vec<i32>,
    /// Numbers of the images in their set.
    pub indices: Vec<usize>,
    pub skipped: Vec<Skipped>,
}

pub struct MaskLoader {
    source: Source<Maker>,
    current: MaskBatch,
    waited: Duration,
}

impl MaskLoader {
    /// Finishes samples; begins at once to work on the first `depth` of the requests.
    pub fn new(
        set: Arc<dyn MaskedSet>,
        transform: MaskTransform,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Self, DataError> {
        Self::with(set, transform, true, settings, Box::new(requests))
    }

    /// Leaves normalisation to a device.
    pub fn unfinished(
        set: Arc<dyn MaskedSet>,
        transform: MaskTransform,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Self, DataError> {
        Self::with(set, transform, false, settings, Box::new(requests))
    }

    fn with(
        set: Arc<dyn MaskedSet>,
        transform: MaskTransform,
        finished: bool,
        settings: LoaderSettings,
        requests: crate::loader::Requests,
    ) -> Result<Self, DataError> {
        settings.check(set.len())?;
        let finish = MaskFinish::of(&transform)?;
        let (found, expected) = (set.channels(), transform.channels);
        if found != expected {
            return Err(DataError::setting("channels", expected, format!("the images have {found}")));
        }
        let current = MaskBatch::with_room(settings.batch, &transform, finished);
        let maker = || {
            let preparer = MaskPreparer::new(transform.clone())?;
            let finish = finished.then(|| finish.clone());
            Ok(Maker::new(Arc::clone(&set), preparer, finish, settings.sampler.clone(), settings.skip_bad))
        };
        let source = Source::new(maker, &current, &settings, requests)?;
        Ok(Self { source, current, waited: Duration::ZERO })
    }

    /// The next batch, or none after the last request. As [`crate::Loader::next_batch`].
    pub fn next_batch(&mut self) -> Result<Option<&MaskBatch>, DataError> {
        let start = Instant::now();
        let found = self.source.next(&mut self.current);
        self.waited += start.elapsed();
        Ok(if found? { Some(&self.current) } else { None })
    }

    /// Seconds that [`MaskLoader::next_batch`] took in all.
    pub fn waited(&self) -> f64 {
        self.waited.as_secs_f64()
    }
}

impl MaskBatch {
    fn with_room(capacity: usize, transform: &MaskTransform, finished: bool) -> Self {
        let (area, channels) = (capacity * transform.area(), transform.channels);
        let (here, device) = if finished { (area, 0) } else { (0, area) };
        Self {
            images: vec![0.0; here * channels],
            labels: vec![0; here],
            weights: vec![0.0; here],
            pixels: vec![0; device * channels],
            masks: vec![IGNORED; device],
            extents: vec![0; if finished { 0 } else { 2 * capacity }],
            indices: vec![0; capacity],
            ..Self::default()
        }
    }

    /// The part of each list that belongs to one place.
    fn place(&mut self, place: usize) -> Place<'_> {
        let capacity = self.indices.len();
        fn part<T>(list: &mut [T], capacity: usize, place: usize) -> &mut [T] {
            let len = list.len() / capacity;
            &mut list[place * len..][..len]
        }
        Place {
            images: part(&mut self.images, capacity, place),
            labels: part(&mut self.labels, capacity, place),
            weights: part(&mut self.weights, capacity, place),
            pixels: part(&mut self.pixels, capacity, place),
            masks: part(&mut self.masks, capacity, place),
            extents: part(&mut self.extents, capacity, place),
        }
    }
}

struct Place<'a> {
    images: &'a mut [f32],
    labels: &'a mut [i32],
    weights: &'a mut [f32],
    pixels: &'a mut [u8],
    masks: &'a mut [u8],
    extents: &'a mut [i32],
}

impl Place<'_> {
    /// Nothing here counts.
    fn blank(self) {
        self.images.fill(0.0);
        self.labels.fill(0);
        self.weights.fill(0.0);
        self.pixels.fill(0);
        self.masks.fill(IGNORED);
        self.extents.fill(0);
    }
}

impl Fill for MaskBatch {
    fn begin(&mut self, request: Request) {
        self.request = request;
        self.skipped.clear();
    }

    fn end(&mut self) {
        let count = self.request.count;
        for place in count..self.indices.len() {
            self.indices[place] = 0;
            self.place(place).blank();
        }
        let Self { request, indices, skipped, .. } = self;
        sort_skipped(request, indices, skipped);
    }
}

/// Prepares samples; one for each thread.
struct Maker {
    set: Arc<dyn MaskedSet>,
    sampler: Sampler,
    skip_bad: bool,
    preparer: MaskPreparer,
    /// None if that is left to a device.
    finish: Option<MaskFinish>,
    pair: Pair,
    index: usize,
    pixels: Vec<u8>,
    mask: Vec<u8>,
    extent: [i32; 2],
    image: Vec<f32>,
    made: Result<(), DataError>,
}

impl Maker {
    fn new(
        set: Arc<dyn MaskedSet>,
        preparer: MaskPreparer,
        finish: Option<MaskFinish>,
        sampler: Sampler,
        skip_bad: bool,
    ) -> Self {
        let transform = preparer.transform();
        let (area, channels) = (transform.area(), transform.channels);
        let image = vec![0.0; if finish.is_some() { area * channels } else { 0 }];
        Self {
            set,
            sampler,
            skip_bad,
            finish,
            pair: Pair::default(),
            index: 0,
            pixels: vec![0; area * channels],
            mask: vec![0; area],
            extent: [0; 2],
            image,
            made: Ok(()),
            preparer,
        }
    }

    fn prepare(&mut self, epoch: u64, position: usize) -> Result<(), DataError> {
        self.set.read(self.index, &mut self.pair)?;
        let choice = self.preparer.transform().choose(self.sampler.seed, epoch, position, &self.pair);
        let prepared = self.preparer.prepare(&self.pair, &choice, &mut self.pixels, &mut self.mask);
        self.extent = prepared.map_err(|error| {
            let image = self.set.name(self.index);
            DataError::Image { image, problem: error.to_string() }
        })?;
        if let Some(finish) = &self.finish {
            finish.apply(&self.pixels, self.extent, &mut self.image);
        }
        Ok(())
    }
}

impl Work for Maker {
    type Batch = MaskBatch;

    fn parts(request: &Request) -> Range<usize> {
        request.first..request.first + request.count
    }

    fn make(&mut self, request: Request, position: usize) -> Result<(), Problem> {
        self.index = self.sampler.index(request.epoch, position);
        let made = caught(|| self.made = self.prepare(request.epoch, position));
        made.map_err(|message| {
            let problem = format!("preparing image {}: {message}", self.index);
            (position, DataError::Worker { problem })
        })
    }

    fn deliver(&mut self, request: Request, position: usize, batch: &mut MaskBatch) -> Result<(), Problem> {
        let place = position - request.first;
        batch.indices[place] = self.index;
        if let Err(error) = std::mem::replace(&mut self.made, Ok(())) {
            if !self.skip_bad {
                return Err((position, error));
            }
            let (name, problem) = (self.set.name(self.index), error.to_string());
            batch.skipped.push(Skipped { index: self.index, name, problem });
            batch.place(place).blank();
            return Ok(());
        }
        let out = batch.place(place);
        if self.finish.is_some() {
            out.images.copy_from_slice(&self.image);
            for ((label, weight), &mask) in out.labels.iter_mut().zip(out.weights).zip(&self.mask) {
                let counts = mask != IGNORED;
                (*label, *weight) = (if counts { i32::from(mask) } else { 0 }, f32::from(u8::from(counts)));
            }
        } else {
            out.pixels.copy_from_slice(&self.pixels);
            out.masks.copy_from_slice(&self.mask);
            out.extents.copy_from_slice(&self.extent);
        }
        Ok(())
    }
}
