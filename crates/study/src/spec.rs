//! Experiments as data: what a file or flags ask for, before anything is known of models and data.

use crate::axes::{AXES, Axes, Axis, AxisValue};
use crate::error::StudyError;
use crate::results::Kind;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use text::nearest;

/// A study as asked for: experiments, and how their runs are started. Written to `study.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Study {
    pub name: String,
    pub title: String,
    /// What legends call this machine.
    pub platform: Option<String>,
    pub repeats: usize,
    /// Seed of the order in which points run.
    pub seed: u64,
    /// Points may have more threads than cores.
    pub oversubscribe: bool,
    pub launch: Launch,
    /// Options that every run of `vitesse train` gets.
    pub train: Vec<String>,
    pub experiments: Vec<Experiment>,
}

/// How ranks are started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    pub comm: Option<String>,
    /// Names of hosts for mpirun.
    pub hosts: Vec<String>,
    pub hostfile: Option<PathBuf>,
    /// A command that starts the ranks, as `srun -n {ranks}`.
    pub launcher: Option<String>,
}

/// A grid: every combination is a point. `None` leaves the choice to the kind, or to `vitesse train`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    pub kind: Option<Kind>,
    /// classify or segment, where models and data don't say so.
    #[serde(default)]
    pub task: Option<String>,
    /// Values of each axis.
    #[serde(flatten)]
    pub axes: Axes,
    pub device: Option<String>,
    pub epochs: Option<u64>,
    /// Optimizer steps instead of epochs; where the images are constant, of one rank.
    pub steps: Option<u64>,
    /// First steps that don't count.
    pub warmup: Option<u64>,
}

impl Experiment {
    /// These settings, and where they say nothing, those of `other`. Epochs and steps are one setting: the length of a run.
    pub fn or(self, other: &Experiment) -> Experiment {
        let own_length = self.epochs.is_some() || self.steps.is_some();
        let length = if own_length { &self } else { other };
        let (epochs, steps) = (length.epochs, length.steps);
        Experiment {
            kind: self.kind.or(other.kind),
            task: self.task.or_else(|| other.task.clone()),
            axes: self.axes.or(&other.axes),
            device: self.device.or_else(|| other.device.clone()),
            epochs,
            steps,
            warmup: self.warmup.or(other.warmup),
        }
    }
}

/// A study as flags or a file say it: what one leaves out, the other or a default has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    pub name: Option<String>,
    pub title: Option<String>,
    pub platform: Option<String>,
    pub repeats: Option<usize>,
    pub seed: Option<u64>,
    pub oversubscribe: bool,
    pub launch: Launch,
    pub train: Vec<String>,
    /// What all experiments have in common.
    pub common: Experiment,
    pub experiments: Vec<Experiment>,
}

/// Runs of a point by default.
const REPEATS: usize = 5;

impl Asked {
    /// What was typed on top of what a file says.
    pub fn over(self, file: Asked) -> Asked {
        let some = |a: Vec<String>, b| if a.is_empty() { b } else { a };
        let launch = Launch {
            comm: self.launch.comm.or(file.launch.comm),
            hosts: some(self.launch.hosts, file.launch.hosts),
            hostfile: self.launch.hostfile.or(file.launch.hostfile),
            launcher: self.launch.launcher.or(file.launch.launcher),
        };
        let typed = self.common;
        let experiments = file.experiments.into_iter().map(|one| typed.clone().or(&one).or(&file.common));
        let experiments: Vec<Experiment> = experiments.collect();
        Asked {
            name: self.name.or(file.name),
            title: self.title.or(file.title),
            platform: self.platform.or(file.platform),
            repeats: self.repeats.or(file.repeats),
            seed: self.seed.or(file.seed),
            oversubscribe: self.oversubscribe || file.oversubscribe,
            launch,
            train: some(self.train, file.train),
            common: typed.or(&file.common),
            experiments,
        }
    }

    pub fn study(self) -> Result<Study, StudyError> {
        let experiments = if self.experiments.is_empty() { vec![self.common] } else { self.experiments };
        let repeats = self.repeats.unwrap_or(REPEATS);
        if repeats == 0 {
            return Err(StudyError::Impossible("repeats 0: a point runs at least once".into()));
        }
        let name = self.name.unwrap_or_else(|| "study".to_string());
        Ok(Study {
            title: self.title.unwrap_or_else(|| name.clone()),
            name,
            platform: self.platform,
            repeats,
            seed: self.seed.unwrap_or(0),
            oversubscribe: self.oversubscribe,
            launch: self.launch,
            train: self.train,
            experiments,
        })
    }

