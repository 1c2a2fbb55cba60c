//! A number that tells two sets apart.

use crate::random::mix;
use crate::{Dataset, Image};

/// Images whose pixels are looked at, spread over the set.
const LOOKED_AT: usize = 32;

/// Equal for equal sets. Sets that differ in their number of images, their classes, any label, or the pixels of one of
/// 32 images spread over the set, have different ones; a difference in the pixels of other images alone isn't seen.
pub fn fingerprint(set: &dyn Dataset) -> u64 {
    let mut hash = Hash::new(set.channels() as u64);
    hash.word(set.len() as u64);
    for name in set.class_names() {
        hash.bytes(name.as_bytes());
    }
    (0..set.len()).for_each(|index| hash.word(set.label(index) as u64));
    let mut image = Image::default();
    for k in 0..LOOKED_AT.min(set.len()) {
        let index = k * set.len() / LOOKED_AT.min(set.len());
        match set.read(index, &mut image) {
            Ok(()) => {
                hash.word((image.height * image.width) as u64);
                hash.bytes(&image.pixels);
            }
            // A broken image is broken for every rank; how it can't be read says nothing more.
            Err(_) => hash.word(index as u64),
        }
    }
    hash.value()
}

pub(crate) struct Hash(u64);

impl Hash {
    pub(crate) fn new(start: u64) -> Self {
        Hash(start)
    }

    pub(crate) fn value(&self) -> u64 {
        self.0
    }

    pub(crate) fn word(&mut self, word: u64) {
        self.0 = mix(self.0 ^ word).wrapping_add(word.rotate_left(32));
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Leading, Split, Synthetic, SyntheticSpec};
    use std::sync::Arc;

    fn drawn(change: impl FnOnce(&mut SyntheticSpec)) -> Synthetic {
        let mut spec =
            SyntheticSpec { split: Split::Train, len: 50, image_size: 8, channels: 3, classes: 4, seed: 1 };
        change(&mut spec);
        Synthetic::new(spec).unwrap()
    }

    #[test]
    fn equal_sets_agree_and_others_do_not() {
        let plain = fingerprint(&drawn(|_| {}));
        assert_eq!(plain, fingerprint(&drawn(|_| {})));
        let others = [
            fingerprint(&drawn(|s| s.seed = 2)),
            fingerprint(&drawn(|s| s.len = 51)),
            fingerprint(&drawn(|s| s.image_size = 16)),
            fingerprint(&drawn(|s| s.classes = 3)),
            fingerprint(&drawn(|s| s.channels = 1)),
            fingerprint(&drawn(|s| s.split = Split::Test)),
            fingerprint(&*Leading::of(Arc::new(drawn(|_| {})), 49, false)),
        ];
        assert!(others.iter().all(|other| *other != plain));
        assert_eq!(others.iter().collect::<std::collections::HashSet<_>>().len(), others.len());
    }

    #[test]
    fn an_empty_set_has_one_too() {
        assert_eq!(fingerprint(&drawn(|s| s.len = 0)), fingerprint(&drawn(|s| s.len = 0)));
    }
}
