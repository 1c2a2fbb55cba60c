//! Samples with a label for each pixel: transformed one by one, and finished here or left to a device.

use super::batch::weight as weight_of;
use super::maker::{Draw, Prepare};
use super::{Batch, Request};
use crate::segment::{IGNORED, MaskFinish, MaskPreparer};
use crate::{DataError, Sample};

/// Prepares one sample.
pub(super) struct Masks {
    preparer: MaskPreparer,
    /// None if that is left to a device.
    finish: Option<MaskFinish>,
    pixels: Vec<u8>,
    mask: Vec<u8>,
    /// Rows and columns that are image.
    extent: [i32; 2],
    image: Vec<f32>,
}

impl Masks {
    pub(super) fn new(preparer: MaskPreparer, finish: Option<MaskFinish>) -> Self {
        let transform = preparer.transform();
        let (area, channels) = (transform.area(), transform.channels);
        let image = vec![0.0; if finish.is_some() { area * channels } else { 0 }];
        let (pixels, mask, extent) = (vec![0; area * channels], vec![0; area], [0; 2]);
        Self { preparer, finish, pixels, mask, extent, image }
    }
}

impl Prepare for Masks {
    fn prepare(&mut self, _slot: usize, draw: Draw, sample: &Sample) -> Result<(), DataError> {
        let choice = self.preparer.transform().choose(draw.seed, draw.epoch, draw.position, sample);
        self.extent = self.preparer.prepare(sample, &choice, &mut self.pixels, &mut self.mask)?;
        if let Some(finish) = &self.finish {
            finish.apply(&self.pixels, self.extent, &mut self.image);
        }
        Ok(())
    }

    fn deliver(&mut self, _slot: usize, good: bool, request: Request, position: usize, batch: &mut Batch) {
        let (place, capacity) = (position - request.first, batch.capacity());
        if !good {
            batch.clear(place);
            return;
        }
        if self.finish.is_none() {
            Batch::part(&mut batch.pixels, capacity, place).copy_from_slice(&self.pixels);
            Batch::part(&mut batch.masks, capacity, place).copy_from_slice(&self.mask);
            Batch::part(&mut batch.extents, capacity, place).copy_from_slice(&self.extent);
            return;
        }
        Batch::part(&mut batch.images, capacity, place).copy_from_slice(&self.image);
        let labels = Batch::part(&mut batch.labels, capacity, place);
        let weights = Batch::part(&mut batch.weights, capacity, place);
        let class_weights = &self.preparer.transform().class_weights;
        for ((label, weight), &mask) in labels.iter_mut().zip(weights).zip(&self.mask) {
            let class = i32::from(mask);
            (*label, *weight) =
                if mask == IGNORED { (0, 0.0) } else { (class, weight_of(class_weights, class)) };
        }
    }
}
