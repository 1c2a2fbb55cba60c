//! Labelled images, and the way they reach a model.
//!
//! * [`Dataset`] is what training sees: numbered [`Sample`]s with a class for each image or for each pixel.
//! * [`cifar`] reads CIFAR-10 and CIFAR-100; [`pickle`] reads what Python wrote, without running it.
//! * [`registry`] names all sets, [`mod@get`] downloads some.
//! * [`synthetic`] draws a learnable set from a seed, so that a first run needs no download.
//! * [`folder`] and [`list`] find [`LabelledFiles`], [`decode`] reads one, [`resize`] makes it larger or smaller.
//! * [`subset`] takes a part of a set, [`cache`] keeps its decoded images in memory.
//! * [`fingerprint()`] tells two sets apart.
//! * [`sampler`] says which image comes at which position of which epoch.
//! * [`augment`] chooses what happens to a sample, and does it.
//! * [`loader`] prepares batches ahead of their use, on threads of its own.
//! * [`segment`] reads and transforms images with a class for each pixel, and puts predictions together.
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
mod fingerprint;
pub mod folder;
pub mod get;
mod image;
mod labelled;
pub mod limits;
pub mod list;
pub mod loader;
pub mod pickle;
mod random;
pub mod registry;
pub mod resize;
mod sample;
pub mod sampler;
pub mod segment;
pub mod sheet;
pub mod subset;
pub mod synthetic;
pub mod unlabelled;

pub use augment::{Choice, Finish, Geometry, Mix, Preparer, RandAugment, Transform};
pub use cache::{Cached, available_memory};
pub use cifar::{Cifar, CifarKind, CifarLabels};
pub use error::DataError;
pub use fingerprint::fingerprint;
pub use folder::images_below;
pub use get::{Downloadable, get};
pub use image::Image;
pub use labelled::LabelledFiles;
pub use loader::{Batch, Loader, LoaderSettings, Preparation, Request};
pub use registry::Entry;
pub use resize::{CropBox, Interpolation, Resizer};
pub use sample::{Sample, Skipped, Task};
pub use sampler::Sampler;
pub use sheet::{Caption, Sheet};
pub use subset::Subset;
pub use synthetic::{Synthetic, SyntheticSpec};
pub use unlabelled::Unlabelled;

/// Numbered images of any size, all with the same number of channels, labelled for one [`Task`].
pub trait Dataset: Send + Sync {
    fn len(&self) -> usize;

    /// One name for each class, in the order of the labels.
    fn class_names(&self) -> &[String];

    fn channels(&self) -> usize;

    fn task(&self) -> Task {
        Task::Classify
    }

    /// Class of an image, below [`Dataset::classes`]. Always 0 in a set of [`Task::Segment`], whose masks label pixels.
    fn label(&self, _index: usize) -> usize {
        0
    }

    /// Name of an image in messages: its path, or its number and the file it lies in.
    fn name(&self, index: usize) -> String;

    /// Replaces `out` by an image and, in a set of [`Task::Segment`], its mask. Reuses memory.
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError>;

    /// Width and height of every image, where all have the same and that is known before they are read.
    fn size(&self) -> Option<(usize, usize)> {
        None
    }

    /// Returns whether the images lie in memory as bytes, so that reading one is copying it.
    fn in_memory(&self) -> bool {
        false
    }

    /// Returns whether images of a class stand together, so that the first images of the set are of few classes.
    fn sorted_by_class(&self) -> bool {
        false
    }

    /// Files that were found and do not belong to the set, such as an image without a mask, where that is no error.
    fn left_out(&self) -> &[Skipped] {
        &[]
    }

    fn classes(&self) -> usize {
        self.class_names().len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A set over another: it reads that one's images in its own way, and is like it otherwise.
pub trait Layer: Send + Sync {
    fn below(&self) -> &dyn Dataset;

    /// Number of images, if not all of those below.
    fn images(&self) -> usize {
        self.below().len()
    }

    /// Number that an image has below.
    fn index_below(&self, index: usize) -> usize {
        index
    }

    /// Reads an image, as [`Dataset::read`].
    fn read_below(&self, index: usize, out: &mut Sample) -> Result<(), DataError>;
}

impl<L: Layer> Dataset for L {
    fn len(&self) -> usize {
        self.images()
    }

    fn class_names(&self) -> &[String] {
        self.below().class_names()
    }

    fn channels(&self) -> usize {
        self.below().channels()
    }

    fn task(&self) -> Task {
        self.below().task()
    }

    fn label(&self, index: usize) -> usize {
        self.below().label(self.index_below(index))
    }

    fn name(&self, index: usize) -> String {
        self.below().name(self.index_below(index))
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        self.read_below(index, out)
    }

    fn size(&self) -> Option<(usize, usize)> {
        self.below().size()
    }

    fn in_memory(&self) -> bool {
        self.below().in_memory()
    }

    fn sorted_by_class(&self) -> bool {
        self.below().sorted_by_class()
    }

    fn left_out(&self) -> &[Skipped] {
        self.below().left_out()
    }
}

/// Part of a set: the training set, or the validation set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    Train,
    Test,
}

impl Split {
    /// Keeps the draws of one part apart from those of the other.
    pub(crate) fn number(self) -> u64 {
        match self {
            Split::Train => 0,
            Split::Test => 1,
        }
    }
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Split::Train => "train",
            Split::Test => "test",
        })
    }
}
