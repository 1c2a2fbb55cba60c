//! How many images make a step: all ranks together = one rank's micro-step × micro-steps × ranks. Any two give the third.

use super::origin::{Log, Origin};
use super::recipe::Recipe;
use super::resolve::{LEAST_NORMALISED, at_least_one};
use super::resolved::Resolved;
use super::settings::Raw;
use super::shares::Shares;
use crate::ConfigError;
use crate::deepspeed::{DeepSpeed, FileError, Setting};
use text::many;

/// The batch of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Images of a micro-step of one rank.
    pub micro: usize,
    pub accumulate: usize,
    /// Images of an optimizer step, over all ranks.
    pub total: usize,
}

impl Batch {
    /// Images of a micro-step over all ranks, where these have unequal shares.
    pub(super) fn uneven(&self, world: usize) -> Option<usize> {
        (self.micro * self.accumulate * world != self.total).then(|| self.total / self.accumulate)
    }

    /// Refuses mixing where a rank has an odd number of images.
    pub(super) fn check_mixing(&self, mixes: bool, world: usize) -> Result<(), ConfigError> {
        let odd = self.uneven(world).is_some_and(|images| !images.is_multiple_of(2));
        if mixes && (odd || !self.micro.is_multiple_of(2)) {
            let why = "mixup and cutmix mix images in pairs, so that a rank needs an even number of them";
            return Err(ConfigError::setting("batch-size", self.micro, why));
        }
        Ok(())
    }
}

const STUDY_MICRO: &str = "micro_batch_per_gpu";

/// A number and what it is called where it was written.
#[derive(Clone, Debug, PartialEq)]
struct Given {
    value: usize,
    name: String,
    origin: Origin,
}

impl std::fmt::Display for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.value)
    }
}

/// Values of the three, by flag or file.
struct Said {
    total: Option<Given>,
    micro: Option<Given>,
    accumulate: Option<Given>,
    world: usize,
    recipe: Recipe,
    /// Flag: ranks may have unequal shares.
    uneven: bool,
}

impl Raw {
    pub(super) fn batch(&self, world: usize, log: &mut Log) -> Result<Batch, ConfigError> {
        let said = self.said(world)?;
        let from_file = [&said.total, &said.micro, &said.accumulate]
            .iter()
            .any(|given| given.as_ref().is_some_and(|given| given.origin != Origin::Flag));
        let file = self.deepspeed.as_ref().filter(|_| from_file).map(|file| file.file.clone());
        said.settle(log).map_err(|why| match file {
            Some(file) => FileError::File { file, why }.into(),
            None => ConfigError::Batch(why),
        })
    }

    /// A run that goes on over another number of ranks keeps the images of a step, unless it is told otherwise: with as few
    /// micro-steps as give no rank more images at a time than it had before. A model that takes moments over the images of a
    /// micro-step keeps those. With `--min-ranks` nothing told holds against that, and shares may be unequal.
    pub fn divide_again(&mut self, before: &Resolved, world: usize) {
        let told = self.batch_size.or(self.accumulate).or(self.global_batch).is_some();
        if told && self.min_ranks.is_none() || world == before.world || world == 0 {
            return;
        }
        let total = before.global_batch();
        let divisions = || (1..=total).filter_map(|accumulate| division(before, world, accumulate));
        let steps = |shares: &Shares| total / shares.total();
        let first = divisions().next().filter(|_| self.min_ranks.is_some());
        // Many small micro-steps of equal shares take longer than a few of nearly equal ones.
        let few = |equal: &Shares| first.as_ref().is_none_or(|first| steps(equal) <= 2 * steps(first));
        if let Some(shares) = divisions().find(Shares::is_equal).filter(few).or(first.clone()) {
            self.accumulate = Some(steps(&shares));
            self.batch_size = Some(shares.largest());
            self.global_batch = Some(total);
        }
    }

    /// Reason why the three don't multiply, without the file's name; for a table that has it in its title.
    pub(super) fn batch_fault(&self, world: usize) -> Option<String> {
        self.said(world).ok()?.settle(&mut Log::default()).err()
    }

