use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum DataError {
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
