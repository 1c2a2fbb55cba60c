//! Finding the weights of a run, or of a folder of Hugging Face.

use crate::checkpoint::{CheckpointError, Checkpoints};
use crate::hugging_face;
use std::path::{Path, PathBuf};

/// The file of weights that `path` is or, if it is the folder of a run or of Hugging Face, holds.
pub fn weights_file(path: &Path) -> Result<PathBuf, CheckpointError> {
    if path.is_dir() { of_folder(path) } else { Ok(path.to_path_buf()) }
}

fn of_folder(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let checkpoints = Checkpoints::of_run(folder, 1);
    let of_run = [checkpoints.best(), folder.join("weights.safetensors")];
    let of_others = hugging_face::FILES.map(|name| folder.join(name));
    match of_run.into_iter().chain(of_others).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => checkpoints.latest(),
    }
}
