//! What follows from the runs of a study: estimates, comparisons along each series, flags, warnings, and the answer.

mod answer;

use crate::axes::{STAGES, unsettled};
use crate::factors::factors;
use crate::limiter::{counted, limiter};
use crate::results::{Estimate, Flag, Kind, Measured, OfKind, Point, Results, Score, Summary, Usage};
use crate::serial;
use crate::stats::{self, estimate, estimate_share, median, ratio, serial_fraction};
use records::Parts;

/// Fills in all that follows from the runs. `oversubscribed`: whether the point of that name has more threads than cores.
pub fn complete(results: &mut Results, oversubscribed: &dyn Fn(&str) -> bool) {
    for point in &mut results.points {
        point.flags = flags(point, oversubscribed(&point.id));
        point.summary = summarise(point);
    }
    let before = results.points.clone();
    for point in &mut results.points {
        let base = base_of(point, &before);
        if let Some(base) = base {
            compare_with(point, base);
        }
        let crowded = oversubscribed(&point.id);
        point.limiter = limiter(point, base, crowded, results.platform.cores);
    }
    divide(results);
    results.warnings = warnings(results);
    results.summary = answer::answer(results);
}

/// Fills in where the efficiency of every point went, and the serial part of every series. Results of older versions lack both.
pub fn divide(results: &mut Results) {
    let before = results.points.clone();
    for point in &mut results.points {
        let compared = point.summary.as_ref().is_some_and(|summary| summary.efficiency.is_some());
        point.factors = factors(point, base_of(point, &before).filter(|_| compared));
    }
    results.serial = serial::fits(results);
}

fn measured(point: &Point) -> Vec<&Measured> {
    point.runs.iter().filter_map(|run| run.measured()).collect()
}

fn flags(point: &Point, oversubscribed: bool) -> Vec<Flag> {
    let mut flags = Vec::new();
    if oversubscribed {
        flags.push(Flag::Oversubscribed);
    }
    let good: Vec<_> = point.runs.iter().filter(|run| run.measured().is_some()).collect();
    let rates: Vec<f64> = measured(point).iter().map(|m| m.images_per_second).collect();
    let far: Vec<usize> = stats::outliers(&rates).into_iter().map(|at| good[at].repeat).collect();
    if !far.is_empty() {
        flags.push(Flag::Outliers(far));
    }
    let failed: Vec<usize> =
        point.runs.iter().filter(|run| run.measured().is_none()).map(|run| run.repeat).collect();
    if !failed.is_empty() {
        flags.push(Flag::Failed(failed));
    }
    let images: Vec<u64> = measured(point).iter().map(|m| m.images).collect();
    if let (Some(least), Some(most)) = (images.iter().min(), images.iter().max())
        && least != most
    {
        flags.push(Flag::UnequalWork(format!("its runs trained on {least} to {most} images")));
    }
    flags
}

/// One sample a run: the run's mean.
fn summarise(point: &Point) -> Option<Summary> {
    let runs = measured(point);
    if runs.is_empty() {
        return None;
    }
    let each = |f: fn(&Measured) -> f64| runs.iter().map(|run| f(run)).collect::<Vec<_>>();
    let parts: Vec<Parts> = runs.iter().map(|run| Parts::mean(&run.ranks)).collect();
    let middle = |f: fn(&Parts) -> f64| median(&parts.iter().map(f).collect::<Vec<_>>());
    Some(Summary {
        epoch_seconds: estimate(&each(|run| {
            run.epoch_seconds.iter().sum::<f64>() / run.epoch_seconds.len() as f64
        })),
        step_seconds: estimate(&each(|run| {
            run.step_seconds.iter().sum::<f64>() / run.step_seconds.len() as f64
        })),
        images_per_second: estimate(&each(|run| run.images_per_second)),
        speedup: None,
        efficiency: None,
        serial_fraction: None,
        parts: Parts::from_fn(middle),
        score: score(&runs),
        usage: usage(&runs),
        collectives: collectives(&runs),
    })
}

