//! ADE20K as it was published for scene parsing.
//!
//! ```text
//! root/images/training/ADE_train_00000001.jpg         root/images/validation/…
//! root/annotations/training/ADE_train_00000001.png    root/annotations/validation/…
//! root/objectInfo150.txt                              the classes; their names are known without it, too
//! ```
//!
//! In the files 1 to 150 are the classes and 0 is everything else; here the classes are 0 to 149, and 0 is ignored.

mod names;

use super::files::{MaskedFiles, Numbering, Paired, Unpaired, folder};
use crate::error::shown;
use crate::registry::{Entry, Images, Open, Place, PublishedRun};
use crate::{DataError, Split, Task};
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub const CLASSES: usize = 150;

/// Entry of the registry. The run is that of UPerNet, by its authors and in mmsegmentation.
pub(crate) const ENTRY: Entry = Entry {
    name: "ade20k",
    place: Some(Place::Folder),
    task: Task::Segment,
    about: "ADE20K in its published layout, with masks of 150 classes",
    image_size: 512,
    images: Images::Files,
    facts: None,
    run: Some(PublishedRun { steps: 160_000, batch: 8, evaluations: 10 }),
    archive: None,
    open: Open::Path(|root, reading| Ok(Arc::new(open(root, reading.split, reading.into())?))),
};

const LOOKED_FOR: &str =
    "ADE20K is looked for as images/ and annotations/ with training/ and validation/ in both";
const CLASS_LIST: &str = "objectInfo150.txt";

/// Looks for all files of a part; none but the list of classes is opened.
pub fn open(root: &Path, split: Split, unpaired: Unpaired) -> Result<MaskedFiles, DataError> {
    let part = match split {
        Split::Train => "training",
        Split::Test => "validation",
    };
    let images = folder(root, &format!("images/{part}"), LOOKED_FOR)?;
    let masks = folder(root, &format!("annotations/{part}"), LOOKED_FOR)?;
    let found = Paired::find(&images, &masks, unpaired)?;
    MaskedFiles::new(found, class_names(root)?, 3, Numbering::FromOne)
}

/// Reads names of classes; of several for a class the first is taken.
fn class_names(root: &Path) -> Result<Vec<String>, DataError> {
    let path = root.join(CLASS_LIST);
    if !path.exists() {
        return Ok(names::NAMES.map(String::from).to_vec());
    }
    let text = fs::read_to_string(&path).map_err(|error| DataError::file(&path, error))?;
    let mut names = vec![];
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split('\t').map(str::trim).collect();
        if number == 0 && fields.first() == Some(&"Idx") {
            continue;
        }
        let name = fields.last().and_then(|names| names.split(',').next()).map(str::trim).unwrap_or_default();
        let expected = (names.len() + 1).to_string();
        if fields.len() < 2 || fields[0] != expected || name.is_empty() {
            let problem =
                format!("line {}: `{}` is not class {expected} and its names", number + 1, shown(line));
            return Err(DataError::file(&path, problem));
        }
        names.push(name.to_string());
    }
    if names.len() != CLASSES {
        return Err(DataError::file(&path, format!("{} classes; ADE20K has {CLASSES}", names.len())));
    }
    Ok(names)
}
