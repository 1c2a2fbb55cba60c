//! From a study to its points: every combination of a grid, as options of `vitesse train`.
//!
//! What the options come to (images an epoch, batches, steps) is for whoever knows models and data to say, through [`Resolve`]; a
//! combination that can't be is refused here, before anything runs.

use crate::child;
use crate::error::StudyError;
use crate::results::{Kind, Settings};
use crate::spec::{Experiment, Study};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// A point to be measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    pub id: String,
    pub kind: Kind,
    pub series: String,
    pub settings: Settings,
    /// Options of `vitesse train`, without those that say how ranks are started and where results go.
    pub options: Vec<String>,
    pub warmup: u64,
    pub oversubscribed: bool,
    /// Seconds that a run may take, where someone could tell.
    pub estimate: Option<f64>,
}

/// What options of `vitesse train` come to.
pub struct Facts {
    pub task: String,
    /// The set, as `vitesse train` calls it.
    pub data: String,
    pub image_size: usize,
    pub loader_threads: usize,
    pub batch_per_rank: usize,
    pub accumulation: usize,
    pub model: String,
    pub optimizer: String,
    pub precision: String,
    pub device: String,
    pub images_per_epoch: u64,
    pub epochs: u64,
    pub steps: u64,
    /// Seconds of a run, as far as they can be told.
    pub estimate: Option<f64>,
}

/// Says what options come to over a number of ranks, or why they are refused.
pub trait Resolve {
    fn facts(&mut self, options: &[String], ranks: usize) -> Result<Facts, String>;
    /// Cores of this machine.
    fn cores(&self) -> usize;
    /// GPUs of this machine.
    fn gpus(&self) -> usize;
}

/// First steps of a run that don't count: buffers are touched, loaders fill, clocks rise.
const WARMUP: u64 = 3;

/// Options that a study sets itself.
const OWN: [&str; 22] = [
    "--task",
    "--ranks",
    "--comm",
    "--hostfile",
    "--out",
    "--resume",
    "--json",
    "--no-checkpoints",
    "--no-breakdown",
    "--no-account",
    "--max-restarts",
    "--batch-size",
    "--global-batch",
    "--accumulate",
    "--threads",
    "--model",
    "--data",
    "--data-fraction",
    "--epochs",
    "--steps",
    "--iterations",
    "--config",
];

/// One combination of a grid.
#[derive(Clone, Default)]
struct Cell {
    ranks: usize,
    nodes: usize,
    batch: Option<usize>,
    accumulation: Option<usize>,
    model: Option<String>,
    data: Option<String>,
    fraction: Option<f64>,
    optimizer: Option<String>,
    precision: Option<String>,
    threads: usize,
}

/// All points of a study, in the order of its file.
pub fn plan(study: &Study, resolve: &mut dyn Resolve) -> Result<Vec<Planned>, StudyError> {
    if let Some(option) = study.train.iter().find(|o| OWN.contains(&o.split('=').next().unwrap_or(o))) {
        let why = format!("{option} is the study's own to set: it has a flag or key for what varies");
        return Err(StudyError::Impossible(why));
    }
    let mut all = Vec::new();
    for experiment in &study.experiments {
        let kind = experiment.kind.unwrap_or(Kind::Grid);
        all.push((kind, experiment, cells(kind, experiment, resolve.cores())?));
    }
    let mut points = Vec::new();
    for (kind, experiment, cells) in &all {
        // Experiments of a kind are drawn together: what differs between them is in the names of their series, too.
        let together: Vec<&Cell> = all.iter().filter(|one| one.0 == *kind).flat_map(|one| &one.2).collect();
        let named = names(*kind, &together);
        points.extend(plan_experiment(study, (*kind, experiment), cells, &named, resolve)?);
    }
    let mut seen = HashSet::new();
    match points.iter().find(|point| !seen.insert(point.id.as_str())) {
        Some(twice) => Err(StudyError::Impossible(format!("{}: the study has this point twice", twice.id))),
        None => Ok(points),
    }
}

