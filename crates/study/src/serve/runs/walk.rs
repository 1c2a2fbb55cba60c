//! A walk through folders that stops when it has gone through enough entries, and goes on there.

use crate::serve::folder::{Kind, kind};
use std::collections::HashSet;
use std::fs::{self, ReadDir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Folders below folders that are looked into.
const DEEP: usize = 6;
/// A folder that begins with so many files and no folder is one of data, and left.
pub const FILES: usize = 500;

pub struct Walk {
    root: PathBuf,
    /// Folders that are being gone through, each within the one before.
    open: Vec<Open>,
    begun: bool,
    /// Device and number of every folder that was met: links may lead in circles.
    met: HashSet<(u64, u64)>,
}

struct Open {
    /// The way from the root; empty for itself.
    name: String,
    entries: ReadDir,
    files: usize,
    folders: bool,
}

impl Walk {
    pub fn new(root: &Path) -> Walk {
        Walk { root: root.to_path_buf(), open: vec![], begun: false, met: HashSet::new() }
    }

    /// Goes through at most so many entries, and calls `found` for every run and study. True when all was gone through. What can't be
    /// read is passed over.
    pub fn go_on(&mut self, entries: usize, found: &mut dyn FnMut(String, PathBuf, Kind)) -> bool {
        if !self.begun {
            self.begun = true;
            self.enter(String::new());
        }
        for _ in 0..entries {
            let Some(open) = self.open.last_mut() else { return true };
            let Some(Ok(entry)) = open.entries.next() else {
                self.open.pop();
                continue;
            };
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_folder = match entry.file_type() {
                Ok(kind) if kind.is_symlink() => fs::metadata(entry.path()).is_ok_and(|data| data.is_dir()),
                Ok(kind) => kind.is_dir(),
                Err(_) => false,
            };
            if !is_folder {
                open.files += 1;
                if open.files >= FILES && !open.folders {
                    self.open.pop();
                }
                continue;
            }
            open.folders = true;
            if name.starts_with('.') {
                continue;
            }
            let name = if open.name.is_empty() { name } else { format!("{}/{name}", open.name) };
            let folder = entry.path();
            match kind(&folder) {
                Some(kind) => found(name, folder, kind),
                None if self.open.len() <= DEEP => self.enter(name),
                None => {}
            }
        }
        self.open.is_empty()
    }

    fn enter(&mut self, name: String) {
        let folder = self.root.join(&name);
        let Ok(data) = fs::metadata(&folder) else { return };
        if !self.met.insert((data.dev(), data.ino())) {
            return;
        }
        if let Ok(entries) = fs::read_dir(&folder) {
            self.open.push(Open { name, entries, files: 0, folders: false });
        }
    }
}