    /// Reads a study file: TOML, or JSON if its name ends so.
    pub fn read(path: &Path) -> Result<Asked, StudyError> {
        let file = path.display().to_string();
        let text = read_short(path).map_err(StudyError::io(path))?;
        let json = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json"));
        let mut asked = Self::parse(&text, json).map_err(|why| StudyError::File { file, why })?;
        if asked.name.is_none() {
            asked.name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        }
        Ok(asked)
    }

    fn parse(text: &str, json: bool) -> Result<Asked, String> {
        let value: Value = match json {
            true => serde_json::from_str(text).map_err(|e| e.to_string())?,
            false => toml::from_str(text).map_err(|e| one_line(text, &e))?,
        };
        let Value::Object(mut keys) = value else { return Err("is no table of keys".to_string()) };
        let mut keys = Keys { within: String::new(), keys: &mut keys };
        let experiments: Vec<Map<String, Value>> = keys.list("experiment")?.unwrap_or_default();
        let asked = Asked {
            name: keys.take("name")?,
            title: keys.take("title")?,
            platform: keys.take("platform")?,
            repeats: keys.take("repeats")?,
            seed: keys.take("seed")?,
            oversubscribe: keys.take("oversubscribe")?.unwrap_or(false),
            launch: Launch {
                comm: keys.take("comm")?,
                hosts: keys.list("hosts")?.unwrap_or_default(),
                hostfile: keys.take("hostfile")?,
                launcher: keys.take("launcher")?,
            },
            train: keys.list("train")?.unwrap_or_default(),
            common: keys.experiment()?,
            experiments: vec![],
        };
        keys.all_known(&[&STUDY[..], &experiment_keys()].concat())?;
        let read = |(i, mut one): (usize, Map<String, Value>)| {
            let mut keys = Keys { within: format!("experiment {}: ", i + 1), keys: &mut one };
            let experiment = keys.experiment()?;
            keys.all_known(&experiment_keys())?;
            Ok(experiment)
        };
        let experiments = experiments.into_iter().enumerate().map(read).collect::<Result<_, String>>()?;
        Ok(Asked { experiments, ..asked })
    }
}

/// A study file has no more bytes than this; its grid would be too large long before.
const LONGEST: u64 = 1 << 20;

fn read_short(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(std::io::Error::other("is longer than 1 MiB, and no study"));
    }
    Ok(text)
}

const STUDY: [&str; 12] = [
    "name",
    "title",
    "platform",
    "repeats",
    "seed",
    "oversubscribe",
    "comm",
    "hosts",
    "hostfile",
    "launcher",
    "train",
    "experiment",
];
/// Keys of an experiment beside those of the axes.
const EXPERIMENT: [&str; 7] = ["kind", "task", "device", "epochs", "steps", "iterations", "warmup"];

/// All keys of an experiment.
fn experiment_keys() -> Vec<&'static str> {
    EXPERIMENT.into_iter().chain(AXES.iter().map(|axis| axis.key)).collect()
}

/// Where an error lies, without the lines that toml draws around it.
fn one_line(text: &str, error: &toml::de::Error) -> String {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    let line = text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
    format!("line {line}: {}", error.message().lines().collect::<Vec<_>>().join("; "))
}

/// Keys that were not read yet.
struct Keys<'a> {
    within: String,
    keys: &'a mut Map<String, Value>,
}