    fn said(&self, world: usize) -> Result<Said, ConfigError> {
        let file = self.deepspeed.as_ref();
        let given = |flag: &'static str, typed: Option<usize>, keys: &[&str]| {
            let typed = typed.map(|value| at_least_one(flag, value)).transpose()?;
            let typed = typed.map(|value| Given { value, name: format!("--{flag}"), origin: Origin::Flag });
            Ok::<_, ConfigError>(typed.or_else(|| keys.iter().find_map(|key| from_file(file?, key))))
        };
        Ok(Said {
            total: given("global-batch", self.global_batch, &["train_batch_size"])?,
            micro: given("batch-size", self.batch_size, &["train_micro_batch_size_per_gpu", STUDY_MICRO])?,
            accumulate: given("accumulate", self.accumulate, &["gradient_accumulation_steps"])?,
            world,
            recipe: self.recipe(),
            uneven: self.min_ranks.is_some(),
        })
    }
}

/// How `accumulate` micro-steps over `world` ranks divide the images of a step as before, if they can.
fn division(before: &Resolved, world: usize, accumulate: usize) -> Option<Shares> {
    let (total, normalises) = (before.global_batch(), before.network.normalises_batches());
    let group = before.augmentation.group();
    let least = if normalises { LEAST_NORMALISED } else { group };
    let shares = Shares::even(total / accumulate, world, group);
    let whole = total.is_multiple_of(accumulate) && shares.total() == total / accumulate;
    let fits = if normalises { accumulate == before.accumulate } else { shares.largest() <= before.batch };
    (whole && fits && shares.smallest() >= least).then_some(shares)
}

fn from_file(file: &DeepSpeed, key: &str) -> Option<Given> {
    match file.whole(key)? {
        Setting::Given(value) => Some(Given {
            value: value as usize,
            name: key.to_string(),
            origin: Origin::File(key.to_string()),
        }),
        Setting::Auto => None,
    }
}

pub(super) fn ranks(world: usize) -> String {
    many(world, "rank")
}

const TOO_MANY: &str = "--batch-size × --accumulate × --ranks: more images than can be counted";

impl Said {
    fn settle(&self, log: &mut Log) -> Result<Batch, String> {
        let product = |a: usize, b: usize| a.checked_mul(b).ok_or_else(|| TOO_MANY.to_string());
        let world = ranks(self.world);
        let (micro, accumulate) = (self.micro.as_ref(), self.accumulate.as_ref());
        let batch = match (&self.total, micro, accumulate) {
            (Some(total), Some(micro), Some(accumulate)) => {
                let found = product(product(micro.value, accumulate.value)?, self.world)?;
                if found != total.value && !self.fits_unevenly(total.value, micro.value, accumulate.value) {
                    return Err(self.contradiction(total, micro, accumulate, found));
                }
                note(log, "batch-size", micro.value, micro.origin.clone());
                note(log, "accumulate", accumulate.value, accumulate.origin.clone());
                Batch { micro: micro.value, accumulate: accumulate.value, total: total.value }
            }
            (Some(total), Some(known), None) => {
                let accumulate =
                    divide(total, product(known.value, self.world)?, &format!("{known} × {world}"))?;
                note(log, "batch-size", known.value, known.origin.clone());
                note(log, "accumulate", accumulate, derived(format!("{total} / ({known} × {world})")));
                Batch { micro: known.value, accumulate, total: total.value }
            }
            (Some(total), None, Some(known)) => {
                let micro = divide(total, product(known.value, self.world)?, &format!("{known} × {world}"))?;
                note(log, "batch-size", micro, derived(format!("{total} / ({known} × {world})")));
                note(log, "accumulate", known.value, known.origin.clone());
                Batch { micro, accumulate: known.value, total: total.value }
            }
            (Some(total), None, None) => {
                let micro = divide(total, self.world, &world)?;
                note(log, "batch-size", micro, derived(format!("{total} / {world}")));
                note(log, "accumulate", 1, Origin::default_value());
                Batch { micro, accumulate: 1, total: total.value }
            }
            (None, micro, accumulate) => {
                let of = |given: Option<&Given>, default: usize, whose: Origin| {
                    given.map_or((default, whose), |given| (given.value, given.origin.clone()))
                };
                let (m, micro) = of(micro, self.recipe.batch, Origin::default_value());
                let (a, accumulate) = of(accumulate, 1, Origin::default_value());
                note(log, "batch-size", m, micro);
                note(log, "accumulate", a, accumulate);
                Batch { micro: m, accumulate: a, total: product(product(m, a)?, self.world)? }
            }
        };
        let origin = match &self.total {
            Some(total) => total.origin.clone(),
            None => derived(format!("{} × {} × {world}", batch.micro, batch.accumulate)),
        };
        note(log, "global-batch", batch.total, origin);
        Ok(batch)
    }

