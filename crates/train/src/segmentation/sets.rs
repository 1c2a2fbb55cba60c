//! Images with masks, as a run is told of them.

use crate::config::augmentation::by_channel;
use crate::config::origin::Log;
use crate::config::{Cache, Interpolation, Preset, Raw, Source};
use crate::error::TrainError;
use crate::sets::cache_budget;
use data::segment::{
    CachedPairs, Drawn, DrawnSpec, MaskTransform, MaskedFiles, MaskedSet, Unpaired, ade20k, masks,
};
use data::{DataError, Skipped, Split};
use std::sync::Arc;

const DRAWN_CLASSES: usize = 5;
const DRAWN_TRAIN: usize = 2_000;
const DRAWN_TEST: usize = 200;
const COLOURS: usize = 3;

/// What a model learns from, and what it is judged by.
#[derive(Clone)]
pub struct MaskedSets {
    pub train: Arc<dyn MaskedSet>,
    pub test: Arc<dyn MaskedSet>,
    /// Images without a mask and masks without an image, where they were to be left out.
    pub left_out: Vec<Skipped>,
}

impl MaskedSets {
    /// Opens both parts of a set of [`Source::has_masks`]. Pairs are kept once they are decoded, as far as memory allows.
    pub fn open(raw: &Raw, source: &Source) -> Result<Self, TrainError> {
        let unpaired = if raw.skip_bad_images { Unpaired::LeftOut } else { Unpaired::Refused };
        let channels = raw.channels.unwrap_or(COLOURS);
        let found = match source {
            Source::SyntheticMasks => return drawn(raw, channels),
            Source::Ade20k(path) => both(|split| ade20k::open(path, split, unpaired))?,
            Source::Masks(path) => both(|split| masks::open(path, split, channels, unpaired))?,
            other => return Err(TrainError::setting("data", other, "has no masks")),
        };
        refuse_samples(raw, source)?;
        if let Some(value) = raw.channels.filter(|&channels| channels != found[0].channels()) {
            let why = format!("the images have {} channels", found[0].channels());
            return Err(TrainError::setting("channels", value, why));
        }
        let left_out = found.iter().flat_map(|set| set.left_out().to_vec()).collect();
        let [train, test] = found;
        // The held-out part has a fifth of the room.
        let budget = cache_budget(raw.cache.unwrap_or(Cache::Auto)).unwrap_or(0) as usize;
        let kept =
            |set: MaskedFiles, bytes| Arc::new(CachedPairs::new(Arc::new(set), bytes)) as Arc<dyn MaskedSet>;
        Ok(MaskedSets { train: kept(train, budget / 5 * 4), test: kept(test, budget / 5), left_out })
    }
}

fn both(open: impl Fn(Split) -> Result<MaskedFiles, DataError>) -> Result<[MaskedFiles; 2], DataError> {
    Ok([open(Split::Train)?, open(Split::Test)?])
}

fn drawn(raw: &Raw, channels: usize) -> Result<MaskedSets, TrainError> {
    let side = raw.image_size.unwrap_or(Source::SyntheticMasks.image_size());
    let classes = raw.classes.unwrap_or(DRAWN_CLASSES);
    let part = |split, len| -> Result<Arc<dyn MaskedSet>, TrainError> {
        let seed = raw.seed.unwrap_or(0);
        let spec = DrawnSpec { split, len, width: side, height: side, channels, classes, seed };
        Ok(Arc::new(Drawn::new(spec)?))
    };
    Ok(MaskedSets {
        train: part(Split::Train, raw.train_samples.unwrap_or(DRAWN_TRAIN))?,
        test: part(Split::Test, raw.test_samples.unwrap_or(DRAWN_TEST))?,
        left_out: vec![],
    })
}

fn refuse_samples(raw: &Raw, source: &Source) -> Result<(), TrainError> {
    for (flag, typed) in [("train-samples", raw.train_samples), ("test-samples", raw.test_samples)] {
        if let Some(value) = typed {
            let why = format!("only drawn sets have as many images as one likes, not {source}");
            return Err(TrainError::setting(flag, value, why));
        }
    }
    Ok(())
}

