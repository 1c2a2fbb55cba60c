//! Cache on disk: compiled kernels, and the algorithms chosen for matmuls. All of it can be made
//! again, so that a failure here costs time, never a run.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Folder of the cache: VITESSE_CACHE, or `vitesse` in the user's cache folder.
fn folder() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    of("VITESSE_CACHE")
        .or_else(|| of("XDG_CACHE_HOME").map(|base| base.join("vitesse")))
        .or_else(|| of("HOME").map(|home| home.join(".cache/vitesse")))
}

pub fn read(name: &str) -> Option<Vec<u8>> {
    std::fs::read(folder()?.join(name)).ok()
}

/// Writes a file atomically, by renaming.
pub fn write(name: &str, bytes: &[u8]) {
    static WRITES: AtomicUsize = AtomicUsize::new(0);
    let Some(folder) = folder() else { return };
    let number = WRITES.fetch_add(1, Ordering::Relaxed);
    let aside = folder.join(format!("{name}.{}-{number}", std::process::id()));
    let written = std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&aside, bytes))
        .and_then(|()| std::fs::rename(&aside, folder.join(name)));
    if written.is_err() {
        let _ = std::fs::remove_file(aside);
    }
}

static BEING_MADE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static MADE: Condvar = Condvar::new();

/// Lock of a file's name among the threads of the process: ranks that need the same file wait, and then find it.
pub struct FileLock(String);

pub fn alone(name: &str) -> FileLock {
    let mut being_made = BEING_MADE.lock().unwrap_or_else(PoisonError::into_inner);
    while !being_made.insert(name.to_string()) {
        being_made = MADE.wait(being_made).unwrap_or_else(PoisonError::into_inner);
    }
    FileLock(name.to_string())
}

impl Drop for FileLock {
    fn drop(&mut self) {
        BEING_MADE.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        MADE.notify_all();
    }
}

/// FNV-1a hash of 128 bits.
pub struct Hash(u128);

impl Hash {
    pub fn new() -> Self {
        Hash(0x6c62272e07bb014262b821756295c58d)
    }

    /// Adds a part, separated from the one before.
    pub fn add(mut self, part: &[u8]) -> Self {
        let length = (part.len() as u64).to_le_bytes();
        for byte in length.iter().chain(part) {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
        self
    }

    pub fn text(&self) -> String {
        format!("{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_makes_a_file() {
        let inside = AtomicUsize::new(0);
        let make = || {
            let _alone = alone("a file");
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            std::thread::sleep(std::time::Duration::from_millis(1));
            inside.fetch_sub(1, Ordering::SeqCst);
        };
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(make))));
    }

    #[test]
    fn parts_have_borders() {
        let one = Hash::new().add(b"ab").add(b"c").text();
        let other = Hash::new().add(b"a").add(b"bc").text();
        assert_ne!(one, other);
        assert_eq!(one, Hash::new().add(b"ab").add(b"c").text());
        assert_eq!(one.len(), 32);
    }
}
