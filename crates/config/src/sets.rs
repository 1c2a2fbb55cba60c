//! The data of a run: opened once, counted, and cut to the part that is asked for.

use crate::ConfigError;
use crate::MaskedSets;
use crate::{Cache, Facts, Raw, Resolved, Source};
use data::segment::{self, Unpaired};
use data::{
    Cached, Cifar, CifarKind, CifarLabels, Dataset, ImageFolder, Leading, Skipped, Split, Synthetic,
    available_memory,
};
use std::sync::Arc;

/// What a model learns from, and what it is judged by.
#[derive(Clone)]
pub enum Sets {
    /// With a class for each image.
    Images(ImageSets),
    /// With a class for each pixel.
    Masked(MaskedSets),
}

#[derive(Clone)]
pub struct ImageSets {
    pub train: Arc<dyn Dataset>,
    pub test: Arc<dyn Dataset>,
}

impl Sets {
    /// Of what is learned, in the order of the labels.
    pub fn class_names(&self) -> &[String] {
        match self {
            Sets::Images(sets) => sets.train.class_names(),
            Sets::Masked(sets) => sets.train.class_names(),
        }
    }

    /// Of what is judged by.
    pub fn test_class_names(&self) -> &[String] {
        match self {
            Sets::Images(sets) => sets.test.class_names(),
            Sets::Masked(sets) => sets.test.class_names(),
        }
    }

    /// How many there are to evaluate on.
    pub fn test_images(&self) -> usize {
        self.facts().test_images
    }

    /// Tell other data apart, of both parts.
    pub fn fingerprints(&self) -> [u64; 2] {
        match self {
            Sets::Images(sets) => [data::fingerprint(&*sets.train), data::fingerprint(&*sets.test)],
            Sets::Masked(sets) => [segment::fingerprint(&*sets.train), segment::fingerprint(&*sets.test)],
        }
    }

    /// Files that have no partner, where they were to be left out.
    pub fn left_out(&self) -> &[Skipped] {
        match self {
            Sets::Images(_) => &[],
            Sets::Masked(sets) => &sets.left_out,
        }
    }

    fn facts(&self) -> Facts {
        let (train_images, test_images, classes, channels) = match self {
            Sets::Images(ImageSets { train, test }) => {
                (train.len(), test.len(), train.classes(), train.channels())
            }
            Sets::Masked(MaskedSets { train, test, .. }) => {
                (train.len(), test.len(), train.classes(), train.channels())
            }
        };
        Facts { train_images, test_images, classes, channels }
    }
}

/// Data that was found; nothing of it was decoded yet.
pub struct Opened {
    /// None for the drawn sets, which have whatever a run asks for.
    found: Option<Sets>,
}

impl Opened {
    /// Opens both parts of a set. `channels`: of images that have a choice of them. `skip_bad`: images without a mask, and masks
    /// without an image, are left out.
    pub fn new(source: &Source, channels: Option<usize>, skip_bad: bool) -> Result<Self, ConfigError> {
        let cifar = |path, kind| {
            let open = |split| -> Result<Arc<dyn Dataset>, ConfigError> {
                Ok(Arc::new(Cifar::open(path, kind, split)?))
            };
            Ok::<_, ConfigError>(ImageSets { train: open(Split::Train)?, test: open(Split::Test)? })
        };
        let images = match source {
            Source::Synthetic | Source::SyntheticMasks => return Ok(Opened { found: None }),
            Source::Ade20k(_) | Source::Masks(_) => {
                let unpaired = if skip_bad { Unpaired::LeftOut } else { Unpaired::Refused };
                let sets = MaskedSets::find(source, channels.unwrap_or(COLOURS), unpaired)?;
                return Ok(Opened { found: Some(Sets::Masked(sets)) });
            }
            Source::Cifar10(path) => cifar(path, CifarKind::Ten)?,
            Source::Cifar100 { path, coarse } => {
                let labels = if *coarse { CifarLabels::Coarse } else { CifarLabels::Fine };
                cifar(path, CifarKind::Hundred { labels })?
            }
            Source::Folder(path) => {
                let open = |split| -> Result<Arc<dyn Dataset>, ConfigError> {
                    Ok(Arc::new(ImageFolder::open(path, split, channels.unwrap_or(COLOURS))?))
                };
                ImageSets { train: open(Split::Train)?, test: open(Split::Test)? }
            }
        };
        Ok(Opened { found: Some(Sets::Images(images)) })
    }

    /// What `raw` names.
    pub fn of(raw: &Raw) -> Result<Self, ConfigError> {
        Self::new(&raw.source()?, raw.channels, raw.skip_bad_images)
    }

    /// What was found; nothing of a drawn set.
    pub fn found(&self) -> Option<Facts> {
        self.found.as_ref().map(Sets::facts)
    }

    /// What the set holds, for [`Raw::resolve`].
    pub fn facts(&self, raw: &Raw) -> Result<Facts, ConfigError> {
        self.found().map_or_else(|| Facts::synthetic(raw), Ok)
    }

    /// The images that a run uses.
    pub fn for_run(self, run: &Resolved) -> Result<Sets, ConfigError> {
        match self.found {
            Some(Sets::Images(ImageSets { train, test })) => {
                let by_class = matches!(run.data.source, Source::Folder(_));
                let train = Leading::of(train, run.data.train_images(), by_class);
                let sets = ImageSets { train, test };
                Ok(Sets::Images(if by_class { cached(sets, run.data.cache) } else { sets }))
            }
            Some(Sets::Masked(sets)) => {
                Ok(Sets::Masked(sets.leading(run.data.train_images()).cached(run.data.cache)))
            }
            None if run.data.source == Source::SyntheticMasks => {
                Ok(Sets::Masked(MaskedSets::drawn(|split| run.drawn_masks(split))?))
            }
            None => Ok(Sets::Images(ImageSets {
                train: Arc::new(Synthetic::new(run.synthetic(Split::Train))?),
                test: Arc::new(Synthetic::new(run.synthetic(Split::Test))?),
            })),
        }
    }
}

/// Red, green and blue.
const COLOURS: usize = 3;

/// Files are decoded once, as far as memory allows; the held-out part has a fifth of the room.
fn cached(sets: ImageSets, cache: Cache) -> ImageSets {
    let Some(budget) = cache_budget(cache) else { return sets };
    let part = |set, bytes: u64| Arc::new(Cached::new(set, bytes as usize)) as Arc<dyn Dataset>;
    ImageSets { train: part(sets.train, budget / 5 * 4), test: part(sets.test, budget / 5) }
}

/// Bytes of decoded images that may be kept.
pub(crate) fn cache_budget(cache: Cache) -> Option<u64> {
    match cache {
        Cache::Off => None,
        Cache::Bytes(bytes) => Some(bytes),
        Cache::Auto => Some(available_memory().unwrap_or(0) / 4),
    }
}

/// Resolves what was typed on the data it names.
pub fn resolve(raw: &Raw, world: usize) -> Result<(Resolved, Sets), ConfigError> {
    let opened = Opened::of(raw)?;
    let mut run = raw.resolve(&opened.facts(raw)?, world)?;
    let sets = opened.for_run(&run)?;
    run.class_names = sets.class_names().to_vec();
    Ok((run, sets))
}

/// The data of a run that was resolved before.
pub fn reopen(run: &Resolved) -> Result<Sets, ConfigError> {
    let (channels, skip_bad) = (Some(run.network.channels()), run.data.skip_bad_images);
    Opened::new(&run.data.source, channels, skip_bad)?.for_run(run)
}
