//! Registry of the data sets: an entry for each, from which parsing of `--data`, its help and errors, defaults and records
//! follow. A new set is a file with a reader and its [`Entry`], a `mod` line, and a line in [`SETS`].

use crate::{DataError, Dataset, Split, SyntheticSpec, Task, cifar, folder, list, segment, synthetic};
use std::path::Path;
use std::sync::Arc;

/// All sets, in the order in which help names them.
pub static SETS: [Entry; 9] = [
    synthetic::ENTRY,
    cifar::TEN,
    cifar::HUNDRED,
    cifar::HUNDRED_COARSE,
    folder::ENTRY,
    list::ENTRY,
    segment::synthetic::ENTRY,
    segment::ade20k::ENTRY,
    segment::masks::ENTRY,
];

/// A data set as a user names it.
#[derive(Debug)]
pub struct Entry {
    /// Name, as typed in `--data`.
    pub name: &'static str,
    /// Kind of path that follows the name and a colon; nothing follows that of a synthetic set.
    pub place: Option<Place>,
    pub task: Task,
    /// Description for people.
    pub about: &'static str,
    /// Side of the images that a model reads by default, in pixels.
    pub image_size: usize,
    pub images: Images,
    /// Counts of a published set, which are the same everywhere; or those that a synthetic set has by default.
    pub facts: Option<Facts>,
    /// The run that results on it are published for, if there is one.
    pub run: Option<PublishedRun>,
    /// Archive that `vitesse data get` downloads.
    pub archive: Option<Archive<'static>>,
    pub open: Open,
}

/// Kind of path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Folder,
    File,
}

impl Place {
    /// Word for it in messages, and its stand-in in help.
    pub fn words(self) -> (&'static str, &'static str) {
        match self {
            Place::Folder => ("folder", "DIR"),
            Place::File => ("file", "FILE"),
        }
    }
}

/// Origin of the pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Images {
    /// Drawn in the size that a run asks for.
    Synthetic,
    /// Raw bytes, all of the default size.
    Raw,
    /// Image files of any size. Decoding them is work for all threads and worth keeping; training reads random parts of them.
    Files,
}

/// Counts of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    pub train_images: usize,
    pub test_images: usize,
    pub classes: usize,
    pub channels: usize,
}

/// Length of a published run, however many ranks its images are divided among.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedRun {
    pub steps: u64,
    pub batch: u64,
    /// Evaluations, spread over the run.
    pub evaluations: u64,
}

/// A file to download, and how to know it.
#[derive(Clone, Copy, Debug)]
pub struct Archive<'a> {
    pub name: &'a str,
    /// Folder that it is published in.
    pub base_url: &'a str,
    /// Checksum in lower-case hexadecimal.
    pub md5: &'a str,
    pub bytes: u64,
}

/// A set, or why it can't be opened.
pub type Opened = Result<Arc<dyn Dataset>, DataError>;

/// Opens one part of a set.
#[derive(Clone, Copy, Debug)]
pub enum Open {
    Synthetic(fn(SyntheticSpec) -> Opened),
    Path(fn(&Path, Reading) -> Opened),
}

/// Settings of reading files.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub split: Split,
    /// Channels that images are decoded with, where there is a choice.
    pub channels: usize,
    /// Leave out files that do not belong to the set, such as an image without a mask, instead of failing.
    pub skip_bad: bool,
}

impl Entry {
    /// The entry of a name.
    pub fn named(name: &str) -> Option<&'static Entry> {
        SETS.iter().find(|entry| entry.name == name)
    }

    /// The synthetic set of a task, which a run has if none is named.
    pub fn synthetic(task: Task) -> &'static Entry {
        let of_task = |entry: &&Entry| entry.images == Images::Synthetic && entry.task == task;
        SETS.iter().find(of_task).unwrap_or(&SETS[0])
    }

    /// Form of the set in help and errors, such as `cifar10:DIR`.
    pub fn form(&self) -> String {
        match self.place {
            Some(place) => format!("{}:{}", self.name, place.words().1),
            None => self.name.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn entries_are_whole() {
        let names: HashSet<&str> = SETS.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), SETS.len(), "no name stands twice");
        for entry in &SETS {
            let synthetic = entry.images == Images::Synthetic;
            assert_eq!(synthetic, entry.place.is_none(), "{}", entry.name);
            assert_eq!(synthetic, matches!(entry.open, Open::Synthetic(_)), "{}", entry.name);
            assert!(!synthetic || entry.facts.is_some(), "{}: how many images by default", entry.name);
            assert!(!entry.about.is_empty() && !entry.about.ends_with('.'), "{}", entry.name);
        }
        for task in [Task::Classify, Task::Segment] {
            assert_eq!(Entry::synthetic(task).task, task);
        }
    }
}
