//! Checkpoints: everything a run needs to go on as if it had never stopped.
//!
//! One file a checkpoint, so that it is there whole or not at all: the states of the program under their logical
//! names (parameters, moments, averages, counters), and in the header's metadata how far the run is and the
//! configuration it was started with. Nothing in it depends on the number of threads or ranks.

use crate::WeightsError;
use crate::tensors::{self, Outline, Reader, Stored, Writer};
use config::Shares;
use files::{self, UNFINISHED, folder_of, sync_folder};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub const FOLDER: &str = "checkpoints";
const BEST: &str = "best.safetensors";
const PREFIX: &str = "step-";
const SUFFIX: &str = ".safetensors";
/// The end of the name of a checkpoint that can't be read.
pub const DAMAGED: &str = ".damaged";
/// Metadata of a checkpoint's header.
const FORMAT: (&str, &str) = ("format", "vitesse-checkpoint-1");
const PROGRESS: &str = "progress";
/// Metadata of plain weights too: the configuration of the run they come from.
pub const CONFIG: &str = "config";

/// A checkpoint, or the folder of them, that can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: it holds no checkpoint and no weights, as model.safetensors", .0.display())]
    Nothing(PathBuf),
    /// A file that is not as it was written.
    #[error("{}: {problem}", path.display())]
    Damaged { path: PathBuf, problem: String },
    /// A file of something else.
    #[error("{}: {problem}", path.display())]
    Other { path: PathBuf, problem: String },
}

impl CheckpointError {
    /// Whether a file was read that is not as it was written: another one may be.
    pub fn is_damage(&self) -> bool {
        match self {
            CheckpointError::Damaged { .. } => true,
            CheckpointError::Weights(error) => error.is_damage(),
            _ => false,
        }
    }
}

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The step to run next.
    pub step: u64,
    pub best: Option<Best>,
    /// Broken images skipped so far.
    pub skipped: u64,
    /// How micro-steps are divided among the ranks, if not equally.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<Shares>,
}

/// The best evaluation, the earliest of equals: by top-1 accuracy, or by the mean IoU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The step after which it was evaluated.
    pub step: u64,
    #[serde(alias = "top1")]
    pub merit: f64,
    pub loss: f64,
}

impl Progress {
    /// Notes an evaluation after `step`; says whether it is the best so far.
    pub fn note(&mut self, step: u64, merit: f64, loss: f64) -> bool {
        let better = self.best.is_none_or(|best| merit > best.merit);
        if better {
            self.best = Some(Best { step, merit, loss });
        }
        better
    }
}

/// The checkpoints of one run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    /// How many of the last ones stay.
    keep: usize,
}

impl Checkpoints {
    pub fn of_run(run: &Path, keep: usize) -> Self {
        Checkpoints { folder: run.join(FOLDER), keep: keep.max(1) }
    }

    pub fn best(&self) -> PathBuf {
        self.folder.join(BEST)
    }

