//! From what was typed to what can be run. Nothing after this fails for a bad setting.

use super::arithmetic::Arithmetic;
use super::optimize::Length;
use super::origin::{Log, Origin};
use super::resolved::{Resolved, SCHEMA};
use super::settings::Raw;
use super::source::{Cache, Data, Facts, Source, fraction};
use super::task::Task;
use super::whole::steps_per_epoch;
use crate::ConfigError;
use crate::deepspeed::Setting;
use crate::deepspeed::zero::gathering;
use data::Split;
use data::registry::{Entry, Open, PublishedRun};
use models::{Network, RATES, Variation};
use std::path::PathBuf;
use text::many;

const DEFAULT_EPOCHS: u64 = 3;

impl Facts {
    /// A synthetic set is whatever was asked for.
    pub fn synthetic(raw: &Raw) -> Result<Facts, ConfigError> {
        let entry = match raw.task()? {
            Task::Classify => Entry::synthetic(data::Task::Classify),
            Task::Segment => Entry::synthetic(data::Task::Segment),
        };
        let default = entry.facts.map(Facts::from).unwrap_or_default();
        let samples = |flag, typed: Option<usize>, default| at_least_one(flag, typed.unwrap_or(default));
        Ok(Facts {
            train_images: samples("train-samples", raw.train_samples, default.train_images)?,
            test_images: samples("test-samples", raw.test_samples, default.test_images)?,
            classes: raw.classes.unwrap_or(default.classes),
            channels: raw.channels.unwrap_or(default.channels),
        })
    }
}

impl Raw {
    /// The run on data of which `facts` are known, over `world` ranks.
    pub fn resolve(&self, facts: &Facts, world: usize) -> Result<Resolved, ConfigError> {
        self.settle(facts, world, &mut Log::default())
    }

    /// For commands that plan or time a step and read no data: a published model is as it was published.
    pub fn resolve_without_data(&self, world: usize) -> Result<Resolved, ConfigError> {
        let (image_size, classes) = self.recipe().size.unzip();
        let raw = Raw {
            image_size: self.image_size.or(image_size),
            classes: self.classes.or(classes),
            ..self.clone()
        };
        let run = Facts::synthetic(&raw).and_then(|facts| {
            let run = raw.settle_without_data(&facts, world, &mut Log::default())?;
            trainable(&run)?;
            Ok(run)
        });
        run.map_err(|error| error.placed(self))
    }

    /// For evaluating weights on data of which `facts` are known. What is of training alone has no say.
    pub fn resolve_for_evaluation(&self, facts: &Facts) -> Result<Resolved, ConfigError> {
        let raw = Raw { steps: Some(1), ..self.clone() };
        // As many as make a batch of training.
        let enough = Facts { train_images: usize::MAX / 2, ..*facts };
        let run = raw.settle_without_data(&enough, 1, &mut Log::default());
        let mut run = run.map_err(|error| error.placed(self))?;
        run.data.facts = *facts;
        Ok(run)
    }

    pub(super) fn settle(&self, facts: &Facts, world: usize, log: &mut Log) -> Result<Resolved, ConfigError> {
        self.settled(facts, world, log).map_err(|error| error.placed(self))
    }

    fn settled(&self, facts: &Facts, world: usize, log: &mut Log) -> Result<Resolved, ConfigError> {
        let run = self.settle_without_data(facts, world, log)?;
        trainable(&run)?;
        self.refuse_idle_interpolation(&run)?;
        if let Open::Synthetic(open) = run.data.source.entry().open {
            open(run.synthetic(Split::Train))?;
        }
        Ok(run)
    }

    /// Refuses what is wrong whatever the data: no ranks, keys of DeepSpeed's file, settings that don't go together.
    fn refuse_typed(&self, world: usize) -> Result<(), ConfigError> {
        if at_least_one("ranks", world)? > MOST_RANKS {
            return Err(ConfigError::setting("ranks", world, format!("must be at most {MOST_RANKS}")));
        }
        if let Some(file) = &self.deepspeed
            && let Some(refused) = file.refusal(&file.verdicts(&self.context(world)))
        {
            return Err(refused.into());
        }
        self.refuse_misfits()
    }