    /// Returns whether a rank has `micro` images at most if the ranks divide a step as equally as they can.
    fn fits_unevenly(&self, total: usize, micro: usize, accumulate: usize) -> bool {
        let images = total / accumulate.max(1);
        let whole = images >= self.world && total == images * accumulate;
        let found = [1, 2].map(|group| Shares::even(images, self.world, group));
        self.uneven && whole && found.iter().any(|s| s.total() == images && s.largest() == micro)
    }

    fn contradiction(&self, total: &Given, micro: &Given, accumulate: &Given, found: usize) -> String {
        let one_rank = micro.value * accumulate.value;
        let fits = match total.value.checked_div(one_rank) {
            Some(n) if n * one_rank == total.value => format!("it fits {}", ranks(n)),
            _ => "it fits no number of ranks".to_string(),
        };
        let mut text = format!("{total} ≠ {micro} × {accumulate} × {} = {found}; {fits}", ranks(self.world));
        if micro.name == STUDY_MICRO {
            let theirs = total.value / (accumulate.value * self.world).max(1);
            text += &format!(
                " (DeepSpeed would have ignored {STUDY_MICRO}, which is not its key, and taken {} per rank)",
                many(theirs, "image")
            );
        }
        text
    }
}

fn derived(arithmetic: String) -> Origin {
    Origin::Derived(arithmetic)
}

fn note(log: &mut Log, name: &'static str, value: usize, origin: Origin) {
    log.note(name, value, origin);
}

