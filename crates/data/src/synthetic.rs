//! Synthetic set: learnable, deterministic, and there without a download.
//!
//! Each image shows one figure on a plain ground. Its class is the figure's form alone; place, tilt,
//! colours, shading and noise are drawn independently of it, and so is size among the single shapes.
//!
//! Image i is a pure function of (seed, split, i, image size, channels, classes). As it is computed
//! with IEEE additions, multiplications, divisions and square roots only, its bytes are the same on
//! every platform.
//!
//! Classes 0 to 9 are single shapes. Above that, each further ten repeat the shapes in another
//! arrangement: two to four copies, then one to four within a round frame, then within a square one.
//! A mirror image, left to right, keeps its class.

mod figure;
pub mod files;
pub(crate) mod scene;
pub(crate) mod shape;

use crate::limits::{SYNTHETIC_CHANNELS, SYNTHETIC_SIDES, within};
use crate::random::key;
use crate::registry::{Entry, Facts, Images, Open};
use crate::sampler::permute;
use crate::{DataError, Dataset, Sample, Split, Task};
use figure::Figure;
use scene::Scene;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Classes that a synthetic set may have.
pub const CLASSES: RangeInclusive<usize> = 2..=figure::COUNT;

/// Entry of the registry.
pub(crate) const ENTRY: Entry = Entry {
    name: "synthetic",
    place: None,
    task: Task::Classify,
    about: "synthetic images of one figure each",
    image_size: 32,
    images: Images::Synthetic,
    facts: Some(Facts { train_images: 20_000, test_images: 2_000, classes: 10, channels: 3 }),
    run: None,
    archive: None,
    open: Open::Synthetic(|spec| Ok(Arc::new(Synthetic::new(spec)?))),
};

/// The streams of randomness that one seed gives, kept apart by these numbers.
const LABELS: u64 = 1;
const SCENES: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticSpec {
    pub split: Split,
    pub len: usize,
    pub image_size: usize,
    pub channels: usize,
    pub classes: usize,
    pub seed: u64,
}

/// The synthetic set. Any `len` is fine: a longer set starts with the images of a shorter one.
#[derive(Clone, Debug)]
pub struct Synthetic {
    spec: SyntheticSpec,
    class_names: Vec<String>,
}

impl Synthetic {
    pub fn new(spec: SyntheticSpec) -> Result<Self, DataError> {
        let SyntheticSpec { image_size, channels, classes, .. } = spec;
        within("classes", classes, &CLASSES, "the synthetic set can have so many")?;
        within("image-size", image_size, &SYNTHETIC_SIDES, "synthetic images can have these sizes")?;
        within("channels", channels, &SYNTHETIC_CHANNELS, "synthetic images can have so many")?;
        let class_names = (0..classes).map(|class| Figure::of_class(class).to_string()).collect();
        Ok(Self { spec, class_names })
    }

    fn key(&self, purpose: u64, index: usize) -> u64 {
        key(&[self.spec.seed, self.spec.split.number(), purpose, index as u64])
    }

    pub fn spec(&self) -> &SyntheticSpec {
        &self.spec
    }
}

impl Dataset for Synthetic {
    fn len(&self) -> usize {
        self.spec.len
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        self.spec.channels
    }

    /// Each run of `classes` images shows every class once, in an order of its own; so the counts
    /// of two classes differ by one at most, whatever the length of the set.
    fn label(&self, index: usize) -> usize {
        let classes = self.spec.classes;
        let run = self.key(LABELS, index / classes);
        permute(index % classes, classes, run)
    }

    fn name(&self, index: usize) -> String {
        format!("synthetic {} image {index}", self.spec.split)
    }

    fn size(&self) -> Option<(usize, usize)> {
        Some((self.spec.image_size, self.spec.image_size))
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        if index >= self.len() {
            return Err(DataError::IndexOutOfRange { index, len: self.len() });
        }
        let SyntheticSpec { image_size, channels, .. } = self.spec;
        let scene = Scene::new(Figure::of_class(self.label(index)), self.key(SCENES, index));
        scene.paint(image_size, channels, out.image.reset(image_size, image_size, channels));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
