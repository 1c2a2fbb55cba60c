//! Finding the weights of a run.

use crate::checkpoint::{CheckpointError, Checkpoints};
use std::path::{Path, PathBuf};

/// The file of weights that `path` is or, if it is the folder of a run, holds.
pub fn weights_file(path: &Path) -> Result<PathBuf, CheckpointError> {
    if path.is_dir() { of_folder(path) } else { Ok(path.to_path_buf()) }
}

fn of_folder(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let checkpoints = Checkpoints::of_run(folder, 1);
    let candidates = [checkpoints.best(), folder.join("weights.safetensors")];
    match candidates.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => checkpoints.latest(),
    }
}
