//! Which model weights belong to: as they say themselves, or as flags say.

use models::names::Weights;
use train::config::Task;
use train::sets::{Opened, Sets};
use train::stored::Stored;
use train::{Raw, Resolved, printable, weights};

/// Weights with a run that can judge images by them.
pub struct Judge {
    pub run: Resolved,
    pub weights: Weights,
}

impl Judge {
    /// Flags about the model win over what the weights say of themselves: all of them then, not one by one.
    pub fn new(stored: Stored, raw: &Raw) -> anyhow::Result<Self> {
        let mut run = match stored.run.filter(|_| raw.model.is_none()) {
            Some(run) => run,
            None => raw.resolve_without_data(1)?,
        };
        run.batch = raw.batch_size.unwrap_or(run.batch);
        run.threads = raw.threads.unwrap_or(run.threads);
        run.data.workers = raw.workers.unwrap_or(run.data.workers);
        run.data.skip_bad_images |= raw.skip_bad_images;
        raw.judge_pixels(&mut run)?;
        let weights = weights::load_for(&stored.weights, &run.network, false)?;
        Ok(Judge { run, weights })
    }

    /// Refuses weights of another task; `instead` is the command for them.
    pub fn of_task(self, task: Task, instead: &str) -> anyhow::Result<Self> {
        if self.run.task() == task {
            return Ok(self);
        }
        anyhow::bail!("{}: its task is {}; use `vitesse {instead}`", self.run.model, self.run.task())
    }

    /// Where images are judged: on the CPU, unless flags say otherwise.
    pub fn on_device(mut self, raw: &Raw) -> anyhow::Result<Self> {
        raw.judge_on(&mut self.run)?;
        Ok(self)
    }

    /// The data the weights were trained on, or what was typed.
    pub fn sets(&mut self, raw: &Raw) -> anyhow::Result<Sets> {
        if raw.data.is_some() {
            let source = Raw { data: raw.data.clone(), ..Raw::default() }.source()?;
            if source.has_masks() != self.run.network.segments() {
                let task = self.run.task();
                anyhow::bail!("--data {source}: doesn't fit {}, whose task is {task}", self.run.model);
            }
            self.run.data.source = source;
        }
        let (channels, skip_bad) = (Some(self.run.network.channels()), self.run.data.skip_bad_images);
        let opened = Opened::new(&self.run.data.source, channels, skip_bad)?;
        if let Some(found) = opened.found() {
            self.run.data.facts = found;
        }
        let sets = opened.for_run(&self.run)?;
        let names = sets.test_class_names();
        let classes = names.len();
        if classes > self.run.network.classes() {
            anyhow::bail!(
                "{}: {classes} classes, but the head of the weights tells {} apart",
                self.run.data.source,
                self.run.network.classes()
            );
        }
        let known = &self.run.class_names;
        if let Some((ours, theirs)) = names.iter().zip(known).find(|(ours, theirs)| ours != theirs) {
            anyhow::bail!(
                "{}: class `{ours}` stands where the weights know `{theirs}`",
                self.run.data.source
            );
        }
        Ok(sets)
    }
}

/// What to call class `class` where people read it: one line that a terminal only shows.
pub fn class_name(names: &[String], class: usize) -> String {
    printable::line(&exact_name(names, class))
}

/// The same for programs, to the character.
pub fn exact_name(names: &[String], class: usize) -> String {
    names.get(class).cloned().unwrap_or_else(|| format!("class {class}"))
}