/// After the last epoch; none if runs were evaluated by different metrics.
pub(crate) fn score(runs: &[&Measured]) -> Option<Score> {
    let last: Option<Vec<(&str, f64)>> = runs.iter().map(|run| run.curve.last()?.score()).collect();
    let last = last?;
    let name = last.first()?.0;
    let values: Vec<f64> = last.iter().map(|(_, value)| *value).collect();
    last.iter()
        .all(|(other, _)| *other == name)
        .then(|| Score { name: name.into(), value: estimate_share(&values) })
}

/// The mean of each kind over runs that have it.
fn collectives(runs: &[&Measured]) -> Vec<OfKind> {
    let mut kinds: Vec<OfKind> = vec![];
    for one in runs.iter().flat_map(|run| &run.collectives) {
        let part = OfKind { kind: one.kind.clone(), ..one.scaled(1.0 / runs.len() as f64) };
        match kinds.iter_mut().find(|known| known.kind == one.kind) {
            Some(known) => *known = known.plus(&part),
            None => kinds.push(part),
        }
    }
    kinds
}

pub(crate) fn usage(runs: &[&Measured]) -> Usage {
    let all = |f: fn(&Measured) -> Option<f64>| runs.iter().map(|run| f(run)).collect::<Option<Vec<f64>>>();
    let of = |f| all(f).map(|all| estimate(&all));
    let share = |f| all(f).map(|all| estimate_share(&all));
    Usage {
        cpu_utilisation: share(|run| run.cpu_utilisation),
        gpu_utilisation: share(|run| run.gpu_utilisation),
        gpu_load: share(|run| run.gpu_load),
        memory_bytes: of(|run| run.memory_bytes.map(|bytes| bytes as f64)),
        planned_bytes: of(|run| run.planned_bytes.map(|bytes| bytes as f64)),
        gpu_memory_bytes: of(|run| run.gpu_memory_bytes.map(|bytes| bytes as f64)),
        watts: of(|run| run.watts),
        gpu_watts: of(|run| run.gpu_watts),
    }
}

fn over_ranks(kind: Kind) -> bool {
    matches!(kind, Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes | Kind::Grid)
}

/// The point of the fewest ranks in the same series; of stages of ZeRO, the lowest. Hosts of one rank each are held against one rank on one host.
fn base_of<'a>(point: &Point, all: &'a [Point]) -> Option<&'a Point> {
    let name = |point: &Point| match point.kind {
        Kind::Nodes => point.series.rsplit_once(" · ").map_or(String::new(), |(name, _)| name.to_string()),
        _ => point.series.clone(),
    };
    let same = all.iter().filter(|other| other.kind == point.kind && name(other) == name(point));
    let related = |kind: Kind| over_ranks(kind) || kind == Kind::Zero;
    let measured = same.filter(|other| other.summary.is_some() && related(other.kind));
    measured.min_by_key(|other| (other.settings.ranks, other.settings.hosts, other.settings.stage() as u64))
}

/// Speedup by images/s, which for equal work is T1 / Tp.
fn compare_with(point: &mut Point, base: &Point) {
    if let Some(why) = unequal(point, base) {
        point.flags.push(Flag::UnequalWork(why));
    }
    let comparable = |point: &Point| !point.flags.iter().any(|flag| matches!(flag, Flag::UnequalWork(_)));
    let crowded = point.flags.contains(&Flag::Oversubscribed);
    if !comparable(point) || !comparable(base) {
        return;
    }
    let (Some(summary), Some(reference)) = (&mut point.summary, &base.summary) else { return };
    let (slow, fast) = (&reference.images_per_second, &summary.images_per_second);
    let speedup = if point.id == base.id {
        scaled(fast, 1.0 / slow.median, None)
    } else {
        scaled(fast, 1.0 / slow.median, ratio(&slow.samples, &fast.samples).interval)
    };
    let p = point.settings.ranks as f64 / base.settings.ranks as f64;
    // Cores that are shared among ranks say nothing of how well ranks scale.
    if !crowded {
        let interval = speedup.interval.map(|(low, high)| (low / p, high / p));
        summary.efficiency = Some(scaled(fast, 1.0 / slow.median / p, interval));
        summary.serial_fraction =
            (base.settings.ranks == 1).then(|| serial_fraction(speedup.median, p)).flatten();
        summary.serial_fraction = summary.serial_fraction.filter(|part| (0.0..=1.0).contains(part));
    }
    summary.speedup = Some(speedup);
}

