//! What is evaluated, and how: weights, and settings that start from what the weights say about themselves. What was typed
//! overrides that key by key, and the whole is resolved once, for every command that reads weights.

use crate::error::TrainError;
use crate::record;
use config::card::Card;
use config::sets::{Opened, Sets};
use config::{ConfigError, Facts, Place, Raw, Resolved, Source, Task};
use files::folder_of;
use formats::checkpoint::FOLDER;
use formats::locate::weights_file;
use formats::weights::Named;
use models::Network;
use models::names::Weights;
use std::path::{Path, PathBuf};

/// Weights that were found, with what they say about themselves.
pub struct Found {
    pub file: PathBuf,
    named: Named,
    card: Card,
}

/// Weights, and the settings to evaluate them by.
pub struct Evaluated {
    pub file: PathBuf,
    pub weights: Weights,
    pub run: Resolved,
    /// Whether mean and deviation are said neither by the weights nor by flags.
    pub assumed: bool,
    /// Files beside the weights that say how to evaluate them.
    pub told_by: Vec<&'static str>,
    /// Of the weights as they were found.
    told: Card,
    /// The configuration of the run they come from, as JSON.
    config: Option<String>,
}

impl Found {
    /// `path` is a file of weights, a checkpoint, or the folder of a run, of which the best checkpoint is taken.
    pub fn at(path: &Path) -> Result<Self, TrainError> {
        let file = weights_file(path)?;
        let named = Named::read(&file)?;
        Ok(Found { card: named.card()?, file, named })
    }

    /// To be evaluated on the data that was typed, or that the weights name.
    pub fn with_data(self, typed: &Raw) -> Result<(Evaluated, Sets), TrainError> {
        let settings = self.settings(typed)?;
        let source = self.source(typed)?;
        let model = settings.model.as_deref().unwrap_or_default();
        if source.has_masks() != Network::name_segments(model) {
            let why = format!("doesn't fit {model}, whose task is {}", task_of(model));
            return Err(TrainError::setting("data", source, why));
        }
        let settings = Raw { data: Some(source.to_string()), ..settings };
        let opened = Opened::of(&settings)?;
        let facts = opened.facts(&settings)?;
        if let Some(head) = settings.classes.filter(|head| *head < facts.classes) {
            let classes = facts.classes;
            let why = format!("{classes} classes, but the head of the weights has {head}");
            return Err(TrainError::setting("data", source, why));
        }
        let mut evaluated = self.resolved(&settings, &facts)?;
        let sets = opened.for_run(&evaluated.run)?;
        let (names, known) = (sets.test_class_names(), &mut evaluated.run.class_names);
        // Labels of Hugging Face are words where folders of ImageNet have numbers: if none agrees, order is all there is.
        let other_words = !evaluated.told_by.is_empty() && names.iter().all(|name| !known.contains(name));
        let differing = names.iter().zip(&*known).find(|(ours, theirs)| ours != theirs);
        if let Some((ours, theirs)) = differing.filter(|_| !other_words) {
            let why = format!("class `{ours}` stands where the weights know `{theirs}`");
            return Err(TrainError::setting("data", source, why));
        }
        if known.len() < names.len() {
            *known = names.to_vec();
        }
        Ok((evaluated, sets))
    }

    /// To be evaluated on images that a command names, or not at all.
    pub fn without_data(self, typed: &Raw) -> Result<Evaluated, TrainError> {
        let settings = self.settings(typed)?;
        let facts = Facts::synthetic(&settings)?;
        self.resolved(&settings, &facts)
    }

    /// What was typed, over what the weights say, but for the data.
    fn settings(&self, typed: &Raw) -> Result<Raw, TrainError> {
        let settings = self.card.under(typed);
        let Some(model) = &settings.model else {
            let file = self.file.display();
            let why = match self.named.but_for_window() {
                Some(name) => format!("{file} doesn't say how large its windows are: name it, as {name}"),
                None => format!("{file} doesn't say which model it is of: name it"),
            };
            return Err(TrainError::setting("model", "", why));
        };
        let Some(image_size) = settings.image_size.or_else(|| Network::published_image(model)) else {
            let why = format!("{} doesn't say what size its images have: name it", self.file.display());
            return Err(TrainError::setting("image-size", "", why));
        };
        Ok(Raw { image_size: Some(image_size), ..settings })
    }

    fn source(&self, typed: &Raw) -> Result<Source, TrainError> {
        if let Some(name) = &typed.data {
            return name.parse().map_err(|why: String| TrainError::setting("data", name, why));
        }
        let Some(place) = &self.card.data else {
            let why = format!("{} doesn't say what to evaluate it on: name a set", self.file.display());
            return Err(TrainError::setting("data", "", why));
        };
        self.locate(place)
    }

    fn locate(&self, place: &Place) -> Result<Source, TrainError> {
        let home = home_of(&self.file);
        let launches = record::launches(home).unwrap_or_default();
        Ok(place.find(home, launches.first().map(|launch| launch.folder.as_path()))?)
    }

