//! Cache of decoded images and masks in memory.
//!
//! A small set is decoded once in a run rather than once in every epoch. What doesn't fit is read as ever.

use crate::{DataError, Dataset, Layer, Sample};
use std::sync::Arc;

mod memory;
mod shelf;

pub use memory::available_memory;
pub(crate) use shelf::{Kept, Shelf};

/// A set whose images are kept when they are first read, as long as there is room.
pub struct Cached {
    set: Arc<dyn Dataset>,
    shelf: Shelf,
}

impl Cached {
    /// Keeps up to `budget` bytes of pixels and masks. A quarter of [`available_memory`] leaves room for everything else.
    pub fn new(set: Arc<dyn Dataset>, budget: usize) -> Self {
        let shelf = Shelf::new(set.len(), budget);
        Self { set, shelf }
    }

    /// Bytes kept by now.
    pub fn used(&self) -> usize {
        self.shelf.used()
    }
}

impl Layer for Cached {
    fn below(&self) -> &dyn Dataset {
        &*self.set
    }

    fn read_below(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        if index >= self.set.len() {
            return Err(DataError::IndexOutOfRange { index, len: self.set.len() });
        }
        if let Some(&Kept { width, height, ref bytes }) = self.shelf.get(index) {
            let pixels = out.image.reset(width, height, self.set.channels());
            let (image, mask) = bytes.split_at(pixels.len());
            pixels.copy_from_slice(image);
            out.mask.clear();
            out.mask.extend_from_slice(mask);
            return Ok(());
        }
        // What another set left there is not this one's.
        out.mask.clear();
        self.set.read(index, out)?;
        self.shelf.keep(index, out.size(), &[&out.image.pixels, &out.mask]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Image;
    use std::sync::Mutex;

    /// Image i is i + 1 pixels wide and 2 high. Counts how often each is read; the last can't be.
    struct Counted(Vec<String>, Mutex<Vec<usize>>);

    impl Counted {
        fn new(len: usize) -> Arc<Self> {
            Arc::new(Counted(vec!["one".into()], Mutex::new(vec![0; len])))
        }

        fn reads(&self) -> Vec<usize> {
            self.1.lock().unwrap().clone()
        }
    }

    impl Dataset for Counted {
        fn len(&self) -> usize {
            self.1.lock().unwrap().len()
        }
        fn class_names(&self) -> &[String] {
            &self.0
        }
        fn channels(&self) -> usize {
            3
        }
        fn label(&self, _: usize) -> usize {
            0
        }
        fn name(&self, index: usize) -> String {
            index.to_string()
        }
        fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
            let mut reads = self.1.lock().unwrap();
            reads[index] += 1;
            if index + 1 == reads.len() {
                return Err(DataError::file("last", "broken"));
            }
            out.image.reset(index + 1, 2, 3).fill(index as u8);
            Ok(())
        }
    }

    fn expected(index: usize) -> Sample {
        let image =
            Image { width: index + 1, height: 2, channels: 3, pixels: vec![index as u8; (index + 1) * 6] };
        Sample { image, mask: vec![] }
    }

    #[test]
    fn images_are_read_once_as_long_as_there_is_room() {
        let set = Counted::new(5);
        // Room for images 0, 1 and 2, of 6, 12 and 18 bytes, and not for 3, of 24.
        let cached = Cached::new(set.clone(), 40);
        let mut image = Sample::default();
        for _ in 0..3 {
            for index in [2, 0, 3, 1] {
                cached.read(index, &mut image).unwrap();
                assert_eq!(image, expected(index));
            }
            assert_eq!(cached.used(), 36);
        }
        assert_eq!(set.reads(), [1, 1, 1, 3, 0]);
    }

    #[test]
    fn failures_are_not_kept() {
        let set = Counted::new(2);
        let cached = Cached::new(set.clone(), 1000);
        let mut image = Sample::default();
        for _ in 0..2 {
            assert_eq!(cached.read(1, &mut image), Err(DataError::file("last", "broken")));
        }
        assert_eq!((set.reads()[1], cached.used()), (2, 0));
        assert_eq!(cached.read(2, &mut image), Err(DataError::IndexOutOfRange { index: 2, len: 2 }));
    }

    #[test]
    fn threads_share_it_and_the_budget_holds() {
        let len = 101;
        let cached = Cached::new(Counted::new(len), 10_000);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let cached = &cached;
                scope.spawn(move || {
                    let mut image = Sample::default();
                    for step in 0..2000 {
                        let index = (step * 7 + thread * 13) % (len - 1);
                        cached.read(index, &mut image).unwrap();
                        assert_eq!(image, expected(index));
                        assert!(cached.used() <= 10_000);
                    }
                });
            }
        });
        let kept: usize =
            (0..len).filter_map(|index| cached.shelf.get(index)).map(|kept| kept.bytes.len()).sum();
        assert_eq!(kept, cached.used());
    }
}
