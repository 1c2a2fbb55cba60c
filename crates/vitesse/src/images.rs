//! Images that are named on a command line: files, and folders of them. Those that can't be read are named at the end, and don't keep the
//! others from their answers.

use anyhow::bail;
use data::Skipped;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use text::{many, printable};

/// An image to be answered for.
pub struct Named {
    pub path: PathBuf,
    /// Its name within the folder that was named; of a file, its own.
    pub within: PathBuf,
}

/// Files as they are named, and the images below folders, by name.
pub fn found(typed: &[PathBuf]) -> anyhow::Result<Vec<Named>> {
    let mut all = vec![];
    for path in typed {
        if !path.is_dir() {
            let within = path.file_name().map_or_else(|| path.clone(), PathBuf::from);
            all.push(Named { path: path.clone(), within });
            continue;
        }
        let below = data::images_below(path)?;
        if below.is_empty() {
            bail!("{}: has no images (jpg, jpeg, png or webp)", path.display());
        }
        all.extend(below.into_iter().map(|within| Named { path: path.join(&within), within }));
    }
    Ok(all)
}

/// Why images can't be read, by their places.
pub fn unread(skipped: Vec<Skipped>) -> BTreeMap<usize, String> {
    skipped.into_iter().map(|skipped| (skipped.index, printable::line(&skipped.problem))).collect()
}

/// Names what could not be read; a failure if there is any.
pub fn end(unread: &BTreeMap<usize, String>, images: usize) -> anyhow::Result<()> {
    let Some(first) = unread.values().next() else { return Ok(()) };
    if images == 1 {
        bail!("{first}");
    }
    unread.values().for_each(|why| eprintln!("vitesse: {why}"));
    bail!("{} of {} could not be read", text::count::grouped(unread.len()), many(images, "image"))
}

/// The problem with an image as it is given in JSON.
pub fn failed(path: &Path, why: &str) -> serde_json::Value {
    serde_json::json!({"image": path, "error": why})
}
