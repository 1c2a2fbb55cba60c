//! Finding files.

use crate::DataError;
use std::fs::{self, DirEntry, FileType};
use std::path::{Path, PathBuf};

/// For messages.
pub(crate) const KINDS: &str = "jpg, jpeg, png or webp";

/// Image files below a folder, named relative to it.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) files: Vec<PathBuf>,
    /// Files that are no images by extension.
    pub(crate) ignored: usize,
}

pub(crate) struct Walk {
    found: Found,
    /// The folders we are in, free of links: a link to one of them would lead in circles.
    within: Vec<PathBuf>,
}

impl Walk {
    /// All images below `folder`, in no certain order.
    pub(crate) fn all(folder: &Path) -> Result<Found, DataError> {
        let mut walk = Walk { found: Found::default(), within: Vec::new() };
        walk.folder(folder, Path::new(""))?;
        Ok(walk.found)
    }

    fn folder(&mut self, folder: &Path, relative: &Path) -> Result<(), DataError> {
        let real = fs::canonicalize(folder).map_err(|error| DataError::file(folder, error))?;
        if self.within.contains(&real) {
            return Ok(());
        }
        self.within.push(real);
        for (entry, kind) in entries(folder)? {
            let name = relative.join(entry.file_name());
            if kind.is_dir() {
                self.folder(&entry.path(), &name)?;
            } else if is_image(&name) {
                self.found.files.push(name);
            } else {
                self.found.ignored += 1;
            }
        }
        self.within.pop();
        Ok(())
    }
}

/// Image files below a folder, by name and relative to it.
pub fn images_below(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Walk::all(folder)?.files;
    files.sort_unstable();
    Ok(files)
}

/// Names of the folders in a folder, sorted.
pub(crate) fn folders(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = entries(folder)?.into_iter().filter(|(_, kind)| kind.is_dir());
    let mut names: Vec<PathBuf> = entries.map(|(entry, _)| entry.file_name().into()).collect();
    names.sort_unstable();
    Ok(names)
}

/// Number of files in a folder itself.
pub(crate) fn other_files(folder: &Path) -> Result<usize, DataError> {
    Ok(entries(folder)?.iter().filter(|(_, kind)| !kind.is_dir()).count())
}

/// Returns whether images lie in a folder itself.
pub(crate) fn holds_images(folder: &Path) -> Result<bool, DataError> {
    Ok(entries(folder)?.iter().any(|(entry, kind)| !kind.is_dir() && is_image(Path::new(&entry.file_name()))))
}

/// Entries of a folder, but for what is hidden. A link counts as what it leads to.
fn entries(folder: &Path) -> Result<Vec<(DirEntry, FileType)>, DataError> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| DataError::file(folder, error))? {
        let entry = entry.map_err(|error| DataError::file(folder, error))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let kind = entry.file_type().map_err(|error| DataError::file(&path, error))?;
        let kind = if kind.is_symlink() {
            let target =
                fs::metadata(&path).map_err(|_| DataError::file(&path, "a link that leads nowhere"))?;
            target.file_type()
        } else {
            kind
        };
        entries.push((entry, kind));
    }
    Ok(entries)
}

pub(crate) fn is_image(name: &Path) -> bool {
    let known = ["jpg", "jpeg", "png", "webp"];
    name.extension().is_some_and(|extension| known.iter().any(|known| extension.eq_ignore_ascii_case(known)))
}
