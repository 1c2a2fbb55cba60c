//! What a folder holds: a run, a study, or neither.

use std::path::{Path, PathBuf};

/// What a folder holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Run,
    Study,
}

/// Tells what a folder holds; none if neither a run nor a study.
pub fn kind(folder: &Path) -> Option<Kind> {
    if is_study(folder) {
        return Some(Kind::Study);
    }
    // Earlier versions wrote no record.
    let run = ["run.json", "metrics.jsonl"].iter().any(|name| folder.join(name).is_file());
    run.then_some(Kind::Run)
}

/// Tells a study's folder from a run's.
pub fn is_study(folder: &Path) -> bool {
    ["study.json", "results.json"].iter().any(|name| folder.join(name).is_file())
}

/// Name of a folder, also where its path has none.
pub fn named(folder: &Path) -> String {
    let whole: PathBuf = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    whole.file_name().map_or_else(|| whole.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Returns whether a process of this machine works on a study: it holds a lock on this file. Asked of the kernel's list, as whoever tried the lock
/// would hold it for a moment.
pub fn is_locked(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let Ok(inode) = std::fs::metadata(path).map(|data| data.ino().to_string()) else { return false };
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    // As in `1: FLOCK  ADVISORY  WRITE 1234 00:1f:5678 0 EOF`.
    locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|words| {
        let held = words.get(1) == Some(&"FLOCK") && words.get(3) == Some(&"WRITE");
        held && words.get(5).is_some_and(|file| file.rsplit(':').next() == Some(&inode))
    })
}
