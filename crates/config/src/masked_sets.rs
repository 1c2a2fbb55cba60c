//! Images with masks, as a run is told of them.

use crate::ConfigError;
use crate::sets::cache_budget;
use crate::{Cache, Facts, Raw, Source};
use data::segment::{
    CachedPairs, Drawn, DrawnSpec, LeadingPairs, MaskedFiles, MaskedSet, Unpaired, ade20k, masks,
};
use data::{DataError, Skipped, Split};
use std::sync::Arc;

/// What a model learns from, and what it is judged by.
#[derive(Clone)]
pub struct MaskedSets {
    pub train: Arc<dyn MaskedSet>,
    pub test: Arc<dyn MaskedSet>,
    /// Images without a mask and masks without an image, where they were to be left out.
    pub left_out: Vec<Skipped>,
}

impl MaskedSets {
    /// Looks for both parts of a set of files.
    pub fn find(source: &Source, channels: usize, unpaired: Unpaired) -> Result<Self, ConfigError> {
        let [train, test] = match source {
            Source::Ade20k(path) => both(|split| ade20k::open(path, split, unpaired))?,
            Source::Masks(path) => both(|split| masks::open(path, split, channels, unpaired))?,
            other => return Err(ConfigError::setting("data", other, "has no files with masks")),
        };
        let left_out = [&train, &test].into_iter().flat_map(|set| set.left_out().to_vec()).collect();
        Ok(MaskedSets { train: Arc::new(train), test: Arc::new(test), left_out })
    }

    pub fn drawn(spec: impl Fn(Split) -> DrawnSpec) -> Result<Self, ConfigError> {
        let part =
            |split| -> Result<Arc<dyn MaskedSet>, ConfigError> { Ok(Arc::new(Drawn::new(spec(split))?)) };
        Ok(MaskedSets { train: part(Split::Train)?, test: part(Split::Test)?, left_out: vec![] })
    }

    /// To be looked at, without a model; images are as large as they are, or drawn as they would be by default.
    pub fn to_look_at(raw: &Raw, source: &Source) -> Result<Self, ConfigError> {
        if *source != Source::SyntheticMasks {
            let unpaired = if raw.skip_bad_images { Unpaired::LeftOut } else { Unpaired::Refused };
            let sets = Self::find(source, raw.channels.unwrap_or(3), unpaired)?;
            return Ok(sets.cached(raw.cache.unwrap_or_default()));
        }
        let Facts { train_images, test_images, classes, channels } = Facts::synthetic(raw)?;
        let (side, seed) = (raw.image_size.unwrap_or(source.image_size()), raw.seed.unwrap_or(0));
        Self::drawn(|split| {
            let len = if split == Split::Train { train_images } else { test_images };
            DrawnSpec { split, len, width: side, height: side, channels, classes, seed }
        })
    }

    /// The first of the training pairs.
    pub fn leading(self, len: usize) -> Self {
        MaskedSets { train: LeadingPairs::of(self.train, len), ..self }
    }

    /// Pairs are kept once they are decoded, as far as memory allows; the held-out part has a fifth of the room.
    pub fn cached(self, cache: Cache) -> Self {
        let Some(budget) = cache_budget(cache) else { return self };
        let kept = |set, bytes: u64| Arc::new(CachedPairs::new(set, bytes as usize)) as Arc<dyn MaskedSet>;
        MaskedSets { train: kept(self.train, budget / 5 * 4), test: kept(self.test, budget / 5), ..self }
    }
}

fn both(open: impl Fn(Split) -> Result<MaskedFiles, DataError>) -> Result<[MaskedFiles; 2], DataError> {
    Ok([open(Split::Train)?, open(Split::Test)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Task;
    use crate::sets::{self, Sets};

    #[test]
    fn what_is_not_there_is_named() {
        let find = |source| MaskedSets::find(&source, 3, Unpaired::Refused).err().unwrap().to_string();
        assert!(find(Source::Ade20k("nowhere".into())).contains("nowhere: no such folder"));
        assert!(find(Source::Synthetic).starts_with("--data synthetic: has no files with masks"));
        let raw = Raw { task: Some(Task::Segment), classes: Some(99), ..Raw::default() };
        assert!(sets::resolve(&raw, 1).err().unwrap().to_string().contains("classes"));
    }

    #[test]
    fn the_drawn_set_is_whatever_is_asked_for() {
        let raw = Raw {
            task: Some(Task::Segment),
            classes: Some(4),
            image_size: Some(32),
            train_samples: Some(40),
            data_fraction: Some(0.5),
            ..Raw::default()
        };
        let (run, Sets::Masked(sets)) = sets::resolve(&raw, 1).unwrap() else { panic!("no masks") };
        assert_eq!((sets.train.len(), sets.test.len(), sets.train.classes()), (20, 200, 4));
        assert_eq!((run.network.classes(), run.steps_per_epoch), (4, 2), "whole batches of 8");
        let looked_at = MaskedSets::to_look_at(&raw, &Source::SyntheticMasks).unwrap();
        assert_eq!((looked_at.train.len(), looked_at.train.classes()), (40, 4));
    }
}
