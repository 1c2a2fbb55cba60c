//! Single image files without masks: what someone wants to have segmented.

use super::{IGNORED, MaskedSet, Pair};
use crate::files::Files;
use crate::{DataError, Dataset};
use std::path::PathBuf;

/// Images of which every pixel is ignored: none counts for a score.
pub struct Unmasked {
    files: Files,
    class_names: Vec<String>,
}

impl Unmasked {
    pub fn new(paths: Vec<PathBuf>, channels: usize, class_names: Vec<String>) -> Self {
        Unmasked { files: Files::new(paths, channels), class_names }
    }
}

impl MaskedSet for Unmasked {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        self.files.channels()
    }

    fn name(&self, index: usize) -> String {
        self.files.name(index)
    }

    fn read(&self, index: usize, out: &mut Pair) -> Result<(), DataError> {
        self.files.read(index, &mut out.image)?;
        out.mask.clear();
        out.mask.resize(out.image.width * out.image.height, IGNORED);
        Ok(())
    }
}
