//! Decoded pairs kept in memory, as far as there is room.

use super::{MaskedSet, Pair};
use crate::DataError;
use crate::cache::{Kept, Shelf};
use std::sync::Arc;

/// A set whose pairs are kept when they are first read.
pub struct CachedPairs {
    set: Arc<dyn MaskedSet>,
    shelf: Shelf,
}

impl CachedPairs {
    /// Keeps up to `budget` bytes of pixels and labels.
    pub fn new(set: Arc<dyn MaskedSet>, budget: usize) -> Self {
        let shelf = Shelf::new(set.len(), budget);
        Self { set, shelf }
    }

    /// Bytes kept by now.
    pub fn used(&self) -> usize {
        self.shelf.used()
    }
}

impl MaskedSet for CachedPairs {
    fn len(&self) -> usize {
        self.set.len()
    }

    fn class_names(&self) -> &[String] {
        self.set.class_names()
    }

    fn channels(&self) -> usize {
        self.set.channels()
    }

    fn name(&self, index: usize) -> String {
        self.set.name(index)
    }

    fn read(&self, index: usize, out: &mut Pair) -> Result<(), DataError> {
        if let Some(&Kept { width, height, ref bytes }) = self.shelf.get(index) {
            let (pixels, mask) = bytes.split_at(bytes.len() - width * height);
            out.image.reset(width, height, self.set.channels()).copy_from_slice(pixels);
            out.mask.clear();
            out.mask.extend_from_slice(mask);
            return Ok(());
        }
        self.set.read(index, out)?;
        self.shelf.keep(index, (out.image.width, out.image.height), &[&out.image.pixels, &out.mask]);
        Ok(())
    }
}
