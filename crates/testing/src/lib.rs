//! Support for tests, written once: a dev-dependency of the other crates, and of none of their libraries.
//!
//! - [`Folder`]: a temporary folder that goes when the test ends.
//! - [`skip!`], [`need!`]: a test that can't run here says so and why; with `VITESSE_REQUIRE_ALL=1` it fails.
//! - [`tools`]: programs that tests call (Chromium, mpirun, cc), and hosts made of network namespaces.
//! - [`allocations`]: an allocator that counts.
//! - [`Random`], [`formula`]: numbers that are the same every time.
//! - [`fuzz`]: damaged files for readers.
//! - [`modules`]: whether modules of a crate depend on each other in one direction.
//! - [`words`]: words of our own where the field has others.

pub mod allocations;
mod folder;
pub mod formula;
pub mod fuzz;
pub mod modules;
mod random;
mod skip;
pub mod tools;
pub mod words;

pub use folder::Folder;
pub use random::Random;
pub use skip::{inapplicable, skipped};

use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// Files below a folder whose names end with `.EXTENSION`, sorted.
pub fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let (mut folders, mut files) = (vec![folder.to_path_buf()], vec![]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}