    fn settle_without_data(
        &self,
        facts: &Facts,
        world: usize,
        log: &mut Log,
    ) -> Result<Resolved, ConfigError> {
        self.refuse_typed(world)?;
        let Arithmetic { device, precision, residual, loss_scale } = self.arithmetic(log)?;
        let threads = threads("threads", log.pick("threads", self.threads, available_threads()))?;
        let source = self.source()?;
        log.typed("task", self.task);
        let (model, network) = self.network(&source, facts, log)?;
        let mut data = self.data(source, facts, threads, log)?;
        let batch = self.batch(world, log)?;
        holdable(&model, &network, batch.micro)?;
        let (augmentation, label_smoothing, pixels) = self.of_task(&data.source, &network, log)?;
        batch.check_mixing(augmentation.mixes(), world)?;
        self.check_class_weights(&network, &augmentation, label_smoothing)?;
        let length = self.length(&data, &network, batch.total, log)?;
        data.eval_images = self.eval_images(&data, length, batch.total, log)?;
        let (eval_every, eval_steps) = self.eval_every(&data, length, batch.total, log)?;
        let (optimizer, lr) = self.optimizer(log)?;
        let schedule = self.schedule(lr, length, log)?;
        let groups = self.groups(&network, log)?;
        self.refuse_idle(&optimizer)?;
        let (out, resume) = self.folders(log)?;
        let all_reduce = self.all_reduce(world, precision, &network, log)?;
        let plain = self.plain(log)?;
        let shard_group = self.shard_group(&plain, world, log)?;
        let gathering = gathering(self.deepspeed.as_ref(), plain.zero, world);
        Ok(Resolved {
            schema: SCHEMA,
            gpu: 0,
            model,
            class_names: vec![],
            network,
            data,
            augmentation,
            pixels,
            world,
            batch: batch.micro,
            accumulate: batch.accumulate,
            uneven: batch.uneven(world),
            epochs: length.steps.div_ceil(length.steps_per_epoch),
            steps: length.steps,
            steps_per_epoch: length.steps_per_epoch,
            optimizer,
            schedule,
            clip: self.clip(log)?,
            label_smoothing,
            groups,
            recompute: self.recompute.unwrap_or_default(),
            device,
            precision,
            residual,
            loss_scale,
            threads,
            init: self.init(log)?,
            new_head: self.new_head,
            out,
            resume,
            checkpoint_every: count("checkpoint-every", self.checkpoint_every, length.steps_per_epoch, log)?,
            checkpoints: !self.no_checkpoints,
            eval_every,
            eval_steps,
            log_every: self.log_every(length.steps, log)?,
            breakdown: self.breakdown(),
            breakdown_lines: self.breakdown_in_file() == Some(true),
            account: !self.no_account,
            trace: self.trace.clone(),
            force: self.force,
            all_reduce,
            shard_group,
            gathering,
            plain,
            typed: None,
        })
    }

    fn network(
        &self,
        source: &Source,
        facts: &Facts,
        log: &mut Log,
    ) -> Result<(String, Network), ConfigError> {
        let model = log.pick("model", self.model.clone(), self.default_model().to_string());
        let image = match Network::image_in_name(&model).filter(|_| self.image_size.is_none()) {
            Some(image) => {
                log.note("image-size", image, Origin::Default(format!("that of {model}")));
                image
            }
            None => log.pick("image-size", self.image_size, source.image_size()),
        };
        let channels = log.pick("channels", self.channels, facts.channels);
        if channels != facts.channels {
            let why = format!("the images have {}", many(facts.channels, "channel"));
            return Err(ConfigError::setting("channels", channels, why));
        }
        let classes = log.pick("classes", self.classes, facts.classes);
        if classes < facts.classes {
            let why = format!("the data has {}, more than the head would have", many(facts.classes, "class"));
            return Err(ConfigError::setting("classes", classes, why));
        }
        let mut network = Network::named(&model, image, channels, classes)?;
        self.norm_eps.map(|eps| positive("norm-eps", eps)).transpose()?;
        self.check_rates()?;
        network
            .vary(&self.variation())
            .map_err(|misfit| ConfigError::setting(misfit.flag, misfit.value, misfit.why))?;
        network.check(&model)?;
        match (network.usual_dropout(), self.dropout) {
            (Some((rate, why)), None) => log.note("dropout", rate, Origin::Default(why.to_string())),
            (_, typed) => log.typed("dropout", typed),
        }
        log.typed("attention-dropout", self.attention_dropout);
        log.typed("norm-eps", self.norm_eps);
        let recipe = self.recipe();
        match self.drop_path {
            None if recipe.drop_path > 0.0 => log.note("drop-path", recipe.drop_path, recipe.origin()),
            typed => log.typed("drop-path", typed),
        }
        Ok((model, network))
    }

