//! Which images, how many of them, and how they are read.

use crate::ConfigError;
use data::registry::{self, Entry, Images, SETS};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use text::nearest;

/// Source of images: a set of the registry, and the place of one that is not synthetic.
#[derive(Clone)]
pub struct Source {
    entry: &'static Entry,
    path: Option<PathBuf>,
}

impl Source {
    /// A set of the registry at a place.
    pub fn new(entry: &'static Entry, path: Option<PathBuf>) -> Self {
        Source { entry, path }
    }

    /// The synthetic set of a task.
    pub fn synthetic(task: data::Task) -> Self {
        Source { entry: Entry::synthetic(task), path: None }
    }

    /// Entry of the set in the registry.
    pub fn entry(&self) -> &'static Entry {
        self.entry
    }

    /// Folder or file it lies in, unless it is synthetic.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The same set at another place.
    pub(super) fn at(&self, place: &Path) -> Source {
        Source { entry: self.entry, path: self.path.is_some().then(|| place.to_path_buf()) }
    }

    /// Counts that are known without opening the set: CIFAR is the same everywhere.
    pub fn published(&self) -> Option<Facts> {
        self.entry.facts.filter(|_| !self.is_synthetic()).map(Facts::from)
    }

    /// Name of the set, wherever it lies.
    pub fn set(&self) -> &'static str {
        self.entry.name
    }

    /// Side of its images, in pixels, unless the user wants another.
    pub fn image_size(&self) -> usize {
        self.entry.image_size
    }

    /// Returns whether its images are files to be decoded: work for all threads, and worth keeping.
    pub fn decodes(&self) -> bool {
        self.entry.images == Images::Files
    }

    /// Returns whether it is synthetic.
    pub fn is_synthetic(&self) -> bool {
        self.entry.images == Images::Synthetic
    }

    /// Returns whether every pixel has a class, rather than every image.
    pub fn has_masks(&self) -> bool {
        self.entry.task == data::Task::Segment
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        (self.set(), &self.path) == (other.set(), &other.path)
    }
}

impl Eq for Source {}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({self})")
    }
}

/// Forms of the sets, for help: those with a class for each image, then those with masks.
pub fn help() -> String {
    let forms = |task| {
        let all: Vec<String> = SETS.iter().filter(|e| e.task == task).map(Entry::form).collect();
        match all.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
        }
    };
    format!("{}; with masks: {}", forms(data::Task::Classify), forms(data::Task::Segment))
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.split_once(':') {
            Some((name, path)) => (name, Some(path)),
            None => (text, None),
        };
        let Some(entry) = Entry::named(name) else {
            let forms = SETS.iter().map(Entry::form).collect::<Vec<_>>().join(", ");
            let meant = nearest(name, SETS.iter().map(|entry| entry.name)).and_then(Entry::named);
            let hint = meant.map(|meant| format!("; did you mean {}?", meant.form())).unwrap_or_default();
            return Err(format!("is none of {forms}{hint}"));
        };
        match (entry.place, path) {
            (None, None) => Ok(Source { entry, path: None }),
            (None, Some(_)) => Err("a synthetic set has no folder: leave out what follows the colon".into()),
            (Some(_), Some(path)) if !path.is_empty() => Ok(Source { entry, path: Some(path.into()) }),
            (Some(place), _) => Err(format!("names no {}: write {}", place.words().0, entry.form())),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{}:{}", self.set(), path.display()),
            None => f.write_str(self.set()),
        }
    }
}

