//! What is trained how, where neither flags nor a file say so.

use super::augmentation::Preset;
use super::choice::Form;
use super::origin::Origin;
use super::settings::Raw;
use super::task::Task;
use models::Network;

/// Defaults that belong together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Recipe {
    /// Whose they are; nothing of our own.
    whose: &'static str,
    /// Images of a micro-step of one rank. With masks those of the study of scaling (8 a GPU): the recipe has 16 over 8 GPUs.
    pub batch: usize,
    /// Learning rate of AdamW.
    pub lr: f64,
    pub weight_decay: f64,
    pub schedule: Form,
    /// Steps of warm-up, at most, and one part of so many of a run.
    warmup: (u64, u64),
    /// 0 for none.
    pub clip: f64,
    pub drop_path: f64,
    pub augment: Preset,
    /// Size of training and validation images that have none of their own; and of classes.
    pub size: Option<(usize, usize)>,
}

const CLASSIFY: Recipe = Recipe {
    whose: "",
    batch: 64,
    lr: 1e-3,
    weight_decay: 0.05,
    schedule: Form::Cosine,
    warmup: (u64::MAX, 20),
    clip: 1.0,
    drop_path: 0.0,
    augment: Preset::None,
    size: None,
};

/// Swin's UPerNet on ADE20K, by its authors and in mmsegmentation: 160,000 steps, 1,500 of them warm-up, no clipping.
const UPERNET: Recipe = Recipe {
    whose: "published for UPerNet on ADE20K",
    batch: 8,
    lr: 6e-5,
    weight_decay: 0.01,
    schedule: Form::Poly,
    warmup: (1500, 10),
    clip: 0.0,
    drop_path: 0.3,
    augment: Preset::Strong,
    size: Some((512, 150)),
};

/// Small models, and those that nobody published a recipe for, learn from nothing: the same with a higher rate.
const SEGMENT: Recipe =
    Recipe { whose: "as published for UPerNet", lr: 1e-3, clip: 1.0, drop_path: 0.0, size: None, ..UPERNET };

impl Recipe {
    /// By the family and the width of the model alone.
    fn of(model: &str) -> Recipe {
        match task_of(model) {
            Task::Segment if Network::published_image(model).is_some() => UPERNET,
            Task::Segment => SEGMENT,
            Task::Classify => CLASSIFY,
        }
    }

    /// Steps of warm-up of a run of `steps`.
    pub fn warmup(&self, steps: u64) -> u64 {
        let (most, parts) = self.warmup;
        (steps / parts).min(most)
    }

    /// Origin of a default of this recipe.
    pub fn origin(&self) -> Origin {
        Origin::Default(self.whose.to_string())
    }

    /// The same for a value that may come from elsewhere.
    pub fn or_origin(&self, origin: Origin) -> Origin {
        if origin == Origin::default_value() { self.origin() } else { origin }
    }
}

fn task_of(model: &str) -> Task {
    if Network::name_segments(model) { Task::Segment } else { Task::Classify }
}

impl Raw {
    pub(super) fn recipe(&self) -> Recipe {
        Recipe::of(self.model.as_deref().unwrap_or(self.default_model()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_go_by_the_model() {
        assert_eq!(Recipe::of("vit-b/16"), CLASSIFY);
        assert_eq!(Recipe::of("swinv2-b/w8"), CLASSIFY);
        assert_eq!(Recipe::of("swinv2-b/w8+upernet"), UPERNET);
        assert_eq!(Recipe::of("swinv2-l/w12to16+upernet"), UPERNET);
        assert_eq!(Recipe::of("swinv2-nano/w8+upernet"), SEGMENT);
        assert_eq!(Recipe::of("vit-ti/16+linear"), SEGMENT);
        assert_eq!(Recipe::of("nonsense"), CLASSIFY, "refused elsewhere");
    }

    #[test]
    fn warm_up_is_a_part_of_short_runs() {
        assert_eq!((CLASSIFY.warmup(939), CLASSIFY.warmup(1_000_000)), (46, 50_000));
        assert_eq!((UPERNET.warmup(160_000), UPERNET.warmup(20_000), UPERNET.warmup(100)), (1500, 1500, 10));
    }
}
