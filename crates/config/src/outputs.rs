//! Whether results can be written where they are to go: asked at the start of a command, before the work is done whose
//! results they are.

use crate::ConfigError;
use files::folder_of;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Kind of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// A file. It takes the place of one by `force` alone.
    File { force: bool },
    /// A folder for files; it may be there.
    Folder,
}

/// Refuses a path that can't be written, by the name of its flag; nothing is written where there is none.
pub fn check(flag: &'static str, path: Option<&Path>, output: Output) -> Result<(), ConfigError> {
    let Some(path) = path else { return Ok(()) };
    let refuse = |why: String| Err(ConfigError::setting(flag, path.display(), why));
    let found = match fs::metadata(path) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return refuse("lies below a file, where only folders can be".to_string());
        }
        Err(error) => return refuse(error.to_string()),
    };
    let within = match (output, found) {
        (Output::Folder, Some(found)) if found.is_dir() => path,
        (Output::Folder, Some(_)) => return refuse("is a file, where a folder is to be".to_string()),
        (Output::Folder, None) => nearest(path),
        (_, Some(found)) if found.is_dir() => return refuse("is a folder; name a file".to_string()),
        (Output::File { force }, Some(found)) => {
            if let Err(why) = files::output::free(path, force) {
                return refuse(why.to_string());
            }
            if let Err(error) = File::options().append(true).open(path) {
                return refuse(error.to_string());
            }
            if !found.is_file() {
                // A device or a pipe, which is written to as it is.
                return Ok(());
            }
            folder_of(path)
        }
        (_, None) => folder_of(path),
    };
    if path.file_name().is_none() && output != Output::Folder {
        return refuse("names no file".to_string());
    }
    match fs::metadata(within) {
        Ok(folder) if !folder.is_dir() => return refuse(format!("{} is no folder", within.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return refuse(format!("there is no folder {}", within.display()));
        }
        Err(error) => return refuse(format!("{}: {error}", within.display())),
        Ok(_) => {}
    }
    try_writing(within)
        .or_else(|error| refuse(format!("nothing can be written in {}: {error}", within.display())))
}

/// The deepest folder above a path that is there.
fn nearest(path: &Path) -> &Path {
    let above = |path: &&Path| path.as_os_str().is_empty() || path.exists();
    let found = path.ancestors().skip(1).find(above).unwrap_or(path);
    if found.as_os_str().is_empty() { Path::new(".") } else { found }
}

/// What permissions, quotas and kinds of file systems come to is seen by trying.
fn try_writing(folder: &Path) -> io::Result<()> {
    // Unlike that of any other process or thread, and gone in a moment.
    let name = format!(".vitesse-{}-{:?}.tmp", std::process::id(), std::thread::current().id());
    let file = folder.join(name);
    File::options().write(true).create_new(true).open(&file)?;
    fs::remove_file(&file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[test]
    fn what_can_be_written_is_accepted_and_left_as_it_was() {
        let folder = Folder::new("outputs");
        let [new, deep] = ["new.json", "a/b/c"].map(|name| folder.0.join(name));
        let old = folder.file("old.json", b"old");
        for (path, output) in [
            (&new, Output::File { force: true }),
            (&new, Output::File { force: false }),
            (&old, Output::File { force: true }),
            (&folder.0, Output::Folder),
            (&deep, Output::Folder),
        ] {
            check("trace", Some(path), output).unwrap();
        }
        check("confusion", Some(Path::new("/dev/null")), Output::File { force: false }).unwrap();
        assert_eq!(fs::read(&old).unwrap(), b"old");
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "nothing is left behind");
    }

    const FILE: Output = Output::File { force: false };

    #[test]
    fn what_cannot_be_written_is_refused_by_its_flag() {
        let folder = Folder::new("no-outputs");
        let old = folder.file("old.json", b"old");
        let refused = |path: &Path, output| {
            let text = check("trace", Some(path), output).unwrap_err().to_string();
            let start = format!("--trace {}: ", path.display());
            text.strip_prefix(&start).unwrap_or_else(|| panic!("{text}")).to_string()
        };
        let there = folder.0.display().to_string();
        assert_eq!(refused(&folder.0, FILE), "is a folder; name a file");
        assert_eq!(refused(&old, FILE), "exists already; --force replaces it");
        assert_eq!(refused(&old, Output::Folder), "is a file, where a folder is to be");
        let missing = refused(&folder.0.join("no/x.json"), FILE);
        assert_eq!(missing, format!("there is no folder {there}/no"));
        // Under a file there can be nothing.
        assert!(refused(&old.join("x.json"), FILE).starts_with("lies below a file"));
        assert!(refused(&old.join("x/y"), Output::Folder).starts_with("lies below a file"));
        // No one can make files there, not even root.
        assert!(refused(Path::new("/proc/x.json"), FILE).starts_with("nothing can be written in /proc"));
    }
}
