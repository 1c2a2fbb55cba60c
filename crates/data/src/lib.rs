//! Labelled images, and the way they reach a model.
//!
//! * [`Dataset`] is what training sees: numbered square images with a class each.
//! * [`synthetic`] draws a learnable set from a seed, so that a first run needs no download.
//! * [`sampler`] says which image comes at which position of which epoch.
//! * [`batch`] turns a list of indices into the `f32` buffers a model reads.
//!
//! Everything here is a pure function of its settings: no order of calls, number of threads or
//! number of ranks changes which image is read or what it looks like.
//!
//! Letters used for shapes: B batch, C channels, H height, W width (H = W).

pub mod batch;
mod error;
mod random;
pub mod sampler;
pub mod synthetic;

pub use batch::Filler;
pub use error::DataError;
pub use sampler::Sampler;
pub use synthetic::{Synthetic, SyntheticSpec};

/// Numbered, labelled, square images of one size, held as planar bytes (C, H, W).
pub trait Dataset: Send + Sync {
    fn len(&self) -> usize;

    fn classes(&self) -> usize;

    /// Height and width in pixels.
    fn image_size(&self) -> usize;

    fn channels(&self) -> usize;

    /// The class of an image, below [`Dataset::classes`].
    fn label(&self, index: usize) -> usize;

    /// Writes one image (C, H, W) over the whole of `out`, which holds [`Dataset::image_len`] bytes.
    fn read(&self, index: usize, out: &mut [u8]) -> Result<(), DataError>;

    /// One name for each class, in the order of the labels.
    fn class_names(&self) -> Vec<String>;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes in one image: C × H × W.
    fn image_len(&self) -> usize {
        self.channels() * self.image_size() * self.image_size()
    }
}

/// Which part of a set: what a model learns from, or what it is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    Train,
    Test,
}
