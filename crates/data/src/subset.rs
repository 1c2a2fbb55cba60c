//! Subset of a set, with a share of every class.

use crate::{DataError, Dataset, Layer, Sample};
use std::sync::Arc;

/// Some images of another set, in its order.
///
/// Sets that are sorted by class would lose whole classes if simply cut off, so images are taken by their place among
/// those of their class: the first of every class, then the next, in the proportions of the whole. A set whose classes
/// come mixed, as CIFAR's do, is cut off after its first images, and so is one with masks.
pub struct Subset {
    set: Arc<dyn Dataset>,
    indices: Vec<u32>,
}

impl Subset {
    /// `len` images of a set; the set itself if it has no more.
    pub fn of(set: Arc<dyn Dataset>, len: usize) -> Arc<dyn Dataset> {
        if len >= set.len() {
            return set;
        }
        let all = 0..set.len() as u32;
        let indices =
            if set.sorted_by_class() { by_place_in_class(&*set, len) } else { all.take(len).collect() };
        Arc::new(Subset { set, indices })
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

impl Layer for Subset {
    fn below(&self) -> &dyn Dataset {
        &*self.set
    }

    fn images(&self) -> usize {
        self.indices.len()
    }

    fn index_below(&self, index: usize) -> usize {
        self.indices[index] as usize
    }

    fn read_below(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
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
        sorted: bool,
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
        fn sorted_by_class(&self) -> bool {
            self.sorted
        }
        fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
            out.image.reset(1, 1, 1).fill(index as u8);
            Ok(())
        }
    }

    fn sorted(sizes: &[usize], sorted: bool) -> Arc<dyn Dataset> {
        let labels = sizes.iter().enumerate().flat_map(|(class, &n)| vec![class; n]).collect();
        Arc::new(Sorted { labels, names: (0..sizes.len()).map(|c| c.to_string()).collect(), sorted })
    }

    fn names(set: &dyn Dataset) -> Vec<String> {
        (0..set.len()).map(|index| set.name(index)).collect()
    }

    #[test]
    fn every_class_keeps_its_share() {
        let set = Subset::of(sorted(&[10, 20, 30], true), 12);
        assert_eq!(names(&*set), ["0", "1", "10", "11", "12", "13", "30", "31", "32", "33", "34", "35"]);
        let mut sample = Sample::default();
        set.read(2, &mut sample).unwrap();
        assert_eq!((sample.image.pixels[0], set.label(2), set.label(11)), (10, 1, 2));
        assert!(set.read(12, &mut sample).is_err());
    }

    #[test]
    fn a_small_class_is_not_lost() {
        assert_eq!(names(&*Subset::of(sorted(&[100, 1, 100], true), 5)), ["0", "1", "100", "101", "102"]);
    }

    #[test]
    fn a_mixed_set_is_cut_off_and_a_whole_one_left_alone() {
        assert_eq!(names(&*Subset::of(sorted(&[4, 4], false), 3)), ["0", "1", "2"]);
        assert_eq!(Subset::of(sorted(&[4, 4], true), 8).len(), 8);
    }
}
