//! A batch of prepared samples.

use super::Request;
use crate::Skipped;
use crate::segment::IGNORED;

/// Samples of one size (B). From `request.count` on a batch is padding with weight 0. Lists that its task or its device has
/// no use for are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub request: Request,
    /// (B, C, H, W); none where a device is to make them.
    pub images: Vec<f32>,
    /// Bytes that a device makes images of: see [`crate::Finish`] and [`crate::segment::MaskFinish`]. None where all of the
    /// set lies there.
    pub pixels: Vec<u8>,
    /// Choices that go with the pixels of images with one label each.
    pub choices: Vec<i32>,
    /// Labels that go with the pixels of images with masks, (B, H, W), 255 for an ignored pixel; and for each sample the rows
    /// and columns that are image (B, 2).
    pub masks: Vec<u8>,
    pub extents: Vec<i32>,
    /// Labels of images (B) or of pixels (B, H, W); 0 for an ignored pixel.
    pub labels: Vec<i32>,
    /// Label of the sample that was mixed in, or the sample's own (B).
    pub partners: Vec<i32>,
    /// λ, the share of the sample's own label; 1 where nothing was mixed in (B).
    pub mix: Vec<f32>,
    /// Weights of the labels: 0 for padding, for an image that was skipped and for an ignored pixel, otherwise that of
    /// the label's class, which is 1 unless the transform says otherwise.
    pub weights: Vec<f32>,
    /// Numbers of the images in their set.
    pub indices: Vec<usize>,
    pub skipped: Vec<Skipped>,
}

/// Weight of a label by its class.
pub(super) fn weight(class_weights: &[f32], label: i32) -> f32 {
    usize::try_from(label).ok().and_then(|class| class_weights.get(class)).copied().unwrap_or(1.0)
}

impl Batch {
    /// Samples that there is room for.
    pub fn capacity(&self) -> usize {
        self.indices.len()
    }

    /// Part of a list that belongs to one place.
    pub(super) fn part<T>(list: &mut [T], capacity: usize, place: usize) -> &mut [T] {
        let len = list.len() / capacity;
        &mut list[place * len..][..len]
    }

    /// Makes a place one without a sample, but for its choices. Pixels that have choices are erased by them.
    pub(super) fn clear(&mut self, place: usize) {
        let capacity = self.capacity();
        Self::part(&mut self.images, capacity, place).fill(0.0);
        if self.choices.is_empty() {
            Self::part(&mut self.pixels, capacity, place).fill(0);
        }
        Self::part(&mut self.masks, capacity, place).fill(IGNORED);
        Self::part(&mut self.extents, capacity, place).fill(0);
        Self::part(&mut self.labels, capacity, place).fill(0);
        Self::part(&mut self.partners, capacity, place).fill(0);
        Self::part(&mut self.mix, capacity, place).fill(1.0);
        Self::part(&mut self.weights, capacity, place).fill(0.0);
        self.indices[place] = 0;
    }

    /// Brings skipped images, which threads name as they finish, into the order of the batch.
    pub(super) fn sort_skipped(&mut self) {
        let held = &self.indices[..self.request.count.min(self.indices.len())];
        let position = |index| held.iter().position(|&other| other == index);
        self.skipped.sort_unstable_by_key(|skipped| position(skipped.index));
    }
}
