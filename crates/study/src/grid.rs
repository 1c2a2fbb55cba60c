//! From a study to its points: every combination of a grid, as options of `vitesse train`.
//!
//! What the options come to (images per epoch, batches, steps) is for whoever knows models and data to say, through [`Resolve`]; a
//! combination that can't be is refused here, before anything runs.

mod cell;

use crate::axes::{ACCUMULATION, AXES, Axis, BATCH_SIZES, NODES, OPTIMIZERS, PRECISIONS, RANKS, ZERO};
use crate::child;
use crate::error::StudyError;
use crate::results::{Kind, Settings};
use crate::spec::{Experiment, Study};
pub use cell::MOST_POINTS;
use cell::{Cell, cells, check_size, refused, settle_batches};
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
    /// Estimated seconds of a run.
    pub estimate: Option<f64>,
}

/// The settings that options of `vitesse train` resolve to.
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
    /// Training images of the whole set, whatever part of it is used.
    pub images_of_set: u64,
    pub images_per_epoch: u64,
    pub epochs: u64,
    pub steps: u64,
    /// Estimated seconds of a run, where they can be estimated.
    pub estimate: Option<f64>,
}

/// Resolves options over a number of ranks, or says why they are refused.
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

/// All points of a study, in the order of its file.
pub fn plan(study: &Study, resolve: &mut dyn Resolve) -> Result<Vec<Planned>, StudyError> {
    if let Some(option) = study.train.iter().find(|o| OWN.contains(&o.split('=').next().unwrap_or(o))) {
        let why = format!("{option} is the study's own to set: it has a flag or key for what varies");
        return Err(StudyError::Impossible(why));
    }
    check_size(study)?;
    let mut all = Vec::new();
    for experiment in &study.experiments {
        let kind = experiment.kind.unwrap_or(Kind::Grid);
        let mut cells = cells(kind, experiment, resolve.cores())?;
        settle_batches((kind, experiment), study, &mut cells, resolve)?;
        all.push((kind, experiment, cells));
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
    named: &[&Axis],
    resolve: &mut dyn Resolve,
) -> Result<Vec<Planned>, StudyError> {
    let mut points = Vec::new();
    for cell in cells {
        let mut options = cell.options(kind, study, experiment)?;
        let refused = |why: String| refused(kind, cell.ranks(), why);
        let mut facts = resolve.facts(&options, cell.ranks()).map_err(refused)?;
        if let Some(fraction) = cell.equal_fraction(kind, facts.images_of_set)
            && option(&options, "--data-fraction").is_some_and(|now| *now != fraction)
        {
            set_option(&mut options, "--data-fraction", fraction);
            facts = resolve.facts(&options, cell.ranks()).map_err(refused)?;
        }
        let warmup = experiment.warmup.unwrap_or(WARMUP);
        if facts.steps <= warmup {
            let why = format!("a warm-up of {warmup} steps leaves none of {} to count", facts.steps);
            return Err(refused(why));
        }
        let oversubscribed = cell.oversubscribed(study, &facts, resolve);
        if let (Some(why), false) = (&oversubscribed, study.oversubscribe) {
            return Err(refused(format!("{why}; --oversubscribe allows it")));
        }
        let series = cell.series(kind, &facts, named);
        let point = cell.planned(kind, series, study, options, facts, warmup, oversubscribed.is_some());
        child::check(&study.launch, &point).map_err(refused)?;
        points.push(point);
    }
    Ok(points)
}

/// Axes that name the series of a kind: those whose values differ between its cells, but for the one that its curves follow.
fn names(kind: Kind, cells: &[&Cell]) -> Vec<&'static Axis> {
    let varies = |axis: &Axis| cells.iter().map(|cell| cell.called(axis)).collect::<HashSet<_>>().len() > 1;
    let curve = curve_of(kind);
    // The study of hosts has names for them.
    let own = |axis: &Axis| axis.key == curve || (axis.key == NODES && kind == Kind::Nodes);
    AXES.iter().filter(|axis| !own(axis) && varies(axis)).collect()
}

/// The axis along which points of a series lie.
fn curve_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes | Kind::Grid => RANKS,
        Kind::Batch => BATCH_SIZES,
        Kind::Accumulation => ACCUMULATION,
        Kind::Optimizer => OPTIMIZERS,
        Kind::Precision => PRECISIONS,
        Kind::Zero => ZERO,
    }
}

fn set_option(options: &mut [String], name: &str, value: String) {
    if let Some(at) = options.iter().position(|option| option == name)
        && let Some(old) = options.get_mut(at + 1)
    {
        *old = value;
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
pub fn set_name(data: &str) -> String {
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

#[cfg(test)]
mod tests;
