//! The optimizer and its schedule, from flags, the configuration file, or defaults.
//!
//! What a file's section leaves out is as DeepSpeed has it; what it calls "auto" is as vitesse has it.

use super::choice::Form;
use super::optimizers;
use super::origin::{Log, Origin};
use super::resolve::positive;
use super::settings::Raw;
use crate::ConfigError;
use crate::deepspeed::{DeepSpeed, FileError, Setting, same_optimizer};
use crate::raw::Span;
use crate::schedule::{Drops, Schedule};
use crate::settings::value::none_of;
use graph::Optimizer;
use text::many;

/// A value with where it came from.
pub(super) type Picked<T> = (T, Origin);

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Length {
    pub steps: u64,
    pub steps_per_epoch: u64,
}

/// A section of the file, if it holds for this run.
pub(super) struct Section<'a> {
    pub file: Option<&'a DeepSpeed>,
    pub name: &'static str,
}

impl Section<'_> {
    /// `ours` if there is no section or it says "auto"; `theirs` if the section leaves it out.
    pub fn pick<T>(
        &self,
        param: &str,
        read: impl Fn(&DeepSpeed, &str) -> Option<Setting<T>>,
        ours: T,
        theirs: T,
    ) -> Picked<T> {
        let key = format!("{}.params.{param}", self.name);
        let Some(file) = self.file else { return (ours, Origin::default_value()) };
        match read(file, &key) {
            Some(Setting::Given(value)) => (value, Origin::File(key)),
            Some(Setting::Auto) => (ours, Origin::Default(format!("default, as {key} is \"auto\""))),
            None => (theirs, Origin::Default(format!("DeepSpeed's default, as {key} is not given"))),
        }
    }

    pub fn number(&self, param: &str, ours: f64, theirs: f64) -> Picked<f64> {
        self.pick(param, DeepSpeed::number, ours, theirs)
    }

    pub fn whole(&self, param: &str, ours: u64, theirs: u64) -> Picked<u64> {
        self.pick(param, DeepSpeed::whole, ours, theirs)
    }

    pub fn boolean(&self, param: &str, ours: bool, theirs: bool) -> Picked<bool> {
        self.pick(param, DeepSpeed::boolean, ours, theirs)
    }
}

pub(super) fn or_flag<T>(flag: Option<T>, otherwise: Picked<T>) -> Picked<T> {
    flag.map_or(otherwise, |value| (value, Origin::Flag))
}

/// The default of torch.optim.AdamW.
const TORCH_DECAY: f64 = 0.01;

impl Raw {
    /// The optimizer and its learning rate.
    pub(super) fn optimizer(&self, log: &mut Log) -> Result<(Optimizer, Picked<f64>), ConfigError> {
        if let Some(decay) = self.weight_decay.filter(|decay| *decay != 0.0) {
            positive("weight-decay", decay)?;
        }
        let context = self.context(1);
        let of_file = self.deepspeed.as_ref().and_then(|file| file.text("optimizer.type"));
        let file = self.deepspeed.as_ref().filter(|file| of_file.is_some() && same_optimizer(file, &context));
        let section = Section { file, name: "optimizer" };
        let (name, origin) = match (&self.optimizer, of_file) {
            (Some(name), _) => (name.clone(), Origin::Flag),
            (None, Some(name)) => (name.to_ascii_lowercase(), Origin::File("optimizer.type".to_string())),
            (None, None) => (optimizers::ALL[0].name.to_string(), Origin::default_value()),
        };
        let found = match self.optimizer {
            Some(_) => optimizers::Optimizer::named(&name),
            None => {
                optimizers::Optimizer::named(&name).or_else(|| optimizers::Optimizer::of_deepspeed(&name))
            }
        };
        let Some(one) = found else {
            let names: Vec<&str> = optimizers::ALL.iter().map(|one| one.name).collect();
            let why = none_of(&name, &names);
            return Err(ConfigError::setting("optimizer", name, why));
        };
        let name = one.name;
        log.note("optimizer", name, origin);
        let recipe = self.recipe();
        // PyTorch's own AdamW, if the file asks for it, decays where DeepSpeed's doesn't.
        let torch = matches!(section.boolean("torch_adam", false, false), (true, _)) && name == "adamw";
        let theirs = if torch { TORCH_DECAY } else { 0.0 };
        let ours = one.weight_decay.unwrap_or(recipe.weight_decay);
        let (decay, origin) = or_flag(self.weight_decay, section.number("weight_decay", ours, theirs));
        let origin = if one.weight_decay.is_none() { recipe.or_origin(origin) } else { origin };
        log.note("weight-decay", decay, origin);
        let optimizer = one.rule(self, &section, decay, log)?;
        if let Optimizer::Sgd { momentum, nesterov, .. } = optimizer {
            self.nesterov_needs_momentum(momentum, nesterov)?;
        }
        let default_lr = one.lr.unwrap_or(recipe.lr);
        let (lr, origin) = or_flag(self.lr, section.number("lr", default_lr, 1e-3));
        let origin = if one.lr.is_none() { recipe.or_origin(origin) } else { origin };
        Ok((optimizer, (positive("lr", lr)?, origin)))
    }

