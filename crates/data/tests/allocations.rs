//! After a few batches a loader allocates nothing. One test, alone in its program, since the counter sees every thread.

use data::{
    DataError, Dataset, Finish, Geometry, Interpolation, Loader, LoaderSettings, Preparation, RandAugment,
    Request,
};
use data::{Sample, Sampler, Transform};
use std::sync::Arc;
use testing::allocations::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// A set in memory.
struct Memory(Vec<u8>, Vec<String>);

impl Dataset for Memory {
    fn len(&self) -> usize {
        1000
    }
    fn class_names(&self) -> &[String] {
        &self.1
    }
    fn channels(&self) -> usize {
        3
    }
    fn label(&self, index: usize) -> usize {
        index % 10
    }
    fn name(&self, index: usize) -> String {
        index.to_string()
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        out.image.reset(32, 32, 3).copy_from_slice(&self.0[index..index + 32 * 32 * 3]);
        Ok(())
    }
}

#[test]
fn a_batch_allocates_nothing() {
    let set = Arc::new(Memory((0..5000).map(|i| (i * 7) as u8).collect(), Vec::new()));
    let transform = Transform {
        geometry: Geometry::PadCrop { padding: 4 },
        flip: 0.5,
        rand_augment: Some(RandAugment { ops: 2, magnitude: 9 }),
        erase: 0.25,
        mixup: 0.8,
        cutmix: 1.0,
        ..Transform::evaluation(32, None, &[0.5; 3], &[0.5; 3], Interpolation::Bilinear)
    };
    let finish = Arc::new(Finish::of(&transform, &*set).unwrap());
    for (workers, finishes) in [(0, true), (2, true), (0, false), (2, false)] {
        let sampler = Sampler { len: 1000, seed: 1, shuffle: true };
        let settings = LoaderSettings { sampler, batch: 50, workers, depth: 3, skip_bad: true };
        let requests =
            (0..60).map(|step| Request { epoch: step / 20, first: step as usize % 20 * 50, count: 50 });
        let (set, transform) = (set.clone(), transform.clone());
        let loader = match finishes {
            true => Loader::new(set, transform, settings, requests),
            false => {
                let preparation = Preparation::Labels { transform, finish: Some(finish.clone()) };
                Loader::new(set, preparation, settings, requests)
            }
        };
        let mut loader = loader.unwrap();
        for _ in 0..20 {
            loader.next_batch().unwrap();
        }
        let before = allocations::count();
        for _ in 0..40 {
            loader.next_batch().unwrap().unwrap();
        }
        let allocated = allocations::count() - before;
        assert_eq!(allocated, 0, "{workers} threads, images {finishes}");
    }
}