fn plan_experiment(
    study: &Study,
    (kind, experiment): (Kind, &Experiment),
    cells: &[Cell],
    named: &[Name],
    resolve: &mut dyn Resolve,
) -> Result<Vec<Planned>, StudyError> {
    let mut points = Vec::new();
    for cell in cells {
        let options = cell.options(kind, study, experiment)?;
        let refused = |why: String| {
            let ranks = if cell.ranks == 1 { "1 rank".into() } else { format!("{} ranks", cell.ranks) };
            StudyError::Impossible(format!("{} over {ranks}: {why}", kind.name()))
        };
        let facts = resolve.facts(&options, cell.ranks).map_err(refused)?;
        let warmup = experiment.warmup.unwrap_or(WARMUP);
        if facts.steps <= warmup {
            let why = format!("a warm-up of {warmup} steps leaves none of {} to count", facts.steps);
            return Err(refused(why));
        }
        let oversubscribed = cell.oversubscribed(study, &facts, resolve);
        if let (Some(why), false) = (&oversubscribed, study.oversubscribe) {
            return Err(refused(format!("{why}: --oversubscribe says that this is meant")));
        }
        let series = cell.series(kind, &facts, named);
        let point = cell.planned(kind, series, study, options, facts, warmup, oversubscribed.is_some());
        child::check(&study.launch, &point).map_err(refused)?;
        points.push(point);
    }
    Ok(points)
}

/// An axis, and how a cell's place on it is called in the name of a series.
type Name = (&'static str, fn(&Cell) -> String);

const NAMES: [Name; 8] = [
    ("data", |c| c.data.as_deref().map_or(String::new(), set_name)),
    ("fraction", |c| c.fraction.map_or(String::new(), |f| format!("{}% of the data", 100.0 * f))),
    ("batch", |c| c.batch.map_or(String::new(), |b| format!("batch {b}"))),
    ("accumulation", |c| c.accumulation.map_or(String::new(), |a| format!("accumulation {a}"))),
    ("optimizer", |c| c.optimizer.clone().unwrap_or_default()),
    ("precision", |c| c.precision.clone().unwrap_or_default()),
    ("threads", |c| format!("{} threads", c.threads)),
    ("ranks", |c| if c.ranks == 1 { "1 rank".into() } else { format!("{} ranks", c.ranks) }),
];

/// What tells series of a kind apart.
fn names(kind: Kind, cells: &[&Cell]) -> Vec<Name> {
    let varies = |f: fn(&Cell) -> String| cells.iter().map(|cell| f(cell)).collect::<HashSet<_>>().len() > 1;
    let curve = curve_of(kind);
    NAMES.into_iter().filter(|(axis, f)| *axis != curve && varies(*f)).collect()
}

/// The axis along which points of a series lie.
fn curve_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes | Kind::Grid => "ranks",
        Kind::Batch => "batch",
        Kind::Accumulation => "accumulation",
        Kind::Optimizer => "optimizer",
        Kind::Precision => "precision",
    }
}

