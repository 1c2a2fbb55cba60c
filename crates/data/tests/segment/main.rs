//! Images with masks: files, augmentation, batches, evaluation.

#[path = "../common/mod.rs"]
mod common;

mod files;
mod loader;
mod pictures;
mod prepare;
mod published;
