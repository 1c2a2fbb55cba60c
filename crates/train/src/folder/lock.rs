//! The lock of a run's folder: a file that names the process working there.
//!
//! A lock outlives a process that was killed, so whoever finds one has to find out about its holder. A holder on this machine is alive if its
//! process is: same pid, same time of start. Of another machine or container nothing is known but what the file shows: its
//! holder renews a counter in it every [`BEAT`], and if that stands still for [`SILENCE`], by the clock of the one who looks, the
//! holder is gone. No two clocks are compared, and the file system need only give a name to one of two who ask for it.

use crate::error::TrainError;
use crate::run::Events;
use files::{self, UNFINISHED};
pub use records::host;
use records::{Holder, process_started};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const NAME: &str = Holder::FILE;
/// How often a holder shows that it is alive.
const BEAT: Duration = Duration::from_secs(10);
/// After so long without a beat, a holder elsewhere is taken for dead.
pub const SILENCE: Duration = Duration::from_secs(60);
/// How often whoever waits looks again.
const LOOK: Duration = Duration::from_millis(200);
/// A run that is started again waits so long for the process that was lost to end.
const LINGERS: Duration = Duration::from_secs(10);
/// Others may take and leave the lock in the meantime, but not for ever.
const TRIES: usize = 20;

/// Where the digits of the beat are.
const BEAT_AT: u64 = r#"{"beat":""#.len() as u64;

fn digits(beat: u64) -> String {
    format!("{beat:010}")
}

/// Text of a lock as errors name its holder.
fn shown(text: &str) -> String {
    match Holder::parse(text) {
        Some(Holder { host, pid, .. }) => format!("pid {pid} on {host}"),
        None => "a process whose lock can't be read".to_string(),
    }
}

/// Whether the process that locked a folder lives; none if there is no lock, or that can't be told from here.
pub fn holder_lives(folder: &Path) -> Option<bool> {
    Holder::of(folder)?.lives()
}

/// Whether there is a process of this pid here.
pub fn is_running(pid: u32) -> bool {
    process_started(pid).is_some()
}

/// How a lock that someone holds is met.
pub struct Manner<'a> {
    /// Take it from a holder of whom nothing can be told.
    pub force: bool,
    /// The run was lost and is started again: its process may take a moment to end.
    pub again: bool,
    pub silence: Duration,
    /// Hears of a wait, and can end it.
    pub events: &'a mut dyn Events,
}

/// A held lock; let go when dropped.
pub struct Lock {
    place: Arc<Mutex<Place>>,
    lost: Arc<AtomicBool>,
    /// Ends when the sender is dropped.
    beats: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The lock file: as it is open, and where it should be.
struct Place {
    file: File,
    path: PathBuf,
}

enum Fate {
    Held,
    Gone,
    /// Another's lock is in its place.
    Taken,
}

impl Place {
    /// A lock file that appears with its text in it, if none is there.
    fn make(path: &Path) -> io::Result<Self> {
        let me = Holder::me(digits(0));
        let text = serde_json::to_string(&me).map_err(io::Error::other)?;
        let aside = path.with_file_name(format!("{NAME}.{}-{}{UNFINISHED}", me.host, me.pid));
        let write = |file: File| {
            file.write_all_at(text.as_bytes(), 0)?;
            files::sync(&file).map(|()| file)
        };
        let made = files::create(&aside).and_then(write).and_then(|file| match files::link(&aside, path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists || error.kind() == ErrorKind::NotFound => {
                Err(error)
            }
            // A file system without links.
            Err(_) => write(File::options().write(true).create_new(true).open(path)?),
            Ok(()) => Ok(file),
        });
        let _ = fs::remove_file(&aside);
        Ok(Place { file: made?, path: path.to_path_buf() })
    }

    fn fate(&self) -> Fate {
        let (Ok(ours), Ok(there)) = (self.file.metadata(), fs::metadata(&self.path)) else {
            return Fate::Gone;
        };
        if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) { Fate::Held } else { Fate::Taken }
    }
}