fn scaled(estimate: &Estimate, factor: f64, interval: Option<(f64, f64)>) -> Estimate {
    let samples = estimate.samples.iter().map(|x| x * factor).collect();
    Estimate { median: estimate.median * factor, interval, samples }
}

/// What a point did other work in than its base, beyond what its kind is to vary.
fn unequal(point: &Point, base: &Point) -> Option<String> {
    let (a, b) = (&base.settings, &point.settings);
    let differs = |what: &str, base: String, here: String| {
        (base != here).then(|| format!("{what}: {here}, and {base} over {}", counted(a.ranks, "rank")))
    };
    let number = |what, base: usize, here: usize| differs(what, base.to_string(), here.to_string());
    let text = |what, base: &String, here: &String| differs(what, base.clone(), here.clone());
    let same = text("model", &a.model, &b.model)
        .or_else(|| text("data", &a.data, &b.data))
        .or_else(|| text("optimizer", &a.optimizer, &b.optimizer))
        .or_else(|| text("precision", &a.precision, &b.precision))
        .or_else(|| text("device", &a.device, &b.device))
        .or_else(|| number("threads per rank", a.threads_per_rank, b.threads_per_rank))
        .or_else(|| {
            let varied = |what: &str| point.kind == Kind::Zero && what == STAGES;
            let pairs = unsettled(a).zip(unsettled(b)).filter(|((what, _), _)| !varied(what));
            pairs.into_iter().find_map(|((what, base), (_, here))| text(what, &base, &here))
        });
    let images = || number("images per epoch", a.images_per_epoch as usize, b.images_per_epoch as usize);
    let global = || number("global batch", a.global_batch, b.global_batch);
    let of_rank =
        || number("batch of a rank", a.batch_per_rank * a.accumulation, b.batch_per_rank * b.accumulation);
    same.or_else(|| match point.kind {
        Kind::Strong | Kind::Nodes => images().or_else(global).or_else(|| trained(point, base, false)),
        Kind::Weak => of_rank()
            .or_else(|| images_of_a_rank(a.images_per_epoch, a.ranks, b.images_per_epoch, b.ranks))
            .or_else(|| trained(point, base, true)),
        Kind::FixedPerRank => images().or_else(of_rank),
        _ => images().or_else(|| global().and(of_rank())),
    })
}

/// Each rank has the same number of images, up to one that is left over.
fn images_of_a_rank(base: u64, base_ranks: usize, here: u64, ranks: usize) -> Option<String> {
    let (a, b) = (base as f64 / base_ranks as f64, here as f64 / ranks as f64);
    ((a - b).abs() > 1.0)
        .then(|| format!("images of a rank: {b:.1}, and {a:.1} over {}", counted(base_ranks, "rank")))
}

/// What was really trained on: images that could not be read are missing.
fn trained(point: &Point, base: &Point, by_rank: bool) -> Option<String> {
    let images = |point: &Point| median(&measured(point).iter().map(|m| m.images as f64).collect::<Vec<_>>());
    let (a, b) = (images(base) as u64, images(point) as u64);
    match by_rank {
        true => images_of_a_rank(a, base.settings.ranks, b, point.settings.ranks),
        false => (a != b).then(|| {
            format!("images trained on: {b}, and {a} over {}", counted(base.settings.ranks, "rank"))
        }),
    }
}

/// Half an interval's width against the median, from which on it is worth a warning.
const WIDE: f64 = 0.10;

