//! A decoded sample: an image and what it is labelled with.

use crate::Image;

/// Task that a set is labelled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// A class for each image: [`crate::Dataset::label`].
    Classify,
    /// A class for each pixel: [`Sample::mask`].
    Segment,
}

/// Buffers that a set reads an image into; reused from one to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub image: Image,
    /// Labels of the image's pixels, (H, W), in sets of [`Task::Segment`]; empty in others.
    pub mask: Vec<u8>,
}

impl Sample {
    /// Width and height of the image.
    pub fn size(&self) -> (usize, usize) {
        (self.image.width, self.image.height)
    }
}

/// An image that could not be read, or a file that does not belong to a set. In a batch its place has weight 0 and pixels 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub index: usize,
    pub name: String,
    pub problem: String,
}