    fn nesterov_needs_momentum(&self, momentum: f64, nesterov: bool) -> Result<(), ConfigError> {
        match &self.deepspeed {
            Some(file) if nesterov && momentum == 0.0 => {
                let why =
                    "optimizer.params.nesterov true needs optimizer.params.momentum above 0".to_string();
                Err(FileError::File { file: file.file.clone(), why }.into())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn schedule(
        &self,
        lr: Picked<f64>,
        length: Length,
        log: &mut Log,
    ) -> Result<Schedule, ConfigError> {
        let named = self.deepspeed.as_ref().and_then(|file| Some((file, file.text("scheduler.type")?)));
        let (schedule, origin) = match named.filter(|_| self.schedule.is_none()) {
            Some((file, name)) => {
                let key = Origin::File("scheduler.type".to_string());
                (Schedule::DeepSpeed(self.scheduler(file, name, lr, length, log)?), key)
            }
            None => {
                let origin = if self.schedule.is_some() { Origin::Flag } else { self.recipe().origin() };
                log.note("lr", lr.0, lr.1);
                (self.own_schedule(lr.0, length, log)?, origin)
            }
        };
        log.note("schedule", &schedule, origin);
        Ok(schedule)
    }

    fn own_schedule(&self, peak: f64, length: Length, log: &mut Log) -> Result<Schedule, ConfigError> {
        let recipe = self.recipe();
        let form = self.schedule.unwrap_or(recipe.schedule);
        self.refuse_flags_of_others(&form.to_string(), |forms| forms.contains(&form))?;
        let total = length.steps;
        let default_warmup = if form == Form::Constant { 0 } else { recipe.warmup(total) };
        let (warmup, origin) = or_flag(self.warmup(length), (default_warmup, Origin::default_value()));
        log.note("warmup-steps", warmup, self.warmup_origin(length, origin));
        let warmup = warmup.min(total);
        let min = self.min_lr.unwrap_or(0.0);
        if !(0.0..=peak).contains(&min) {
            let why = format!("must lie between 0 and the highest rate, {peak}");
            return Err(ConfigError::setting("min-lr", min, why));
        }
        Ok(match form {
            Form::Cosine => Schedule::Cosine { peak, min, warmup, total },
            Form::Linear => Schedule::Linear { peak, min, warmup, total },
            Form::Constant => Schedule::Constant { peak, warmup },
            Form::Poly => {
                let power = positive("power", log.pick("power", self.power, 1.0))?;
                Schedule::Poly { peak, min, power, warmup, total }
            }
            Form::Step => {
                let gamma = positive("gamma", log.pick("gamma", self.gamma, 0.1))?;
                Schedule::Step { peak, gamma, drops: self.drops(length)?, warmup }
            }
        })
    }

    /// Steps of warm-up that were asked for.
    pub(super) fn warmup(&self, length: Length) -> Option<u64> {
        self.warmup_steps.map(|span| span.steps(length.steps_per_epoch))
    }

    /// Where the steps of warm-up come from: epochs are counted in steps.
    pub(super) fn warmup_origin(&self, length: Length, origin: Origin) -> Origin {
        match self.warmup_steps {
            Some(span @ Span::Epochs(_)) => Origin::Derived(format!(
                "--warmup-steps {span} × {} an epoch",
                many(length.steps_per_epoch as usize, "step")
            )),
            _ => origin,
        }
    }

    fn drops(&self, length: Length) -> Result<Drops, ConfigError> {
        let mut milestones: Vec<u64> =
            self.milestones.iter().map(|span| span.steps(length.steps_per_epoch)).collect();
        milestones.sort_unstable();
        let zero = |span: &&Span| matches!(span, Span::Steps(0) | Span::Epochs(0.0));
        let spans = [
            ("milestones", self.milestones.iter().find(zero)),
            ("step-every", self.step_every.as_ref().filter(zero)),
        ];
        if let Some((flag, span)) = spans.into_iter().find_map(|(flag, span)| Some((flag, span?))) {
            return Err(ConfigError::setting(flag, span, "must be more than 0"));
        }
        match (self.step_every, milestones.is_empty()) {
            (Some(every), false) => {
                Err(ConfigError::setting("step-every", every, "--milestones says when the rate drops"))
            }
            (None, false) => Ok(Drops::At(milestones)),
            (Some(every), true) => Ok(Drops::Every(every.steps(length.steps_per_epoch).max(1))),
            (None, true) => Ok(Drops::Every(length.steps.div_ceil(3).max(1))),
        }
    }

    /// Flags that shape another schedule than this one would do nothing.
    pub(super) fn refuse_flags_of_others(
        &self,
        name: &str,
        own: impl Fn(&[Form]) -> bool,
    ) -> Result<(), ConfigError> {
        let falling: &[Form] = &[Form::Cosine, Form::Linear, Form::Poly];
        let milestones = self.milestones.first();
        for (flag, typed, forms) in [
            ("min-lr", self.min_lr.map(|x| x.to_string()), falling),
            ("power", self.power.map(|x| x.to_string()), &[Form::Poly]),
            ("gamma", self.gamma.map(|x| x.to_string()), &[Form::Step]),
            ("step-every", self.step_every.map(|x| x.to_string()), &[Form::Step]),
            ("milestones", milestones.map(|x| x.to_string()), &[Form::Step]),
        ] {
            if let Some(value) = typed.filter(|_| !own(forms)) {
                let forms: Vec<String> = forms.iter().map(Form::to_string).collect();
                let why = format!("is for --schedule {}; this run's is {name}", forms.join(", "));
                return Err(ConfigError::setting(flag, value, why));
            }
        }
        Ok(())
    }
}
