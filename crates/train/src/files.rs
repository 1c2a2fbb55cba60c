//! Files that are there whole or as they were, even if the disk is full or the power fails.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// The end of the names of files that are still being written.
pub const UNFINISHED: &str = ".tmp";

/// Writes a file aside, syncs it, and gives it its name. Of a failure nothing stays behind.
pub fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_string_lossy();
    // Always the same name: what a killed run left is written over by the next.
    let aside = folder_of(path).join(format!(".{name}{UNFINISHED}"));
    let written = File::create(&aside).map(BufWriter::new).and_then(|mut file| {
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        fs::rename(&aside, path)
    });
    if written.is_err() {
        // The error that is reported is the first one; whether this succeeds adds nothing.
        let _ = fs::remove_file(&aside);
    }
    written?;
    sync_folder(folder_of(path))
}

/// The folder a file lies in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes names that were given or taken away in a folder survive a power failure.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all())
}
