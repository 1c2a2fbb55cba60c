//! Decoded images kept in memory.
//!
//! A small set is decoded once in a run rather than once in every epoch. What doesn't fit is read as ever.

use crate::{DataError, Dataset, Image};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

pub use memory::available_memory;
mod memory;

/// A set whose images are kept when they are first read, as long as there is room.
pub struct Cached {
    set: Arc<dyn Dataset>,
    slots: Vec<OnceLock<Kept>>,
    /// Bytes that may be kept.
    budget: usize,
    used: AtomicUsize,
}

/// An image without what all have in common.
struct Kept {
    width: u32,
    height: u32,
    pixels: Box<[u8]>,
}

impl Cached {
    /// Keeps up to `budget` bytes of pixels. A quarter of [`available_memory`] leaves room for everything else.
    pub fn new(set: Arc<dyn Dataset>, budget: usize) -> Self {
        let slots = (0..set.len()).map(|_| OnceLock::new()).collect();
        Self { set, slots, budget, used: AtomicUsize::new(0) }
    }

    /// Bytes of pixels kept by now.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Takes bytes from the budget, if that many are left.
    fn reserve(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|&used| used <= self.budget);
        self.used.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    fn keep(&self, slot: &OnceLock<Kept>, image: &Image) {
        let (Ok(width), Ok(height)) = (u32::try_from(image.width), u32::try_from(image.height)) else {
            return;
        };
        let bytes = image.pixels.len();
        if !self.reserve(bytes) {
            return;
        }
        let kept = Kept { width, height, pixels: image.pixels.as_slice().into() };
        if slot.set(kept).is_err() {
            // Another thread read the same image in the meantime, and keeps it.
            self.used.fetch_sub(bytes, Relaxed);
        }
    }
}

impl Dataset for Cached {
    fn len(&self) -> usize {
        self.set.len()
    }

    fn class_names(&self) -> &[String] {
        self.set.class_names()
    }

    fn channels(&self) -> usize {
        self.set.channels()
    }

    fn label(&self, index: usize) -> usize {
        self.set.label(index)
    }

    fn name(&self, index: usize) -> String {
        self.set.name(index)
    }

    fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
        let Some(slot) = self.slots.get(index) else {
            return Err(DataError::IndexOutOfRange { index, len: self.len() });
        };
        if let Some(kept) = slot.get() {
            let pixels = out.reset(kept.width as usize, kept.height as usize, self.set.channels());
            pixels.copy_from_slice(&kept.pixels);
            return Ok(());
        }
        self.set.read(index, out)?;
        self.keep(slot, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
            let mut reads = self.1.lock().unwrap();
            reads[index] += 1;
            if index + 1 == reads.len() {
                return Err(DataError::file("last", "broken"));
            }
            out.reset(index + 1, 2, 3).fill(index as u8);
            Ok(())
        }
    }

    fn expected(index: usize) -> Image {
        Image { width: index + 1, height: 2, channels: 3, pixels: vec![index as u8; (index + 1) * 6] }
    }

    #[test]
    fn images_are_read_once_as_long_as_there_is_room() {
        let set = Counted::new(5);
        // Room for images 0, 1 and 2, of 6, 12 and 18 bytes, and not for 3, of 24.
        let cached = Cached::new(set.clone(), 40);
        let mut image = Image::default();
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
        let mut image = Image::default();
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
                    let mut image = Image::default();
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
            cached.slots.iter().filter_map(|slot| slot.get()).map(|kept| kept.pixels.len()).sum();
        assert_eq!(kept, cached.used());
    }
}
