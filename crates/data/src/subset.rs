//! The leading part of a set.

use crate::{DataError, Dataset, Image};
use std::sync::Arc;

/// The first images of a set, or the first of each class.
pub struct Leading {
    set: Arc<dyn Dataset>,
    part: Part,
}

enum Part {
    /// This many, from the first on.
    First(usize),
    /// Those at these indices, in ascending order.
    Of(Vec<usize>),
}

impl Leading {
    /// Takes a `fraction` of a set, more than 0 and at most 1, rounded to the nearest number of images.
    ///
    /// A set that is sorted by class, as folders are, would lose its last classes with its last images. With `stratified` the
    /// fraction is taken of each class instead: rounded for each, and at least one image. Sets that are shuffled already need
    /// none of that, and there the leading part is just what its name says.
    pub fn new(set: Arc<dyn Dataset>, fraction: f64, stratified: bool) -> Result<Self, DataError> {
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(DataError::Fraction { found: fraction });
        }
        let part_of = |count: usize| ((count as f64 * fraction).round() as usize).clamp(1.min(count), count);
        let part = if stratified {
            Part::Of(first_of_each_class(&*set, part_of))
        } else {
            Part::First(part_of(set.len()))
        };
        Ok(Self { set, part })
    }

    fn index(&self, index: usize) -> Result<usize, DataError> {
        let found = match &self.part {
            Part::First(len) => (index < *len).then_some(index),
            Part::Of(indices) => indices.get(index).copied(),
        };
        found.ok_or(DataError::IndexOutOfRange { index, len: self.len() })
    }

    /// As a slice would panic: the trait gives no way to refuse.
    fn index_within(&self, index: usize) -> usize {
        match &self.part {
            Part::First(_) => index,
            Part::Of(indices) => indices[index],
        }
    }
}

fn first_of_each_class(set: &dyn Dataset, part_of: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut left = vec![0; set.classes()];
    (0..set.len()).for_each(|index| left[set.label(index)] += 1);
    left.iter_mut().for_each(|count| *count = part_of(*count));
    let mut take = |index: &usize| {
        let left = &mut left[set.label(*index)];
        let taken = *left > 0;
        *left -= usize::from(taken);
        taken
    };
    (0..set.len()).filter(|index| take(index)).collect()
}

impl Dataset for Leading {
    fn len(&self) -> usize {
        match &self.part {
            Part::First(len) => *len,
            Part::Of(indices) => indices.len(),
        }
    }

    fn class_names(&self) -> &[String] {
        self.set.class_names()
    }

    fn channels(&self) -> usize {
        self.set.channels()
    }

    fn label(&self, index: usize) -> usize {
        self.set.label(self.index_within(index))
    }

    fn name(&self, index: usize) -> String {
        self.set.name(self.index_within(index))
    }

    fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
        self.set.read(self.index(index)?, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Split, Synthetic, SyntheticSpec};

    /// Images of class i, `counts[i]` of them, one class after the other. The pixel of an image is its index.
    struct Sorted(Vec<String>, Vec<usize>);

    impl Sorted {
        fn new(counts: &[usize]) -> Arc<Self> {
            let labels = counts.iter().enumerate().flat_map(|(class, &count)| vec![class; count]);
            Arc::new(Sorted((0..counts.len()).map(|class| class.to_string()).collect(), labels.collect()))
        }
    }

    impl Dataset for Sorted {
        fn len(&self) -> usize {
            self.1.len()
        }
        fn class_names(&self) -> &[String] {
            &self.0
        }
        fn channels(&self) -> usize {
            1
        }
        fn label(&self, index: usize) -> usize {
            self.1[index]
        }
        fn name(&self, index: usize) -> String {
            index.to_string()
        }
        fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
            out.reset(1, 1, 1)[0] = index as u8;
            Ok(())
        }
    }

    fn read_all(set: &Leading) -> Vec<u8> {
        let mut image = Image::default();
        let read = |index| set.read(index, &mut image).map(|()| image.pixels[0]);
        (0..set.len()).map(read).collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn a_part_of_each_class_is_taken() {
        let part = Leading::new(Sorted::new(&[10, 3, 1, 0, 6]), 0.25, true).unwrap();
        assert_eq!(read_all(&part), [0, 1, 2, 10, 13, 14, 15]);
        assert_eq!((0..part.len()).map(|i| part.label(i)).collect::<Vec<_>>(), [0, 0, 0, 1, 2, 4, 4]);
        assert_eq!(part.name(3), "10");
        let out_of_range = part.read(7, &mut Image::default());
        assert_eq!(out_of_range, Err(DataError::IndexOutOfRange { index: 7, len: 7 }));
    }

    #[test]
    fn a_plain_part_is_the_beginning() {
        let part = |fraction| Leading::new(Sorted::new(&[4, 4]), fraction, false).unwrap();
        assert_eq!(read_all(&part(0.6)), [0, 1, 2, 3, 4]);
        assert_eq!(part(0.001).len(), 1);
        assert_eq!(part(1.0).len(), 8);
        let out_of_range = part(0.5).read(4, &mut Image::default());
        assert_eq!(out_of_range, Err(DataError::IndexOutOfRange { index: 4, len: 4 }));
    }

    #[test]
    fn the_whole_is_the_set_itself() {
        let spec =
            SyntheticSpec { split: Split::Train, len: 23, image_size: 8, channels: 3, classes: 5, seed: 1 };
        let set = Arc::new(Synthetic::new(spec).unwrap());
        for stratified in [false, true] {
            let whole = Leading::new(set.clone(), 1.0, stratified).unwrap();
            assert_eq!(whole.len(), 23);
            assert!((0..23).all(|i| whole.label(i) == set.label(i) && whole.name(i) == set.name(i)));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for fraction in [0.0, -1.0, 1.01, f64::NAN, f64::INFINITY] {
            assert!(Leading::new(Sorted::new(&[3]), fraction, true).is_err(), "{fraction}");
        }
    }
}
