//! Weights found on disk, with the run they come from.

use crate::checkpoint::{Checkpoints, config_of};
use crate::config::Resolved;
use crate::error::TrainError;
use crate::pth;
use std::path::{Path, PathBuf};

/// A file of weights; `run` is known of those that vitesse wrote.
pub struct Stored {
    pub weights: PathBuf,
    pub run: Option<Resolved>,
}

impl Stored {
    /// `path` is a file of weights, a checkpoint, or the folder of a run, of which the best checkpoint is taken.
    pub fn find(path: &Path) -> Result<Self, TrainError> {
        let weights = weights_file(path)?;
        if pth::is_pth(&weights) {
            return Ok(Stored { weights, run: None });
        }
        let name = weights.display().to_string();
        let config = config_of(&weights)?;
        let run = config.map(|text| Resolved::from_json(&name, &text)).transpose()?;
        Ok(Stored { weights, run })
    }
}

/// The file of weights that `path` is or, if it is the folder of a run, holds.
pub fn weights_file(path: &Path) -> Result<PathBuf, TrainError> {
    if path.is_dir() { of_folder(path) } else { Ok(path.to_path_buf()) }
}

fn of_folder(folder: &Path) -> Result<PathBuf, TrainError> {
    let checkpoints = Checkpoints::of_run(folder, 1);
    let candidates = [checkpoints.best(), folder.join("weights.safetensors")];
    match candidates.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => checkpoints.latest(),
    }
}