    /// Writes a checkpoint, then lets go of those that are too many. `values` gives those of a state, by its place in
    /// `states`. `best`: this is the best so far, and is kept until there is a better one.
    pub fn save<T: Stored>(
        &self,
        states: &[Outline<'_>],
        values: impl FnMut(usize, &mut Writer<'_, T>) -> io::Result<()>,
        progress: &Progress,
        config: &str,
        best: bool,
    ) -> Result<PathBuf, CheckpointError> {
        let io_error = |source| CheckpointError::Io { path: self.folder.clone(), source };
        files::create_folder(&self.folder).map_err(io_error)?;
        let path = self.folder.join(format!("{PREFIX}{:08}{SUFFIX}", progress.step));
        let metadata = BTreeMap::from([
            (FORMAT.0.to_string(), FORMAT.1.to_string()),
            (PROGRESS.to_string(), serde_json::json!(progress).to_string()),
            (CONFIG.to_string(), config.to_string()),
        ]);
        tensors::write_each(&path, states, &metadata, values)?;
        if best {
            self.mark_best(&path).map_err(io_error)?;
        }
        self.forget_old().map_err(io_error)?;
        Ok(path)
    }

    /// A second name for the same file where the file system has such, else a copy; either way whole or not there.
    fn mark_best(&self, path: &Path) -> io::Result<()> {
        let aside = self.folder.join(format!(".{BEST}.{}{UNFINISHED}", std::process::id()));
        let _ = fs::remove_file(&aside);
        let made = files::link(path, &aside).or_else(|_| {
            fs::copy(path, &aside)?;
            files::sync(&fs::File::open(&aside)?)
        });
        let named = made.and_then(|()| files::rename(&aside, &self.best()));
        if named.is_err() {
            let _ = fs::remove_file(&aside);
        }
        named?;
        sync_folder(&self.folder)
    }

    /// A run that was killed between writing its best checkpoint and marking it does so now.
    pub fn mend_best(&self, path: &Path, progress: &Progress) -> Result<(), CheckpointError> {
        let is_best = progress.best.is_some_and(|best| best.step + 1 == progress.step);
        let marked = Checkpoint::open(&self.best()).is_ok_and(|best| best.progress.step == progress.step);
        if is_best && !marked {
            let io_error = |source| CheckpointError::Io { path: self.folder.clone(), source };
            self.mark_best(path).map_err(io_error)?;
        }
        Ok(())
    }

    fn forget_old(&self) -> io::Result<()> {
        let mut paths = self.numbered()?;
        while paths.len() > self.keep {
            files::remove(&paths.remove(0).1)?;
        }
        Ok(())
    }

    /// Checkpoints with their steps, oldest first.
    fn numbered(&self) -> io::Result<Vec<(u64, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let step = name.strip_prefix(PREFIX).and_then(|n| n.strip_suffix(SUFFIX)?.parse().ok());
            found.extend(step.map(|step| (step, path)));
        }
        found.sort();
        Ok(found)
    }

    /// The newest checkpoint.
    pub fn latest(&self) -> Result<PathBuf, CheckpointError> {
        let none = || CheckpointError::Nothing(folder_of(&self.folder).to_path_buf());
        self.newest_first()?.into_iter().next().ok_or_else(none)
    }

    /// All checkpoints; the best, which is one of them or older, comes last.
    pub fn newest_first(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let io_error = |source| CheckpointError::Io { path: self.folder.clone(), source };
        if !self.folder.try_exists().map_err(io_error)? {
            return Ok(vec![]);
        }
        let numbered = self.numbered().map_err(io_error)?.into_iter().rev().map(|(_, path)| path);
        let best = Some(self.best()).filter(|best| best.is_file());
        Ok(numbered.chain(best).collect())
    }

    /// Removes files that a killed run left half-written; they never had a name of their own. For who holds the run's lock: those of a
    /// run that goes on are none.
    pub fn remove_unfinished(&self) -> Result<(), CheckpointError> {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if name.starts_with('.') && name.ends_with(UNFINISHED) {
                files::remove(&path).map_err(|source| CheckpointError::Io { path: path.clone(), source })?;
            }
        }
        Ok(())
    }

    /// Renames damaged checkpoints, so that they are none of the run's any more; the best as well, if it is one of them under another
    /// name. Returns what is wrong with them.
    pub fn set_aside_with_best(
        &self,
        mut damaged: Vec<(PathBuf, String)>,
    ) -> Result<String, CheckpointError> {
        let best = self.best();
        if best.is_file() && damaged.iter().all(|(path, _)| *path != best) {
            let broken = Reader::open(&best).and_then(Reader::verify).err();
            damaged.extend(broken.filter(WeightsError::is_damage).map(|error| (best, error.to_string())));
        }
        for (path, _) in &damaged {
            let mut name = path.clone().into_os_string();
            name.push(DAMAGED);
            let io_error = |source| CheckpointError::Io { path: path.clone(), source };
            files::rename(path, Path::new(&name)).map_err(io_error)?;
        }
        let problems: Vec<String> = damaged.into_iter().map(|(_, problem)| problem).collect();
        Ok(problems.join("; "))
    }
}

/// An open checkpoint.
pub struct Checkpoint {
    path: PathBuf,
    reader: Reader,
    pub progress: Progress,
    /// The configuration of the run, as JSON.
    pub config: String,
}

