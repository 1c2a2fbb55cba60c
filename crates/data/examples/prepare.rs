//! Microseconds it takes to prepare an image, and what a loader with one thread delivers.
//!
//!     cargo run --release -p data --example prepare

use data::{
    DataError, Dataset, Geometry, Image, Interpolation, Loader, LoaderSettings, Preparer, RandAugment,
    Request, Sample, Sampler, Transform,
};
use std::sync::Arc;
use std::time::Instant;

const ROUND: usize = 16;

/// Images of one size in memory, as CIFAR is.
struct Memory {
    images: Vec<Image>,
    names: Vec<String>,
}

impl Memory {
    fn new(count: usize, width: usize, height: usize) -> Self {
        let image = |seed: usize| {
            let mut image = Image::default();
            let pixels = image.reset(width, height, 3);
            pixels.iter_mut().enumerate().for_each(|(i, byte)| *byte = ((i * (seed + 7)) >> 3) as u8);
            image
        };
        Self { images: (0..count).map(image).collect(), names: vec!["one".into(), "two".into()] }
    }
}

impl Dataset for Memory {
    fn len(&self) -> usize {
        self.images.len()
    }
    fn class_names(&self) -> &[String] {
        &self.names
    }
    fn channels(&self) -> usize {
        3
    }
    fn label(&self, index: usize) -> usize {
        index % 2
    }
    fn name(&self, index: usize) -> String {
        index.to_string()
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        out.image.clone_from(&self.images[index]);
        Ok(())
    }
}

fn plain(size: usize) -> Transform {
    Transform::evaluation(size, None, &[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225], Interpolation::Bilinear)
}

fn cifar() -> Transform {
    Transform { geometry: Geometry::PadCrop { padding: 4 }, flip: 0.5, ..plain(32) }
}

/// The best of many short rounds: others may use the machine, too.
fn preparing(name: &str, transform: &Transform, set: &Memory) -> Result<(), DataError> {
    let mut preparer = Preparer::new(transform.clone())?;
    let mut out = vec![0.0; transform.sample_len()];
    let mut best = f64::INFINITY;
    for epoch in 0..20 {
        for (round, images) in set.images.chunks(ROUND).enumerate() {
            let start = Instant::now();
            for (place, image) in images.iter().enumerate() {
                let position = round * ROUND + place;
                let choice = transform.choose(1, epoch, position, (image.width, image.height));
                preparer.prepare(image, &choice, &mut out)?;
            }
            best = best.min(start.elapsed().as_secs_f64() / images.len() as f64);
        }
    }
    println!("{name:50} {:8.2} µs an image", best * 1e6);
    Ok(())
}

/// The best of many groups of batches, each longer than what was prepared ahead.
fn loading(name: &str, transform: &Transform, set: &Arc<Memory>, workers: usize) -> Result<(), DataError> {
    let (batch, group, groups) = (128, 16, 40);
    let len = set.len();
    let steps = len / batch;
    let sampler = Sampler { len, seed: 1, shuffle: true };
    let settings = LoaderSettings { sampler, batch, workers, depth: 2, skip_bad: false };
    let requests = (0..group * groups).map(move |step| Request {
        epoch: (step / steps) as u64,
        first: step % steps * batch,
        count: batch,
    });
    let mut loader = Loader::new(set.clone(), transform.clone(), settings, requests)?;
    let mut best = f64::INFINITY;
    for _ in 0..groups {
        let start = Instant::now();
        for _ in 0..group {
            loader.next_batch()?;
        }
        best = best.min(start.elapsed().as_secs_f64() / (group * batch) as f64);
    }
    println!("{name:50} {:8.2} µs an image ({:.0} images/s)", best * 1e6, 1.0 / best);
    Ok(())
}

fn main() -> Result<(), DataError> {
    let small = Arc::new(Memory::new(4096, 32, 32));
    let photos = Memory::new(128, 500, 375);
    let rand_augment = Some(RandAugment { ops: 2, magnitude: 9 });
    let geometry = Geometry::RandomResizedCrop { scale: (0.08, 1.0), ratio: (0.75, 4.0 / 3.0) };
    let crop = Transform { geometry, flip: 0.5, ..plain(224) };
    let strong = Transform { rand_augment, ..cifar() };
    let all = Transform { mixup: 0.8, cutmix: 1.0, erase: 0.25, ..strong.clone() };

    preparing("32 px: normalise", &plain(32), &small)?;
    preparing("32 px: shift, flip", &cifar(), &small)?;
    preparing("32 px: shift, flip, RandAugment(2, 9)", &strong, &small)?;
    preparing("500×375 to 224: random part, flip", &crop, &photos)?;
    preparing("500×375 to 224: and RandAugment(2, 9)", &Transform { rand_augment, ..crop.clone() }, &photos)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for workers in [0, 1, 2, 4, 8, 16].into_iter().filter(|&n| n <= threads) {
        loading(&format!("loader, {workers} threads: shift, flip"), &cifar(), &small, workers)?;
        loading(&format!("loader, {workers} threads: and RandAugment, erase, mix"), &all, &small, workers)?;
    }
    Ok(())
}
