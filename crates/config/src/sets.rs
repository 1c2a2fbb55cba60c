//! Data of a run: opened once, counted, and cut to the subset that is asked for.

use crate::{Cache, ConfigError, Facts, Raw, Resolved, Source};
use data::registry::{Open, Reading};
use data::{
    Cached, DataError, Dataset, Skipped, Split, Subset, SyntheticSpec, available_memory, fingerprint,
};
use std::sync::Arc;

/// Training set and validation set, for whatever task.
#[derive(Clone)]
pub struct Sets {
    pub train: Arc<dyn Dataset>,
    pub test: Arc<dyn Dataset>,
}

impl Sets {
    /// Opens both parts of a set.
    fn open(open: impl Fn(Split) -> Result<Arc<dyn Dataset>, DataError>) -> Result<Self, ConfigError> {
        Ok(Sets { train: open(Split::Train)?, test: open(Split::Test)? })
    }

    /// Names of the classes that are trained on, in the order of the labels.
    pub fn class_names(&self) -> &[String] {
        self.train.class_names()
    }

    /// Names of the classes of the validation set.
    pub fn test_class_names(&self) -> &[String] {
        self.test.class_names()
    }

    /// Images to evaluate on.
    pub fn test_images(&self) -> usize {
        self.test.len()
    }

    /// Hashes that tell other data apart, of both parts.
    pub fn fingerprints(&self) -> [u64; 2] {
        [fingerprint(&*self.train), fingerprint(&*self.test)]
    }

    /// Files that do not belong to the sets, where that is no error.
    pub fn left_out(&self) -> impl Iterator<Item = &Skipped> {
        self.train.left_out().iter().chain(self.test.left_out())
    }

    fn facts(&self) -> Facts {
        let Sets { train, test } = self;
        let (train_images, test_images) = (train.len(), test.len());
        Facts { train_images, test_images, classes: train.classes(), channels: train.channels() }
    }

    /// Keeps images once they are decoded, as far as memory allows; the validation set has a fifth of the room.
    fn cached(self, cache: Cache) -> Self {
        let Some(budget) = cache_budget(cache) else { return self };
        let part = |set, bytes: u64| Arc::new(Cached::new(set, bytes as usize)) as Arc<dyn Dataset>;
        Sets { train: part(self.train, budget / 5 * 4), test: part(self.test, budget / 5) }
    }
}

/// Data that was found; nothing of it was decoded yet.
pub struct Opened {
    /// None for synthetic sets, which have whatever a run asks for.
    found: Option<Sets>,
}

impl Opened {
    /// Opens both parts of a set. `channels`: of images that have a choice of them. `skip_bad`: images without a mask, and masks
    /// without an image, are left out.
    pub fn new(source: &Source, channels: Option<usize>, skip_bad: bool) -> Result<Self, ConfigError> {
        let found = match (source.entry().open, source.path()) {
            (Open::Path(open), Some(path)) => {
                let channels = channels.unwrap_or(COLOURS);
                Some(Sets::open(|split| open(path, Reading { split, channels, skip_bad }))?)
            }
            _ => None,
        };
        Ok(Opened { found })
    }

    /// Opens what `raw` names.
    pub fn of(raw: &Raw) -> Result<Self, ConfigError> {
        Self::new(&raw.source()?, raw.channels, raw.skip_bad_images)
    }

    /// Facts of what was found; none of a synthetic set.
    pub fn found(&self) -> Option<Facts> {
        self.found.as_ref().map(Sets::facts)
    }

    /// Facts of the set, for [`Raw::resolve`].
    pub fn facts(&self, raw: &Raw) -> Result<Facts, ConfigError> {
        self.found().map_or_else(|| Facts::synthetic(raw), Ok)
    }

    /// The sets that a run uses.
    pub fn for_run(self, run: &Resolved) -> Result<Sets, ConfigError> {
        let Some(Sets { train, test }) = self.found else {
            return synthetic(&run.data.source, |split| run.synthetic(split));
        };
        let sets = Sets { train: Subset::of(train, run.data.train_images()), test };
        Ok(if run.data.source.decodes() { sets.cached(run.data.cache) } else { sets })
    }

    /// The images as `data inspect` shows them, without a model: files in their own size, synthetic images in the default one.
    pub fn to_inspect(self, raw: &Raw, source: &Source) -> Result<Sets, ConfigError> {
        if let Some(sets) = self.found {
            return Ok(if source.decodes() { sets.cached(raw.cache.unwrap_or_default()) } else { sets });
        }
        let Facts { train_images, test_images, classes, channels } = Facts::synthetic(raw)?;
        let (image_size, seed) = (raw.image_size.unwrap_or(source.image_size()), raw.seed.unwrap_or(0));
        synthetic(source, |split| {
            let len = if split == Split::Train { train_images } else { test_images };
            SyntheticSpec { split, len, image_size, channels, classes, seed }
        })
    }
}

