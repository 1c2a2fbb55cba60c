//! A part of a set: its first pairs.

use super::{MaskedSet, Pair};
use crate::DataError;
use std::sync::Arc;

/// The leading pairs of another set. What an image shows is not known before it is read, so nothing is balanced.
pub struct LeadingPairs {
    set: Arc<dyn MaskedSet>,
    len: usize,
}

impl LeadingPairs {
    /// `len` pairs of a set; all of it if it has no more.
    pub fn of(set: Arc<dyn MaskedSet>, len: usize) -> Arc<dyn MaskedSet> {
        if len >= set.len() { set } else { Arc::new(LeadingPairs { set, len }) }
    }
}

impl MaskedSet for LeadingPairs {
    fn len(&self) -> usize {
        self.len
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
        if index >= self.len {
            return Err(DataError::IndexOutOfRange { index, len: self.len });
        }
        self.set.read(index, out)
    }
}
