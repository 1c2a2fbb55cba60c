//! One combination of a grid, and all of them: how many there may be, and what `vitesse train` is asked for each.

use super::{Facts, Planned, Resolve, id, option};
use crate::axes::{
    ACCUMULATION, AXES, Axes, Axis, AxisValue, BATCH_SIZES, DATA, DATA_FRACTIONS, NODES, RANKS, THREADS,
    varied,
};
use crate::error::StudyError;
use crate::limiter::counted;
use crate::results::{Kind, Settings};
use crate::spec::{Experiment, Study};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Points of a study, and runs of all of them, at most: more are a slip of the keyboard, and would take years.
pub const MOST_POINTS: usize = 2_000;
const MOST_RUNS: usize = 100_000;

/// One combination of a grid: a value on each axis that was named or has a default, by the axis's key.
#[derive(Clone, Default)]
pub struct Cell(BTreeMap<&'static str, AxisValue>);

impl Cell {
    fn with(mut self, key: &'static str, value: impl Into<AxisValue>) -> Cell {
        self.0.insert(key, value.into());
        self
    }

    fn count(&self, key: &str) -> Option<usize> {
        self.0.get(key).map(|value| value.number() as usize)
    }

    pub fn ranks(&self) -> usize {
        self.count(RANKS).unwrap_or(1)
    }

    pub fn nodes(&self) -> usize {
        self.count(NODES).unwrap_or(1)
    }

    fn threads(&self) -> usize {
        self.count(THREADS).unwrap_or(1)
    }

    fn fraction(&self) -> Option<f64> {
        self.0.get(DATA_FRACTIONS).map(AxisValue::number)
    }

    /// Its place on an axis, in the name of a series; empty where it has none.
    pub fn called(&self, axis: &Axis) -> String {
        self.0.get(axis.key).map_or(String::new(), |value| axis.called(value))
    }
}

/// The axes of an experiment with the number of their values, before any combination is made.
fn axes(kind: Kind, experiment: &Experiment) -> Vec<(&'static str, usize)> {
    let values = |axis: &Axis| match (kind, axis.key) {
        (Kind::Nodes, NODES) => 2,
        _ => experiment.axes.get(axis.key).map_or(1, <[_]>::len),
    };
    varied().map(|axis| (axis.plural, values(axis))).collect()
}

/// Refuses a study of more points or runs than there may be. Nothing is allocated for them before.
pub fn check_size(study: &Study) -> Result<(), StudyError> {
    let product = |axes: &[(&str, usize)]| axes.iter().try_fold(1usize, |n, axis| n.checked_mul(axis.1));
    let mut points = Some(0usize);
    for experiment in &study.experiments {
        let axes = axes(experiment.kind.unwrap_or(Kind::Grid), experiment);
        points = points.and_then(|sum| sum.checked_add(product(&axes)?));
        if points.is_none_or(|points| points > MOST_POINTS) {
            let varied: Vec<String> =
                axes.iter().filter(|axis| axis.1 > 1).map(|(name, n)| format!("{n} {name}")).collect();
            let varied = if varied.is_empty() { "its experiments".into() } else { varied.join(" × ") };
            let why = format!("{varied}: a study has at most {MOST_POINTS} points");
            return Err(StudyError::Impossible(why));
        }
    }
    let points = points.unwrap_or(0);
    match points.checked_mul(study.repeats) {
        Some(runs) if runs <= MOST_RUNS => Ok(()),
        _ => Err(StudyError::Impossible(format!(
            "{points} points × {} repeats: a study has at most {MOST_RUNS} runs",
            study.repeats
        ))),
    }
}

/// Every combination. How many there are was checked before.
pub fn cells(kind: Kind, experiment: &Experiment, cores: usize) -> Result<Vec<Cell>, StudyError> {
    let counts = |key: &str| -> Vec<usize> {
        let values =
            experiment.axes.get(key).map(|values| values.iter().map(|value| value.number() as usize));
        values.map_or_else(|| vec![1], Iterator::collect)
    };
    let (ranks, nodes) = (counts(RANKS), counts(NODES));
    if ranks.contains(&0) || nodes.contains(&0) {
        return Err(StudyError::Impossible("ranks and nodes: must be at least 1".into()));
    }
    if kind == Kind::Nodes && experiment.axes.get(NODES).is_some() {
        let why = "nodes: this study puts the ranks on one host, and one on each of as many; leave out nodes";
        return Err(StudyError::Impossible(why.into()));
    }
    let most = ranks.iter().copied().max().unwrap_or(1);
    let mut places: Vec<(usize, usize)> = match kind {
        Kind::Nodes => ranks.iter().flat_map(|r| [(*r, 1), (*r, *r)]).collect(),
        _ => ranks.iter().flat_map(|r| nodes.iter().map(|n| (*r, *n))).collect(),
    };
    let mut seen = HashSet::new();
    places.retain(|place| seen.insert(*place));
    // Threads are the same for all points, so that a rank is always as strong.
    let mut defaults = Axes::default().with(THREADS, [(cores / most).max(1)]);
    if kind == Kind::Weak {
        defaults = defaults.with(DATA_FRACTIONS, [1.0 / most as f64]);
    }
    let named = experiment.axes.clone().or(&defaults);
    let mut cells: Vec<Cell> = places
        .into_iter()
        .map(|(ranks, nodes)| Cell::default().with(RANKS, ranks).with(NODES, nodes))
        .collect();
    for axis in varied().filter(|axis| ![RANKS, NODES].contains(&axis.key)) {
        let Some(values) = named.get(axis.key) else { continue };
        let with = |cell: &Cell| {
            values.iter().map(|value| cell.clone().with(axis.key, value.clone())).collect::<Vec<_>>()
        };
        cells = cells.iter().flat_map(with).collect();
    }
    Ok(cells)
}

/// Where the global batch is to be the same for all ranks, and none is named: what `vitesse train` gives one rank, or the next number
/// that all ranks and accumulations divide.
pub fn settle_batches(
    (kind, experiment): (Kind, &Experiment),
    study: &Study,
    cells: &mut [Cell],
    resolve: &mut dyn Resolve,
) -> Result<(), StudyError> {
    if !kind.keeps_global_batch() || experiment.axes.get(BATCH_SIZES).is_some() {
        return Ok(());
    }
    let mut parts = cells.iter().map(|cell| cell.ranks().checked_mul(cell.count(ACCUMULATION).unwrap_or(1)));
    let unit = parts.try_fold(1, |unit, part| least_common_multiple(unit, part?));
    let mut known: HashMap<Vec<String>, Facts> = HashMap::new();
    for cell in cells {
        let mut alone = cell.clone().with(RANKS, 1).with(NODES, 1);
        alone.0.remove(ACCUMULATION);
        let options = alone.options(kind, study, experiment)?;
        if !known.contains_key(&options) {
            let facts = resolve.facts(&options, 1).map_err(|why| refused(kind, 1, why))?;
            known.insert(options.clone(), facts);
        }
        let facts = &known[&options];
        let images = facts.images_per_epoch as usize;
        let batch = unit.and_then(|unit| facts.batch_per_rank.checked_next_multiple_of(unit));
        let batch = batch.filter(|batch| *batch <= images.max(facts.batch_per_rank)).ok_or_else(|| {
            let why = format!("no batch of up to {images} images can be divided among all these ranks");
            StudyError::Impossible(format!("{}: {why}; name one with --batch-sizes", kind.name()))
        })?;
        cell.0.insert(BATCH_SIZES, batch.into());
    }
    Ok(())
}

fn least_common_multiple(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a.checked_div(x)?.checked_mul(b)
}

/// Why a point can't be, in the words of whoever refused it.
pub fn refused(kind: Kind, ranks: usize, why: String) -> StudyError {
    StudyError::Impossible(format!("{} over {}: {why}", kind.name(), counted(ranks, "rank")))
}

impl Cell {
    pub fn options(
        &self,
        kind: Kind,
        study: &Study,
        experiment: &Experiment,
    ) -> Result<Vec<String>, StudyError> {
        let mut options = Vec::new();
        let mut add = |flag: &str, value: Option<String>| {
            options.extend(value.map(|value| [format!("--{flag}"), value]).into_iter().flatten());
        };
        add("task", experiment.task.clone());
        for axis in AXES {
            let Some(option) = axis.option else { continue };
            let value = self.0.get(axis.key).map(ToString::to_string);
            match axis.key {
                DATA_FRACTIONS => add(option, self.data_fraction(kind)?.map(|f| f.to_string())),
                BATCH_SIZES if kind.keeps_global_batch() => add("global-batch", value),
                THREADS => {
                    add("device", experiment.device.clone());
                    add(option, value);
                }
                _ => add(option, value),
            }
        }
        match experiment.steps {
            Some(steps) => add("steps", Some(self.steps(kind, steps)?.to_string())),
            None => add("epochs", Some(experiment.epochs.unwrap_or(1).to_string())),
        }
        options.extend(study.train.iter().cloned());
        Ok(options)
    }

    /// Where the data grows with the ranks, each has its part.
    fn data_fraction(&self, kind: Kind) -> Result<Option<f64>, StudyError> {
        let (Kind::Weak, Some(each)) = (kind, self.fraction()) else { return Ok(self.fraction()) };
        let all = each * self.ranks() as f64;
        // Thirds and the like don't add up to one exactly.
        let all = if (all - 1.0).abs() < 1e-9 { 1.0 } else { all };
        if all <= 1.0 {
            return Ok(Some(all));
        }
        let why = format!("{} ranks × {each} of the data each is more than there is", self.ranks());
        Err(StudyError::Impossible(format!("{}: {why}", kind.name())))
    }

    /// The part of a set of so many images that gives every rank as many as one rank has, to the image.
    pub fn equal_fraction(&self, kind: Kind, set: u64) -> Option<String> {
        let (Kind::Weak, Some(each)) = (kind, self.fraction()) else { return None };
        // Ten parts of a tenth are a whole, if a hair less in binary.
        let images = (each * set as f64 + 1e-6).floor();
        (images >= 1.0).then(|| (images * self.ranks() as f64 / set as f64).min(1.0).to_string())
    }

    /// Where the images are constant and the global batch grows, more ranks make fewer steps.
    fn steps(&self, kind: Kind, steps: u64) -> Result<u64, StudyError> {
        let ranks = self.ranks() as u64;
        match kind {
            Kind::FixedPerRank if !steps.is_multiple_of(ranks) => Err(StudyError::Impossible(format!(
                "{}: {steps} steps of one rank are no multiple of {ranks} ranks",
                kind.name()
            ))),
            Kind::FixedPerRank => Ok(steps / ranks),
            _ => Ok(steps),
        }
    }

    /// Why this machine has too little for the point; of other hosts nothing is known here.
    pub fn oversubscribed(&self, study: &Study, facts: &Facts, resolve: &dyn Resolve) -> Option<String> {
        let launch = &study.launch;
        let elsewhere = launch.launcher.is_some() || launch.hostfile.is_some() || !launch.hosts.is_empty();
        if elsewhere {
            return None;
        }
        let (cores, gpus) = (resolve.cores(), resolve.gpus());
        let (ranks, threads) = (self.ranks(), self.threads());
        if ranks.saturating_mul(threads) > cores {
            let plural = if threads == 1 { "thread" } else { "threads" };
            return Some(format!("{ranks} × {threads} {plural} on {cores} cores"));
        }
        (facts.device != "cpu" && ranks > gpus.max(1)).then(|| format!("{ranks} ranks on {gpus} GPUs"))
    }

    pub fn series(&self, kind: Kind, facts: &Facts, named: &[&Axis]) -> String {
        let mut words = vec![facts.model.clone()];
        words.extend(named.iter().map(|axis| self.called(axis)).filter(|name| !name.is_empty()));
        if kind == Kind::Nodes {
            words.push(if self.nodes() == 1 { "one host" } else { "one rank per host" }.to_string());
        }
        words.join(" · ")
    }

    #[allow(clippy::too_many_arguments)]
    pub fn planned(
        &self,
        kind: Kind,
        series: String,
        study: &Study,
        options: Vec<String>,
        facts: Facts,
        warmup: u64,
        oversubscribed: bool,
    ) -> Planned {
        let comm = study.launch.comm.clone();
        let comm =
            comm.unwrap_or_else(|| if self.local(study) { "threads".into() } else { "launcher".into() });
        let own = AXES.iter().filter(|axis| !axis.settled);
        let other =
            own.filter_map(|axis| Some((axis.key.to_string(), self.0.get(axis.key)?.to_string()))).collect();
        let settings = Settings {
            task: facts.task,
            model: facts.model,
            image_size: facts.image_size,
            data: self.0.get(DATA).map_or(facts.data, ToString::to_string),
            data_fraction: option(&options, "--data-fraction").and_then(|f| f.parse().ok()).unwrap_or(1.0),
            ranks: self.ranks(),
            hosts: self.nodes(),
            threads_per_rank: self.threads(),
            batch_per_rank: facts.batch_per_rank,
            accumulation: facts.accumulation,
            global_batch: facts.batch_per_rank * facts.accumulation * self.ranks(),
            optimizer: facts.optimizer,
            precision: facts.precision,
            device: facts.device,
            comm,
            images_per_epoch: facts.images_per_epoch,
            epochs: facts.epochs,
            steps: facts.steps,
            loader_threads: facts.loader_threads,
            other,
        };
        let id = id(kind, &settings, &options, warmup);
        let estimate = facts.estimate;
        Planned { id, kind, series, settings, options, warmup, oversubscribed, estimate }
    }

    fn local(&self, study: &Study) -> bool {
        study.launch.launcher.is_none() && study.launch.hosts.is_empty() && study.launch.hostfile.is_none()
    }
}
