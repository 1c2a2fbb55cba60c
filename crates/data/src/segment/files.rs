//! Pairs of files: an image, and a mask of the same name.

use super::{IGNORED, MAX_CLASSES};
use crate::decode::{decode_mask, read_image};
use crate::folder::walk::{self, Found, Walk};
use crate::registry::Reading;
use crate::{DataError, Dataset, Sample, Skipped, Task};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Treatment of an image without a mask, and of a mask without an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpaired {
    /// The first of them is an error.
    Refused,
    /// They are named in [`Dataset::left_out`].
    LeftOut,
}

impl From<Reading> for Unpaired {
    fn from(reading: Reading) -> Self {
        if reading.skip_bad { Unpaired::LeftOut } else { Unpaired::Refused }
    }
}

/// Meaning of the numbers in a set's masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbering {
    /// 0 is ignored, 1 is the first class.
    FromOne,
    /// 0 is the first class, 255 is ignored.
    FromZero,
}

impl Numbering {
    /// The label of each number; none for those that mean nothing.
    fn labels(self, classes: usize) -> [Option<u8>; 256] {
        std::array::from_fn(|number| match self {
            Numbering::FromOne if number == 0 => Some(IGNORED),
            Numbering::FromOne => (number <= classes).then_some(number as u8 - 1),
            Numbering::FromZero if number == usize::from(IGNORED) => Some(IGNORED),
            Numbering::FromZero => (number < classes).then_some(number as u8),
        })
    }

    fn told(self, classes: usize) -> String {
        match self {
            Numbering::FromOne => format!("1 to {classes} are the {classes} classes, 0 is ignored"),
            Numbering::FromZero => {
                format!("0 to {} are the {classes} classes, 255 is ignored", classes.saturating_sub(1))
            }
        }
    }
}

/// A set of image files and mask files.
#[derive(Debug)]
pub struct MaskedFiles {
    /// Sorted by name.
    pairs: Vec<(PathBuf, PathBuf)>,
    class_names: Vec<String>,
    channels: usize,
    numbering: Numbering,
    labels: [Option<u8>; 256],
    left_out: Vec<Skipped>,
}

impl MaskedFiles {
    pub(super) fn new(
        found: Paired,
        class_names: Vec<String>,
        channels: usize,
        numbering: Numbering,
    ) -> Result<Self, DataError> {
        let classes = class_names.len();
        if !(1..=MAX_CLASSES).contains(&classes) {
            let problem = format!("there may be 1 to {MAX_CLASSES}");
            return Err(DataError::setting("classes", classes, problem));
        }
        let labels = numbering.labels(classes);
        let Paired { pairs, left_out } = found;
        Ok(MaskedFiles { pairs, class_names, channels, numbering, labels, left_out })
    }

    /// Paths of an image and its mask.
    ///
    /// # Panics
    ///
    /// When `index` is not below the number of pairs, as a slice would.
    pub fn paths(&self, index: usize) -> (&Path, &Path) {
        let (image, mask) = &self.pairs[index];
        (image, mask)
    }

    /// Turns the numbers of a file into labels.
    fn relabel(&self, mask: &Path, width: usize, numbers: &mut [u8]) -> Result<(), DataError> {
        let mut unknown = None;
        for (place, number) in numbers.iter_mut().enumerate() {
            match self.labels[usize::from(*number)] {
                Some(label) => *number = label,
                None => unknown = unknown.or(Some((place, *number))),
            }
        }
        let Some((place, number)) = unknown else { return Ok(()) };
        let (column, row) = (place % width.max(1), place / width.max(1));
        let meaning = self.numbering.told(self.class_names.len());
        Err(DataError::file(mask, format!("label {number} at column {column}, row {row}; {meaning}")))
    }
}

impl Dataset for MaskedFiles {
    fn len(&self) -> usize {
        self.pairs.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        self.channels
    }

    fn task(&self) -> Task {
        Task::Segment
    }

    /// Images without a mask and masks without an image; none unless they were to be left out.
    fn left_out(&self) -> &[Skipped] {
        &self.left_out
    }

