use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum DataError {
    /// A file or folder that can't be used, and why.
    #[error("{}: {problem}", path.display())]
    File { path: PathBuf, problem: String },

    /// An image that was read, but can't be used as it is.
    #[error("{image}: {problem}")]
    Image { image: String, problem: String },

    /// A setting of the augmentation or of the loader that can't be honoured.
    #[error("setting `{setting}`: {problem}")]
    Setting { setting: &'static str, problem: String },

    #[error("pixels of {width}×{height} with {found} channels; this run reads {channels} channels")]
    Pixels { width: usize, height: usize, found: usize, channels: usize },

    #[error("{count} samples from position {first} were asked of an epoch of {len}")]
    RequestOutOfRange { first: usize, count: usize, len: usize },

    #[error("a thread that prepares images failed: {problem}")]
    Worker { problem: String },

    #[error(
        "the part at {left},{top} of {width}×{height} pixels does not lie in an image of {image_width}×{image_height}"
    )]
    Region { left: f64, top: f64, width: f64, height: f64, image_width: usize, image_height: usize },

    #[error("image {index} was asked of a set that holds {len}")]
    IndexOutOfRange { index: usize, len: usize },

    #[error("{buffer} holds {found} elements; it needs {expected}")]
    BufferLength { buffer: &'static str, expected: usize, found: usize },

    #[error("{indices} images do not fit a batch of {capacity}")]
    BatchOverfull { indices: usize, capacity: usize },

    #[error("the synthetic set has between {min} and {max} classes; {found} were asked for")]
    SyntheticClasses { found: usize, min: usize, max: usize },

    #[error("synthetic images are between {min} and {max} pixels wide; {found} were asked for")]
    SyntheticImageSize { found: usize, min: usize, max: usize },

    #[error("synthetic images have between 1 and {max} channels; {found} were asked for")]
    SyntheticChannels { found: usize, max: usize },
}

impl DataError {
    pub fn file(path: impl AsRef<Path>, problem: impl ToString) -> Self {
        DataError::File { path: path.as_ref().to_path_buf(), problem: problem.to_string() }
    }
}

/// Text that came from a file or a server, fit to stand on the one line of a message.
pub(crate) fn shown(text: impl ToString) -> String {
    let printable = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.to_string().chars().map(printable).take(200).collect()
}
