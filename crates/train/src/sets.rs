//! The data of a run: opened once, counted, and cut to the part that is asked for.

use crate::config::{Cache, Facts, Raw, Resolved, Source};
use crate::error::TrainError;
use data::{
    Cached, Cifar, CifarKind, CifarLabels, Dataset, ImageFolder, Leading, Split, Synthetic, available_memory,
};
use std::sync::Arc;

/// What a model learns from, and what it is judged by.
#[derive(Clone)]
pub struct Sets {
    pub train: Arc<dyn Dataset>,
    pub test: Arc<dyn Dataset>,
}

/// Data that was found; nothing of it was decoded yet.
pub struct Opened {
    /// None for the drawn set, which has whatever a run asks for.
    found: Option<Sets>,
}

impl Opened {
    /// Opens both parts of a set. `channels`: of images that have a choice of them.
    pub fn new(source: &Source, channels: Option<usize>) -> Result<Self, TrainError> {
        let cifar = |path, kind| {
            let open = |split| -> Result<Arc<dyn Dataset>, TrainError> {
                Ok(Arc::new(Cifar::open(path, kind, split)?))
            };
            Ok::<_, TrainError>(Sets { train: open(Split::Train)?, test: open(Split::Test)? })
        };
        let found = match source {
            Source::Synthetic => None,
            Source::Cifar10(path) => Some(cifar(path, CifarKind::Ten)?),
            Source::Cifar100 { path, coarse } => {
                let labels = if *coarse { CifarLabels::Coarse } else { CifarLabels::Fine };
                Some(cifar(path, CifarKind::Hundred { labels })?)
            }
            Source::Folder(path) => {
                let open = |split| -> Result<Arc<dyn Dataset>, TrainError> {
                    Ok(Arc::new(ImageFolder::open(path, split, channels.unwrap_or(COLOURS))?))
                };
                Some(Sets { train: open(Split::Train)?, test: open(Split::Test)? })
            }
            Source::SyntheticMasks | Source::Ade20k(_) | Source::Masks(_) => {
                let why = "has a class for each pixel; models here tell whole images apart (`vitesse data inspect` shows it)";
                return Err(TrainError::setting("data", source, why));
            }
        };
        Ok(Opened { found })
    }

    /// What was found; nothing of the drawn set.
    pub fn found(&self) -> Option<Facts> {
        let Sets { train, test } = self.found.as_ref()?;
        let (train_images, test_images) = (train.len(), test.len());
        Some(Facts { train_images, test_images, classes: train.classes(), channels: train.channels() })
    }

    /// What the set holds, for [`Raw::resolve`].
    pub fn facts(&self, raw: &Raw) -> Result<Facts, TrainError> {
        self.found().map_or_else(|| Facts::synthetic(raw), Ok)
    }

    /// The images that a run uses.
    pub fn for_run(self, run: &Resolved) -> Result<Sets, TrainError> {
        match self.found {
            Some(Sets { train, test }) => {
                let by_class = matches!(run.data.source, Source::Folder(_));
                let train = Leading::of(train, run.data.train_images(), by_class);
                Ok(if by_class { cached(Sets { train, test }, run.data.cache) } else { Sets { train, test } })
            }
            None => Ok(Sets {
                train: Arc::new(Synthetic::new(run.synthetic(Split::Train))?),
                test: Arc::new(Synthetic::new(run.synthetic(Split::Test))?),
            }),
        }
    }
}

/// Red, green and blue.
const COLOURS: usize = 3;

/// Files are decoded once, as far as memory allows; the held-out part has a fifth of the room.
fn cached(sets: Sets, cache: Cache) -> Sets {
    let Some(budget) = cache_budget(cache) else { return sets };
    let part = |set, bytes: u64| Arc::new(Cached::new(set, bytes as usize)) as Arc<dyn Dataset>;
    Sets { train: part(sets.train, budget / 5 * 4), test: part(sets.test, budget / 5) }
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
pub fn resolve(raw: &Raw, world: usize) -> Result<(Resolved, Sets), TrainError> {
    let opened = Opened::new(&raw.source()?, raw.channels)?;
    let run = raw.resolve(&opened.facts(raw)?, world)?;
    let sets = opened.for_run(&run)?;
    Ok((run, sets))
}

/// The data of a run that was resolved before.
pub fn reopen(run: &Resolved) -> Result<Sets, TrainError> {
    Opened::new(&run.data.source, Some(run.network.channels()))?.for_run(run)
}
