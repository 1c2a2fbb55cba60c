//! Single image files without labels: images to classify or to segment.

use crate::decode::read_image;
use crate::segment::IGNORED;
use crate::{DataError, Dataset, Sample, Task};
use std::path::PathBuf;

/// Image files as a set. For [`Task::Segment`] every pixel is ignored, so none counts for a score.
pub struct Unlabelled {
    paths: Vec<PathBuf>,
    channels: usize,
    task: Task,
    class_names: Vec<String>,
}

impl Unlabelled {
    /// Images for a model of `task` that knows the classes `class_names`.
    pub fn new(paths: Vec<PathBuf>, channels: usize, task: Task, class_names: Vec<String>) -> Self {
        Unlabelled { paths, channels, task, class_names }
    }
}

impl Dataset for Unlabelled {
    fn len(&self) -> usize {
        self.paths.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        self.channels
    }

    fn task(&self) -> Task {
        self.task
    }

    fn name(&self, index: usize) -> String {
        self.paths[index].display().to_string()
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        let Some(path) = self.paths.get(index) else {
            return Err(DataError::IndexOutOfRange { index, len: self.paths.len() });
        };
        read_image(path, self.channels, &mut out.image)?;
        if self.task == Task::Segment {
            out.mask.clear();
            out.mask.resize(out.image.width * out.image.height, IGNORED);
        }
        Ok(())
    }
}