/// What happens to training images of a set with masks. `--augment none`: the middle; `standard`: other sizes, random
/// cuts and mirror images; `strong`: also distorted colours, which is the recipe that UPerNet was published with.
pub fn training_transform(raw: &Raw, source: &Source, channels: usize) -> Result<MaskTransform, TrainError> {
    let why = "is for images with one class each; of images with masks --augment, --flip, --mean and --std can be set";
    let refused = [
        ("crop", raw.crop.map(|x| x.to_string())),
        ("rand-augment", raw.rand_augment.map(|x| x.to_string())),
        ("erase", raw.erase.map(|x| x.to_string())),
        ("mixup", raw.mixup.map(|x| x.to_string())),
        ("cutmix", raw.cutmix.map(|x| x.to_string())),
        ("eval-resize", raw.eval_resize.map(|x| x.to_string())),
    ];
    if let Some((flag, value)) = refused.into_iter().find_map(|(flag, typed)| Some((flag, typed?))) {
        return Err(TrainError::setting(flag, value, why));
    }
    if raw.interpolation == Some(Interpolation::Bicubic) {
        return Err(TrainError::setting(
            "interpolation",
            "bicubic",
            "images with masks are resized bilinearly",
        ));
    }
    let size = raw.image_size.unwrap_or(source.image_size());
    let log = &mut Log::default();
    let mean = by_channel("mean", &raw.mean, channels, log, f32::is_finite)?;
    let std = by_channel("std", &raw.std, channels, log, |x| x > 0.0 && x.is_finite())?;
    let plain = MaskTransform::plain(size, size, &mean, &std);
    let transform = match raw.augment.unwrap_or_default() {
        Preset::None => plain,
        Preset::Standard => plain.with_crops(),
        Preset::Strong => plain.with_crops().with_distortion(),
    };
    let transform = MaskTransform { flip: raw.flip.unwrap_or(transform.flip), ..transform };
    transform.check()?;
    Ok(transform)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(change: impl FnOnce(&mut Raw)) -> Raw {
        let mut raw = Raw::default();
        change(&mut raw);
        raw
    }

    #[test]
    fn presets_are_recipes() {
        let source = Source::Ade20k("d".into());
        let transform = |change: fn(&mut Raw)| training_transform(&raw(change), &source, 3);
        let plain = transform(|_| {}).unwrap();
        assert_eq!((plain.height, plain.width, plain.fit, plain.flip), (512, 512, (2048, 512), 0.0));
        let standard = transform(|raw| raw.augment = Some(Preset::Standard)).unwrap();
        assert_eq!((standard.ratio, standard.max_share, standard.flip), ((0.5, 2.0), 0.75, 0.5));
        assert!(!standard.distort);
        let strong = transform(|raw| (raw.augment, raw.flip) = (Some(Preset::Strong), Some(0.0))).unwrap();
        assert!(strong.distort && strong.flip == 0.0);
        let small = transform(|raw| raw.image_size = Some(128)).unwrap();
        assert_eq!(small.fit, (512, 128));
    }

    #[test]
    fn what_does_not_fit_masks_is_refused_by_name() {
        let refused = |change: fn(&mut Raw)| {
            training_transform(&raw(change), &Source::SyntheticMasks, 3).unwrap_err().to_string()
        };
        assert!(
            refused(|raw| raw.mixup = Some(0.8)).starts_with("--mixup 0.8: is for images with one class")
        );
        assert!(
            refused(|raw| raw.interpolation = Some(Interpolation::Bicubic))
                .starts_with("--interpolation bicubic")
        );
        assert!(refused(|raw| raw.mean = vec![0.1, 0.2]).starts_with("--mean"));
        assert!(refused(|raw| raw.flip = Some(2.0)).contains("flip"));
        let open =
            |change: fn(&mut Raw), source| MaskedSets::open(&raw(change), &source).err().unwrap().to_string();
        assert!(open(|_| {}, Source::Ade20k("nowhere".into())).contains("nowhere: no such folder"));
        assert!(open(|raw| raw.classes = Some(99), Source::SyntheticMasks).contains("classes"));
        assert!(open(|_| {}, Source::Synthetic).starts_with("--data synthetic: has no masks"));
    }

    #[test]
    fn the_drawn_set_is_whatever_is_asked_for() {
        let raw = raw(|raw| (raw.classes, raw.image_size, raw.train_samples) = (Some(4), Some(32), Some(7)));
        let sets = MaskedSets::open(&raw, &Source::SyntheticMasks).unwrap();
        assert_eq!((sets.train.len(), sets.test.len(), sets.train.classes()), (7, 200, 4));
    }
}
