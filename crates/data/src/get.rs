//! Downloads of the published sets.
//!
//! An archive is written to `NAME.part`, which survives a broken connection or an interrupted run and is
//! continued the next time. Only when size and checksum are right does it get its name, so that an archive that is there
//! is always whole.

mod transfer;

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::Duration;

use md5::{Digest, Md5};

use crate::DataError;
use crate::registry::{Archive, SETS};

/// A set that can be downloaded.
#[derive(Clone, Copy, Debug)]
pub struct Downloadable {
    set: &'static str,
    archive: Archive<'static>,
}

impl Downloadable {
    fn all() -> impl Iterator<Item = Downloadable> {
        SETS.iter().filter_map(|entry| Some(Downloadable { set: entry.name, archive: entry.archive? }))
    }
}

impl std::str::FromStr for Downloadable {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::all().find(|set| set.set == name).ok_or_else(|| {
            let names: Vec<&str> = Self::all().map(|set| set.set).collect();
            format!("can't be downloaded: only {} can", names.join(" and "))
        })
    }
}

impl std::fmt::Display for Downloadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.set)
    }
}

/// Limits of waiting and trying again.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Attempts in a row that bring nothing new.
    attempts: u32,
    /// Before the second attempt; twice as long before each further one.
    pause: Duration,
    connect: Duration,
    /// Without a single byte.
    silence: Duration,
}

const PATIENCE: Patience = Patience {
    attempts: 5,
    pause: Duration::from_secs(1),
    connect: Duration::from_secs(20),
    silence: Duration::from_secs(30),
};

/// Callback with the bytes that are there, and those that there will be.
pub type Progress<'a> = &'a mut dyn FnMut(u64, Option<u64>);

/// Downloads the archive of a set into a folder, unless it is there already, and gives its path.
///
/// `base_url` is the folder on a mirror; without it the archive comes from where it is published. The environment
/// may name a proxy (`HTTPS_PROXY`, `ALL_PROXY`) and the certificates to trust (`SSL_CERT_FILE`).
pub fn get(
    set: Downloadable,
    dest: &Path,
    base_url: Option<&str>,
    progress: Progress,
) -> Result<PathBuf, DataError> {
    let base_url = base_url.unwrap_or(set.archive.base_url);
    fetch(Archive { base_url, ..set.archive }, dest, PATIENCE, progress)
}

fn fetch(
    archive: Archive,
    dest: &Path,
    patience: Patience,
    progress: Progress,
) -> Result<PathBuf, DataError> {
    fs::create_dir_all(dest).map_err(cannot(dest, "create"))?;
    let path = dest.join(archive.name);
    if is_there(&path, &archive)? {
        return Ok(path);
    }
    let part_path = dest.join(format!("{}.part", archive.name));
    let mut part = open_part(&part_path)?;
    // Whoever held the lock before may just have finished.
    if is_there(&path, &archive)? {
        return Ok(path);
    }
    let client =
        transfer::Client::new(&archive, patience).map_err(|problem| DataError::file(&path, problem))?;
    if let Err(problem) = client.complete(&mut part, progress) {
        if part.metadata().is_ok_and(|about| about.len() == 0) {
            // Nothing to continue from; that it could not be removed would add nothing to the message.
            let _ = fs::remove_file(&part_path);
        }
        return Err(DataError::file(&path, problem));
    }
    if let Err(problem) = check(&mut part, &archive).map_err(cannot(&part_path, "read"))? {
        fs::remove_file(&part_path).map_err(cannot(&part_path, "remove"))?;
        return Err(DataError::file(
            &path,
            format!("what was downloaded is not the published archive: {problem}"),
        ));
    }
    part.sync_all().map_err(cannot(&part_path, "write"))?;
    fs::rename(&part_path, &path).map_err(cannot(&part_path, "rename"))?;
    File::open(dest).and_then(|folder| folder.sync_all()).map_err(cannot(dest, "sync"))?;
    Ok(path)
}

fn cannot(path: &Path, doing: &'static str) -> impl Fn(io::Error) -> DataError {
    move |error| DataError::file(path, format!("cannot {doing}: {error}"))
}

/// Returns whether the archive is there whole. A file of its name that is something else is the user's, and stays.
fn is_there(path: &Path, archive: &Archive) -> Result<bool, DataError> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        opened => opened.map_err(cannot(path, "open"))?,
    };
    match check(&mut file, archive).map_err(cannot(path, "read"))? {
        Ok(()) => Ok(true),
        Err(problem) => {
            Err(DataError::file(path, format!("it is not the published archive: {problem}; move it away")))
        }
    }
}

/// Opens what an earlier download left, or starts anew. Locked, so that two downloads do not mix their bytes.
fn open_part(path: &Path) -> Result<File, DataError> {
    let part = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let part = part.map_err(cannot(path, "create"))?;
    match part.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(DataError::file(path, "another download of this archive is under way"))
        }
        // Some network file systems have no locks; the checksum still tells.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(part),
    }
}

/// Compares size and checksum; the inner error says how they differ.
fn check(file: &mut File, archive: &Archive) -> io::Result<Result<(), String>> {
    let length = file.metadata()?.len();
    if length != archive.bytes {
        return Ok(Err(format!("it has {length} bytes, not {}", archive.bytes)));
    }
    file.rewind()?;
    let mut sum = Md5::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => sum.update(&buffer[..count]),
        }
    }
    let found: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(if found == archive.md5 { Ok(()) } else { Err(format!("its MD5 is {found}, not {}", archive.md5)) })
}

#[cfg(test)]
mod tests;
