//! A number that tells two sets apart.

use crate::random::mix;
use crate::{Dataset, Sample, Task};

/// Images whose pixels are hashed, spread over the set.
const HASHED: usize = 32;

/// Hash of a set: equal for equal sets. Sets that differ in their number of images, their classes, any image's label, or
/// the pixels or mask of one of 32 images spread over the set, have different ones; a difference in other pixels alone
/// isn't seen.
pub fn fingerprint(set: &dyn Dataset) -> u64 {
    let mut hash = Hash::new(set.channels() as u64);
    hash.word(set.len() as u64);
    for name in set.class_names() {
        hash.bytes(name.as_bytes());
    }
    let masked = set.task() == Task::Segment;
    if !masked {
        (0..set.len()).for_each(|index| hash.word(set.label(index) as u64));
    }
    let mut sample = Sample::default();
    let hashed = HASHED.min(set.len());
    for index in (0..hashed).map(|k| k * set.len() / hashed) {
        match set.read(index, &mut sample) {
            Ok(()) => {
                hash.word((sample.image.height * sample.image.width) as u64);
                hash.bytes(&sample.image.pixels);
                if masked {
                    hash.bytes(&sample.mask);
                }
            }
            // A broken image is broken for every rank; how it can't be read says nothing more.
            Err(_) => hash.word(index as u64),
        }
    }
    hash.value()
}

struct Hash(u64);

impl Hash {
    fn new(start: u64) -> Self {
        Hash(start)
    }

    fn value(&self) -> u64 {
        self.0
    }

    fn word(&mut self, word: u64) {
        self.0 = mix(self.0 ^ word).wrapping_add(word.rotate_left(32));
    }

    fn bytes(&mut self, bytes: &[u8]) {
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
    use crate::{Split, Subset, Synthetic, SyntheticSpec};
    use std::sync::Arc;

    fn synthetic(change: impl FnOnce(&mut SyntheticSpec)) -> Synthetic {
        let mut spec =
            SyntheticSpec { split: Split::Train, len: 50, image_size: 8, channels: 3, classes: 4, seed: 1 };
        change(&mut spec);
        Synthetic::new(spec).unwrap()
    }

    #[test]
    fn equal_sets_agree_and_others_do_not() {
        let plain = fingerprint(&synthetic(|_| {}));
        assert_eq!(plain, fingerprint(&synthetic(|_| {})));
        let others = [
            fingerprint(&synthetic(|s| s.seed = 2)),
            fingerprint(&synthetic(|s| s.len = 51)),
            fingerprint(&synthetic(|s| s.image_size = 16)),
            fingerprint(&synthetic(|s| s.classes = 3)),
            fingerprint(&synthetic(|s| s.channels = 1)),
            fingerprint(&synthetic(|s| s.split = Split::Test)),
            fingerprint(&*Subset::of(Arc::new(synthetic(|_| {})), 49)),
        ];
        assert!(others.iter().all(|other| *other != plain));
        assert_eq!(others.iter().collect::<std::collections::HashSet<_>>().len(), others.len());
    }

    #[test]
    fn an_empty_set_has_one_too() {
        assert_eq!(fingerprint(&synthetic(|s| s.len = 0)), fingerprint(&synthetic(|s| s.len = 0)));
    }
}