    fn name(&self, index: usize) -> String {
        self.paths(index).0.display().to_string()
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        let Some((image, mask)) = self.pairs.get(index) else {
            return Err(DataError::IndexOutOfRange { index, len: self.len() });
        };
        let bytes = |path: &Path| fs::read(path).map_err(|error| DataError::file(path, error));
        read_image(image, self.channels, &mut out.image)?;
        let (width, height) = decode_mask(&bytes(mask)?, mask, &mut out.mask)?;
        if (width, height) != (out.image.width, out.image.height) {
            let (of_image, image) = ((out.image.width, out.image.height), image.display());
            let problem = format!(
                "a mask of {width}×{height} pixels; its image, {image}, has {}×{}",
                of_image.0, of_image.1
            );
            return Err(DataError::file(mask, problem));
        }
        self.relabel(mask, width, &mut out.mask)
    }
}

/// Files that belong together, and those that don't.
pub(super) struct Paired {
    pub(super) pairs: Vec<(PathBuf, PathBuf)>,
    left_out: Vec<Skipped>,
}

impl Paired {
    /// Images below one folder and masks below another, by their names without the extension.
    pub(super) fn find(images: &Path, masks: &Path, unpaired: Unpaired) -> Result<Self, DataError> {
        let (mut by_stem, left_out) = (by_stem(images, walk::is_image)?, vec![]);
        if by_stem.is_empty() {
            return Err(DataError::file(images, format!("no images in it ({})", walk::KINDS)));
        }
        let mut masks_by_stem = by_stem_of_masks(masks)?;
        let mut found = Paired { pairs: Vec::with_capacity(by_stem.len()), left_out };
        while let Some((stem, image)) = by_stem.pop_first() {
            match masks_by_stem.remove(&stem) {
                Some(mask) => found.pairs.push((image, mask)),
                None => {
                    let missing = masks.join(&stem).display().to_string();
                    found.note(unpaired, &image, format!("has no mask: {missing}.png is not there"))?;
                }
            }
        }
        for (stem, mask) in masks_by_stem {
            let missing = images.join(&stem).display().to_string();
            found.note(unpaired, &mask, format!("a mask without an image: there is no {missing}.*"))?;
        }
        if found.pairs.is_empty() {
            return Err(DataError::file(images, "no image in it has a mask"));
        }
        Ok(found)
    }

    fn note(&mut self, unpaired: Unpaired, path: &Path, problem: String) -> Result<(), DataError> {
        if unpaired == Unpaired::Refused {
            return Err(DataError::file(path, problem));
        }
        let (index, name) = (self.left_out.len(), path.display().to_string());
        self.left_out.push(Skipped { index, name, problem });
        Ok(())
    }

    /// The part of the pairs for which `keep` holds of their number.
    pub(super) fn filtered(self, keep: impl Fn(usize) -> bool) -> Self {
        let pairs = self.pairs.into_iter().enumerate().filter(|(number, _)| keep(*number));
        Paired { pairs: pairs.map(|(_, pair)| pair).collect(), left_out: self.left_out }
    }
}

fn by_stem_of_masks(folder: &Path) -> Result<BTreeMap<PathBuf, PathBuf>, DataError> {
    by_stem(folder, |name| name.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png")))
}

fn by_stem(folder: &Path, wanted: impl Fn(&Path) -> bool) -> Result<BTreeMap<PathBuf, PathBuf>, DataError> {
    let Found { files, .. } = Walk::all(folder)?;
    let mut by_stem = BTreeMap::new();
    for file in files.into_iter().filter(|file| wanted(file)) {
        let path = folder.join(&file);
        if let Some(other) = by_stem.insert(file.with_extension(""), path.clone()) {
            let (one, other) = (path.clone().min(other.clone()), path.max(other));
            let problem = format!("has the name of {}, but for the extension", other.display());
            return Err(DataError::file(one, problem));
        }
    }
    Ok(by_stem)
}

/// A folder that has to be there.
pub(super) fn folder(root: &Path, name: &str, looked_for: &str) -> Result<PathBuf, DataError> {
    let folder = root.join(name);
    if folder.is_dir() {
        return Ok(folder);
    }
    if !root.is_dir() {
        let problem = if root.exists() { "not a folder" } else { "no such folder" };
        return Err(DataError::file(root, problem));
    }
    Err(DataError::file(root, format!("no folder `{name}` in it; {looked_for}")))
}
