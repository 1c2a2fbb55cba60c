//! A run and its continuation, as event files. `fixtures/check_tensorboard.py` reads what this test leaves in the build's
//! `tmp/tensorboard` with TensorBoard itself.

use std::fs;
use std::path::{Path, PathBuf};
use train::tensorboard::EventFile;

/// Steps 0 to 29 of a run that stops there, and from 20 on of the run that takes over from its last checkpoint.
fn write_pair(folder: &Path) -> [PathBuf; 2] {
    let mut first = EventFile::create(folder, 0).unwrap();
    first.text(0, "config", "model `vit-nano/4`, **lr** 1e-3").unwrap();
    for step in 0..30 {
        first.scalar(step, "train/loss", 3.0 - 0.01 * step as f64).unwrap();
    }
    first.scalar(29, "eval/top1", 0.25).unwrap();
    first.flush().unwrap();
    let mut second = EventFile::create(folder, 20).unwrap();
    for step in 20..40 {
        second.scalar(step, "train/loss", 2.0 - 0.01 * step as f64).unwrap();
    }
    second.scalar(39, "eval/top1", 0.5).unwrap();
    second.scalar(39, "eval/loss", f64::NAN).unwrap();
    second.flush().unwrap();
    [first.path().to_path_buf(), second.path().to_path_buf()]
}

/// The lengths of a file's events, as their frames say; panics where a frame is cut short.
fn frames(path: &Path) -> Vec<usize> {
    let bytes = fs::read(path).unwrap();
    let (mut at, mut lengths) = (0, vec![]);
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        at += 8 + 4 + length + 4;
        lengths.push(length);
    }
    assert_eq!(at, bytes.len());
    lengths
}

#[test]
fn a_resumed_run_has_two_files_in_order() {
    let folder = testing::Folder::new("tensorboard");
    let [first, second] = write_pair(&folder);
    assert!(first < second, "TensorBoard reads files by name: {first:?}, {second:?}");
    let name = first.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("events.out.tfevents."), "{name}");
    assert_eq!(frames(&first).len(), 2 + 1 + 30 + 1, "version and start, text, losses, accuracy");
    assert_eq!(frames(&second).len(), 2 + 20 + 2, "version and start, losses, accuracy and loss");
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let error = EventFile::create(Path::new("/no/such/folder"), 0).err().unwrap().to_string();
    assert!(error.starts_with("/no/such/folder/events.out.tfevents."), "{error}");
}
