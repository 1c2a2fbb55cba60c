//! Batches.

use data::segment::{IGNORED, MaskFinish, MaskTransform, SyntheticMasks, SyntheticMasksSpec};
use data::{
    Batch, Cached, DataError, Dataset, Loader, LoaderSettings, Preparation, Request, Sample, Sampler, Split,
    Task,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const LEN: usize = 13;

fn synthetic() -> SyntheticMasks {
    let spec = SyntheticMasksSpec {
        split: Split::Train,
        len: LEN,
        width: 40,
        height: 30,
        channels: 3,
        classes: 5,
        seed: 3,
    };
    SyntheticMasks::new(spec).unwrap()
}

/// Some of its images can't be read; one makes its reader panic.
struct Faulty(SyntheticMasks, Vec<usize>, Option<usize>, AtomicUsize);

impl Dataset for Faulty {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn class_names(&self) -> &[String] {
        self.0.class_names()
    }
    fn channels(&self) -> usize {
        3
    }
    fn task(&self) -> Task {
        Task::Segment
    }
    fn name(&self, index: usize) -> String {
        format!("image {index}")
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        self.3.fetch_add(1, Relaxed);
        assert!(self.2 != Some(index), "at its end");
        if self.1.contains(&index) {
            return Err(DataError::file(format!("file {index}"), "broken"));
        }
        self.0.read(index, out)?;
        // Something to ignore.
        out.mask[..50].fill(IGNORED);
        Ok(())
    }
}

fn set(bad: &[usize], panics: Option<usize>) -> Arc<Faulty> {
    Arc::new(Faulty(synthetic(), bad.to_vec(), panics, AtomicUsize::new(0)))
}

fn transform() -> MaskTransform {
    MaskTransform::plain(24, 32, &[0.5; 3], &[0.25; 3]).with_crops().with_distortion()
}

fn settings(batch: usize, workers: usize, skip_bad: bool) -> LoaderSettings {
    let sampler = Sampler { len: LEN, seed: 11, shuffle: true };
    LoaderSettings { sampler, batch, workers, depth: 3, skip_bad }
}

/// An epoch and a bit, in batches of `batch`.
fn requests(batch: usize) -> impl Iterator<Item = Request> + Send + Clone {
    (0..2).flat_map(move |epoch| {
        let first = (0..LEN).step_by(batch);
        first.map(move |first| Request { epoch, first, count: batch.min(LEN - first) })
    })
}

fn batches(mut loader: Loader) -> Vec<Batch> {
    let mut batches = vec![];
    while let Some(batch) = loader.next_batch().unwrap() {
        batches.push(batch.clone());
    }
    batches
}

fn load(set: Arc<dyn Dataset>, batch: usize, workers: usize) -> Vec<Batch> {
    batches(Loader::new(set, transform(), settings(batch, workers, true), requests(batch)).unwrap())
}

/// An image's number, its values, labels and weights.
type Seen = (usize, Vec<f32>, Vec<i32>, Vec<f32>);

/// Samples in order, without what depends on the batch they came in.
fn samples(batches: &[Batch]) -> Vec<Seen> {
    let area = transform().area();
    let each = |batch: &Batch| -> Vec<_> {
        let part = |i: usize| {
            let images = batch.images[i * area * 3..][..area * 3].to_vec();
            let labels = batch.labels[i * area..][..area].to_vec();
            (batch.indices[i], images, labels, batch.weights[i * area..][..area].to_vec())
        };
        (0..batch.request.count).map(part).collect()
    };
    batches.iter().flat_map(each).collect()
}

#[test]
fn batches_depend_on_requests_alone() {
    let alone = load(set(&[4], None), 4, 0);
    assert_eq!(alone.len(), 8);
    for workers in [1, 3] {
        assert_eq!(load(set(&[4], None), 4, workers), alone, "{workers} threads");
    }
    // Another division of the same samples, as other ranks have it.
    assert_eq!(samples(&load(set(&[4], None), 3, 2)), samples(&alone));
    let different: Vec<_> = samples(&alone).into_iter().map(|(_, images, ..)| images).collect();
    assert_ne!(different[0], different[LEN], "another epoch is cut elsewhere");
}

#[test]
fn ignored_pixels_and_padding_have_no_weight() {
    let loaded = load(set(&[], None), 5, 2);
    let area = transform().area();
    for batch in &loaded {
        let lengths = (batch.images.len(), batch.labels.len(), batch.weights.len(), batch.pixels.len());
        assert_eq!(lengths, (5 * area * 3, 5 * area, 5 * area, 0));
        let counted = batch.weights.iter().filter(|&&weight| weight == 1.0).count();
        assert!(batch.weights.iter().all(|&weight| weight == 0.0 || weight == 1.0));
        assert!(batch.labels.iter().all(|label| (0..5).contains(label)));
        assert!(counted > 0 && counted < batch.weights.len());
        assert!(batch.labels.iter().zip(&batch.weights).all(|(&label, &weight)| weight == 1.0 || label == 0));
    }
    let last = &loaded[2];
    assert_eq!(last.request.count, 3);
    assert!(last.weights[3 * area..].iter().all(|&weight| weight == 0.0));
    assert!(last.images[3 * area * 3..].iter().all(|&value| value == 0.0));
}

#[test]
fn a_device_comes_to_the_same() {
    let finished = load(set(&[4], None), 4, 2);
    let preparation = Preparation::Masks { transform: transform(), finished: false };
    let loader = Loader::new(set(&[4], None), preparation, settings(4, 2, true), requests(4)).unwrap();
    let bytes = batches(loader);
    let (finish, area) = (MaskFinish::of(&transform()).unwrap(), transform().area());
    for (batch, expected) in bytes.iter().zip(&finished) {
        assert_eq!((batch.images.len(), batch.labels.len(), batch.weights.len()), (0, 0, 0));
        let mut images = vec![f32::NAN; expected.images.len()];
        for (sample, out) in images.chunks_exact_mut(area * 3).enumerate() {
            let extent = [batch.extents[2 * sample], batch.extents[2 * sample + 1]];
            finish.apply(&batch.pixels[sample * area * 3..][..area * 3], extent, out);
        }
        assert_eq!(images, expected.images);
        for ((&mask, &label), &weight) in batch.masks.iter().zip(&expected.labels).zip(&expected.weights) {
            let counts = mask != IGNORED;
            assert_eq!(
                (if counts { i32::from(mask) } else { 0 }, f32::from(u8::from(counts))),
                (label, weight)
            );
        }
        assert_eq!((&batch.indices, &batch.skipped), (&expected.indices, &expected.skipped));
    }
}

#[test]
fn bad_images_are_skipped_and_named_or_end_the_batch() {
    let bad = [2, 7, 9];
    let loaded = load(set(&bad, None), LEN, 3);
    let order = Sampler { len: LEN, seed: 11, shuffle: true };
    let expected: Vec<usize> = (0..LEN).map(|p| order.index(0, p)).filter(|i| bad.contains(i)).collect();
    let skipped: Vec<usize> = loaded[0].skipped.iter().map(|skipped| skipped.index).collect();
    assert_eq!(skipped, expected);
    assert_eq!(
        (&*loaded[0].skipped[0].name, &*loaded[0].skipped[0].problem),
        (&*format!("image {}", expected[0]), &*format!("file {}: broken", expected[0]))
    );
    let area = transform().area();
    for (place, index) in loaded[0].indices.iter().enumerate() {
        let weights = &loaded[0].weights[place * area..][..area];
        assert_eq!(weights.iter().all(|&weight| weight == 0.0), bad.contains(index));
    }
    for workers in [0, 3] {
        let mut loader =
            Loader::new(set(&bad, None), transform(), settings(LEN, workers, false), requests(LEN)).unwrap();
        let error = loader.next_batch().unwrap_err();
        assert_eq!(error, DataError::file(format!("file {}", expected[0]), "broken"));
    }
}

#[test]
fn a_reader_that_panics_is_an_error() {
    let panicking = set(&[], Some(5));
    let mut loader = Loader::new(panicking, transform(), settings(LEN, 2, true), requests(LEN)).unwrap();
    let message = loader.next_batch().unwrap_err().to_string();
    assert!(message.contains("preparing image 5: at its end"), "{message}");
}

#[test]
fn pairs_are_read_once_if_they_are_kept() {
    let plain = load(set(&[], None), 4, 0);
    for workers in [0, 2] {
        let counted = set(&[], None);
        let cached = Arc::new(Cached::new(counted.clone(), 1 << 20));
        assert_eq!(load(cached.clone(), 4, workers), plain);
        let read = counted.3.load(Relaxed);
        // Two threads may read the same pair at the same time, where an epoch ends and the next begins; it is kept once.
        assert!(read == LEN || (workers > 1 && read > LEN), "{read} reads by {workers} workers");
        assert_eq!(cached.used(), LEN * 40 * 30 * 4);
        assert_eq!(load(cached, 4, workers), plain);
        assert_eq!(counted.3.load(Relaxed), read, "what is kept is not read again");
    }
    let small = Cached::new(set(&[], None), 40 * 30 * 4 + 1);
    (0..3).for_each(|index| small.read(index, &mut Sample::default()).unwrap());
    assert_eq!(small.used(), 40 * 30 * 4);
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = |transform, settings| {
        Loader::new(set(&[], None), transform, settings, requests(4)).err().unwrap().to_string()
    };
    assert!(refused(MaskTransform::plain(8, 8, &[0.5], &[0.5]), settings(4, 1, true)).contains("channels"));
    assert!(refused(transform(), settings(0, 1, true)).contains("batch"));
    let mut long = settings(4, 1, true);
    long.sampler.len = LEN + 1;
    assert!(refused(transform(), long).contains("sampler"));
}
