//! `algorithms.json`: how matmuls and attention of a run are made on a GPU, so that a continuation makes them alike.

use crate::DeviceError;
use cuda::AlgorithmChoices;
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::path::Path;

/// The name of the file in a run's folder.
pub const ALGORITHMS: &str = "algorithms.json";

/// The algorithms of a run, if they were measured.
pub fn algorithms(folder: &Path) -> Result<Option<AlgorithmChoices>, DeviceError> {
    let path = folder.join(ALGORITHMS);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(DeviceError::Io { path, source }),
    };
    let broken = |error| DeviceError::Algorithms {
        path,
        problem: format!("names no algorithms ({error}); without it they are measured again"),
    };
    serde_json::from_str(&text).map(Some).map_err(broken)
}

/// Writes the algorithms of a run, in the device's own terms.
pub fn write_algorithms(folder: &Path, choices: &impl Serialize) -> Result<(), DeviceError> {
    let text = serde_json::to_string_pretty(choices).unwrap_or_default();
    let path = folder.join(ALGORITHMS);
    files::replace(&path, |file| file.write_all(text.as_bytes()))
        .map_err(|source| DeviceError::Io { path: path.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use testing::Folder;

    #[test]
    fn algorithms_are_kept_with_the_run() {
        let kept = Folder::new("algorithms");
        let folder = &kept.0;
        assert_eq!(algorithms(folder).unwrap(), None);
        let chosen = BTreeMap::from([("8x4 · 4x2".to_string(), "own 192x4 2 8".to_string())]);
        let choices =
            AlgorithmChoices { gpu: "H200".into(), of: "products-1.json".into(), algorithms: chosen };
        write_algorithms(folder, &choices).unwrap();
        assert_eq!(algorithms(folder).unwrap(), Some(choices));
        fs::write(folder.join(ALGORITHMS), "{").unwrap();
        let error = algorithms(folder).unwrap_err().to_string();
        assert!(error.contains("algorithms.json") && error.contains("measured again"), "{error}");
    }
}