impl Keys<'_> {
    fn take<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>, String> {
        let Some(value) = self.keys.remove(key) else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|e| self.wrong(key, e))
    }

    /// One value, or a list of them.
    fn list<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<Vec<T>>, String> {
        let Some(values) = self.values(key)? else { return Ok(None) };
        serde_json::from_value(values).map(Some).map_err(|e| self.wrong(key, e))
    }

    /// The values of an axis.
    fn axis(&mut self, axis: &Axis) -> Result<Option<Vec<AxisValue>>, String> {
        let Some(values) = self.values(axis.key)? else { return Ok(None) };
        axis.read(values).map(Some).map_err(|e| self.wrong(axis.key, e))
    }

    /// A list that is not empty, also of a value that stands alone.
    fn values(&mut self, key: &str) -> Result<Option<Value>, String> {
        match self.keys.remove(key) {
            Some(Value::Array(list)) if list.is_empty() => Err(self.wrong(key, "is an empty list")),
            Some(list @ Value::Array(_)) => Ok(Some(list)),
            one => Ok(one.map(|one| Value::Array(vec![one]))),
        }
    }

    fn wrong(&self, key: &str, why: impl Display) -> String {
        format!("{}key {key}: {why}", self.within)
    }

    fn experiment(&mut self) -> Result<Experiment, String> {
        let read = self.read_experiment()?;
        match (read.epochs, read.steps) {
            (Some(_), Some(_)) => Err(format!("{}keys epochs and steps: a run has one length", self.within)),
            _ => Ok(read),
        }
    }

    fn read_experiment(&mut self) -> Result<Experiment, String> {
        let mut axes = Axes::default();
        for axis in AXES {
            self.axis(axis)?.into_iter().for_each(|values| axes.set(axis, values));
        }
        Ok(Experiment {
            kind: self.take("kind")?,
            task: self.take("task")?,
            axes,
            device: self.take("device")?,
            epochs: self.take("epochs")?,
            steps: self.steps()?,
            warmup: self.take("warmup")?,
        })
    }

    /// By either of their names.
    fn steps(&mut self) -> Result<Option<u64>, String> {
        match (self.take("steps")?, self.take("iterations")?) {
            (Some(_), Some(_)) => Err(format!("{}keys steps and iterations: mean the same", self.within)),
            (steps, iterations) => Ok(steps.or(iterations)),
        }
    }

    fn all_known(&self, known: &[&str]) -> Result<(), String> {
        let Some(key) = self.keys.keys().next() else { return Ok(()) };
        let meant = nearest(key, known.iter().copied()).map(|meant| format!("; did you mean {meant}?"));
        Err(format!("{}unknown key {key}{}", self.within, meant.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_and_flags_win() {
        let text = "repeats = 3\nkind = \"strong\"\nranks = [1, 2]\nmodels = \"vit-ti/4\"\n\
                    [[experiment]]\nkind = \"weak\"\nranks = 4\n[[experiment]]\n";
        let file = Asked::parse(text, false).unwrap();
        let typed = Asked {
            repeats: Some(7),
            common: Experiment { epochs: Some(2), ..Experiment::default() },
            ..Asked::default()
        };
        let study = typed.over(file).study().unwrap();
        assert_eq!((study.repeats, study.experiments.len()), (7, 2));
        let [weak, strong] = &study.experiments[..] else { panic!("two") };
        let ranks =
            |ranks: &[usize]| Axes::default().with("models", ["vit-ti/4"]).with("ranks", ranks.to_vec());
        assert_eq!((weak.kind, &weak.axes), (Some(Kind::Weak), &ranks(&[4])));
        assert_eq!((strong.kind, &strong.axes), (Some(Kind::Strong), &ranks(&[1, 2])));
        assert_eq!((weak.epochs, strong.epochs), (Some(2), Some(2)));
        // Of two lengths, that of whoever speaks last.
        let steps = Asked::parse("steps = 9\n[[experiment]]\n[[experiment]]\nsteps = 5", false).unwrap();
        let typed =
            Asked { common: Experiment { epochs: Some(2), ..Experiment::default() }, ..Asked::default() };
        let experiments = typed.over(steps).experiments;
        assert!(experiments.iter().all(|one| (one.epochs, one.steps) == (Some(2), None)), "{experiments:?}");
        let iterations = Asked::parse("task = \"segment\"\niterations = 160", false).unwrap().common;
        assert_eq!((iterations.task.as_deref(), iterations.steps), (Some("segment"), Some(160)));
        let json = Asked::parse(r#"{"kind": "fixed-per-rank", "ranks": [1, 2]}"#, true).unwrap();
        assert_eq!(json.common.kind, Some(Kind::FixedPerRank));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |text: &str| Asked::parse(text, false).unwrap_err();
        assert_eq!(wrong("rank = 1"), "unknown key rank; did you mean ranks?");
        assert_eq!(
            wrong("[[experiment]]\n[[experiment]]\nepoch = 2"),
            "experiment 2: unknown key epoch; did you mean epochs?"
        );
        assert_eq!(wrong("steps = 1\niterations = 1"), "keys steps and iterations: mean the same");
        assert_eq!(wrong("steps = 1\nepochs = 1"), "keys epochs and steps: a run has one length");
        assert_eq!(wrong("[[experiment]]\nrepeats = 2"), "experiment 1: unknown key repeats");
        assert!(wrong("ranks = [\"two\"]").starts_with("key ranks: invalid type"));
        assert!(wrong("ranks = []").starts_with("key ranks: is an empty list"));
        assert!(wrong("kind = \"strung\"").contains("key kind: unknown variant"));
        let broken = wrong("a = 1\nranks = [1,");
        assert!(broken.starts_with("line 2: ") && !broken.contains('\n'), "{broken}");
    }
}
