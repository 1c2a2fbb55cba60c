//! The folder of a run, and who may work in it.
//!
//! A folder holds a run once `run.json` is there, which is written last. A folder that `--out` names and that isn't there yet is
//! prepared beside its place and renamed, so that it appears whole or not at all. One that is there (empty, or
//! with files of the user) is locked first, then filled.

mod lock;

use crate::error::TrainError;
use crate::metrics;
use crate::record::{self, RESTART};
use crate::run::Events;
use files::{self, UNFINISHED, folder_of};
use formats::checkpoint::Checkpoints;
use lock::{Lock, Manner};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// In the names of folders that are being prepared: `.NAME.start-HOST-PID.tmp`.
const START: &str = ".start-";
/// Preparing takes far less: what another machine left so long ago, by the file system's clock, is of a process that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// The folder of a run that this process works in. Nobody else does until it is dropped.
pub struct RunFolder {
    pub path: PathBuf,
    lock: Lock,
}

impl RunFolder {
    /// Starts a run in a folder: `write` writes its first files into the folder that it is given, `run.json` last.
    pub fn start(
        path: &Path,
        force: bool,
        events: &mut dyn Events,
        write: impl Fn(&Path) -> Result<(), TrainError>,
    ) -> Result<Self, TrainError> {
        let at = |path: &Path| {
            let path = path.to_path_buf();
            move |source| TrainError::Io { path, source }
        };
        let parent = folder_of(path);
        fs::create_dir_all(parent).map_err(at(path))?;
        remove_leftovers(path);
        if path.try_exists().map_err(at(path))? {
            let folder = Self::enter(path, force, events)?;
            check_free(path)?;
            clear(path)?;
            write(path)?;
            return Ok(folder);
        }
        let aside =
            parent.join(format!("{}{}-{}{UNFINISHED}", aside_prefix(path), lock::host(), std::process::id()));
        files::create_folder(&aside).map_err(at(path))?;
        let made = Self::enter(&aside, force, events).and_then(|folder| {
            write(&aside)?;
            files::rename(&aside, path).map_err(at(path))?;
            folder.lock.moved_to(path);
            Ok(RunFolder { path: path.to_path_buf(), ..folder })
        });
        match made {
            Ok(folder) => {
                files::sync_folder(parent).map_err(at(path))?;
                Ok(folder)
            }
            Err(error) => {
                let _ = fs::remove_dir_all(&aside);
                // Another run may have begun here meanwhile; who that is says more than a folder that is not empty.
                if path.is_dir() {
                    Self::enter(path, false, events).and_then(|_| check_free(path))?;
                }
                Err(error)
            }
        }
    }

    /// Goes on with a run in its folder.
    pub fn enter(path: &Path, force: bool, events: &mut dyn Events) -> Result<Self, TrainError> {
        let again = std::env::var(RESTART).is_ok_and(|again| again != "0");
        let mut manner = Manner { force, again, silence: lock::SILENCE, events };
        Ok(RunFolder { path: path.to_path_buf(), lock: Lock::take(path, &mut manner)? })
    }

    /// Fails if the folder was removed or taken over.
    pub fn check(&self) -> Result<(), TrainError> {
        self.lock.check()
    }

    /// The same as far as it is known already: for every step.
    pub fn check_quickly(&self) -> Result<(), TrainError> {
        self.lock.check_quickly()
    }
}

/// Refuses a folder that holds a run in which a step was made.
pub fn check_free(path: &Path) -> Result<(), TrainError> {
    if !Checkpoints::of_run(path, 1).newest_first()?.is_empty() || metrics::any(path)? {
        return Err(TrainError::RunExists(path.to_path_buf()));
    }
    // Of a killed start there may be a configuration without a run; anything else under this name is the user's.
    let config = record::config_path(path);
    if !record::holds_run(path) && config.exists() && record::config(path).is_err() {
        let problem = "is no record of a run, and would be overwritten: choose another --out".to_string();
        return Err(TrainError::Record { path: config, problem });
    }
    Ok(())
}