impl Checkpoint {
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let reader = Reader::open(path)?;
        let damage = |problem: String| CheckpointError::Damaged { path: path.to_path_buf(), problem };
        if !is_checkpoint(&reader) {
            let problem = "holds tensors, but is not a checkpoint: use --init to start from weights".into();
            return Err(CheckpointError::Other { path: path.to_path_buf(), problem });
        }
        let text = |key: &str| {
            let found = reader.metadata().get(key).cloned();
            found.ok_or_else(|| damage(format!("its header has no `{key}`")))
        };
        let progress = serde_json::from_str(&text(PROGRESS)?)
            .map_err(|error| damage(format!("how far the run was can't be read: {error}")))?;
        let config = text(CONFIG)?;
        Ok(Checkpoint { path: path.to_path_buf(), reader, progress, config })
    }

    /// Gives the values of each expected state to `place`, after all were found to be there with the right shape.
    pub fn restore<T: Stored, E: From<CheckpointError>>(
        self,
        expected: &[Outline<'_>],
        mut place: impl FnMut(&str, &[T]) -> Result<(), E>,
    ) -> Result<Progress, E> {
        let found: BTreeMap<&str, &[usize]> = self.reader.tensors().collect();
        let of_another = |problem: String| {
            let (path, problem) = (self.path.clone(), format!("is of another run: {problem}"));
            E::from(CheckpointError::Other { path, problem })
        };
        for Outline { name, shape } in expected {
            match found.get(name) {
                Some(there) if there == shape => {}
                Some(there) => {
                    return Err(of_another(format!("{name} is {there:?}, this run needs {shape:?}")));
                }
                None => return Err(of_another(format!("it has no {name}"))),
            }
        }
        if let Some(name) = found.keys().find(|name| !expected.iter().any(|e| e.name == **name)) {
            return Err(of_another(format!("it holds {name}, which this run doesn't have")));
        }
        let mut placed = Ok(());
        let read = self.reader.each(|name, _, values: Vec<T>| {
            if placed.is_ok() {
                placed = place(&name, &values);
            }
        });
        read.map_err(CheckpointError::from)?;
        placed.map(|()| self.progress)
    }
}

