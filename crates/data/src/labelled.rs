//! Image files with a class each, however their names were found.

use crate::decode::{read_image, supports_channels};
use crate::{DataError, Dataset, Sample, Skipped};
use std::path::{Path, PathBuf};

/// A set of image files, in memory by name alone.
#[derive(Debug)]
pub struct LabelledFiles {
    /// Folder that names of files are relative to.
    pub(crate) folder: PathBuf,
    pub(crate) class_names: Vec<String>,
    pub(crate) files: Vec<PathBuf>,
    /// Class of each file.
    pub(crate) labels: Vec<u32>,
    pub(crate) channels: usize,
    /// Number of files that are no images by extension, and of images without a class.
    pub(crate) ignored: usize,
    pub(crate) left_out: Vec<Skipped>,
}

impl LabelledFiles {
    /// A set without files; `source` is what it is read from.
    pub(crate) fn empty(source: &Path, channels: usize) -> Result<Self, DataError> {
        if !supports_channels(channels) {
            let problem = format!("images are read with 1 or 3 channels; {channels} were asked for");
            return Err(DataError::file(source, problem));
        }
        let (class_names, files, labels, left_out) = (vec![], vec![], vec![], vec![]);
        Ok(LabelledFiles {
            folder: PathBuf::new(),
            class_names,
            files,
            labels,
            channels,
            ignored: 0,
            left_out,
        })
    }

    /// Number of files that were passed over: those that are no images by extension, and images without a class.
    pub fn ignored(&self) -> usize {
        self.ignored
    }

    /// Path of an image.
    ///
    /// # Panics
    ///
    /// When `index` is not below the number of images, as a slice would.
    pub fn path(&self, index: usize) -> PathBuf {
        self.folder.join(&self.files[index])
    }
}

impl Dataset for LabelledFiles {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        self.channels
    }

    fn label(&self, index: usize) -> usize {
        self.labels[index] as usize
    }

    fn name(&self, index: usize) -> String {
        self.path(index).display().to_string()
    }

    fn sorted_by_class(&self) -> bool {
        true
    }

    fn left_out(&self) -> &[Skipped] {
        &self.left_out
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        if index >= self.len() {
            return Err(DataError::IndexOutOfRange { index, len: self.len() });
        }
        read_image(&self.path(index), self.channels, &mut out.image)
    }
}
