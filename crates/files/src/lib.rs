//! Files that are there whole or as they were, even if the disk is full or the power fails.
//!
//! Whatever changes the folder of a run goes through these functions, one operation each, so that tests can let every single one
//! fail, or end the process before it (`VITESSE_FAULT`).

pub mod fault;
pub mod output;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// The end of the names of files that are still being written.
pub const UNFINISHED: &str = ".tmp";

/// Writes a file aside, syncs it, and gives it its name. Of a failure nothing stays behind.
pub fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    // A device or a pipe stays what it is: /dev/null must not become a file.
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        let mut file = BufWriter::new(File::options().write(true).open(path)?);
        write(&mut file)?;
        return file.flush();
    }
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_string_lossy();
    // Always the same name: what a killed run left is written over by the next.
    let aside = folder_of(path).join(format!(".{name}{UNFINISHED}"));
    let written = create(&aside).map(BufWriter::new).and_then(|mut file| {
        fault::file_operation()?;
        write(&mut file)?;
        file.flush()?;
        sync(file.get_ref())?;
        rename(&aside, path)
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
    File::open(folder).and_then(|folder| sync(&folder))
}

/// A new file, or an empty one in the place of what was there.
pub fn create(path: &Path) -> io::Result<File> {
    fault::file_operation()?;
    File::create(path)
}

/// A new file, where none must be.
pub fn create_new(path: &Path) -> io::Result<File> {
    fault::file_operation()?;
    File::options().write(true).create_new(true).open(path)
}

/// A file to write more to; made if it isn't there.
pub fn append(path: &Path) -> io::Result<File> {
    fault::file_operation()?;
    File::options().append(true).create(true).open(path)
}

/// A folder in one that is there; it may be there itself.
pub fn create_folder(path: &Path) -> io::Result<()> {
    fault::file_operation()?;
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made,
    }
}

pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fault::file_operation()?;
    fs::rename(from, to)
}

/// Gives a file a second name, which nothing must have.
pub fn link(from: &Path, to: &Path) -> io::Result<()> {
    fault::file_operation()?;
    fs::hard_link(from, to)
}

/// Removes a file, if it is there.
pub fn remove(path: &Path) -> io::Result<()> {
    fault::file_operation()?;
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Fails unless an open file still has its name: it may have been removed, or replaced by another.
pub fn is_at(file: &File, path: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (open, named) = (file.metadata()?, fs::metadata(path)?);
    if (open.dev(), open.ino()) == (named.dev(), named.ino()) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "it was replaced while the run was writing to it"))
}

pub fn sync(file: &File) -> io::Result<()> {
    fault::file_operation()?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[test]
    fn a_file_is_replaced_and_a_device_is_written_to() {
        let folder = Folder::new("replaced");
        let file = folder.file("old.json", b"old");
        replace(&file, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        let device = folder.0.join("null");
        std::os::unix::fs::symlink("/dev/null", &device).unwrap();
        replace(&device, |out| out.write_all(b"gone")).unwrap();
        assert!(fs::symlink_metadata(&device).unwrap().is_symlink(), "it became a file");
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2, "nothing is left behind");
    }
}
