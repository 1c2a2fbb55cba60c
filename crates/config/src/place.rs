//! Where a run's data lies: as it was found, and as seen from the folder of the run, so that both can be moved together.

use super::resolved::Resolved;
use super::source::Source;
use crate::ConfigError;
use crate::FileError;
use serde::{Deserialize, Serialize};
use std::path::{Component, Path, PathBuf};

/// Data as a record names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub source: Source,
    /// The way there from the folder of the record; none in records of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative: Option<PathBuf>,
}

impl Place {
    /// Name in a record in `folder`. The folder need not be there yet.
    pub fn seen_from(source: &Source, folder: &Path) -> Self {
        let Some(path) = source.path() else { return Place { source: source.clone(), relative: None } };
        let source = source.at(&absolute(path));
        let relative = Some(way(&real(folder), &real(path))).filter(|way| way.to_str().is_some());
        Place { source, relative }
    }

    /// Path of it now: where it was found, or where it lies as seen from `folder`, the record's. `launched`: the folder that a
    /// relative path of before was typed in.
    pub fn find(&self, folder: &Path, launched: Option<&Path>) -> Result<Source, ConfigError> {
        let Some(path) = self.source.path() else { return Ok(self.source.clone()) };
        let found = launched.map_or_else(|| path.to_path_buf(), |launched| launched.join(path));
        if found.exists() {
            return Ok(self.source.at(&found));
        }
        let Some(moved) = self.relative.as_ref().map(|way| real(&folder.join(way))) else {
            return Ok(self.source.at(&found));
        };
        if moved.exists() {
            return Ok(self.source.at(&moved));
        }
        let why = format!(
            "is not where the run found it, nor at {}, beside the run: name its place with --data",
            moved.display()
        );
        Err(ConfigError::setting("data", self.source.at(&found), why))
    }
}

impl Resolved {
    /// The record as it is written into `folder`: its paths hold from any folder.
    pub fn record(&self, folder: &Path) -> Result<String, FileError> {
        self.recorded(folder).to_json()
    }

    /// With paths that hold from any folder.
    pub fn recorded(&self, folder: &Path) -> Resolved {
        let mut run = self.clone();
        (run.data.source, run.data.relative) = {
            let Place { source, relative } = Place::seen_from(&self.data.source, folder);
            (source, relative)
        };
        for path in [&mut run.init, &mut run.out, &mut run.resume, &mut run.trace] {
            *path = path.as_deref().map(absolute);
        }
        run
    }

    /// Its data, as the record names it.
    pub fn place(&self) -> Place {
        Place { source: self.data.source.clone(), relative: self.data.relative.clone() }
    }
}

/// A record is text: what can't be written there stays as it was typed.
fn absolute(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).ok().filter(|path| path.to_str().is_some());
    absolute.unwrap_or_else(|| path.to_path_buf())
}

/// Without links and detours, as far as the path is there.
fn real(path: &Path) -> PathBuf {
    let path = absolute(path);
    let known = path.ancestors().find_map(|ancestor| {
        let (rest, real) = (path.strip_prefix(ancestor).ok()?, ancestor.canonicalize().ok()?);
        // Joined with nothing, a path would end in a slash.
        Some(if rest.as_os_str().is_empty() { real } else { real.join(rest) })
    });
    known.unwrap_or(path)
}

/// From one folder to another; both are real.
fn way(from: &Path, to: &Path) -> PathBuf {
    let (mut from, mut to) = (from.components().peekable(), to.components().peekable());
    while from.peek().is_some() && from.peek() == to.peek() {
        from.next();
        to.next();
    }
    from.map(|_| Component::ParentDir).chain(to).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Raw;
    use std::fs;
    use testing::Folder;

    fn folder_at(path: impl Into<PathBuf>) -> Source {
        Source::new(data::Entry::named("folder").unwrap(), Some(path.into()))
    }

    #[test]
    fn data_is_found_where_it_was_and_beside_a_run_that_was_moved_with_it() {
        let folder = Folder::new("place");
        let (old, new) = (folder.0.join("old"), folder.0.join("new"));
        fs::create_dir_all(old.join("photos")).unwrap();
        let source = folder_at(old.join("photos"));
        let place = Place::seen_from(&source, &old.join("runs/first"));
        assert_eq!(place.relative, Some("../../photos".into()));
        assert_eq!(place.find(&new.join("runs/first"), None).unwrap(), source);
        fs::create_dir_all(old.join("runs/first")).unwrap();
        fs::rename(&old, &new).unwrap();
        let real = fs::canonicalize(&new).unwrap();
        assert_eq!(place.find(&new.join("runs/first"), None).unwrap(), folder_at(real.join("photos")));
        fs::remove_dir_all(new.join("photos")).unwrap();
        let error = place.find(&new.join("runs/first"), None).unwrap_err().to_string();
        let start =
            format!("--data folder:{}: is not where the run found it, nor at ", old.join("photos").display());
        assert!(error.starts_with(&start) && error.contains("new/photos"), "{error}");
    }

    #[test]
    fn relative_paths_of_before_are_those_of_the_launch() {
        let folder = Folder::new("place-before");
        fs::create_dir_all(folder.0.join("photos")).unwrap();
        let place = Place { source: folder_at("photos"), relative: None };
        let found = place.find(&folder.0.join("runs/first"), Some(&folder.0)).unwrap();
        assert_eq!(found, folder_at(folder.0.join("photos")));
        assert_eq!(
            place.find(Path::new("run"), None).unwrap(),
            place.source,
            "as it is, where no more is known"
        );
    }

    #[test]
    fn a_record_has_no_path_that_depends_on_the_folder_it_is_read_in() {
        let raw = Raw {
            data: Some("folder:photos".into()),
            init: Some("w.safetensors".into()),
            out: Some("runs/first".into()),
            trace: Some("trace.json".into()),
            ..Raw::default()
        };
        let facts = crate::Facts { train_images: 100, test_images: 10, classes: 2, channels: 3 };
        let run = raw.resolve(&facts, 1).unwrap();
        let text = run.record(Path::new("runs/first")).unwrap();
        let read = Resolved::from_json("config.json", &text).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(read.place().source, folder_at(here.join("photos")));
        assert_eq!(read.place().relative, Some("../../photos".into()));
        assert_eq!(read.init, Some(here.join("w.safetensors")));
        assert_eq!((read.out, read.trace), (Some(here.join("runs/first")), Some(here.join("trace.json"))));
        assert!(run.differences(&Resolved::from_json("", &text).unwrap()).is_empty());
        let drawn = Raw::default().resolve_without_data(1).unwrap();
        assert_eq!(drawn.recorded(Path::new("x")), drawn);
    }
}