/// In records: the name of a synthetic set, or the name of another with its place.
impl Serialize for Source {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.path {
            None => serializer.serialize_str(self.set()),
            Some(path) => serializer.collect_map([(self.set(), path)]),
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Name(String),
    Placed(BTreeMap<String, Where>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Where {
    Path(PathBuf),
    /// CIFAR-100, as records up to 0.9 have it.
    Labels {
        path: PathBuf,
        coarse: bool,
    },
}

impl<'de> Deserialize<'de> for Source {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (name, path) = match Written::deserialize(deserializer)? {
            // Without a hyphen in records up to 0.9.
            Written::Name(name) if name == "syntheticmasks" => ("synthetic-masks".to_string(), None),
            Written::Name(name) => (name, None),
            Written::Placed(one) => match one.into_iter().next() {
                Some((name, Where::Path(path))) => (name, Some(path)),
                Some((name, Where::Labels { path, coarse })) => {
                    (if coarse { name + "-coarse" } else { name }, Some(path))
                }
                None => return Err(D::Error::custom("no data set is named")),
            },
        };
        let entry = Entry::named(&name).filter(|entry| entry.place.is_some() == path.is_some());
        let entry = entry.ok_or_else(|| D::Error::custom(format!("data set `{name}` is not known")))?;
        Ok(Source { entry, path })
    }
}

/// Counts of a set, from whoever opened it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub train_images: usize,
    pub test_images: usize,
    pub classes: usize,
    pub channels: usize,
}

impl From<registry::Facts> for Facts {
    fn from(facts: registry::Facts) -> Self {
        let registry::Facts { train_images, test_images, classes, channels } = facts;
        Facts { train_images, test_images, classes, channels }
    }
}

/// Settings of the data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    pub source: Source,
    /// In a record: the way there from its folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative: Option<PathBuf>,
    /// Counts of the whole set, before `fraction`.
    pub facts: Facts,
    /// Share of the training set that is used.
    pub fraction: f64,
    /// Threads that read and augment images.
    pub workers: usize,
    pub cache: Cache,
    /// Leave out images that can't be read, instead of ending the run.
    pub skip_bad_images: bool,
    /// Images of the validation set that are evaluated in training; all where none is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_images: Option<usize>,
}

impl Data {
    /// Images of the validation set that a training run evaluates.
    pub fn eval_images(&self) -> usize {
        self.eval_images.unwrap_or(usize::MAX).min(self.facts.test_images)
    }

    /// Training images that the run uses.
    pub fn train_images(&self) -> usize {
        let images = (self.facts.train_images as f64 * self.fraction).round() as usize;
        images.clamp(1, self.facts.train_images.max(1))
    }
}

/// Memory for decoded images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// A share of the free memory.
    #[default]
    Auto,
    Off,
    Bytes(u64),
}

const UNITS: [(&str, f64); 9] = [
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
];

impl FromStr for Cache {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.to_ascii_lowercase();
        match lower.as_str() {
            "auto" => return Ok(Cache::Auto),
            "off" | "0" => return Ok(Cache::Off),
            _ => {}
        }
        let unit = UNITS.iter().find_map(|(unit, bytes)| Some((lower.strip_suffix(unit)?, *bytes)));
        let (number, bytes) = unit.unwrap_or((lower.as_str(), 1.0));
        match number.trim().parse::<f64>() {
            Ok(n) if n > 0.0 && n * bytes < u64::MAX as f64 => Ok(Cache::Bytes((n * bytes) as u64)),
            _ => Err("is neither auto, off, nor a size such as 2GB or 512MiB".to_string()),
        }
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cache::Auto => f.write_str("auto"),
            Cache::Off => f.write_str("off"),
            Cache::Bytes(bytes) => write!(f, "{} MB", *bytes as f64 / 1e6),
        }
    }
}