/// What is said of points, each with what is its own, once for all of them.
#[derive(Default)]
struct Said(Vec<(&'static str, Vec<String>)>);

impl Said {
    fn add(&mut self, what: &'static str, of: String) {
        match self.0.iter_mut().find(|known| known.0 == what) {
            Some(known) => known.1.push(of),
            None => self.0.push((what, vec![of])),
        }
    }

    fn sentences(self) -> Vec<String> {
        const LISTED: usize = 4;
        let one = |(what, mut of): (&str, Vec<String>)| {
            let count = if of.len() > 1 { format!(" ({} points)", of.len()) } else { String::new() };
            let more = of.len().saturating_sub(LISTED);
            of.truncate(LISTED);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            format!("{what}{count}: {}{more}", of.join("; "))
        };
        self.0.into_iter().map(one).collect()
    }
}

fn warnings(results: &Results) -> Vec<String> {
    let mut said = Said::default();
    for point in &results.points {
        let name = named(point, &results.points);
        for flag in &point.flags {
            match flag {
                Flag::Oversubscribed => {
                    said.add("more threads than cores, left out of efficiency", name.clone())
                }
                Flag::UnequalWork(why) => {
                    said.add("not compared, as other work was done", format!("{name} ({why})"))
                }
                Flag::Outliers(runs) => {
                    said.add("runs far from the others", format!("{name} ({})", list(runs)))
                }
                Flag::Failed(runs) => said.add("runs that failed", format!("{name} ({})", list(runs))),
            }
        }
        let rate = point.summary.as_ref().map(|summary| &summary.images_per_second);
        if let Some(Estimate { median, interval: Some((low, high)), .. }) = rate
            && high - low > 2.0 * WIDE * median
        {
            let half = 50.0 * (high - low) / median;
            said.add(
                "runs differ widely; other programs may be using the machine",
                format!("{name} (±{half:.0}%)"),
            );
        }
        if let Some(why) = starved(point, results.platform.cores) {
            said.add("other programs use the machine", format!("{name} {why}"));
        }
    }
    let mut warnings = said.sentences();
    let few = results.points.iter().filter(|point| point.summary.is_some());
    let few = few.map(|point| measured(point).len()).filter(|runs| *runs < stats::FEWEST).count();
    if few > 0 {
        let points = counted(few, "point");
        warnings.push(format!(
            "{points} of fewer than {} runs: samples are shown, without an interval",
            stats::FEWEST
        ));
    }
    warnings
}

/// A point in the words that tell it from the others of its study.
fn named(point: &Point, all: &[Point]) -> String {
    let (kinds, series) =
        (all.iter().any(|p| p.kind != point.kind), all.iter().any(|p| p.series != point.series));
    let s = &point.settings;
    let ranks = match s.hosts {
        1 => counted(s.ranks, "rank"),
        hosts => format!("{} on {hosts} hosts", counted(s.ranks, "rank")),
    };
    let own = match point.kind {
        Kind::Batch => format!("batch {}", s.batch_per_rank),
        Kind::Accumulation => format!("accumulation {}", s.accumulation),
        Kind::Optimizer => s.optimizer.clone(),
        Kind::Precision => s.precision.clone(),
        Kind::Zero => format!("stage {}", s.stage()),
        _ => ranks,
    };
    let words = [(kinds, point.kind.name()), (series, point.series.as_str()), (true, own.as_str())];
    words.iter().filter(|(told, _)| *told).map(|(_, word)| *word).collect::<Vec<_>>().join(", ")
}

fn list(runs: &[usize]) -> String {
    let numbers = runs.iter().map(|run| (run + 1).to_string()).collect::<Vec<_>>().join(", ");
    format!("{} {numbers}", if runs.len() == 1 { "run" } else { "runs" })
}

/// Threads that compute all the time and yet get much less than that of the cores: someone else has them.
fn starved(point: &Point, cores: usize) -> Option<String> {
    let parts = &point.summary.as_ref()?.parts;
    let settings = &point.settings;
    let threads = settings.ranks * settings.threads_per_rank;
    let computing = (parts.compute + parts.optimizer) / parts.wall();
    let busy = point.summary.as_ref()?.usage.cpu_utilisation.as_ref()?;
    let got = busy.median * (cores * settings.hosts) as f64 / threads as f64;
    let local = settings.device == "cpu" && !point.flags.contains(&Flag::Oversubscribed);
    (local && got < 0.8 * computing).then(|| {
        format!(
            "had something to compute {:.0}% of the time, and a core {:.0}%",
            100.0 * computing,
            100.0 * got
        )
    })
}

#[cfg(test)]
mod tests;
