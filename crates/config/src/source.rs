//! Which images, how many of them, and how they are read.

use crate::ConfigError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use text::nearest;

/// Where images come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Synthetic,
    Cifar10(PathBuf),
    /// With `coarse`, the twenty groups of classes instead of the hundred classes.
    Cifar100 {
        path: PathBuf,
        coarse: bool,
    },
    /// A folder for each class, under `train` and `val`.
    Folder(PathBuf),
    /// Drawn images with masks.
    SyntheticMasks,
    /// ADE20K in its published layout.
    Ade20k(PathBuf),
    /// Images with masks of the same name.
    Masks(PathBuf),
}

const FORMS: &str = "synthetic, cifar10:DIR, cifar100:DIR, cifar100-coarse:DIR, folder:DIR, synthetic-masks, ade20k:DIR, masks:DIR";
const NAMES: [&str; 8] =
    ["synthetic", "cifar10", "cifar100", "cifar100-coarse", "folder", "synthetic-masks", "ade20k", "masks"];

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.split_once(':') {
            Some((name, path)) => (name, Some(PathBuf::from(path)).filter(|p| !p.as_os_str().is_empty())),
            None => (text, None),
        };
        match (name, path) {
            ("synthetic", None) if !text.contains(':') => Ok(Source::Synthetic),
            ("synthetic-masks", None) if !text.contains(':') => Ok(Source::SyntheticMasks),
            ("synthetic" | "synthetic-masks", _) => {
                Err("the synthetic set is drawn and has no folder: leave out what follows the colon".into())
            }
            ("cifar10", Some(path)) => Ok(Source::Cifar10(path)),
            ("cifar100", Some(path)) => Ok(Source::Cifar100 { path, coarse: false }),
            ("cifar100-coarse", Some(path)) => Ok(Source::Cifar100 { path, coarse: true }),
            ("folder", Some(path)) => Ok(Source::Folder(path)),
            ("ade20k", Some(path)) => Ok(Source::Ade20k(path)),
            ("masks", Some(path)) => Ok(Source::Masks(path)),
            (name, None) if NAMES.contains(&name) => Err(format!("names no folder: write {name}:DIR")),
            (name, _) => Err(match nearest(name, NAMES) {
                Some(meant @ ("synthetic" | "synthetic-masks")) => {
                    format!("is none of {FORMS}; did you mean {meant}?")
                }
                Some(meant) => format!("is none of {FORMS}; did you mean {meant}:DIR?"),
                None => format!("is none of {FORMS}"),
            }),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path() {
            Some(path) => write!(f, "{}:{}", self.set(), path.display()),
            None => f.write_str(self.set()),
        }
    }
}

impl Source {
    /// The folder it lies in, unless it is drawn.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Source::Synthetic | Source::SyntheticMasks => None,
            Source::Cifar10(path) | Source::Cifar100 { path, .. } => Some(path),
            Source::Folder(path) | Source::Ade20k(path) | Source::Masks(path) => Some(path),
        }
    }

    /// The same set in another folder.
    pub(super) fn at(&self, folder: &Path) -> Source {
        let mut moved = self.clone();
        match &mut moved {
            Source::Synthetic | Source::SyntheticMasks => {}
            Source::Cifar10(path) | Source::Cifar100 { path, .. } => *path = folder.to_path_buf(),
            Source::Folder(path) | Source::Ade20k(path) | Source::Masks(path) => *path = folder.to_path_buf(),
        }
        moved
    }

    /// What is known of a set without opening it: CIFAR is the same everywhere.
    pub fn published(&self) -> Option<Facts> {
        let classes = match self {
            Source::Cifar10(_) => 10,
            Source::Cifar100 { coarse: true, .. } => 20,
            Source::Cifar100 { coarse: false, .. } => 100,
            _ => return None,
        };
        Some(Facts { train_images: 50_000, test_images: 10_000, classes, channels: 3 })
    }

    /// The name of the set, wherever it lies.
    pub fn set(&self) -> &'static str {
        match self {
            Source::Synthetic => "synthetic",
            Source::Cifar10(_) => "cifar10",
            Source::Cifar100 { coarse: false, .. } => "cifar100",
            Source::Cifar100 { coarse: true, .. } => "cifar100-coarse",
            Source::Folder(_) => "folder",
            Source::SyntheticMasks => "synthetic-masks",
            Source::Ade20k(_) => "ade20k",
            Source::Masks(_) => "masks",
        }
    }

    /// The side of its images, in pixels, unless the user wants another.
    pub fn image_size(&self) -> usize {
        match self {
            Source::Folder(_) => 224,
            Source::Ade20k(_) | Source::Masks(_) => 512,
            Source::SyntheticMasks => 64,
            _ => 32,
        }
    }

    /// Whether its images are files to be decoded: work for all threads, and worth keeping.
    pub fn decodes(&self) -> bool {
        matches!(self, Source::Folder(_) | Source::Ade20k(_) | Source::Masks(_))
    }

    /// Whether it is drawn as a run asks for it.
    pub fn is_drawn(&self) -> bool {
        matches!(self, Source::Synthetic | Source::SyntheticMasks)
    }

    /// Whether every pixel has a class, rather than every image.
    pub fn has_masks(&self) -> bool {
        matches!(self, Source::SyntheticMasks | Source::Ade20k(_) | Source::Masks(_))
    }
}

/// What whoever opened the data says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub train_images: usize,
    pub test_images: usize,
    pub classes: usize,
    pub channels: usize,
}

/// Settings of the data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    pub source: Source,
    /// In a record: the way there from its folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative: Option<PathBuf>,
    /// Of the whole set, before `fraction`.
    pub facts: Facts,
    /// How much of the training set is used.
    pub fraction: f64,
    /// Threads that read and augment images.
    pub workers: usize,
    pub cache: Cache,
    /// Leave out images that can't be read, instead of ending the run.
    pub skip_bad_images: bool,
}

impl Data {
    /// Training images that the run uses.
    pub fn train_images(&self) -> usize {
        let images = (self.facts.train_images as f64 * self.fraction).round() as usize;
        images.clamp(1, self.facts.train_images.max(1))
    }
}

/// How much memory decoded images may keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// As much as is there to spare.
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
        assert_eq!(refused("mnist"), format!("is none of {FORMS}"));
        assert_eq!(refused("cifar-10:/d"), format!("is none of {FORMS}; did you mean cifar10:DIR?"));
        assert_eq!(refused("syntetic"), format!("is none of {FORMS}; did you mean synthetic?"));
        assert_eq!(refused("cifar10"), "names no folder: write cifar10:DIR");
        assert_eq!(refused("folder:"), "names no folder: write folder:DIR");
        assert!(refused("synthetic:x").contains("no folder"));
        assert!(refused("synthetic-masks:x").contains("no folder"));
        assert_eq!(refused("ade20k"), "names no folder: write ade20k:DIR");
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
        let facts = Source::Cifar10("d".into()).published().unwrap();
        let data = |fraction| Data {
            source: Source::Synthetic,
            relative: None,
            facts,
            fraction,
            workers: 1,
            cache: Cache::Auto,
            skip_bad_images: false,
        };
        assert_eq!(data(1.0).train_images(), 50_000);
        assert_eq!(data(0.1).train_images(), 5_000);
        assert_eq!(data(1e-9).train_images(), 1);
    }
}