    fn resolved(self, settings: &Raw, facts: &Facts) -> Result<Evaluated, TrainError> {
        let mut run = settings.resolve_for_evaluation(facts)?;
        run.class_names = self.card.class_names.clone();
        if let Some(trained) = self.card.trained_size.or(self.card.image_size) {
            Network::named(&run.model, trained, run.network.channels(), run.network.classes())
                .map_err(ConfigError::from)?;
            run.network = run.network.trained_at([trained; 2]);
        }
        let data = self.card.data.as_ref().map(|place| match self.locate(place) {
            Ok(source) => Place { source, relative: None },
            Err(_) => place.clone(),
        });
        let Found { file, named, card } = self;
        let (config, told_by) = (named.config.clone(), named.told_by()?);
        let weights = named.for_model(&run.network, false)?;
        let assumed = settings.mean.is_empty() || settings.std.is_empty();
        let told = Card { data, ..card };
        Ok(Evaluated { file, weights, run, assumed, told_by, told, config })
    }
}

impl Evaluated {
    /// Refuses weights of another task; `instead` is the command for them.
    pub fn of_task(self, task: Task, instead: &str) -> Result<Self, TrainError> {
        if self.run.task() == task {
            return Ok(self);
        }
        let (path, of) = (self.file, self.run.task());
        let problem = format!("{}: its task is {of}; use `vitesse {instead}`", self.run.model);
        Err(TrainError::Record { path, problem })
    }

    /// What these weights will say about themselves in a file of `folder`.
    pub fn card(&self, folder: &Path) -> Card {
        let Card { data, test_samples, seed, trained_in, .. } = self.told.clone();
        let data = data.map(|place| Place::seen_from(&place.source, folder));
        Card { data, test_samples, seed, trained_in, ..Card::of(&self.run) }
    }

    /// The configuration of the run they come from, as JSON.
    pub fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }
}

fn task_of(model: &str) -> Task {
    if Network::name_segments(model) { Task::Segment } else { Task::Classify }
}

/// The folder that a file's record is of: that of the run, for a checkpoint.
fn home_of(file: &Path) -> &Path {
    let folder = folder_of(file);
    if folder.ends_with(FOLDER) { folder_of(folder) } else { folder }
}

#[cfg(test)]
mod tests {
    use super::*;
    use formats::weights::save_as;
    use models::names::{Convention, Tensor};
    use testing::Folder;

    /// A file of zeros that says `card` of itself.
    fn file(folder: &Folder, card: &Card) -> PathBuf {
        let network = Network::named("swinv2-nano/w8", 64, 3, 5).unwrap();
        let tensor = |shape: Vec<usize>| Tensor { data: vec![0.0; shape.iter().product()], shape };
        let weights = network.expected().into_iter().map(|(name, shape)| (name, tensor(shape))).collect();
        let path = folder.0.join("swin.safetensors");
        save_as(&path, &weights, Convention::Timm, card, None).unwrap();
        path
    }

    fn card() -> Card {
        let (model, sizes) = (Some("swinv2-nano/w8".to_string()), (Some(64), Some(3), Some(5)));
        Card { model, image_size: sizes.0, channels: sizes.1, classes: sizes.2, ..Card::default() }
    }

    #[test]
    fn what_a_file_says_of_itself_is_refused_where_it_cannot_be() {
        let folder = Folder::new("evaluated-cards");
        let found = |card: &Card| Found::at(&file(&folder, card))?.without_data(&Raw::default());
        assert_eq!(found(&card()).unwrap().run.network.size(), [64; 2]);
        let huge = usize::MAX;
        for bad in [
            Card { trained_size: Some(0), ..card() },
            Card { trained_size: Some(6), ..card() },
            Card { image_size: Some(0), ..card() },
            Card { image_size: Some(huge), ..card() },
            Card { classes: Some(huge), ..card() },
            Card { channels: Some(0), ..card() },
            Card { batch_size: Some(0), ..card() },
            Card { batch_size: Some(huge), ..card() },
            Card { eval_resize: Some(huge), image_size: Some(32), ..card() },
            Card { mean: vec![f32::NAN], ..card() },
            Card { std: vec![0.0], ..card() },
            Card { model: Some("vit-nano/4".into()), ..card() },
            Card { model: Some("+".into()), ..card() },
            Card { test_samples: Some(0), ..card() },
        ] {
            match found(&bad) {
                Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
                Ok(_) => assert!(bad.eval_resize.is_some(), "{bad:?}"),
            }
        }
    }

    #[test]
    fn weights_that_do_not_say_are_asked_for_the_rest() {
        let folder = Folder::new("evaluated-asked");
        let asked = |typed: &Raw| {
            let path = file(&folder, &Card { model: None, image_size: None, ..card() });
            Found::at(&path).unwrap().with_data(typed).err().unwrap().to_string()
        };
        assert!(asked(&Raw::default()).starts_with("--model: "), "{}", asked(&Raw::default()));
        let named = Raw { model: Some("swinv2-nano/w8".into()), ..Raw::default() };
        assert!(asked(&named).starts_with("--data: "), "published for 256 px: {}", asked(&named));
        let odd = Raw { model: Some("swinv2-nano/w7".into()), ..Raw::default() };
        assert!(asked(&odd).starts_with("--image-size: "), "{}", asked(&odd));
    }
}
