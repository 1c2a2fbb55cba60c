use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum DataError {
    /// A file or folder that can't be used, and why.
    #[error("{}: {problem}", path.display())]
    File { path: PathBuf, problem: String },

    #[error(
        "{image}: {width}×{height} pixels with {found} channels; this run reads {expected} × {expected} with {channels}"
    )]
    Shape { image: String, width: usize, height: usize, found: usize, expected: usize, channels: usize },

    #[error("image {index} was asked of a set that holds {len}")]
    IndexOutOfRange { index: usize, len: usize },

    #[error("{buffer} holds {found} elements; it needs {expected}")]
    BufferLength { buffer: &'static str, expected: usize, found: usize },

    #[error("{indices} images do not fit a batch of {capacity}")]
    BatchOverfull { indices: usize, capacity: usize },

    #[error("a part of a set is more than 0 and at most 1 of it; {found} was asked for")]
    Fraction { found: f64 },

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
