//! Preparing two neighbours of the global order.

use super::crew::{Problem, Work, caught};
use super::{LoadedBatch, Request, Skipped};
use crate::augment::{CHOICES, Finish, Side};
use crate::{DataError, Dataset, Image, Mix, Preparer, Sampler};
use std::ops::Range;
use std::sync::Arc;

/// Prepares pairs; one for each thread.
pub(super) struct Maker {
    dataset: Arc<dyn Dataset>,
    sampler: Sampler,
    skip_bad: bool,
    preparer: Preparer,
    /// What is left to a device, if anything is.
    finish: Option<Arc<Finish>>,
    image: Image,
    pair: [Sample; 2],
    mix: Mix,
    /// The number of the image that is being prepared, to be named if that panics.
    reading: usize,
}

/// One of the two, and whether it is there.
#[derive(Default)]
struct Sample {
    index: usize,
    label: i32,
    pixels: Vec<f32>,
    /// For a device.
    bytes: Vec<u8>,
    side: Side,
    state: State,
}

#[derive(Default)]
enum State {
    /// Neither asked for nor needed.
    #[default]
    Absent,
    Ready,
    /// With the image's name.
    Bad(DataError, String),
}

impl Maker {
    pub(super) fn new(
        dataset: Arc<dyn Dataset>,
        preparer: Preparer,
        finish: Option<Arc<Finish>>,
        sampler: Sampler,
        skip_bad: bool,
    ) -> Self {
        let (floats, bytes) = match &finish {
            None => (preparer.transform().sample_len(), 0),
            Some(finish) if finish.resident.is_some() => (0, 0),
            Some(finish) => (0, finish.image_len()),
        };
        let sample = || Sample { pixels: vec![0.0; floats], bytes: vec![0; bytes], ..Sample::default() };
        let (pair, image) = ([sample(), sample()], Image::default());
        Self { dataset, sampler, skip_bad, preparer, finish, image, pair, mix: Mix::Off, reading: 0 }
    }

    fn make_both(&mut self, request: Request, pair: usize) {
        let mixes = self.preparer.transform().mixes();
        self.mix = Mix::Off;
        for side in 0..2 {
            let position = 2 * pair + side;
            let needed = request.holds(position) || mixes && position < self.sampler.len;
            self.pair[side].state =
                if needed { self.make_one(request.epoch, position) } else { State::Absent };
        }
        let [one, other] = &mut self.pair;
        if !matches!((&one.state, &other.state), (State::Ready, State::Ready)) {
            self.mix = Mix::Off;
        } else if self.finish.is_none() {
            self.mix.apply(self.preparer.transform().size, &mut one.pixels, &mut other.pixels);
        }
    }

    fn make_one(&mut self, epoch: u64, position: usize) -> State {
        let index = self.sampler.index(epoch, position);
        self.reading = index;
        let sample = &mut self.pair[position % 2];
        (sample.index, sample.label) = (index, self.dataset.label(index) as i32);
        match self.read(epoch, position) {
            Ok(()) => State::Ready,
            Err(error) => State::Bad(error, self.dataset.name(index)),
        }
    }

    fn read(&mut self, epoch: u64, position: usize) -> Result<(), DataError> {
        let Sample { index, pixels, bytes, side, .. } = &mut self.pair[position % 2];
        let resident = self.finish.as_ref().filter(|finish| finish.resident.is_some());
        let size = match resident {
            Some(finish) => (finish.width, finish.height),
            None => {
                self.dataset.read(*index, &mut self.image)?;
                (self.image.width, self.image.height)
            }
        };
        let choice = self.preparer.transform().choose(self.sampler.seed, epoch, position, size);
        // Both draw the same.
        self.mix = choice.mix;
        let prepared = match &self.finish {
            None => self.preparer.prepare(&self.image, &choice, pixels),
            Some(finish) => {
                let begun = match resident {
                    Some(_) => Ok(finish.side(&choice)),
                    None => finish.begin(&mut self.preparer, &self.image, &choice, bytes),
                };
                begun.map(|begun| *side = begun)
            }
        };
        prepared.map_err(|error| {
            let image = self.dataset.name(*index);
            DataError::Image { image, problem: error.to_string() }
        })
    }

    /// The bytes of a sample and the row of its choices, with the bytes of a partner that no other place of the batch has.
    fn deliver_bytes(&self, request: Request, position: usize, ready: bool, batch: &mut LoadedBatch) {
        let Some(finish) = &self.finish else { return };
        let row = &mut batch.choices[(position - request.first) * CHOICES..][..CHOICES];
        if !ready {
            finish.write_blank(row);
            return;
        }
        // Beside the batch there is room for the partners of its first and of its last sample.
        let spare = |position| batch.labels.len() + usize::from(position > request.first);
        let place = |position: usize| match finish.resident {
            Some(_) => self.pair[position % 2].index,
            None if request.holds(position) => position - request.first,
            None => spare(position),
        };
        let partner = if matches!(self.mix, Mix::Off) { position } else { position ^ 1 };
        let of = |position: usize| (&self.pair[position % 2].side, place(position));
        Finish::write(of(position), of(partner), self.mix, row);
        if finish.resident.is_some() {
            return;
        }
        for taken in [position, partner] {
            let bytes = &self.pair[taken % 2].bytes;
            if taken == position || !request.holds(taken) {
                batch.pixels[place(taken) * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
            }
        }
    }
}

impl Work for Maker {
    type Batch = LoadedBatch;

    fn parts(request: &Request) -> Range<usize> {
        request.pairs()
    }

    fn make(&mut self, request: Request, pair: usize) -> Result<(), Problem> {
        caught(|| self.make_both(request, pair)).map_err(|message| {
            let problem = format!("preparing image {}: {message}", self.reading);
            (2 * pair, DataError::Worker { problem })
        })
    }

    fn deliver(&mut self, request: Request, pair: usize, batch: &mut LoadedBatch) -> Result<(), Problem> {
        let labels = [self.pair[0].label, self.pair[1].label];
        let mixed = !matches!(self.mix, Mix::Off);
        for side in 0..2 {
            let position = 2 * pair + side;
            if !request.holds(position) {
                continue;
            }
            let sample = &mut self.pair[side];
            let place = position - request.first;
            batch.indices[place] = sample.index;
            batch.labels[place] = sample.label;
            batch.partners[place] = if mixed { labels[1 - side] } else { sample.label };
            batch.mix[place] = self.mix.lambda();
            batch.weights[place] = 1.0;
            let ready = match std::mem::take(&mut sample.state) {
                State::Ready => true,
                State::Bad(error, _) if !self.skip_bad => return Err((position, error)),
                State::Bad(error, name) => {
                    batch.skipped.push(Skipped { index: sample.index, name, problem: error.to_string() });
                    batch.weights[place] = 0.0;
                    false
                }
                State::Absent => continue,
            };
            if self.finish.is_some() {
                self.deliver_bytes(request, position, ready, batch);
                continue;
            }
            let pixels = &self.pair[side].pixels;
            let out = &mut batch.images[place * pixels.len()..][..pixels.len()];
            if ready { out.copy_from_slice(pixels) } else { out.fill(0.0) }
        }
        Ok(())
    }
}

impl Request {
    pub(crate) fn holds(&self, position: usize) -> bool {
        (self.first..self.first + self.count).contains(&position)
    }
}