/// A part of the training set: more than nothing, at most all.
pub fn fraction(value: f64) -> Result<f64, ConfigError> {
    let good = value > 0.0 && value <= 1.0;
    if good {
        Ok(value)
    } else {
        Err(ConfigError::setting("data-fraction", value, "must lie in 0 < F ≤ 1"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_parse_and_print() {
        for text in ["synthetic", "cifar10:/d", "cifar100:a b", "cifar100-coarse:.", "folder:C:\\images"]
            .into_iter()
            .chain(["synthetic-masks", "ade20k:/d", "masks:m"])
        {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        let refused = |text: &str| text.parse::<Source>().unwrap_err();
        let forms: Vec<String> = SETS.iter().map(Entry::form).collect();
        let forms = forms.join(", ");
        assert_eq!(refused("mnist"), format!("is none of {forms}"));
        assert_eq!(refused("cifar-10:/d"), format!("is none of {forms}; did you mean cifar10:DIR?"));
        assert_eq!(refused("syntetic"), format!("is none of {forms}; did you mean synthetic?"));
        assert_eq!(refused("cifar10"), "names no folder: write cifar10:DIR");
        assert_eq!(refused("folder:"), "names no folder: write folder:DIR");
        assert!(refused("synthetic:x").contains("no folder"));
        assert!(refused("synthetic-masks:x").contains("no folder"));
        assert_eq!(refused("ade20k"), "names no folder: write ade20k:DIR");
    }

    #[test]
    fn records_of_before_are_read() {
        for (old, text, new) in [
            (r#""synthetic""#, "synthetic", r#""synthetic""#),
            (r#""syntheticmasks""#, "synthetic-masks", r#""synthetic-masks""#),
            (r#"{"cifar10":"/d"}"#, "cifar10:/d", r#"{"cifar10":"/d"}"#),
            (
                r#"{"cifar100":{"path":"/d","coarse":true}}"#,
                "cifar100-coarse:/d",
                r#"{"cifar100-coarse":"/d"}"#,
            ),
            (r#"{"cifar100":{"path":"/d","coarse":false}}"#, "cifar100:/d", r#"{"cifar100":"/d"}"#),
            (r#"{"ade20k":"a b"}"#, "ade20k:a b", r#"{"ade20k":"a b"}"#),
        ] {
            let read: Source = serde_json::from_str(old).unwrap();
            assert_eq!(
                (read.to_string().as_str(), serde_json::to_string(&read).unwrap().as_str()),
                (text, new)
            );
            assert_eq!(serde_json::from_str::<Source>(new).unwrap(), read);
        }
        for bad in [r#""folder""#, r#"{"synthetic":"/d"}"#, r#"{"mnist":"/d"}"#, "{}", "3"] {
            assert!(serde_json::from_str::<Source>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn help_names_every_set() {
        let help = help();
        assert!(help.starts_with("synthetic, cifar10:DIR, "), "{help}");
        assert!(help.ends_with("; with masks: synthetic-masks, ade20k:DIR or masks:DIR"), "{help}");
        assert!(SETS.iter().all(|entry| help.contains(&entry.form())), "{help}");
    }

    #[test]
    fn cache_sizes_have_units() {
        assert_eq!("2GB".parse(), Ok(Cache::Bytes(2_000_000_000)));
        assert_eq!("1.5 gib".parse(), Ok(Cache::Bytes(1_610_612_736)));
        assert_eq!("4096".parse(), Ok(Cache::Bytes(4096)));
        assert_eq!("AUTO".parse(), Ok(Cache::Auto));
        assert_eq!("off".parse(), Ok(Cache::Off));
        for bad in ["", "GB", "-1", "1e400", "nan", "2 gigs", "1e30TB"] {
            assert!(bad.parse::<Cache>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_fraction_leaves_at_least_one_image() {
        let facts = "cifar10:d".parse::<Source>().unwrap().published().unwrap();
        let data = |fraction| Data {
            source: Source::synthetic(data::Task::Classify),
            relative: None,
            facts,
            fraction,
            workers: 1,
            cache: Cache::Auto,
            skip_bad_images: false,
            eval_images: None,
        };
        assert_eq!(data(1.0).train_images(), 50_000);
        assert_eq!(data(0.1).train_images(), 5_000);
        assert_eq!(data(1e-9).train_images(), 1);
    }
}
