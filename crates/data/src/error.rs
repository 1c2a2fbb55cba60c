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

    /// A setting that can't be honoured. It goes by the name of the flag that sets it, so that a user reads the same words
    /// whoever refuses it.
    #[error("--{flag} {value}: {problem}")]
    Setting { flag: &'static str, value: String, problem: String },

    /// A caller's mistake, which no setting can bring about.
    #[error("{what}: {problem}")]
    Call { what: &'static str, problem: String },

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
}

impl DataError {
    pub(crate) fn setting(flag: &'static str, value: impl ToString, problem: impl Into<String>) -> Self {
        DataError::Setting { flag, value: value.to_string(), problem: problem.into() }
    }

    pub fn file(path: impl AsRef<Path>, problem: impl ToString) -> Self {
        DataError::File { path: path.as_ref().to_path_buf(), problem: problem.to_string() }
    }
}

/// Text that came from a file or a server, fit to stand on the one line of a message.
pub(crate) fn shown(text: impl ToString) -> String {
    let printable = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.to_string().chars().map(printable).take(200).collect()
}
