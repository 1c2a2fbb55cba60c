//! What a run leaves beside its results, so that anyone can tell later how they came about.
//!
//! `config.json` is the resolved configuration. `run.json` holds one entry for the start and one for every continuation:
//! the exact command, where and when it was given, the version, and the machine; with checksums of each, and of `config.json`. `ended.json`
//! says how the run ended, if its process lived to write it.

use crate::error::TrainError;
use crate::machine;
use config::{Record, Resolved};
pub use records::Launch;
use records::{Ended, Ending, Schema};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub use files::fault::RESTART;

const CONFIG: &str = "config.json";
const RUN: &str = "run.json";

/// The launch of the process that runs now.
pub fn launch() -> Launch {
    Launch {
        command: std::env::args().collect(),
        folder: std::env::current_dir().unwrap_or_default(),
        started: seconds_since_1970(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        machine: machine::here(),
        schema: Schema::CURRENT,
    }
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Notes how a run ended, after so many steps.
pub fn end(folder: &Path, how: Ended, why: Option<String>, steps: u64) -> Result<(), TrainError> {
    let ending = Ending { how, why, steps, ended: seconds_since_1970(), schema: Schema::CURRENT };
    let text = serde_json::to_string_pretty(&ending).map_err(|error| no_record(folder, error))?;
    replace(&folder.join(Ending::FILE), text.as_bytes())
}

/// Tells whether a folder holds the record of a run.
pub fn holds_run(folder: &Path) -> bool {
    folder.join(RUN).is_file()
}

/// All records that a folder may have, that of the run first.
pub fn paths(folder: &Path) -> [PathBuf; 4] {
    [RUN, CONFIG, devices::ALGORITHMS, Ending::FILE].map(|name| folder.join(name))
}

pub fn config_path(folder: &Path) -> PathBuf {
    folder.join(CONFIG)
}

/// Starts the records of a run; `run.json` comes last.
pub fn create(
    folder: &Path,
    config: &str,
    launch: &Launch,
    typed: Option<&Record>,
) -> Result<(), TrainError> {
    replace(&folder.join(CONFIG), config.as_bytes())?;
    let mut first = entry(launch, typed)?;
    first[OF_CONFIG] = checksum(config.as_bytes()).into();
    write_entries(folder, vec![first])
}

/// Notes a continuation; how the run ended before is no longer so.
pub fn continue_with(folder: &Path, launch: &Launch, typed: Option<&Record>) -> Result<(), TrainError> {
    let ending = folder.join(Ending::FILE);
    files::remove(&ending).map_err(|source| TrainError::Io { path: ending.clone(), source })?;
    let mut entries = entries(folder)?;
    entries.push(entry(launch, typed)?);
    write_entries(folder, entries)
}

/// The launches of a run, the first one first.
pub fn launches(folder: &Path) -> Result<Vec<Launch>, TrainError> {
    let read = |entry| serde_json::from_value(entry).map_err(|error| no_record(folder, error));
    entries(folder)?.into_iter().map(read).collect()
}

/// What each launch of a run was told; none where an older version recorded only its command line.
pub fn typed(folder: &Path) -> Result<Vec<Option<Record>>, TrainError> {
    let read = |mut entry: Value| match entry.get_mut(SETTINGS) {
        Some(typed) => serde_json::from_value(typed.take()).map_err(|error| no_record(folder, error)),
        None => Ok(None),
    };
    entries(folder)?.into_iter().map(read).collect()
}

/// The configuration of the run in a folder.
pub fn config(folder: &Path) -> Result<Resolved, TrainError> {
    let path = folder.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(|source| TrainError::Io { path: path.clone(), source })?;
    let written = if holds_run(folder) { entries(folder)?.into_iter().next() } else { None };
    let written = written.as_ref().and_then(|first| first[OF_CONFIG].as_str());
    if written.is_some_and(|written| written != checksum(text.as_bytes())) {
        return Err(damaged(path, "it"));
    }
    Ok(Resolved::from_json(&path.display().to_string(), &text)?)
}

/// Members of `run.json` beside those of a launch: the checksum of an entry without itself, that of `config.json`, and what was typed.
const OF_ENTRY: &str = "crc32";
const OF_CONFIG: &str = "config_crc32";
const SETTINGS: &str = "typed";

fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

fn damaged(path: PathBuf, what: &str) -> TrainError {
    let problem = format!("is damaged: {what} has another checksum than when it was written");
    TrainError::Record { path, problem }
}

fn no_record(folder: &Path, error: serde_json::Error) -> TrainError {
    let problem = format!("is damaged: it is no record of a run: {error}");
    TrainError::Record { path: folder.join(RUN), problem }
}

fn entry(launch: &Launch, typed: Option<&Record>) -> Result<Value, TrainError> {
    let value = |value: serde_json::Result<Value>| value.map_err(|error| no_record(Path::new(""), error));
    let mut entry = value(serde_json::to_value(launch))?;
    if typed.is_some() {
        entry[SETTINGS] = value(serde_json::to_value(typed))?;
    }
    Ok(entry)
}

/// The entries of `run.json`, each as it was written. Those of older versions have no checksums.
fn entries(folder: &Path) -> Result<Vec<Value>, TrainError> {
    let path = folder.join(RUN);
    let text = fs::read_to_string(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => TrainError::NoRun(folder.to_path_buf()),
        _ => TrainError::Io { path: path.clone(), source },
    })?;
    let mut entries: Vec<Value> = serde_json::from_str(&text).map_err(|error| no_record(folder, error))?;
    for (index, entry) in entries.iter_mut().enumerate() {
        let Some(object) = entry.as_object_mut() else {
            return Err(damaged(path, &format!("launch {}", index + 1)));
        };
        let written = object.shift_remove(OF_ENTRY);
        if written.is_some_and(|written| written != checksum(entry.to_string().as_bytes())) {
            return Err(damaged(path, &format!("launch {}", index + 1)));
        }
    }
    Ok(entries)
}

fn write_entries(folder: &Path, mut entries: Vec<Value>) -> Result<(), TrainError> {
    for entry in &mut entries {
        entry[OF_ENTRY] = checksum(entry.to_string().as_bytes()).into();
    }
    let text = serde_json::to_string_pretty(&entries).map_err(|error| no_record(folder, error))?;
    replace(&folder.join(RUN), text.as_bytes())
}

fn replace(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    files::replace(path, |file| file.write_all(bytes))
        .map_err(|source| TrainError::Io { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    /// Whatever bit of the records is flipped: the file is named, or they say what they said.
    #[test]
    fn a_flipped_bit_in_the_records_is_noticed() {
        let kept = Folder::new("records");
        let folder = &kept.0;
        let raw = config::Raw { train_samples: Some(8), ..config::Raw::default() };
        let (run, _) = config::sets::resolve(&raw, 1).unwrap();
        let typed = config::Record::of(&raw, Path::new("/"));
        create(folder, &run.to_json().unwrap(), &launch(), Some(&typed)).unwrap();
        continue_with(folder, &launch(), None).unwrap();
        let read = || Ok::<_, TrainError>((launches(folder)?, super::config(folder)?, super::typed(folder)?));
        let written = read().unwrap();
        assert_eq!(written.0.len(), 2);
        for name in [RUN, CONFIG] {
            let path = folder.join(name);
            let mut bytes = fs::read(&path).unwrap();
            for bit in (0..8 * bytes.len()).step_by(7) {
                bytes[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, &bytes).unwrap();
                match read() {
                    Ok(found) => assert!(found == written, "bit {bit} of {name} changed something"),
                    Err(error) => {
                        let error = error.to_string();
                        assert!(error.contains(name) && !error.contains('\n'), "{error}");
                    }
                }
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(read().unwrap(), written);
    }
}
