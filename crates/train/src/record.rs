//! What a run leaves beside its results, so that anyone can tell later how they came about.
//!
//! `config.json` is the resolved configuration. `run.json` holds one entry for the start and one for every continuation:
//! the exact command, where and when it was given, the version, and the machine. `algorithms.json` says how products were made on a
//! GPU, so that a continuation makes them alike.

use crate::config::Resolved;
use crate::error::TrainError;
use crate::files;
use crate::machine::Machine;
use cuda::Choices;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The environment variable in which a supervisor tells a run how often it was started again.
pub const RESTART: &str = "VITESSE_RESTART";

const CONFIG: &str = "config.json";
const RUN: &str = "run.json";
const ALGORITHMS: &str = "algorithms.json";

/// One start or continuation of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    pub command: Vec<String>,
    pub folder: PathBuf,
    /// Seconds since 1970.
    pub started: u64,
    pub version: String,
    pub machine: Machine,
}

impl Launch {
    /// The process that runs now.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Launch {
            command: std::env::args().collect(),
            folder: std::env::current_dir().unwrap_or_default(),
            started: since.as_secs(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            machine: Machine::here(),
        }
    }
}

/// Starts the records of a run.
pub fn create(folder: &Path, config: &str, launch: &Launch) -> Result<(), TrainError> {
    replace(&folder.join(CONFIG), config.as_bytes())?;
    write_launches(folder, std::slice::from_ref(launch))
}

/// Notes a continuation.
pub fn continue_with(folder: &Path, launch: &Launch) -> Result<(), TrainError> {
    let mut launches = launches(folder)?;
    launches.push(launch.clone());
    write_launches(folder, &launches)
}

/// The launches of a run, the first one first.
pub fn launches(folder: &Path) -> Result<Vec<Launch>, TrainError> {
    let path = folder.join(RUN);
    let text = fs::read_to_string(&path).map_err(|source| TrainError::Io { path: path.clone(), source })?;
    serde_json::from_str(&text)
        .map_err(|error| TrainError::Checkpoint { path, problem: format!("is no record of a run: {error}") })
}

/// The configuration of the run in a folder.
pub fn config(folder: &Path) -> Result<Resolved, TrainError> {
    let path = folder.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(|source| TrainError::Io { path: path.clone(), source })?;
    Ok(Resolved::from_json(&path.display().to_string(), &text)?)
}

/// How products of the run were made, if that was measured.
pub fn algorithms(folder: &Path) -> Result<Option<Choices>, TrainError> {
    let path = folder.join(ALGORITHMS);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TrainError::Io { path, source }),
    };
    let broken = |error| TrainError::Checkpoint {
        path,
        problem: format!("doesn't say how products are made ({error}); without it they are measured anew"),
    };
    serde_json::from_str(&text).map(Some).map_err(broken)
}

pub fn write_algorithms(folder: &Path, choices: &Choices) -> Result<(), TrainError> {
    let text = serde_json::to_string_pretty(choices).unwrap_or_default();
    replace(&folder.join(ALGORITHMS), text.as_bytes())
}

fn write_launches(folder: &Path, launches: &[Launch]) -> Result<(), TrainError> {
    let path = folder.join(RUN);
    let text = serde_json::to_string_pretty(launches).unwrap_or_default();
    replace(&path, text.as_bytes())
}

fn replace(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    files::replace(path, |file| file.write_all(bytes))
        .map_err(|source| TrainError::Io { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Folder;
    use std::collections::BTreeMap;

    #[test]
    fn algorithms_are_kept_with_the_run() {
        let kept = Folder::new("algorithms");
        let folder = &kept.0;
        assert_eq!(algorithms(folder).unwrap(), None);
        let products = BTreeMap::from([("8x4 · 4x2".to_string(), "own 192x4 2 8".to_string())]);
        let choices = Choices { gpu: "H200".into(), of: "products-1.json".into(), products };
        write_algorithms(folder, &choices).unwrap();
        assert_eq!(algorithms(folder).unwrap(), Some(choices));
        fs::write(folder.join(ALGORITHMS), "{").unwrap();
        let error = algorithms(folder).unwrap_err().to_string();
        assert!(error.contains("algorithms.json") && error.contains("measured anew"), "{error}");
    }
}
