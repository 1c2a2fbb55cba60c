//! Images with a class for each pixel, and the way they reach a model.
//!
//! * [`MaskedSet`] is what training sees: numbered pairs of an image and its mask.
//! * [`ade20k`] reads ADE20K, [`masks`] any folder of images with masks, [`drawn`] draws a learnable set.
//! * [`MaskTransform`] chooses what happens to a pair, and [`MaskPreparer`] does it.
//! * [`MaskLoader`] prepares batches ahead of their use; [`CachedPairs`] keeps decoded pairs in memory.
//! * [`windows`] and [`whole`] say how a large image is evaluated; [`Canvas`] puts the answers together.
//! * [`palette`] and [`overlay`] show masks to a person.
//!
//! A label is a class's number, from 0 on; [`IGNORED`] is none. Whatever a set's files hold becomes that when they are read.

pub mod ade20k;
mod batch;
mod cache;
mod canvas;
mod choice;
pub mod drawn;
mod files;
mod leading;
pub mod masks;
pub mod overlay;
pub mod palette;
mod photometric;
mod prepare;
mod transform;
mod unmasked;
pub mod whole;
pub mod windows;

pub use batch::{MaskBatch, MaskLoader};
pub use cache::CachedPairs;
pub use canvas::{Canvas, Grid};
pub use choice::{MaskChoice, resized_mask};
pub use drawn::{Drawn, DrawnSpec};
pub use files::{MaskedFiles, Unpaired};
pub use leading::LeadingPairs;
pub use photometric::Distortion;
pub use prepare::{MaskFinish, MaskPreparer};
pub use transform::MaskTransform;
pub use unmasked::Unmasked;
pub use whole::{Ladder, Whole};
pub use windows::Windows;

use crate::fingerprint::Hash;
use crate::{DataError, Image};

/// The label of a pixel that neither trains nor judges.
pub const IGNORED: u8 = 255;

/// Labels are bytes, and one of them is [`IGNORED`].
pub const MAX_CLASSES: usize = 255;

/// An image and its mask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    pub image: Image,
    /// A label for each pixel of the image: (H, W).
    pub mask: Vec<u8>,
}

/// Numbered images of any size with a label for each pixel.
pub trait MaskedSet: Send + Sync {
    fn len(&self) -> usize;

    /// One name for each class, in the order of the labels.
    fn class_names(&self) -> &[String];

    fn channels(&self) -> usize;

    /// What a message calls an image.
    fn name(&self, index: usize) -> String;

    /// Replaces `out` by a pair, reusing its memory.
    fn read(&self, index: usize, out: &mut Pair) -> Result<(), DataError>;

    fn classes(&self) -> usize {
        self.class_names().len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Pairs that are looked at, spread over the set.
const LOOKED_AT: usize = 32;

/// As [`crate::fingerprint()`] for sets with masks.
pub fn fingerprint(set: &dyn MaskedSet) -> u64 {
    let mut hash = Hash::new(set.channels() as u64);
    hash.word(set.len() as u64);
    set.class_names().iter().for_each(|name| hash.bytes(name.as_bytes()));
    let mut pair = Pair::default();
    let looked_at = LOOKED_AT.min(set.len());
    for index in (0..looked_at).map(|k| k * set.len() / looked_at) {
        match set.read(index, &mut pair) {
            Ok(()) => {
                hash.word((pair.image.height * pair.image.width) as u64);
                hash.bytes(&pair.image.pixels);
                hash.bytes(&pair.mask);
            }
            // A broken pair is broken for every rank.
            Err(_) => hash.word(index as u64),
        }
    }
    hash.value()
}