    fn check_rates(&self) -> Result<(), ConfigError> {
        for (flag, typed) in [
            ("dropout", self.dropout),
            ("attention-dropout", self.attention_dropout),
            ("drop-path", self.drop_path),
        ] {
            if let Some(rate) = typed.filter(|rate| !RATES.contains(rate)) {
                let why = format!("must lie in {} ≤ rate < {}", RATES.start, RATES.end);
                return Err(ConfigError::setting(flag, rate, why));
            }
        }
        Ok(())
    }

    /// Pooling and rates, as typed.
    fn variation(&self) -> Variation {
        Variation {
            pool: self.pool,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            drop_path: self.drop_path.unwrap_or(self.recipe().drop_path),
            norm_eps: self.norm_eps,
        }
    }

    fn data(
        &self,
        source: Source,
        facts: &Facts,
        threads: usize,
        log: &mut Log,
    ) -> Result<Data, ConfigError> {
        let origin = if self.data.is_some() { Origin::Flag } else { Origin::default_value() };
        log.note("data", &source, origin);
        if !source.is_synthetic() {
            for (flag, typed) in [("train-samples", self.train_samples), ("test-samples", self.test_samples)]
            {
                if let Some(value) = typed {
                    let why = format!("only synthetic sets have any number of images, not {source}");
                    return Err(ConfigError::setting(flag, value, why));
                }
            }
        }
        if facts.train_images == 0 || facts.test_images == 0 {
            return Err(ConfigError::setting(
                "data",
                &source,
                "has no images to train on, or an empty validation set",
            ));
        }
        log.typed("train-samples", self.train_samples);
        log.typed("test-samples", self.test_samples);
        // Decoding photographs is work for all threads; synthetic images and CIFAR's raw bytes are not.
        let default_workers = if source.decodes() { threads } else { 1 };
        let workers = super::resolve::threads("workers", log.pick("workers", self.workers, default_workers))?;
        let fraction = fraction(log.pick("data-fraction", self.data_fraction, 1.0))?;
        let cache = log.pick("cache", self.cache, Cache::Auto);
        let skip_bad_images = self.skip_bad_images;
        log.typed("skip-bad-images", skip_bad_images.then_some("yes"));
        Ok(Data {
            source,
            relative: None,
            facts: *facts,
            fraction,
            workers,
            cache,
            skip_bad_images,
            eval_images: None,
        })
    }

