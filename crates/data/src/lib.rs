//! Labelled images, and the way they reach a model.
//!
//! * [`Dataset`] is what training sees: numbered images with a class each.
//! * [`cifar`] reads CIFAR-10 and CIFAR-100; [`pickle`] reads what Python wrote, without running it.
//! * [`mod@get`] downloads them.
//! * [`synthetic`] draws a learnable set from a seed, so that a first run needs no download.
//! * [`folder`] is a set of image files, [`decode`] reads one, [`resize`] makes it larger or smaller.
//! * [`leading`] takes the leading part of a set, [`cache`] keeps its decoded images in memory.
//! * [`fingerprint()`] tells two sets apart.
//! * [`sampler`] says which image comes at which position of which epoch.
//! * [`augment`] chooses what happens to a sample, and does it.
//! * [`loader`] prepares batches ahead of their use, on threads of its own.
//! * [`segment`] does all of this for images with a class for each pixel.
//!
//! Everything here is a pure function of its settings: no order of calls, number of threads or
//! number of ranks changes which image is read or what it looks like.
//!
//! Letters used for shapes: B batch, C channels, H height, W width.

pub mod augment;
pub mod cache;
pub mod cifar;
pub mod decode;
mod drawing;
mod error;
pub mod files;
mod fingerprint;
pub mod folder;
pub mod get;
mod image;
pub mod leading;
pub mod limits;
pub mod loader;
pub mod pickle;
mod random;
pub mod resize;
pub mod sampler;
pub mod segment;
pub mod sheet;
pub mod synthetic;

pub use augment::{Choice, Finish, Geometry, Mix, Preparer, RandAugment, Transform};
pub use cache::{Cached, available_memory};
pub use cifar::{Cifar, CifarKind, CifarLabels};
pub use error::DataError;
pub use fingerprint::fingerprint;
pub use folder::ImageFolder;
pub use get::{Downloadable, get};
pub use image::Image;
pub use leading::Leading;
pub use loader::{LoadedBatch, Loader, LoaderSettings, Request, Skipped};
pub use resize::{CropBox, Interpolation, Resizer};
pub use sampler::Sampler;
pub use sheet::{Caption, Sheet};
pub use synthetic::{Synthetic, SyntheticSpec};

/// Numbered, labelled images of any size, all with the same number of channels.
pub trait Dataset: Send + Sync {
    fn len(&self) -> usize;

    /// One name for each class, in the order of the labels.
    fn class_names(&self) -> &[String];

    fn channels(&self) -> usize;

    /// The class of an image, below [`Dataset::classes`].
    fn label(&self, index: usize) -> usize;

    /// What a message calls an image: its path, or its number and the file it lies in.
    fn name(&self, index: usize) -> String;

    /// Replaces `out` by an image, reusing its memory.
    fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError>;

    /// Width and height of every image, where all have the same and that is known before they are read.
    fn size(&self) -> Option<(usize, usize)> {
        None
    }

    /// Whether the images lie in memory as bytes, so that reading one is copying it.
    fn in_memory(&self) -> bool {
        false
    }

    fn classes(&self) -> usize {
        self.class_names().len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Which part of a set: what a model learns from, or what it is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    Train,
    Test,
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Split::Train => "train",
            Split::Test => "test",
        })
    }
}
