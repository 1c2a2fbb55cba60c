//! A part of a set: the first images of every class.

use crate::{DataError, Dataset, Image};
use std::sync::Arc;

/// The leading images of another set.
///
/// Sets that are sorted by class would lose whole classes if simply cut off, so images are taken by their place among
/// those of their class: the first of every class, then the next, in the proportions of the whole. A set whose classes
/// come mixed, as CIFAR's do, is simply cut off: its leading part is what others call a tenth of it.
pub struct Leading {
    set: Arc<dyn Dataset>,
    indices: Vec<u32>,
}

impl Leading {
    /// `len` images of a set; all of it if it has no more.
    pub fn of(set: Arc<dyn Dataset>, len: usize, by_class: bool) -> Arc<dyn Dataset> {
        if len >= set.len() {
            return set;
        }
        let all = 0..set.len() as u32;
        let indices = if by_class { by_place_in_class(&*set, len) } else { all.take(len).collect() };
        Arc::new(Leading { set, indices })
    }
}

fn by_place_in_class(set: &dyn Dataset, len: usize) -> Vec<u32> {
    let mut sizes = vec![0u64; set.classes()];
    let places: Vec<u64> = (0..set.len())
        .map(|index| {
            let size = &mut sizes[set.label(index)];
            *size += 1;
            *size - 1
        })
        .collect();
    let mut indices: Vec<u32> = (0..set.len() as u32).collect();
    // The first of every class come before all else, however unequal the classes are; then in proportion. Shares are
    // compared as fractions, place/size, without rounding.
    indices.sort_by(|&a, &b| {
        let key = |i: u32| (places[i as usize], sizes[set.label(i as usize)]);
        let ((place_a, size_a), (place_b, size_b)) = (key(a), key(b));
        (place_a > 0).cmp(&(place_b > 0)).then((place_a * size_b).cmp(&(place_b * size_a))).then(a.cmp(&b))
    });
    indices.truncate(len);
    indices.sort_unstable();
    indices
}

impl Dataset for Leading {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn class_names(&self) -> &[String] {
        self.set.class_names()
    }

    fn channels(&self) -> usize {
        self.set.channels()
    }

    fn label(&self, index: usize) -> usize {
        self.set.label(self.indices[index] as usize)
    }

    fn name(&self, index: usize) -> String {
        self.set.name(self.indices[index] as usize)
    }

    fn size(&self) -> Option<(usize, usize)> {
        self.set.size()
    }

    fn in_memory(&self) -> bool {
        self.set.in_memory()
    }

    fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
        let Some(&original) = self.indices.get(index) else {
            return Err(DataError::IndexOutOfRange { index, len: self.indices.len() });
        };
        self.set.read(original as usize, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images sorted by class: `sizes[c]` of class c.
    struct Sorted {
        labels: Vec<usize>,
        names: Vec<String>,
    }

    impl Dataset for Sorted {
        fn len(&self) -> usize {
            self.labels.len()
        }
        fn class_names(&self) -> &[String] {
            &self.names
        }
        fn channels(&self) -> usize {
            1
        }
        fn label(&self, index: usize) -> usize {
            self.labels[index]
        }
        fn name(&self, index: usize) -> String {
            index.to_string()
        }
        fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
            out.reset(1, 1, 1).fill(index as u8);
            Ok(())
        }
    }

    fn sorted(sizes: &[usize]) -> Arc<dyn Dataset> {
        let labels = sizes.iter().enumerate().flat_map(|(class, &n)| vec![class; n]).collect();
        Arc::new(Sorted { labels, names: (0..sizes.len()).map(|c| c.to_string()).collect() })
    }

    fn names(set: &dyn Dataset) -> Vec<String> {
        (0..set.len()).map(|index| set.name(index)).collect()
    }

    #[test]
    fn every_class_keeps_its_share() {
        let set = Leading::of(sorted(&[10, 20, 30]), 12, true);
        assert_eq!(names(&*set), ["0", "1", "10", "11", "12", "13", "30", "31", "32", "33", "34", "35"]);
        let mut image = Image::default();
        set.read(2, &mut image).unwrap();
        assert_eq!((image.pixels[0], set.label(2), set.label(11)), (10, 1, 2));
        assert!(set.read(12, &mut image).is_err());
    }

    #[test]
    fn a_small_class_is_not_lost() {
        assert_eq!(names(&*Leading::of(sorted(&[100, 1, 100]), 5, true)), ["0", "1", "100", "101", "102"]);
    }

    #[test]
    fn a_mixed_set_is_cut_off_and_a_whole_one_left_alone() {
        assert_eq!(names(&*Leading::of(sorted(&[4, 4]), 3, false)), ["0", "1", "2"]);
        assert_eq!(Leading::of(sorted(&[4, 4]), 8, true).len(), 8);
    }
}