fn divide(total: &Given, by: usize, what: &str) -> Result<usize, String> {
    if total.value.is_multiple_of(by) {
        return Ok(total.value / by);
    }
    let product = if what.contains('×') { format!("{what} = {by}") } else { what.to_string() };
    Err(format!("{total} is no multiple of {product}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(json: &str, flags: [Option<usize>; 3], world: usize) -> Result<(usize, usize, usize), String> {
        let deepspeed = Some(DeepSpeed::parse("ds.json", json).unwrap());
        let [global_batch, batch_size, accumulate] = flags;
        let raw = Raw { deepspeed, global_batch, batch_size, accumulate, ..Raw::default() };
        let batch = raw.batch(world, &mut Log::default()).map_err(|e| e.to_string())?;
        assert_eq!(batch.micro * batch.accumulate * world, batch.total);
        Ok((batch.total, batch.micro, batch.accumulate))
    }

    const NONE: [Option<usize>; 3] = [None; 3];
    const MICRO: &str = r#""train_micro_batch_size_per_gpu""#;
    const STEPS: &str = r#""gradient_accumulation_steps""#;
    const TOTAL: &str = r#""train_batch_size""#;

    #[test]
    fn any_two_give_the_third() {
        let all = [
            format!("{{{TOTAL}: 64, {MICRO}: 8, {STEPS}: 4}}"),
            format!("{{{TOTAL}: 64, {MICRO}: 8, {STEPS}: \"auto\"}}"),
            format!("{{{TOTAL}: 64, {STEPS}: 4}}"),
            format!("{{{MICRO}: 8, {STEPS}: 4}}"),
        ];
        for json in all {
            assert_eq!(batch(&json, NONE, 2), Ok((64, 8, 4)), "{json}");
        }
        assert_eq!(batch(&format!("{{{TOTAL}: 64}}"), NONE, 2), Ok((64, 32, 1)));
        assert_eq!(batch(&format!("{{{MICRO}: 8}}"), NONE, 2), Ok((16, 8, 1)));
        assert_eq!(batch(&format!("{{{STEPS}: 3}}"), NONE, 2), Ok((384, 64, 3)));
        assert_eq!(batch("{}", NONE, 1), Ok((64, 64, 1)));
    }

    #[test]
    fn flags_override_and_what_was_derived_is_derived_again() {
        let total = format!("{{{TOTAL}: 64}}");
        assert_eq!(batch(&total, [None, Some(16), None], 1), Ok((64, 16, 4)));
        let two = format!("{{{TOTAL}: 64, {MICRO}: 16}}");
        assert_eq!(batch(&two, [None, Some(32), None], 1), Ok((64, 32, 2)));
        assert_eq!(batch(&two, [Some(128), None, None], 1), Ok((128, 16, 8)));
        let no_total = format!("{{{MICRO}: 16, {STEPS}: 2}}");
        assert_eq!(batch(&no_total, [None, Some(8), None], 1), Ok((16, 8, 2)));
        assert_eq!(batch("{}", [Some(256), None, Some(2)], 4), Ok((256, 32, 2)));
    }

    /// Images of each rank, and micro-steps, when a run of `world` ranks with `batch` images each goes on over `left` ranks.
    fn divided(raw: Raw, world: usize, left: usize) -> (String, usize) {
        let facts = crate::Facts::synthetic(&raw).unwrap();
        let before = raw.resolve(&facts, world).unwrap();
        let mut again = raw.clone();
        again.divide_again(&before, left);
        let after = again.resolve(&facts, left).unwrap();
        assert_eq!(after.global_batch(), before.global_batch());
        assert!(after.differences(&before).is_empty(), "{:?}", after.differences(&before));
        assert_eq!(after.shares().total() * after.accumulate, before.global_batch());
        (after.shares().to_string(), after.accumulate)
    }

    #[test]
    fn fewer_ranks_keep_the_images_of_a_step() {
        let raw = |batch| Raw { batch_size: Some(batch), min_ranks: Some(1), ..Raw::default() };
        assert_eq!(divided(raw(8), 3, 2), ("6 + 6".to_string(), 2), "no rank has more at a time than before");
        assert_eq!(divided(raw(8), 3, 1), ("8".to_string(), 3));
        assert_eq!(divided(raw(64), 8, 7), ("37 + 37 + 37 + 37 + 36 + 36 + 36".to_string(), 2));
        assert_eq!(divided(raw(7), 3, 2), ("4 + 3".to_string(), 3));
        let mixing = Raw { mixup: Some(0.8), ..raw(50) };
        assert_eq!(divided(mixing, 3, 2), ("26 + 24".to_string(), 3), "pairs stay together");
    }

    #[test]
    fn unequal_shares_are_for_ranks_that_were_lost() {
        let flags = |min_ranks| Raw {
            global_batch: Some(24),
            batch_size: Some(5),
            accumulate: Some(1),
            min_ranks,
            ..Raw::default()
        };
        let batch = |raw: Raw| raw.batch(5, &mut Log::default());
        assert!(batch(flags(None)).is_err());
        assert_eq!(batch(flags(Some(2))).unwrap().uneven(5), Some(24));
        assert!(batch(Raw { batch_size: Some(7), ..flags(Some(2)) }).is_err());
    }

    #[test]
    fn contradictions_name_both_sides() {
        let all = format!("{{{TOTAL}: 64, {STEPS}: 1}}");
        let text = batch(&all, [None, Some(32), None], 1).unwrap_err();
        let expected = "ds.json: train_batch_size 64 ≠ --batch-size 32 × gradient_accumulation_steps 1 × 1 rank = 32; it fits 2 ranks";
        assert_eq!(text, expected);
        let text = batch("{}", [Some(100), Some(32), Some(1)], 3).unwrap_err();
        assert_eq!(
            text,
            "--global-batch 100 ≠ --batch-size 32 × --accumulate 1 × 3 ranks = 96; it fits no number of ranks"
        );
        let text = batch(&format!("{{{TOTAL}: 50, {STEPS}: 4}}"), NONE, 1).unwrap_err();
        assert_eq!(
            text,
            "ds.json: train_batch_size 50 is no multiple of gradient_accumulation_steps 4 × 1 rank = 4"
        );
        let text = batch(&format!("{{{TOTAL}: 50}}"), NONE, 4).unwrap_err();
        assert_eq!(text, "ds.json: train_batch_size 50 is no multiple of 4 ranks");
    }

    #[test]
    fn absurd_numbers_are_refused() {
        let huge = format!("{{{MICRO}: 9e15, {STEPS}: 9e15}}");
        assert_eq!(
            batch(&huge, NONE, 1).unwrap_err(),
            "ds.json: --batch-size × --accumulate × --ranks: more images than can be counted"
        );
        let text = batch("{}", [None, Some(0), None], 1).unwrap_err();
        assert_eq!(text, "--batch-size 0: must be at least 1");
    }
}
