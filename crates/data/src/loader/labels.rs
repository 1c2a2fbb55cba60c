//! Samples with one label each: transformed, mixed in pairs, and finished here or left to a device.

use super::batch::weight;
use super::maker::{Draw, Prepare};
use super::{Batch, Request};
use crate::augment::{CHOICES, Finish, Side};
use crate::{DataError, Dataset, Mix, Preparer, Sample};
use std::sync::Arc;

/// Prepares two neighbours of the global order.
pub(super) struct Labels {
    preparer: Preparer,
    /// Part of the transform that is left to a device, if any is.
    finish: Option<Arc<Finish>>,
    pair: [Prepared; 2],
    mix: Mix,
}

#[derive(Default)]
struct Prepared {
    index: usize,
    label: i32,
    pixels: Vec<f32>,
    /// Bytes for a device, and what it is to do with them.
    bytes: Vec<u8>,
    side: Side,
}

impl Labels {
    pub(super) fn new(preparer: Preparer, finish: Option<Arc<Finish>>) -> Self {
        let (floats, bytes) = match &finish {
            None => (preparer.transform().sample_len(), 0),
            Some(finish) if finish.resident.is_some() => (0, 0),
            Some(finish) => (0, finish.image_len()),
        };
        let room = || Prepared { pixels: vec![0.0; floats], bytes: vec![0; bytes], ..Prepared::default() };
        Self { preparer, finish, pair: [room(), room()], mix: Mix::Off }
    }

    /// Copies the bytes of a sample and the row of its choices, with the bytes of a partner that no other place of the batch has.
    fn deliver_bytes(&self, finish: &Finish, request: Request, position: usize, batch: &mut Batch) {
        let row = &mut batch.choices[(position - request.first) * CHOICES..][..CHOICES];
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

impl Prepare for Labels {
    fn mixes(&self) -> bool {
        self.preparer.transform().mixes()
    }

    fn reads(&self) -> bool {
        self.finish.as_ref().is_none_or(|finish| finish.resident.is_none())
    }

    fn begin(&mut self, slot: usize, index: usize, set: &dyn Dataset) {
        (self.pair[slot].index, self.pair[slot].label) = (index, set.label(index) as i32);
    }

    fn prepare(&mut self, slot: usize, draw: Draw, sample: &Sample) -> Result<(), DataError> {
        let Prepared { pixels, bytes, side, .. } = &mut self.pair[slot];
        let resident = self.finish.as_ref().filter(|finish| finish.resident.is_some());
        let size = resident.map_or(sample.size(), |finish| (finish.width, finish.height));
        let choice = self.preparer.transform().choose(draw.seed, draw.epoch, draw.position, size);
        // Both of a pair draw the same.
        self.mix = choice.mix;
        match &self.finish {
            None => self.preparer.prepare(&sample.image, &choice, pixels)?,
            Some(finish) if finish.resident.is_some() => *side = finish.side(&choice),
            Some(finish) => *side = finish.begin(&mut self.preparer, &sample.image, &choice, bytes)?,
        }
        Ok(())
    }

    fn end(&mut self, complete: bool) {
        let [one, other] = &mut self.pair;
        if !complete {
            self.mix = Mix::Off;
        } else if self.finish.is_none() {
            self.mix.apply(self.preparer.transform().size, &mut one.pixels, &mut other.pixels);
        }
    }

    fn deliver(&mut self, slot: usize, good: bool, request: Request, position: usize, batch: &mut Batch) {
        let place = position - request.first;
        let Prepared { label, pixels, .. } = &self.pair[slot];
        if !good {
            batch.clear(place);
            let rows = batch.choices.as_chunks_mut::<CHOICES>().0;
            self.finish.iter().for_each(|finish| finish.write_blank(&mut rows[place]));
            (batch.labels[place], batch.partners[place]) = (*label, *label);
            return;
        }
        let mixed = !matches!(self.mix, Mix::Off);
        batch.labels[place] = *label;
        batch.partners[place] = if mixed { self.pair[1 - slot].label } else { *label };
        batch.mix[place] = self.mix.lambda();
        batch.weights[place] = weight(&self.preparer.transform().class_weights, *label);
        match &self.finish {
            Some(finish) => self.deliver_bytes(finish, request, position, batch),
            None => batch.images[place * pixels.len()..][..pixels.len()].copy_from_slice(pixels),
        }
    }
}