/// Red, green and blue.
const COLOURS: usize = 3;

/// Synthetic sets.
fn synthetic(source: &Source, spec: impl Fn(Split) -> SyntheticSpec) -> Result<Sets, ConfigError> {
    match source.entry().open {
        Open::Synthetic(open) => Sets::open(|split| open(spec(split))),
        Open::Path(_) => Err(ConfigError::setting("data", source, "names no place")),
    }
}

/// Bytes of decoded images that may be kept.
fn cache_budget(cache: Cache) -> Option<u64> {
    match cache {
        Cache::Off => None,
        Cache::Bytes(bytes) => Some(bytes),
        Cache::Auto => Some(available_memory().unwrap_or(0) / 4),
    }
}

/// Resolves what was typed on the data it names.
pub fn resolve(raw: &Raw, world: usize) -> Result<(Resolved, Sets), ConfigError> {
    on_data(raw, world).map_err(|error| error.placed(raw))
}

fn on_data(raw: &Raw, world: usize) -> Result<(Resolved, Sets), ConfigError> {
    let opened = Opened::of(raw)?;
    let mut run = raw.resolve(&opened.facts(raw)?, world)?;
    let sets = opened.for_run(&run)?;
    let sets = Sets { test: Subset::of(sets.test, run.data.eval_images()), ..sets };
    run.class_names = sets.class_names().to_vec();
    run.weights_of_classes(&*sets.train)?;
    Ok((run, sets))
}

/// The data of a run that was resolved before.
pub fn reopen(run: &Resolved) -> Result<Sets, ConfigError> {
    let (channels, skip_bad) = (Some(run.network.channels()), run.data.skip_bad_images);
    Opened::new(&run.data.source, channels, skip_bad)?.for_run(run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Task;

    #[test]
    fn what_is_not_there_is_named() {
        let missing = Opened::new(&"ade20k:nowhere".parse().unwrap(), None, false).err().unwrap();
        assert!(missing.to_string().contains("nowhere: no such folder"));
        let raw = Raw { task: Some(Task::Segment), classes: Some(99), ..Raw::default() };
        assert!(resolve(&raw, 1).err().unwrap().to_string().contains("classes"));
    }

    #[test]
    fn a_synthetic_set_is_whatever_is_asked_for() {
        let raw = Raw {
            task: Some(Task::Segment),
            classes: Some(4),
            image_size: Some(32),
            train_samples: Some(40),
            data_fraction: Some(0.5),
            ..Raw::default()
        };
        let (run, sets) = resolve(&raw, 1).unwrap();
        assert_eq!((sets.train.task(), sets.test.task()), (data::Task::Segment, data::Task::Segment));
        assert_eq!((sets.train.len(), sets.test.len(), sets.train.classes()), (20, 144, 4));
        assert_eq!((run.network.classes(), run.steps_per_epoch), (4, 2), "whole batches of 8");
        let source = raw.source().unwrap();
        let inspected = Opened::of(&raw).unwrap().to_inspect(&raw, &source).unwrap();
        assert_eq!((inspected.train.len(), inspected.train.classes()), (40, 4));
    }

    #[test]
    fn a_list_is_opened_cut_and_recorded() {
        let folder = testing::Folder::new("sets-list");
        let mut text = "path,label,split\n".to_string();
        for (i, part) in ["train"; 8].into_iter().chain(["val"; 2]).enumerate() {
            let name = format!("{i}.png");
            data::segment::overlay::save_mask(&[i as u8; 64], (8, 8), &folder.0.join(&name)).unwrap();
            text += &format!("{name},{},{part}\n", if i % 4 == 0 { "few" } else { "many" });
        }
        let list = folder.file("list.csv", text.as_bytes());
        let raw = Raw {
            data: Some(format!("list:{}", list.display())),
            model: Some("vit-nano/4".into()),
            image_size: Some(16),
            batch_size: Some(2),
            data_fraction: Some(0.5),
            ..Raw::default()
        };
        let (run, sets) = resolve(&raw, 1).unwrap();
        assert_eq!((sets.train.len(), sets.test.len(), sets.class_names().len()), (4, 2, 2));
        assert!((0..4).any(|index| sets.train.label(index) == 0), "a subset has all classes");
        assert_eq!(run.augmentation.train, crate::Geometry::Resize, "nothing random without --augment");
        let again = Resolved::from_json("", &run.to_json().unwrap()).unwrap();
        assert_eq!(again.data.source, run.data.source);
        let reopened = reopen(&again).unwrap();
        assert_eq!(reopened.fingerprints(), sets.fingerprints());
    }
}
