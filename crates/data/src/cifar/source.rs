//! Where a set lies, and its files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::layout::{Form, KINDS};
use super::{CifarKind, MAX_FILE, archive};
use crate::error::shown;
use crate::{DataError, Split};

/// The files of one split in one form, read whole.
pub(super) struct Source {
    pub place: Place,
    pub form: Form,
    pub records: Vec<NamedFile>,
    pub names: Option<NamedFile>,
}

type NamedFile = (String, Vec<u8>);

/// Folder or archive that the files are in.
pub(super) enum Place {
    Folder(PathBuf),
    Archive(PathBuf),
}

impl Place {
    pub fn error(&self, file: &str, problem: impl ToString) -> DataError {
        match self {
            Place::Folder(folder) => DataError::file(folder.join(file), problem),
            Place::Archive(archive) => DataError::file(archive, format!("{file}: {}", problem.to_string())),
        }
    }

    /// Name of a file in messages.
    pub fn name(&self, file: &str) -> String {
        match self {
            Place::Folder(folder) => folder.join(file).display().to_string(),
            Place::Archive(archive) => format!("{}: {file}", archive.display()),
        }
    }
}

impl Source {
    pub fn find(path: &Path, kind: CifarKind, split: Split) -> Result<Self, DataError> {
        let about =
            fs::metadata(path).map_err(|error| DataError::file(path, format!("cannot open: {error}")))?;
        if !about.is_dir() {
            return Self::from_archive(path, kind, split);
        }
        if let Some((folder, form)) = find_folder(path, kind) {
            return Self::from_folder(folder, kind, form, split);
        }
        let archives = Form::ALL.into_iter().flat_map(|form| kind.archives(form));
        match archives.map(|name| path.join(name)).find(|path| path.is_file()) {
            Some(archive) => Self::from_archive(&archive, kind, split),
            None => Err(DataError::file(path, nothing_in_folder(path, kind))),
        }
    }

    fn from_folder(folder: PathBuf, kind: CifarKind, form: Form, split: Split) -> Result<Self, DataError> {
        let place = Place::Folder(folder.clone());
        let mut files = BTreeMap::new();
        for &name in kind.files(form, split).iter().chain([&kind.names_file(form)]) {
            let path = folder.join(name);
            if path.exists() {
                files.insert(
                    name.to_string(),
                    read_file(&path).map_err(|problem| place.error(name, problem))?,
                );
            }
        }
        Self::assemble(place, form, files, kind, split)
    }

    fn from_archive(path: &Path, kind: CifarKind, split: Split) -> Result<Self, DataError> {
        let wanted: Vec<&str> = Form::ALL
            .into_iter()
            .flat_map(|form| kind.files(form, split).iter().copied().chain([kind.names_file(form)]))
            .collect();
        let contents = archive::read(path, &wanted).map_err(|problem| DataError::file(path, problem))?;
        let has = |name: &str| {
            contents.wanted.contains_key(name) || contents.others.iter().any(|other| other == name)
        };
        let form = Form::ALL.into_iter().find(|&form| kind.all_files(form).any(has));
        match form {
            Some(form) => {
                Self::assemble(Place::Archive(path.to_path_buf()), form, contents.wanted, kind, split)
            }
            None => Err(DataError::file(path, nothing_in_archive(&contents, kind))),
        }
    }

    fn assemble(
        place: Place,
        form: Form,
        mut files: BTreeMap<String, Vec<u8>>,
        kind: CifarKind,
        split: Split,
    ) -> Result<Self, DataError> {
        let expected = kind.files(form, split);
        let last = expected.iter().rposition(|&name| files.contains_key(name)).unwrap_or(0);
        let mut records = Vec::new();
        for &name in &expected[..=last] {
            let bytes = files.remove(name).ok_or_else(|| place.error(name, missing(kind, split)))?;
            records.push((name.to_string(), bytes));
        }
        let names = files.remove_entry(kind.names_file(form));
        Ok(Self { place, form, records, names })
    }
}

fn missing(kind: CifarKind, split: Split) -> String {
    format!("it is missing, and {kind}'s {split} set needs it")
}

/// The folder that a set's files are in: this one, or the official one in it.
fn find_folder(path: &Path, kind: CifarKind) -> Option<(PathBuf, Form)> {
    let official = |form| (path.join(kind.folder(form)), form);
    let candidates =
        Form::ALL.map(|form| (path.to_path_buf(), form)).into_iter().chain(Form::ALL.map(official));
    let holds_set =
        |(folder, form): &(PathBuf, Form)| kind.all_files(*form).any(|name| folder.join(name).is_file());
    candidates.into_iter().find(holds_set)
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let cannot = |doing: &str, error| format!("cannot {doing}: {error}");
    let file = File::open(path).map_err(|error| cannot("open", error))?;
    let about = file.metadata().map_err(|error| cannot("open", error))?;
    if !about.is_file() {
        return Err("it is not a regular file".to_string());
    }
    if about.len() > MAX_FILE {
        return Err(archive::too_large(about.len()));
    }
    let mut bytes = Vec::with_capacity(about.len() as usize);
    // A file that grows meanwhile is cut here, and is then found to have the wrong length.
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(|error| cannot("read", error))?;
    Ok(bytes)
}

fn nothing_in_folder(path: &Path, kind: CifarKind) -> String {
    let other = KINDS.into_iter().find(|other| find_folder(path, *other).is_some());
    let (binary, python) = (kind.folder(Form::Binary), kind.folder(Form::Python));
    let hint = other.map(|other| format!("; it holds {other}")).unwrap_or_default();
    format!("there is no {kind} here: no {binary}, no {python}, no archive of them{hint}")
}

fn nothing_in_archive(contents: &archive::Contents, kind: CifarKind) -> String {
    let is_of = |other: CifarKind, name: &String| {
        Form::ALL.into_iter().any(|form| other.all_files(form).any(|file| file == name))
    };
    let other = KINDS.into_iter().find(|other| contents.others.iter().any(|name| is_of(*other, name)));
    match (other, contents.others.first()) {
        (Some(other), _) => format!("this archive holds {other}, not {kind}"),
        (None, Some(first)) => {
            format!("this archive does not hold {kind}; its first file is {}", shown(first))
        }
        (None, None) => format!("this archive does not hold {kind}: it has no files"),
    }
}
