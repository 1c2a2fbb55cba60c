//! Single image files, without classes: what someone wants to have looked at.

use crate::decode::decode;
use crate::{DataError, Dataset, Image};
use std::path::PathBuf;

pub struct Files {
    paths: Vec<PathBuf>,
    channels: usize,
    /// All images are of a class that nobody asks for.
    class: [String; 1],
}

impl Files {
    pub fn new(paths: Vec<PathBuf>, channels: usize) -> Self {
        Files { paths, channels, class: [String::new()] }
    }
}

impl Dataset for Files {
    fn len(&self) -> usize {
        self.paths.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class
    }

    fn channels(&self) -> usize {
        self.channels
    }

    fn label(&self, _index: usize) -> usize {
        0
    }

    fn name(&self, index: usize) -> String {
        self.paths[index].display().to_string()
    }

    fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
        let Some(path) = self.paths.get(index) else {
            return Err(DataError::IndexOutOfRange { index, len: self.paths.len() });
        };
        let bytes = std::fs::read(path).map_err(|error| DataError::file(path, error))?;
        decode(&bytes, path, self.channels, out)
    }
}
