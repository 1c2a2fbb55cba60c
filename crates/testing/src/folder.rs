//! Temporary folders.

use std::ffi::OsStr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, process, thread};

/// Temporary folder of one test. It is removed when dropped, unless the test has failed: then it stays, and its path is printed.
pub struct Folder(pub PathBuf);

impl Folder {
    /// Makes a folder in the system's place for temporary files. Two of the same name are two folders.
    pub fn new(name: &str) -> Folder {
        Folder::within(&env::temp_dir(), &format!("vitesse-{name}"))
    }

    /// Makes a folder in `parent`: `CARGO_TARGET_TMPDIR`, where much is written.
    pub fn within(parent: &Path, name: &str) -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{name}-{}-{number}", process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Writes a file, with the folders above it.
    pub fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Some file systems flush a file that is cut and written anew, which takes milliseconds.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Path of a file in this folder, as text.
    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<OsStr> for Folder {
    fn as_ref(&self) -> &OsStr {
        self.0.as_os_str()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the test's files are in {}", self.0.display());
        } else {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_the_test_and_stays_with_a_failure() {
        let (one, two) = (Folder::new("same"), Folder::new("same"));
        assert_ne!(one.0, two.0);
        assert_eq!(fs::read(one.file("deep/er/file", "text")).unwrap(), b"text");
        let gone = one.0.clone();
        drop(one);
        assert!(!gone.exists() && two.is_dir());
        let kept = two.0.clone();
        let failed = thread::spawn(move || {
            let _kept = two;
            std::panic::resume_unwind(Box::new("a failure"));
        });
        assert!(failed.join().is_err() && kept.is_dir());
        fs::remove_dir_all(kept).unwrap();
    }
}
