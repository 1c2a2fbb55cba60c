//! One combination of a grid, and all of them: how many there may be, and what `vitesse train` is asked for each.

use super::{Facts, Planned, Resolve, id, option};
use crate::error::StudyError;
use crate::limiter::counted;
use crate::results::{Kind, Settings};
use crate::spec::{Experiment, Study};
use std::collections::{HashMap, HashSet};

/// Points of a study, and runs of all of them, at most: more are a slip of the keyboard, and would take years.
pub const MOST_POINTS: usize = 2_000;
const MOST_RUNS: usize = 100_000;

/// One combination of a grid.
#[derive(Clone, Default)]
pub struct Cell {
    pub ranks: usize,
    pub nodes: usize,
    pub batch: Option<usize>,
    pub accumulation: Option<usize>,
    pub model: Option<String>,
    pub data: Option<String>,
    pub fraction: Option<f64>,
    pub optimizer: Option<String>,
    pub precision: Option<String>,
    pub threads: usize,
}

/// The axes of an experiment with their values, before any combination is made.
fn axes(kind: Kind, experiment: &Experiment) -> [(&'static str, usize); 10] {
    fn values<T>(list: &Option<Vec<T>>) -> usize {
        list.as_ref().map_or(1, Vec::len)
    }
    let nodes = if kind == Kind::Nodes { 2 } else { values(&experiment.nodes) };
    [
        ("ranks", values(&experiment.ranks)),
        ("hosts", nodes),
        ("threads", values(&experiment.threads)),
        ("models", values(&experiment.models)),
        ("data sets", values(&experiment.data)),
        ("parts of the data", values(&experiment.data_fractions)),
        ("batch sizes", values(&experiment.batch_sizes)),
        ("accumulations", values(&experiment.accumulation)),
        ("optimizers", values(&experiment.optimizers)),
        ("precisions", values(&experiment.precisions)),
    ]
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
    let ranks = experiment.ranks.clone().unwrap_or_else(|| vec![1]);
    let nodes = experiment.nodes.clone().unwrap_or_else(|| vec![1]);
    if ranks.contains(&0) || nodes.contains(&0) {
        return Err(StudyError::Impossible("ranks and nodes: must be at least 1".into()));
    }
    if kind == Kind::Nodes && experiment.nodes.is_some() {
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
    let fractions = match (kind, &experiment.data_fractions) {
        (Kind::Weak, None) => Some(vec![1.0 / most as f64]),
        (_, given) => given.clone(),
    };
    // The same for all points, so that a rank is always as strong.
    let threads = experiment.threads.clone().unwrap_or_else(|| vec![(cores / most).max(1)]);
    let first = places.into_iter().map(|(ranks, nodes)| Cell { ranks, nodes, ..Cell::default() }).collect();
    let cells = cross(first, &Some(threads), |cell, x| cell.threads = *x);
    let cells = cross(cells, &experiment.models, |cell, x| cell.model = Some(x.clone()));
    let cells = cross(cells, &experiment.data, |cell, x| cell.data = Some(x.clone()));
    let cells = cross(cells, &fractions, |cell, x| cell.fraction = Some(*x));
    let cells = cross(cells, &experiment.batch_sizes, |cell, x| cell.batch = Some(*x));
    let cells = cross(cells, &experiment.accumulation, |cell, x| cell.accumulation = Some(*x));
    let cells = cross(cells, &experiment.optimizers, |cell, x| cell.optimizer = Some(x.clone()));
    Ok(cross(cells, &experiment.precisions, |cell, x| cell.precision = Some(x.clone())))
}

/// Every cell with every value, or as it is where there are none.
fn cross<T>(cells: Vec<Cell>, values: &Option<Vec<T>>, set: impl Fn(&mut Cell, &T)) -> Vec<Cell> {
    let Some(values) = values else { return cells };
    let with = |cell: &Cell, value| {
        let mut cell = cell.clone();
        set(&mut cell, value);
        cell
    };
    cells.iter().flat_map(|cell| values.iter().map(|value| with(cell, value)).collect::<Vec<_>>()).collect()
}

/// Where the global batch is to be the same for all ranks, and none is named: what `vitesse train` gives one rank, or the next number
/// that all ranks and accumulations divide.
pub fn settle_batches(
    (kind, experiment): (Kind, &Experiment),
    study: &Study,
    cells: &mut [Cell],
    resolve: &mut dyn Resolve,
) -> Result<(), StudyError> {
    if !kind.keeps_global_batch() || experiment.batch_sizes.is_some() {
        return Ok(());
    }
    let mut parts = cells.iter().map(|cell| cell.ranks.checked_mul(cell.accumulation.unwrap_or(1)));
    let unit = parts.try_fold(1, |unit, part| least_common_multiple(unit, part?));
    let mut known: HashMap<Vec<String>, Facts> = HashMap::new();
    for cell in cells {
        let alone = Cell { ranks: 1, nodes: 1, accumulation: None, ..cell.clone() };
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
        cell.batch = Some(batch);
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
        add("model", self.model.clone());
        add("data", self.data.clone());
        add("data-fraction", self.data_fraction(kind)?.map(|f| f.to_string()));
        let constant = kind.keeps_global_batch();
        add(if constant { "global-batch" } else { "batch-size" }, self.batch.map(|b| b.to_string()));
        add("accumulate", self.accumulation.map(|a| a.to_string()));
        add("optimizer", self.optimizer.clone());
        add("precision", self.precision.clone());
        add("device", experiment.device.clone());
        add("threads", Some(self.threads.to_string()));
        match experiment.steps {
            Some(steps) => add("steps", Some(self.steps(kind, steps)?.to_string())),
            None => add("epochs", Some(experiment.epochs.unwrap_or(1).to_string())),
        }
        options.extend(study.train.iter().cloned());
        Ok(options)
    }

    /// Where the data grows with the ranks, each has its part.
    fn data_fraction(&self, kind: Kind) -> Result<Option<f64>, StudyError> {
        let (Kind::Weak, Some(each)) = (kind, self.fraction) else { return Ok(self.fraction) };
        let all = each * self.ranks as f64;
        // Thirds and the like don't add up to one exactly.
        let all = if (all - 1.0).abs() < 1e-9 { 1.0 } else { all };
        if all <= 1.0 {
            return Ok(Some(all));
        }
        let why = format!("{} ranks × {each} of the data each is more than there is", self.ranks);
        Err(StudyError::Impossible(format!("{}: {why}", kind.name())))
    }

    /// The part of a set of so many images that gives every rank as many as one rank has, to the image.
    pub fn equal_fraction(&self, kind: Kind, set: u64) -> Option<String> {
        let (Kind::Weak, Some(each)) = (kind, self.fraction) else { return None };
        // Ten parts of a tenth are a whole, if a hair less in binary.
        let images = (each * set as f64 + 1e-6).floor();
        (images >= 1.0).then(|| (images * self.ranks as f64 / set as f64).min(1.0).to_string())
    }

    /// Where the images are constant and the global batch grows, more ranks make fewer steps.
    fn steps(&self, kind: Kind, steps: u64) -> Result<u64, StudyError> {
        let ranks = self.ranks as u64;
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
        let (ranks, threads) = (self.ranks, self.threads);
        if ranks.saturating_mul(threads) > cores {
            let plural = if threads == 1 { "thread" } else { "threads" };
            return Some(format!("{ranks} × {threads} {plural} on {cores} cores"));
        }
        (facts.device != "cpu" && ranks > gpus.max(1)).then(|| format!("{ranks} ranks on {gpus} GPUs"))
    }

    pub fn series(&self, kind: Kind, facts: &Facts, named: &[super::Name]) -> String {
        let mut words = vec![facts.model.clone()];
        words.extend(named.iter().map(|(_, name)| name(self)).filter(|name| !name.is_empty()));
        if kind == Kind::Nodes {
            words.push(if self.nodes == 1 { "one host" } else { "one rank a host" }.to_string());
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
        let settings = Settings {
            task: facts.task,
            model: facts.model,
            image_size: facts.image_size,
            data: self.data.clone().unwrap_or(facts.data),
            data_fraction: option(&options, "--data-fraction").and_then(|f| f.parse().ok()).unwrap_or(1.0),
            ranks: self.ranks,
            hosts: self.nodes,
            threads_per_rank: self.threads,
            batch_per_rank: facts.batch_per_rank,
            accumulation: facts.accumulation,
            global_batch: facts.batch_per_rank * facts.accumulation * self.ranks,
            optimizer: facts.optimizer,
            precision: facts.precision,
            device: facts.device,
            comm,
            images_per_epoch: facts.images_per_epoch,
            epochs: facts.epochs,
            steps: facts.steps,
            loader_threads: facts.loader_threads,
            other: Default::default(),
        };
        let id = id(kind, &settings, &options, warmup);
        let estimate = facts.estimate;
        Planned { id, kind, series, settings, options, warmup, oversubscribed, estimate }
    }

    fn local(&self, study: &Study) -> bool {
        study.launch.launcher.is_none() && study.launch.hosts.is_empty() && study.launch.hostfile.is_none()
    }
}
