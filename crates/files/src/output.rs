//! The one rule for files that a command writes: what is there is not replaced, unless `--force` says so.

use std::fs;
use std::path::Path;

/// Why a file may not be written where one is, with the way out.
pub const TAKEN: &str = "exists already; --force replaces it";

/// Refuses to replace what is there, unless `force`. A device or a pipe is written to as it is.
pub fn free(path: &Path, force: bool) -> Result<(), &'static str> {
    // A link that leads nowhere is somebody's, too.
    match fs::symlink_metadata(path) {
        Ok(_) if force => Ok(()),
        Ok(_) if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) => Ok(()),
        Ok(_) => Err(TAKEN),
        Err(_) => Ok(()),
    }
}

/// Refuses the first of several files that is there.
pub fn all_free<'a>(paths: impl IntoIterator<Item = &'a Path>, force: bool) -> Result<(), String> {
    paths
        .into_iter()
        .try_for_each(|path| free(path, force).map_err(|why| format!("{}: {why}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[test]
    fn what_is_there_is_replaced_by_force_alone() {
        let folder = Folder::new("output");
        let [old, new] = [folder.file("old.png", b"old"), folder.0.join("new.png")];
        assert_eq!(free(&new, false), Ok(()));
        assert_eq!((free(&old, false), free(&old, true)), (Err(TAKEN), Ok(())));
        assert_eq!(free(Path::new("/dev/null"), false), Ok(()));
        let link = folder.0.join("link.png");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert_eq!(free(&link, false), Err(TAKEN));
        let why = all_free([new.as_path(), old.as_path()], false).unwrap_err();
        assert_eq!(why, format!("{}: exists already; --force replaces it", old.display()));
        assert_eq!(all_free([new.as_path(), old.as_path()], true), Ok(()));
    }
}