/// Every combination.
fn cells(kind: Kind, experiment: &Experiment, cores: usize) -> Result<Vec<Cell>, StudyError> {
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

impl Cell {
    fn options(&self, kind: Kind, study: &Study, experiment: &Experiment) -> Result<Vec<String>, StudyError> {
        let mut options = Vec::new();
        let mut add = |flag: &str, value: Option<String>| {
            options.extend(value.map(|value| [format!("--{flag}"), value]).into_iter().flatten());
        };
        add("task", experiment.task.clone());
        add("model", self.model.clone());
        add("data", self.data.clone());
        add("data-fraction", self.data_fraction(kind)?.map(|f| f.to_string()));
        let constant = matches!(kind, Kind::Strong | Kind::Nodes);
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
    fn oversubscribed(&self, study: &Study, facts: &Facts, resolve: &dyn Resolve) -> Option<String> {
        let launch = &study.launch;
        let elsewhere = launch.launcher.is_some() || launch.hostfile.is_some() || !launch.hosts.is_empty();
        if elsewhere {
            return None;
        }
        let (cores, gpus) = (resolve.cores(), resolve.gpus());
        let (ranks, threads) = (self.ranks, self.threads);
        if ranks * threads > cores {
            let plural = if threads == 1 { "thread" } else { "threads" };
            return Some(format!("{ranks} × {threads} {plural} on {cores} cores"));
        }
        (facts.device != "cpu" && ranks > gpus.max(1)).then(|| format!("{ranks} ranks on {gpus} GPUs"))
    }

    fn series(&self, kind: Kind, facts: &Facts, named: &[Name]) -> String {
        let mut words = vec![facts.model.clone()];
        words.extend(named.iter().map(|(_, name)| name(self)).filter(|name| !name.is_empty()));
        if kind == Kind::Nodes {
            words.push(if self.nodes == 1 { "one host" } else { "one rank a host" }.to_string());
        }
        words.join(" · ")
    }

    #[allow(clippy::too_many_arguments)]
    fn planned(
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
        };
        let id = id(kind, &settings, &options, warmup);
        let estimate = facts.estimate;
        Planned { id, kind, series, settings, options, warmup, oversubscribed, estimate }
    }

    fn local(&self, study: &Study) -> bool {
        study.launch.launcher.is_none() && study.launch.hosts.is_empty() && study.launch.hostfile.is_none()
    }
}

fn option<'a>(options: &'a [String], name: &str) -> Option<&'a String> {
    options.iter().position(|o| o == name).and_then(|at| options.get(at + 1))
}

/// A name for files that people can read, and that another machine gives the same point. Where the data lies is no part of it.
fn id(kind: Kind, settings: &Settings, options: &[String], warmup: u64) -> String {
    let set = set_name(&settings.data);
    let Settings {
        model,
        ranks,
        hosts,
        threads_per_rank,
        batch_per_rank,
        accumulation,
        optimizer,
        precision,
        ..
    } = settings;
    let hosts = if *hosts > 1 { format!("-n{hosts}") } else { String::new() };
    let readable = format!(
        "{}-{model}-{set}-r{ranks}{hosts}-t{threads_per_rank}-b{batch_per_rank}-a{accumulation}-{optimizer}-{precision}",
        kind.name()
    );
    let readable: String = readable
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '.' })
        .collect();
    let place = option(options, "--data");
    let rest: Vec<&str> =
        options.iter().map(|o| if Some(o) == place { set.as_str() } else { o.as_str() }).collect();
    format!("{readable}-{:06x}", hash(&format!("{} {warmup} {}", rest.join(" "), settings.comm)) & 0xff_ffff)
}

/// The set and, of a folder of images, the folder's own name.
fn set_name(data: &str) -> String {
    match data.split_once(':') {
        Some((kind @ ("folder" | "masks"), path)) => {
            let name = std::path::Path::new(path).file_name();
            format!("{kind}.{}", name.map(|n| n.to_string_lossy().into_owned()).unwrap_or_default())
        }
        Some((set, _)) => set.to_string(),
        None => data.to_string(),
    }
}

/// Fowler, Noll and Vo's, of 64 bits: the same in every build and on every machine.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Strong => "strong",
            Kind::Weak => "weak",
            Kind::FixedPerRank => "fixed-per-rank",
            Kind::Batch => "batch",
            Kind::Accumulation => "accumulation",
            Kind::Optimizer => "optimizer",
            Kind::Precision => "precision",
            Kind::Nodes => "nodes",
            Kind::Grid => "grid",
        }
    }

    /// What its points have in common, for people.
    pub fn holds(self) -> &'static str {
        match self {
            Kind::Strong => "strong scaling: the same images and the same global batch over more ranks",
            Kind::Weak => "weak scaling: the data grows with the ranks, each has the same images and batch",
            Kind::FixedPerRank => {
                "the same images in all and a fixed batch a rank: the global batch grows with the ranks"
            }
            Kind::Batch => "batch sizes",
            Kind::Accumulation => "micro-steps for each exchange",
            Kind::Optimizer => "optimizers",
            Kind::Precision => "precisions",
            Kind::Nodes => "many hosts with a rank each against one host, the same images and global batch",
            Kind::Grid => "a grid of settings",
        }
    }
}

#[cfg(test)]
mod tests;
