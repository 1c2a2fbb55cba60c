//! When a run evaluates, and on how many images.
//!
//! Unless told otherwise, evaluating takes no longer than training: an image costs about three times as much to train on as to evaluate (a
//! forward pass, and a backward pass of twice that), so between two evaluations, and in the whole run, at least a third as many images are
//! trained on as are evaluated. A short run so evaluates once, at its end. This goes by counts, not by time: every rank, and every
//! repetition, decides alike.

use super::optimize::Length;
use super::origin::{Log, Origin};
use super::raw::{Every, Part};
use crate::{ConfigError, Data, Raw};
use text::many;

/// Images that are evaluated in the time in which one is trained on.
const EVALUATED: u64 = 3;

impl Raw {
    /// Images of the validation set to evaluate on; none for all.
    pub(super) fn eval_images(
        &self,
        data: &Data,
        length: Length,
        global_batch: usize,
        log: &mut Log,
    ) -> Result<Option<usize>, ConfigError> {
        let all = data.facts.test_images;
        if let Some(part) = self.eval_images {
            log.note("eval-images", part, Origin::Flag);
            return match part {
                Part::All => Ok(None),
                Part::Images(0) => Err(ConfigError::setting("eval-images", 0, "must be at least 1")),
                Part::Images(images) if images > all => {
                    let why = format!("the validation set has {}", many(all, "image"));
                    Err(ConfigError::setting("eval-images", images, why))
                }
                Part::Images(images) => Ok(Some(images)),
            };
        }
        let trained = length.steps.saturating_mul(global_batch as u64);
        let most = usize::try_from(trained.saturating_mul(EVALUATED)).unwrap_or(usize::MAX);
        if most >= all {
            log.note("eval-images", Part::All, Origin::default_value());
            return Ok(None);
        }
        let why = format!(
            "{EVALUATED} × {} × {global_batch}: evaluating takes no longer than training",
            many(length.steps as usize, "step")
        );
        log.note("eval-images", most, Origin::Derived(why));
        Ok(Some(most))
    }

    /// Epochs between evaluations, and steps if they count instead.
    pub(super) fn eval_every(
        &self,
        data: &Data,
        length: Length,
        global_batch: usize,
        log: &mut Log,
    ) -> Result<(u64, Option<u64>), ConfigError> {
        let Length { steps, steps_per_epoch } = length;
        let images = data.eval_images() as u64;
        // Steps in which as much is done as an evaluation takes.
        let least = images.div_ceil(EVALUATED * global_batch as u64);
        let (usual, default) = match data.source.entry().run {
            // Epochs of a published run are many.
            Some(run) => {
                let usual = (steps / run.evaluations).max(1);
                (usual, Every::Steps(usual.max(least)))
            }
            None => (steps_per_epoch, Every::Epochs(least.div_ceil(steps_per_epoch).max(1))),
        };
        let origin = match self.eval_every {
            Some(_) => Origin::Flag,
            None if usual < least => Origin::Derived(format!(
                "{} take as long to train on as {} to evaluate",
                many((least * global_batch as u64) as usize, "image"),
                text::count::grouped(images as usize)
            )),
            None => Origin::default_value(),
        };
        let every = self.eval_every.unwrap_or(default);
        log.note("eval-every", every, origin);
        match every {
            Every::Epochs(0) | Every::Steps(0) => {
                Err(ConfigError::setting("eval-every", 0, "must be at least 1"))
            }
            Every::Epochs(epochs) => Ok((epochs, None)),
            Every::Steps(steps) => Ok((1, Some(steps))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Facts, Resolved, Task};

    fn resolve(raw: &Raw, facts: &Facts) -> Resolved {
        raw.resolve(facts, 1).unwrap()
    }

    fn evaluated(run: &Resolved) -> (Vec<u64>, usize) {
        let after = (1..=run.steps).filter(|steps| run.evaluates_after(*steps)).collect::<Vec<_>>();
        assert_eq!(after.len() as u64, run.evaluations());
        (after, run.data.eval_images())
    }

    /// The recipe of ADE20K has ten evaluations of 2,000 images; of a run of twelve steps they would be one after each.
    #[test]
    fn a_short_run_evaluates_once_and_no_longer_than_it_trains() {
        let ade = Facts { train_images: 20_210, test_images: 2000, classes: 150, channels: 3 };
        let raw = |steps| Raw { data: Some("ade20k:x".into()), steps: Some(steps), ..Raw::default() };
        assert_eq!(evaluated(&resolve(&raw(12), &ade)), (vec![12], 288));
        assert_eq!(evaluated(&resolve(&raw(84), &ade)), (vec![84], 2000));
        assert_eq!(resolve(&raw(160_000), &ade).eval_steps, Some(16_000));
        assert_eq!(resolve(&raw(160_000), &ade).evaluations(), 10);
        let all = Raw { eval_images: Some(Part::All), ..raw(12) };
        assert_eq!(evaluated(&resolve(&all, &ade)), (vec![12], 2000));
        let often = Raw { eval_every: Some(Every::Steps(6)), ..raw(12) };
        assert_eq!(evaluated(&resolve(&often, &ade)), (vec![6, 12], 288));
        for steps in [1, 2, 5, 12, 40, 100, 1000, 10_000] {
            let run = resolve(&raw(steps), &ade);
            let (after, images) = evaluated(&run);
            assert!(
                (after.len() - 1) * images <= 3 * steps as usize * 8,
                "{steps} steps: {after:?} of {images}"
            );
            assert!(images <= 3 * steps as usize * 8);
        }
    }

    #[test]
    fn few_training_images_are_gone_through_several_times_between_evaluations() {
        let raw = |samples| Raw {
            task: Some(Task::Segment),
            train_samples: Some(samples),
            epochs: Some(20),
            ..Raw::default()
        };
        let run = |samples| resolve(&raw(samples), &Facts::synthetic(&raw(samples)).unwrap());
        // 200 images to evaluate, as long as 67 to train on.
        assert_eq!((run(2000).eval_every, run(80).eval_every, run(16).eval_every), (1, 1, 5));
    }

    #[test]
    fn who_decided_is_told() {
        let ade = Facts { train_images: 20_210, test_images: 2000, classes: 150, channels: 3 };
        let raw = Raw { data: Some("ade20k:x".into()), steps: Some(12), ..Raw::default() };
        let notes = raw.explain(&ade, 1).settings;
        let origin = |name: &str| notes.iter().find(|note| note.name == name).unwrap().origin.clone();
        let images = "3 × 12 steps × 8: evaluating takes no longer than training".to_string();
        assert_eq!(origin("eval-images"), Origin::Derived(images));
        let every = "96 images take as long to train on as 288 to evaluate".to_string();
        assert_eq!(origin("eval-every"), Origin::Derived(every));
        let refused = |part| {
            let raw = Raw { eval_images: Some(part), ..raw.clone() };
            raw.resolve(&ade, 1).unwrap_err().to_string()
        };
        assert_eq!(refused(Part::Images(0)), "--eval-images 0: must be at least 1");
        assert_eq!(refused(Part::Images(2001)), "--eval-images 2001: the validation set has 2,000 images");
    }
}
