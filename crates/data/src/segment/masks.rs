//! Any folder of images with masks, as PNG files of the same name.
//!
//! ```text
//! root/images/a.jpg          root/masks/a.png            every tenth pair, in the order of the names, is for validation
//! root/images/train/a.jpg    root/masks/train/a.png      `val` (or `test`) beside `train` is for validation
//! root/train/images/a.jpg    root/train/masks/a.png      the same, the other way round
//! root/classes.txt                                       a line for each class, in the order of the labels
//! ```
//!
//! In a mask the gray value, or the place in the palette, is the label: 0 is the first class, 255 is ignored. Without
//! `classes.txt` there are as many classes as the largest label of the training masks says, and they are called by their
//! numbers.

use super::files::{MaskedFiles, Numbering, Paired, Unpaired, folder};
use super::{IGNORED, MAX_CLASSES};
use crate::decode::{decode_mask, supports_channels};
use crate::registry::{Entry, Images, Open, Place};
use crate::{DataError, Split, Task};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Entry of the registry.
pub(crate) const ENTRY: Entry = Entry {
    name: "masks",
    place: Some(Place::Folder),
    task: Task::Segment,
    about: "image files with masks of the same name",
    image_size: 512,
    images: Images::Files,
    facts: None,
    run: None,
    archive: None,
    open: Open::Path(|root, reading| {
        Ok(Arc::new(open(root, reading.split, reading.channels, reading.into())?))
    }),
};

const LOOKED_FOR: &str = "pairs are looked for in images/ and masks/, with or without train/ and val/ in them, or in train/images/ and so on";
const CLASS_LIST: &str = "classes.txt";
/// Pairs of which one is in the validation set, where a set is in one piece.
const ONE_IN: usize = 10;

/// Looks for all files of a part. Without a list of classes, all masks of the training part are read.
pub fn open(
    root: &Path,
    split: Split,
    channels: usize,
    unpaired: Unpaired,
) -> Result<MaskedFiles, DataError> {
    if !supports_channels(channels) {
        let problem = format!("images are read with 1 or 3 channels; {channels} were asked for");
        return Err(DataError::file(root, problem));
    }
    let found = find(root, split, unpaired)?;
    let class_names = match read_class_names(root)? {
        Some(names) => names,
        None if split == Split::Train => numbered(root, &found)?,
        None => numbered(root, &find(root, Split::Train, unpaired)?)?,
    };
    MaskedFiles::new(found, class_names, channels, Numbering::FromZero)
}

fn find(root: &Path, split: Split, unpaired: Unpaired) -> Result<Paired, DataError> {
    let part = |parent: &Path| match split {
        Split::Train => Some("train").filter(|name| parent.join(name).is_dir()),
        Split::Test => ["val", "test"].into_iter().find(|name| parent.join(name).is_dir()),
    };
    let no_part = |parent: &Path| {
        let wanted = if split == Split::Train { "`train`" } else { "`val` or `test`" };
        DataError::file(parent, format!("no folder {wanted} in it, though there is another part"))
    };
    let divided = |parent: &Path| ["train", "val", "test"].iter().any(|name| parent.join(name).is_dir());
    if divided(root) {
        let folder_of_part = root.join(part(root).ok_or_else(|| no_part(root))?);
        return pairs(&folder_of_part, "images", "masks", unpaired);
    }
    let images = folder(root, "images", LOOKED_FOR)?;
    if divided(&images) {
        let part = part(&images).ok_or_else(|| no_part(&images))?;
        return pairs(root, &format!("images/{part}"), &format!("masks/{part}"), unpaired);
    }
    let all = pairs(root, "images", "masks", unpaired)?;
    let (count, of_validation) = (all.pairs.len(), |number: usize| number % ONE_IN == ONE_IN - 1);
    if count < ONE_IN {
        let problem = format!("{count} pairs, of which every tenth is for validation; put some into `val`");
        return Err(DataError::file(root, problem));
    }
    Ok(all.filtered(|number| of_validation(number) == (split == Split::Test)))
}

fn pairs(root: &Path, images: &str, masks: &str, unpaired: Unpaired) -> Result<Paired, DataError> {
    Paired::find(&folder(root, images, LOOKED_FOR)?, &folder(root, masks, LOOKED_FOR)?, unpaired)
}

fn read_class_names(root: &Path) -> Result<Option<Vec<String>>, DataError> {
    let path = root.join(CLASS_LIST);
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).map_err(|error| DataError::file(&path, error))?;
    let names: Vec<String> = text.trim_end().lines().map(|line| line.trim().to_string()).collect();
    if let Some(line) = names.iter().position(String::is_empty) {
        return Err(DataError::file(&path, format!("line {} names no class", line + 1)));
    }
    if names.len() > MAX_CLASSES {
        return Err(DataError::file(&path, format!("{} classes; {MAX_CLASSES} are the most", names.len())));
    }
    Ok(Some(names))
}

/// Class numbers up to the largest label. A mask that can't be read is passed over: whoever reads its pair is told.
fn numbered(root: &Path, found: &Paired) -> Result<Vec<String>, DataError> {
    let mut numbers = vec![];
    let mut largest = |mask: &PathBuf| {
        let bytes = fs::read(mask).ok()?;
        decode_mask(&bytes, mask, &mut numbers).ok()?;
        numbers.iter().copied().filter(|&number| number != IGNORED).max()
    };
    let largest = found.pairs.iter().filter_map(|(_, mask)| largest(mask)).max();
    let Some(largest) = largest else {
        let problem = format!("no mask in it has a label; a file {CLASS_LIST} would name the classes");
        return Err(DataError::file(root, problem));
    };
    Ok((0..=largest).map(|class| class.to_string()).collect())
}