/// Whether a file is a checkpoint rather than plain weights.
pub fn is_checkpoint(reader: &Reader) -> bool {
    reader.metadata().get(FORMAT.0).is_some_and(|format| format == FORMAT.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    fn states(value: f32) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        vec![("a".into(), vec![2], vec![value; 2]), ("a.m".into(), vec![1], vec![-value])]
    }

    fn save(checkpoints: &Checkpoints, step: u64, best: bool) -> PathBuf {
        let states = states(step as f32);
        let outlines: Vec<Outline<'_>> =
            states.iter().map(|(name, shape, _)| Outline { name, shape }).collect();
        let values = |index: usize, write: &mut Writer<'_, f32>| write(&states[index].2);
        let progress = Progress { step, ..Progress::default() };
        checkpoints.save(&outlines, values, &progress, "{}", best).unwrap()
    }

    const EXPECTED: [Outline<'static>; 2] =
        [Outline { name: "a", shape: &[2] }, Outline { name: "a.m", shape: &[1] }];

    fn names(folder: &Folder) -> Vec<String> {
        let entries = fs::read_dir(folder.0.join(FOLDER)).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_last_and_the_best_stay() {
        let folder = Folder::new("checkpoints-stay");
        let checkpoints = Checkpoints::of_run(&folder.0, 2);
        for step in 1..=5 {
            save(&checkpoints, step, step == 2);
        }
        assert_eq!(
            names(&folder),
            ["best.safetensors", "step-00000004.safetensors", "step-00000005.safetensors"]
        );
        assert_eq!(Checkpoint::open(&checkpoints.best()).unwrap().progress.step, 2);
        let latest = Checkpoint::open(&checkpoints.latest().unwrap()).unwrap();
        let mut restored = vec![];
        let progress = latest.restore(&EXPECTED, |name, values: &[f32]| {
            restored.push((name.to_string(), values[0]));
            Ok::<_, CheckpointError>(())
        });
        assert_eq!(progress.unwrap().step, 5);
        assert_eq!(restored, [("a".to_string(), 5.0), ("a.m".to_string(), -5.0)]);
    }

    #[test]
    fn what_a_killed_run_left_is_removed() {
        let folder = Folder::new("checkpoints-killed");
        let checkpoints = Checkpoints::of_run(&folder.0, 2);
        assert!(checkpoints.latest().unwrap_err().to_string().contains("holds no checkpoint and no weights"));
        let whole = save(&checkpoints, 3, false);
        fs::write(folder.0.join(FOLDER).join(".step-00000004.safetensors.77.tmp"), b"half").unwrap();
        assert_eq!(checkpoints.latest().unwrap(), whole);
        assert_eq!(names(&folder).len(), 2, "whoever only reads removes nothing");
        checkpoints.remove_unfinished().unwrap();
        assert_eq!(names(&folder), ["step-00000003.safetensors"]);
    }

    #[test]
    fn another_runs_checkpoint_is_refused_by_name() {
        let folder = Folder::new("checkpoints-other");
        let checkpoints = Checkpoints::of_run(&folder.0, 2);
        let path = save(&checkpoints, 1, false);
        let refused = |expected: &[Outline<'_>]| {
            let never = |_: &str, _: &[f32]| -> Result<(), CheckpointError> { panic!("restored") };
            let restored = Checkpoint::open(&path).unwrap().restore(expected, never);
            restored.unwrap_err().to_string()
        };
        let wider = [Outline { name: "a", shape: &[3] }, Outline { name: "a.m", shape: &[1] }];
        assert!(refused(&wider).ends_with("is of another run: a is [2], this run needs [3]"));
        assert!(refused(&EXPECTED[..1]).ends_with("it holds a.m, which this run doesn't have"));
        let more = [Outline { name: "a", shape: &[2] }, Outline { name: "b", shape: &[1] }];
        assert!(refused(&more).ends_with("it has no b"));
    }

    /// One flipped bit, 500 times anywhere, and in every byte of the header: the file is refused by name, or what is read is what was
    /// written.
    #[test]
    fn a_flipped_bit_is_noticed() {
        let folder = Folder::new("checkpoints-flipped");
        let checkpoints = Checkpoints::of_run(&folder.0, 2);
        let values: Vec<f32> = (0..2_000).map(|i| (i as f32).sin()).collect();
        let outlines = [Outline { name: "a", shape: &[100, 15] }, Outline { name: "a.m", shape: &[500] }];
        let parts = [&values[..1_500], &values[1_500..]];
        let progress = Progress { step: 7, skipped: 3, ..Progress::default() };
        let values = |i: usize, write: &mut Writer<'_, f32>| write(parts[i]);
        let saved = checkpoints.save(&outlines, values, &progress, "{}", false);
        let path = saved.unwrap();
        let read = || {
            let mut states = vec![];
            let checkpoint = Checkpoint::open(&path)?;
            let config = checkpoint.config.clone();
            let progress = checkpoint.restore(&outlines, |_, values: &[f32]| {
                states.extend(values.iter().map(|x| x.to_bits()));
                Ok::<_, CheckpointError>(())
            })?;
            Ok::<_, CheckpointError>((progress, config, states))
        };
        let written = read().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let mut state = 18u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let anywhere: Vec<usize> = (0..500).map(|_| random(8 * bytes.len())).collect();
        for bit in (0..8 * header).step_by(5).chain(anywhere) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).unwrap();
            match read() {
                Ok(found) => assert!(bit / 8 < header && found == written, "bit {bit} changed something"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("step-00000007.safetensors") && !error.contains('\n'), "{error}");
                }
            }
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_truncated_checkpoint_is_named_and_set_aside() {
        let folder = Folder::new("checkpoints-cut");
        let checkpoints = Checkpoints::of_run(&folder.0, 2);
        let older = save(&checkpoints, 1, false);
        let path = save(&checkpoints, 2, false);
        let bytes = fs::read(&path).unwrap();
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            let error = Checkpoint::open(&path).err().unwrap().to_string();
            assert!(error.contains("step-00000002.safetensors") && !error.contains('\n'), "{error}");
        }
        assert_eq!(checkpoints.newest_first().unwrap(), [path.clone(), older.clone()]);
        let broken = Checkpoint::open(&path).err().unwrap();
        checkpoints.set_aside_with_best(vec![(path, broken.to_string())]).unwrap();
        assert_eq!(checkpoints.newest_first().unwrap(), [older]);
    }
}