    fn length(
        &self,
        data: &Data,
        network: &Network,
        global_batch: usize,
        log: &mut Log,
    ) -> Result<Length, ConfigError> {
        let images = data.train_images();
        let drop_last = self.plain(&mut Log::default())?.drop_last;
        if drop_last && images < global_batch {
            let why =
                format!("leaves nothing of {}: no batch of {global_batch} is full", many(images, "image"));
            return Err(ConfigError::setting("drop-last", "", why));
        }
        let whole = drop_last || network.normalises_batches();
        let steps_per_epoch = steps_per_epoch(images, global_batch, whole)?;
        let published = data.source.entry().run.filter(|_| self.steps.is_none() && self.epochs.is_none());
        if let Some(PublishedRun { steps, batch, .. }) = published {
            let origin = format!("{},000 × {} / {global_batch}", steps / 1000, many(batch as usize, "image"));
            let (steps, origin) = ((steps * batch / global_batch as u64).max(1), Origin::Derived(origin));
            log.note("steps", steps, origin);
            return Ok(Length { steps, steps_per_epoch });
        }
        if let (Some(epochs), Some(steps)) = (self.epochs, self.steps) {
            let why = format!("--steps {steps} says how long the run is: leave out one of them");
            return Err(ConfigError::setting("epochs", epochs, why));
        }
        let epochs = count("epochs", self.epochs, DEFAULT_EPOCHS, &mut Log::default())?;
        let Some(steps) = self.steps.or_else(|| epochs.checked_mul(steps_per_epoch)) else {
            return Err(ConfigError::setting("epochs", epochs, "more steps than can be counted"));
        };
        let steps = count("steps", Some(steps), steps, &mut Log::default())?;
        let origin = match self.steps {
            Some(_) => Origin::Flag,
            None => Origin::Derived(format!(
                "{} × {} / {global_batch}",
                many(epochs as usize, "epoch"),
                many(images, "image")
            )),
        };
        if self.steps.is_none() {
            log.pick("epochs", self.epochs, DEFAULT_EPOCHS);
        }
        log.note("steps", steps, origin);
        Ok(Length { steps, steps_per_epoch })
    }

    fn clip(&self, log: &mut Log) -> Result<Option<f64>, ConfigError> {
        let of_file = self.deepspeed.as_ref().and_then(|file| file.number("gradient_clipping"));
        let (norm, origin) = match (self.clip, of_file) {
            (Some(norm), _) => (norm, Origin::Flag),
            (None, Some(Setting::Given(norm))) => (norm, Origin::File("gradient_clipping".to_string())),
            (None, None) if self.deepspeed.is_some() => {
                (0.0, Origin::Default("DeepSpeed's default, as gradient_clipping is not given".to_string()))
            }
            (None, _) => (self.recipe().clip, self.recipe().origin()),
        };
        log.note("clip", norm, origin);
        if norm == 0.0 { Ok(None) } else { positive("clip", norm).map(Some) }
    }

    fn init(&self, log: &mut Log) -> Result<Option<PathBuf>, ConfigError> {
        if self.new_head && self.init.is_none() {
            let why = "there are no weights whose head could be another: add --init WEIGHTS";
            return Err(ConfigError::setting("new-head", "", why));
        }
        log.typed("init", self.init.as_ref().map(|path| path.display()));
        log.typed("new-head", self.new_head.then_some("yes"));
        Ok(self.init.clone())
    }

    /// Folder of the run, and whether it continues there.
    fn folders(&self, log: &mut Log) -> Result<(Option<PathBuf>, Option<PathBuf>), ConfigError> {
        let resume = match (&self.resume, &self.out) {
            (None, _) => None,
            (Some(None), Some(out)) => Some(out.clone()),
            (Some(None), None) => {
                let why = "which run? Name its folder: --resume DIR, or --out DIR";
                return Err(ConfigError::setting("resume", "", why));
            }
            (Some(Some(folder)), Some(out)) if folder != out => {
                let why = format!("a run continues in its own folder, and --out is {}", out.display());
                return Err(ConfigError::setting("resume", folder.display(), why));
            }
            (Some(Some(folder)), _) => Some(folder.clone()),
        };
        if self.no_checkpoints && resume.is_some() {
            let why = "a run that goes on keeps checkpoints, so that it can go on again";
            return Err(ConfigError::setting("no-checkpoints", "", why));
        }
        log.typed("no-checkpoints", self.no_checkpoints.then_some("yes"));
        let out = self.out.clone().or_else(|| resume.clone());
        log.typed("out", out.as_ref().map(|path| path.display()));
        log.typed("resume", resume.as_ref().map(|path| path.display()));
        Ok((out, resume))
    }

