//! Image files in a folder for each class.
//!
//! ```text
//! root/train/<class>/…/image.jpg        training set
//! root/val/<class>/…/image.jpg          validation set; or `test` instead of `val`
//! ```
//!
//! Files are known by their extension, in either case: jpg, jpeg, png, webp. What they hold is found out by reading.
//! Folders within a class folder belong to the class. Hidden files and folders are passed over; links are followed.
//!
//! Classes are the folders in `train`, sorted by name, also for the other part. Images come in the order of their
//! classes, then of their paths, byte by byte: the same on every machine.
//!
//! The images of `val` (or `test`) may also lie there without folders for classes. Then a list says which image is of
//! which class: the first that exists of `root/val.txt`, `root/val.csv`, `root/val/labels.txt` and
//! `root/val/labels.csv`. A line for each image holds its file, relative to `val`, and its class: a class folder's
//! name or its number, from 0 in sorted order (the name, should both be possible). Images that the list doesn't name
//! are passed over.
//!
//! * `.txt`: the class is the last word. `ILSVRC2012_val_00000001.JPEG n01751748`
//! * `.csv`: two fields, with or without quotes. `"a.jpg","cat"`. A heading is passed over.

mod list;
pub(crate) mod walk;

use crate::labelled::LabelledFiles;
use crate::registry::{Entry, Images, Open, Place};
use crate::{DataError, Split, Task};
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub use walk::images_below;
use walk::{Found, Walk};

/// Entry of the registry.
pub(crate) const ENTRY: Entry = Entry {
    name: "folder",
    place: Some(Place::Folder),
    task: Task::Classify,
    about: "image files in a folder for each class, under train/ and val/",
    image_size: 224,
    images: Images::Files,
    facts: None,
    run: None,
    archive: None,
    open: Open::Path(|root, reading| Ok(Arc::new(open(root, reading.split, reading.channels)?))),
};

/// Looks for all files of a split; none is opened.
pub fn open(root: &Path, split: Split, channels: usize) -> Result<LabelledFiles, DataError> {
    let mut set = LabelledFiles::empty(root, channels)?;
    let train = train_folder(root)?;
    set.class_names = class_names(&train)?;
    set.folder = match split {
        Split::Train => train.clone(),
        Split::Test => test_folder(root)?,
    };
    let listed = split == Split::Test && walk::folders(&set.folder)?.is_empty();
    let Labelled { mut images, ignored } = if listed {
        by_list(root, &set.folder, &set.class_names)?
    } else {
        by_class_folders(&set.folder, &train, &set.class_names)?
    };
    images.sort_unstable_by(|a, b| order(a).cmp(&order(b)));
    (set.labels, set.files) = images.into_iter().unzip();
    set.ignored = ignored;
    Ok(set)
}

/// Files of a split with their classes, and the number of files that were passed over.
struct Labelled {
    images: Vec<(u32, PathBuf)>,
    ignored: usize,
}

/// Sort key: class, then bytes of the path.
fn order((label, file): &(u32, PathBuf)) -> (u32, &[u8]) {
    (*label, file.as_os_str().as_encoded_bytes())
}

fn train_folder(root: &Path) -> Result<PathBuf, DataError> {
    if !root.is_dir() {
        let problem = if root.exists() { "not a folder" } else { "no such folder" };
        return Err(DataError::file(root, problem));
    }
    let train = root.join("train");
    if train.is_dir() {
        return Ok(train);
    }
    let looked_for = "no folder `train` in it; images are looked for in train/<class>/";
    for folder in walk::folders(root)? {
        if walk::holds_images(&root.join(&folder))? {
            let folder = folder.display();
            let problem =
                format!("{looked_for}. If `{folder}` is a class, move the class folders into `train`");
            return Err(DataError::file(root, problem));
        }
    }
    Err(DataError::file(root, looked_for))
}

fn test_folder(root: &Path) -> Result<PathBuf, DataError> {
    let found = ["val", "test"].map(|name| root.join(name)).into_iter().find(|folder| folder.is_dir());
    found.ok_or_else(|| {
        DataError::file(root, "no folder `val` or `test` in it to take images for testing from")
    })
}

/// Folders in `train`, sorted by the bytes of their names.
fn class_names(train: &Path) -> Result<Vec<String>, DataError> {
    let mut names = Vec::new();
    for folder in walk::folders(train)? {
        let name = folder.into_os_string().into_string();
        names.push(name.map_err(|name| DataError::file(train.join(name), "its name is not valid UTF-8"))?);
    }
    if names.is_empty() {
        return Err(DataError::file(train, "no class folders in it; images are looked for in <class>/"));
    }
    names.sort_unstable();
    Ok(names)
}

fn by_class_folders(folder: &Path, train: &Path, class_names: &[String]) -> Result<Labelled, DataError> {
    let mut labelled = Labelled { images: Vec::new(), ignored: walk::other_files(folder)? };
    for name in walk::folders(folder)? {
        let class_folder = folder.join(&name);
        let position =
            name.to_str().and_then(|name| class_names.binary_search_by(|n| n.as_str().cmp(name)).ok());
        let Some(label) = position else {
            let problem = format!("a class that {} has no folder for", train.display());
            return Err(DataError::file(class_folder, problem));
        };
        let Found { files, ignored } = Walk::all(&class_folder)?;
        if files.is_empty() {
            return Err(DataError::file(
                class_folder,
                format!("no images in this class folder ({})", walk::KINDS),
            ));
        }
        labelled.ignored += ignored;
        labelled.images.extend(files.into_iter().map(|file| (label as u32, name.join(file))));
    }
    Ok(labelled)
}

fn by_list(root: &Path, folder: &Path, class_names: &[String]) -> Result<Labelled, DataError> {
    let Found { mut files, ignored } = Walk::all(folder)?;
    if files.is_empty() {
        return Err(DataError::file(folder, format!("no images in it ({})", walk::KINDS)));
    }
    files.sort_unstable();
    let list = list::find(root, folder)?;
    let images = list::read(&list, &files, class_names)?;
    let unnamed = files.len() - images.len();
    // A list within the folder was counted as a file that is no image.
    let ignored = ignored - usize::from(list.starts_with(folder)) + unnamed;
    Ok(Labelled { images, ignored })
}

#[cfg(test)]
mod tests;
