//! What a model is to tell: the class of an image, or that of every pixel. As typed, or as the model and the data say.

use super::choice::choice;
use super::settings::Raw;
use super::source::Source;
use crate::ConfigError;
use models::Network;

choice! {
    Task {
        Classify = "classify",
        Segment = "segment",
    }
}

impl Task {
    pub fn of(network: &Network) -> Self {
        if network.segments() { Task::Segment } else { Task::Classify }
    }

    fn of_source(source: &Source) -> Self {
        match source.entry().task {
            data::Task::Segment => Task::Segment,
            data::Task::Classify => Task::Classify,
        }
    }

    fn of_name(model: &str) -> Self {
        if Network::name_segments(model) { Task::Segment } else { Task::Classify }
    }

    /// Words for what a model or a set of this task does, for messages.
    fn tells(self) -> &'static str {
        match self {
            Task::Classify => "one class for each image",
            Task::Segment => "a class for each pixel",
        }
    }

    /// The kind of task, as studies call it.
    pub fn noun(self) -> &'static str {
        match self {
            Task::Classify => "classification",
            Task::Segment => "segmentation",
        }
    }
}

/// The smallest that learn the synthetic sets in about a minute on two cores, and the published one.
pub const DEFAULT_MODEL: &str = "vit-nano/4";
const DEFAULT_SEGMENTER: &str = "swinv2-nano/w8+upernet";
const PUBLISHED_SEGMENTER: &str = "swinv2-b/w8+upernet";

impl Raw {
    /// Whoever said something first decides: the task itself, the model, the data. Whatever contradicts that is refused.
    pub fn task(&self) -> Result<Task, ConfigError> {
        let source: Option<Source> = match &self.data {
            Some(name) => Some(name.parse().map_err(|why: String| ConfigError::setting("data", name, why))?),
            None => None,
        };
        let of_model = self.model.as_deref().map(Task::of_name);
        let of_data = source.as_ref().map(Task::of_source);
        let task = self.task.or(of_model).or(of_data).unwrap_or(Task::Classify);
        if let (Some(model), Some(other)) = (&self.model, of_model.filter(|other| *other != task)) {
            let hint = match task {
                Task::Segment if model.starts_with("swin") => format!("; {model}+upernet has the other"),
                Task::Segment => format!("; {model}+linear has the other"),
                Task::Classify => String::new(),
            };
            let why = format!("has {}, but --task is {task}{hint}", other.tells());
            return Err(ConfigError::setting("model", model, why));
        }
        if let (Some(source), Some(other)) = (&source, of_data.filter(|other| *other != task)) {
            let whose = match (self.task, &self.model) {
                (Some(task), _) => format!("--task is {task}"),
                (None, Some(model)) => format!("--model {model} has {}", task.tells()),
                (None, None) => format!("the task is {task}"),
            };
            return Err(ConfigError::setting("data", source, format!("has {}, but {whose}", other.tells())));
        }
        Ok(task)
    }

    /// Source of the images. Whoever opens them says in [`super::Facts`] what is there.
    pub fn source(&self) -> Result<Source, ConfigError> {
        let task = self.task()?;
        match &self.data {
            Some(name) => {
                name.parse().map_err(|why: String| ConfigError::setting("data", name, why).placed(self))
            }
            None if task == Task::Segment => Ok(Source::synthetic(data::Task::Segment)),
            None => Ok(Source::synthetic(data::Task::Classify)),
        }
    }

    /// The model's name, if nobody gave one.
    pub(super) fn default_model(&self) -> &'static str {
        match self.source() {
            Ok(source) if source.has_masks() && source.is_synthetic() => DEFAULT_SEGMENTER,
            Ok(source) if source.has_masks() => PUBLISHED_SEGMENTER,
            _ => DEFAULT_MODEL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(task: Option<Task>, model: Option<&str>, data: Option<&str>) -> Raw {
        Raw { task, model: model.map(String::from), data: data.map(String::from), ..Raw::default() }
    }

    #[test]
    fn the_task_follows_from_whatever_says_something() {
        use Task::{Classify, Segment};
        let task = |typed, model, data| raw(typed, model, data).task().unwrap();
        assert_eq!(task(None, None, None), Classify);
        assert_eq!(task(None, Some("swinv2-ti/w8+upernet"), None), Segment);
        assert_eq!(task(None, None, Some("ade20k:d")), Segment);
        assert_eq!(task(None, Some("vit-ti/4"), Some("cifar10:d")), Classify);
        assert_eq!(task(Some(Segment), None, None), Segment);
        let source = |task, model| raw(task, model, None).source().unwrap();
        assert_eq!(source(Some(Segment), None).set(), "synthetic-masks");
        assert_eq!(source(None, Some("vit-ti/4+linear")).set(), "synthetic-masks");
        assert_eq!(raw(None, None, Some("ade20k:d")).default_model(), "swinv2-b/w8+upernet");
    }

    #[test]
    fn contradictions_are_named() {
        let refused = |task, model, data| raw(task, model, data).task().unwrap_err().to_string();
        assert_eq!(
            refused(Some(Task::Segment), Some("vit-ti/4"), None),
            "--model vit-ti/4: has one class for each image, but --task is segment; vit-ti/4+linear has the other"
        );
        assert_eq!(
            refused(Some(Task::Classify), Some("vit-ti/4+linear"), None),
            "--model vit-ti/4+linear: has a class for each pixel, but --task is classify"
        );
        assert_eq!(
            refused(None, Some("swinv2-ti/w8+upernet"), Some("cifar10:d")),
            "--data cifar10:d: has one class for each image, but --model swinv2-ti/w8+upernet has a class for each pixel"
        );
        assert_eq!(
            refused(Some(Task::Classify), None, Some("synthetic-masks")),
            "--data synthetic-masks: has a class for each pixel, but --task is classify"
        );
    }
}