    /// About twenty lines a run, unless someone wants otherwise.
    fn log_every(&self, steps: u64, log: &mut Log) -> Result<u64, ConfigError> {
        let of_file = self.deepspeed.as_ref().and_then(|file| file.whole("steps_per_print"));
        if let (None, Some(Setting::Given(every))) = (self.log_every, of_file) {
            log.note("log-every", every, Origin::File("steps_per_print".to_string()));
            return Ok(every);
        }
        count("log-every", self.log_every, (steps / 20).max(1), log)
    }

    fn breakdown(&self) -> bool {
        !self.no_breakdown && self.breakdown_in_file() != Some(false)
    }

    fn breakdown_in_file(&self) -> Option<bool> {
        match self.deepspeed.as_ref()?.boolean("wall_clock_breakdown")? {
            Setting::Given(value) => Some(value),
            Setting::Auto => None,
        }
    }
}

pub(super) fn smoothing(rate: f64) -> Result<f64, ConfigError> {
    let good = (0.0..1.0).contains(&rate);
    if good {
        Ok(rate)
    } else {
        Err(ConfigError::setting("label-smoothing", rate, "must lie in 0 ≤ rate < 1"))
    }
}

/// Refuses sizes that no memory holds.
fn holdable(model: &str, network: &Network, batch: usize) -> Result<(), ConfigError> {
    if network.numbers(batch) < MOST_VALUES {
        return Ok(());
    }
    Err(ConfigError::TooLarge {
        model: model.to_string(),
        image: network.image(),
        channels: network.channels(),
        classes: network.classes(),
        batch,
    })
}

/// Refuses batches that can be evaluated, but not trained on.
fn trainable(run: &Resolved) -> Result<(), ConfigError> {
    if run.network.normalises_batches() && run.batch < LEAST_NORMALISED {
        let why = "batch norm takes moments over at least two images of a rank";
        return Err(ConfigError::setting("batch-size", run.batch, why));
    }
    if run.network.normalises_batches() && run.data.skip_bad_images {
        let why = "a gap in a batch would change what batch norm takes for its moments";
        return Err(ConfigError::setting("skip-bad-images", "", why));
    }
    Ok(())
}

/// Images that batch norm takes moments over: of UPerNet's coarsest pooling each has one value.
pub const LEAST_NORMALISED: usize = 2;

/// A petabyte of f32.
const MOST_VALUES: f64 = 2.5e14;

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn count(flag: &'static str, typed: Option<u64>, default: u64, log: &mut Log) -> Result<u64, ConfigError> {
    let value = log.pick(flag, typed, default);
    if value == 0 { Err(ConfigError::setting(flag, value, "must be at least 1")) } else { Ok(value) }
}

pub(super) fn at_least_one(flag: &'static str, value: usize) -> Result<usize, ConfigError> {
    if value == 0 { Err(ConfigError::setting(flag, value, "must be at least 1")) } else { Ok(value) }
}

/// More than any cluster has, and few enough to count with.
const MOST_RANKS: usize = 1 << 20;

/// More than any machine has, and few enough to be started.
const MOST_THREADS: usize = 4096;

fn threads(flag: &'static str, value: usize) -> Result<usize, ConfigError> {
    if at_least_one(flag, value)? <= MOST_THREADS {
        return Ok(value);
    }
    Err(ConfigError::setting(flag, value, format!("must be at most {MOST_THREADS}")))
}

/// A number that steps are computed with, in `f32` at least.
pub(super) fn positive(flag: &'static str, value: f64) -> Result<f64, ConfigError> {
    match value {
        value if value.is_nan() || value <= 0.0 => Err("must be positive"),
        value => in_fp32(value),
    }
    .map_err(|why| ConfigError::setting(flag, value, why))
}

/// Refuses a positive number that is zero or infinite in `f32`, where a GPU takes subnormal numbers for zero.
pub(super) fn in_fp32(value: f64) -> Result<f64, &'static str> {
    match value as f32 {
        held if held < f32::MIN_POSITIVE => Err("is less than fp32 holds"),
        held if held.is_infinite() => Err("is more than fp32 holds"),
        _ => Ok(value),
    }
}