impl Lock {
    /// Locks a folder that is there, or says who works in it.
    pub fn take(folder: &Path, manner: &mut Manner<'_>) -> Result<Self, TrainError> {
        let path = folder.join(NAME);
        let failed = |source| TrainError::Io { path: path.clone(), source };
        for _ in 0..TRIES {
            match Place::make(&path) {
                Ok(place) => {
                    remove_leftovers(folder);
                    return Self::hold(place).map_err(failed);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                // Whoever got the lock removed what others had prepared.
                Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => continue,
                Err(error) => return Err(failed(error)),
            }
            if let Some(found) = read(&path).map_err(failed)? {
                assess(folder, &path, &found, manner)?;
                set_aside(&path, &found).map_err(failed)?;
            }
        }
        Err(locked(folder, &read(&path).map_err(failed)?.unwrap_or_default()))
    }

    fn hold(place: Place) -> io::Result<Self> {
        let (place, lost) = (Arc::new(Mutex::new(place)), Arc::new(AtomicBool::new(false)));
        let (sender, ends) = channel();
        let (of_beats, found_lost) = (Arc::clone(&place), Arc::clone(&lost));
        let beats = std::thread::Builder::new().name("lock".to_string()).spawn(move || {
            let mut beat = 0;
            while ends.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                beat += 1;
                let place = guard(&of_beats);
                // If it can't be written for long, someone else may take the lock, which the next lines find out.
                let _ = place.file.write_all_at(digits(beat).as_bytes(), BEAT_AT);
                let _ = place.file.sync_data();
                found_lost.store(!matches!(place.fate(), Fate::Held), Ordering::Relaxed);
            }
        })?;
        Ok(Lock { place, lost, beats: Some((sender, beats)) })
    }

    /// The folder was given its name.
    pub fn moved_to(&self, folder: &Path) {
        guard(&self.place).path = folder.join(NAME);
    }

    /// As [`Lock::check`], but only if a beat found something wrong: cheap enough for every step.
    pub fn check_quickly(&self) -> Result<(), TrainError> {
        if self.lost.load(Ordering::Relaxed) { self.check() } else { Ok(()) }
    }