/// Removes what a run without a step, or its killed start, left. The record goes last: until then the run can go on.
fn clear(path: &Path) -> Result<(), TrainError> {
    if record::holds_run(path) {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(crate::tensorboard::PREFIX) {
                let at = |source| TrainError::Io { path: entry.path(), source };
                files::remove(&entry.path()).map_err(at)?;
            }
        }
    }
    for file in metrics::paths(path).into_iter().chain(record::paths(path)) {
        files::remove(&file).map_err(|source| TrainError::Io { path: file.clone(), source })?;
    }
    Ok(())
}

fn aside_prefix(path: &Path) -> String {
    format!(".{}{START}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// Folders that processes left which were killed while they prepared this one.
fn remove_leftovers(path: &Path) {
    let prefix = aside_prefix(path);
    for entry in fs::read_dir(folder_of(path)).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(whose) = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(UNFINISHED)) else {
            continue;
        };
        if is_abandoned(whose, &entry).unwrap_or(false) {
            // Nothing depends on it; whether it can be removed is for its owner to worry about.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn is_abandoned(whose: &str, entry: &fs::DirEntry) -> io::Result<bool> {
    // Killed before it had a lock there, or after.
    let lives = lock::holder_lives(&entry.path()).or_else(|| {
        let (host, pid) = whose.rsplit_once('-')?;
        (host == lock::host()).then(|| lock::is_running(pid.parse().unwrap_or(0)))
    });
    match lives {
        Some(lives) => Ok(!lives),
        None => Ok(entry.metadata()?.modified()?.elapsed().is_ok_and(|age| age > ABANDONED)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    struct Nobody;

    impl Events for Nobody {}

    /// A run as its start leaves it.
    fn start(path: &Path) -> Result<RunFolder, TrainError> {
        let run = config::sets::resolve(&config::Raw { train_samples: Some(8), ..config::Raw::default() }, 1);
        let config = run?.0.to_json()?;
        RunFolder::start(path, false, &mut Nobody, |folder| {
            metrics::begin(folder)?;
            record::create(folder, &config, &record::launch(), None)
        })
    }

    fn refused(path: &Path) -> String {
        start(path).err().expect("it is refused").to_string()
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    const WHOLE: [&str; 4] = ["config.json", "metrics.csv", "metrics.jsonl", "run.json"];

    #[test]
    fn a_folder_without_a_step_is_used_again_and_one_with_a_step_is_not() {
        let base = Folder::new("folder-again");
        let path = base.0.join("deep/run");
        drop(start(&path).unwrap());
        assert_eq!(names(&path), WHOLE);
        assert_eq!(names(&base.0.join("deep")), ["run"]);
        // Killed after its start, when TensorBoard's file was there.
        fs::write(path.join("events.out.tfevents.1"), "").unwrap();
        let busy = start(&path).unwrap();
        assert!(refused(&path).contains("is in use by pid"));
        drop(busy);
        assert_eq!(names(&path), WHOLE);
        let line = "{\"step\":0,\"lr\":1}\n";
        fs::write(path.join("metrics.jsonl"), line).unwrap();
        assert!(refused(&path).contains("already holds a run"));
        fs::remove_file(path.join("run.json")).unwrap();
        assert!(refused(&path).contains("already holds a run"), "its metrics are someone's work");
        assert_eq!(fs::read_to_string(path.join("metrics.jsonl")).unwrap(), line);
    }

    #[test]
    fn files_of_others_stay() {
        let base = Folder::new("folder-others");
        base.file("stdout.log", b"study");
        drop(start(&base.0).unwrap());
        assert_eq!(names(&base.0), ["config.json", "metrics.csv", "metrics.jsonl", "run.json", "stdout.log"]);
        let other = base.0.join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("config.json"), "{\"architectures\":[]}").unwrap();
        assert!(refused(&other).contains("config.json: is no record of a run"));
        assert_eq!(names(&other), ["config.json"]);
    }

    #[test]
    fn what_killed_starts_left_is_removed() {
        let base = Folder::new("folder-left");
        let aside = |host: &str, pid: u32| base.0.join(format!(".run.start-{host}-{pid}.tmp"));
        let (dead, alive) = (aside(&lock::host(), 0x7fff_ffff), aside(&lock::host(), std::process::id()));
        let elsewhere = aside("node7", 1);
        for folder in [&dead, &alive, &elsewhere] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("config.json"), "").unwrap();
        }
        remove_leftovers(&base.0.join("run"));
        assert!(!dead.exists() && alive.exists() && elsewhere.exists());
    }
}