    /// Fails if the folder is gone, or someone else works in it. A lock file that was removed is made again.
    pub fn check(&self) -> Result<(), TrainError> {
        let mut place = guard(&self.place);
        let folder = files::folder_of(&place.path).to_path_buf();
        if matches!(place.fate(), Fate::Gone) && folder.is_dir() {
            // If another was quicker, the lock is theirs.
            if let Ok(again) = Place::make(&place.path) {
                *place = again;
            }
        }
        match place.fate() {
            Fate::Held => Ok(()),
            Fate::Gone => Err(TrainError::FolderGone(folder)),
            Fate::Taken => {
                let by = shown(&read(&place.path).ok().flatten().unwrap_or_default());
                Err(TrainError::TakenOver { folder, by })
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some((sender, beats)) = self.beats.take() {
            drop(sender);
            let _ = beats.join();
        }
        let place = guard(&self.place);
        if matches!(place.fate(), Fate::Held) {
            let _ = fs::remove_file(&place.path);
        }
    }
}

fn guard(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    place.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn locked(folder: &Path, text: &str) -> TrainError {
    TrainError::Locked { folder: folder.to_path_buf(), by: shown(text) }
}

/// None if it is gone by now.
fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a lock may be taken from its holder; an error if not.
fn assess(folder: &Path, path: &Path, found: &str, manner: &mut Manner<'_>) -> Result<(), TrainError> {
    let lives = || Holder::parse(found).and_then(|holder| holder.lives());
    let since = Instant::now();
    if let Some(mut alive) = lives() {
        while alive && manner.again && since.elapsed() < LINGERS {
            std::thread::sleep(LOOK);
            alive = lives() == Some(true);
        }
        return if alive { Err(locked(folder, found)) } else { Ok(()) };
    }
    if manner.force {
        return Ok(());
    }
    manner.events.warned(&format!(
        "{} is locked by {}: looking for {} s whether that is alive (--force: don't)",
        folder.display(),
        shown(found),
        manner.silence.as_secs()
    ));
    while since.elapsed() < manner.silence {
        if manner.events.stop().is_some() {
            return Err(locked(folder, found));
        }
        std::thread::sleep(LOOK);
        match read(path) {
            Ok(Some(text)) if text != found => return Err(locked(folder, &text)),
            // Let go of.
            Ok(None) => return Ok(()),
            // A file system that is away for a moment says nothing of the holder.
            Ok(Some(_)) | Err(_) => {}
        }
    }
    Ok(())
}

/// Takes a lock away that was assessed as `found`. Another's, who was quicker, is put back.
fn set_aside(path: &Path, found: &str) -> io::Result<()> {
    let aside = path.with_file_name(format!("{NAME}.stale-{}-{}{UNFINISHED}", host(), std::process::id()));
    match files::rename(path, &aside) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    if read(&aside)?.is_some_and(|text| text != found) {
        return match fs::hard_link(&aside, path) {
            Ok(()) => fs::remove_file(&aside),
            Err(_) => fs::rename(&aside, path),
        };
    }
    files::remove(&aside)
}

/// What processes that were killed while they took a lock left behind.
fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(&format!("{NAME}.")) && name.ends_with(UNFINISHED) {
            // Nothing depends on it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[derive(Default)]
    struct Heard(Vec<String>);

    impl Events for Heard {
        fn noted(&mut self, line: &str) {
            self.0.push(line.to_string());
        }
    }

    fn take(folder: &Folder, force: bool, silence: u64) -> (Result<Lock, String>, Vec<String>) {
        let mut heard = Heard::default();
        let silence = Duration::from_millis(silence);
        let mut manner = Manner { force, again: false, silence, events: &mut heard };
        let lock = Lock::take(&folder.0, &mut manner).map_err(|error| error.to_string());
        (lock, heard.0)
    }

    fn leave(folder: &Folder, holder: &Holder) -> PathBuf {
        folder.file(NAME, serde_json::to_string(holder).unwrap().as_bytes())
    }

    fn names(folder: &Folder) -> Vec<String> {
        let entries = fs::read_dir(&folder.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn one_process_at_a_time_is_in_a_folder() {
        let folder = Folder::new("lock-one");
        let first = take(&folder, false, 0).0.unwrap();
        for force in [false, true] {
            let refused = take(&folder, force, 0).0.err().unwrap();
            let me = Holder::me(digits(0));
            assert!(refused.contains(&format!("pid {} on {}", me.pid, me.host)), "{refused}");
        }
        first.check().unwrap();
        drop(first);
        assert!(names(&folder).is_empty(), "{:?}", names(&folder));
        take(&folder, false, 0).0.unwrap();
    }

    #[test]
    fn a_dead_process_of_this_machine_holds_nothing() {
        let folder = Folder::new("lock-dead");
        let me = Holder::me(digits(0));
        let no_such_pid = Holder { pid: 0x7fff_ffff, ..me.clone() };
        let pid_used_again = Holder { started: "1".into(), ..me };
        for dead in [no_such_pid, pid_used_again] {
            leave(&folder, &dead);
            let (lock, heard) = take(&folder, false, 60_000);
            lock.unwrap().check().unwrap();
            assert!(heard.is_empty(), "nobody waits: {heard:?}");
        }
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let zombie = child.id();
        while !fs::read_to_string(format!("/proc/{zombie}/stat")).unwrap().contains(") Z ") {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(process_started(zombie), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_holder_elsewhere_is_watched() {
        let folder = Folder::new("lock-elsewhere");
        let elsewhere =
            Holder { host: "node7".into(), machine: "node7 b pid:[1]".into(), ..Holder::me(digits(0)) };
        let path = leave(&folder, &elsewhere);
        let beating = File::options().write(true).open(&path).unwrap();
        let beat = std::thread::spawn(move || {
            std::thread::sleep(2 * LOOK);
            beating.write_all_at(digits(1).as_bytes(), BEAT_AT).unwrap();
        });
        let (refused, heard) = take(&folder, false, 60_000);
        assert!(refused.err().unwrap().contains(&format!("pid {} on node7", elsewhere.pid)));
        assert!(heard.len() == 1 && heard[0].contains("node7"), "{heard:?}");
        beat.join().unwrap();
        // It stands still.
        take(&folder, false, 500).0.unwrap().check().unwrap();
        // Whether it does is not looked at.
        leave(&folder, &elsewhere);
        let (forced, heard) = take(&folder, true, 60_000);
        assert!(forced.is_ok() && heard.is_empty());
        drop(forced);
        for unreadable in ["", "{", "\u{0}\u{0}"] {
            folder.file(NAME, unreadable.as_bytes());
            take(&folder, false, 300).0.unwrap();
        }
        assert!(names(&folder).is_empty(), "{:?}", names(&folder));
    }

    #[test]
    fn a_lock_that_was_taken_or_removed_is_noticed() {
        let folder = Folder::new("lock-lost");
        let lock = take(&folder, false, 0).0.unwrap();
        fs::remove_file(folder.0.join(NAME)).unwrap();
        lock.check().unwrap();
        assert_eq!(names(&folder), [NAME], "it is made again");
        // Written aside and renamed, as another file.
        fs::remove_file(folder.0.join(NAME)).unwrap();
        let other = Holder { host: "node7".into(), ..Holder::me(digits(0)) };
        leave(&folder, &other);
        let error = lock.check().unwrap_err().to_string();
        assert!(error.contains("taken over by pid") && error.contains("node7"), "{error}");
        drop(lock);
        assert_eq!(names(&folder), [NAME], "the other's lock stays");
        fs::remove_file(folder.0.join(NAME)).unwrap();
        let lock = take(&folder, false, 0).0.unwrap();
        fs::remove_dir_all(&folder.0).unwrap();
        assert!(lock.check().unwrap_err().to_string().contains("was removed"));
    }
}
