//! Points in the order in which people read them, in groups that are one curve each, with names for what differs.

use super::numbers::{self, bytes, counted, grouped, percent, seconds, short};
use crate::axes::unsettled;
use crate::compare;
use crate::results::{Estimate, Flag, Kind, Measured, Outcome, Point, Results, Settings, Summary, Usage};

/// The points of one series on one platform.
pub struct PointGroup<'a> {
    pub platform: usize,
    pub platform_name: String,
    pub kind: Kind,
    pub series: String,
    pub points: Vec<&'a Point>,
}

/// Names of platforms that differ, whatever they are called.
pub fn platform_names(results: &[Results]) -> Vec<String> {
    let mut names: Vec<String> = vec![];
    for (i, result) in results.iter().enumerate() {
        let own = &result.platform.name;
        let alike = results.iter().filter(|other| other.platform.name == *own).count() > 1;
        let mut name = if alike { format!("{own} ({})", result.name) } else { own.clone() };
        if names.contains(&name) {
            name = format!("{name} #{}", i + 1);
        }
        names.push(name);
    }
    names
}

/// How many times faster each further platform is than the first.
pub fn against(results: &[Results]) -> Vec<String> {
    let names = platform_names(results);
    let Some((first, others)) = results.split_first() else { return vec![] };
    let named = others.iter().zip(&names[1..]);
    let said = |(other, name): (&Results, &String)| {
        let (least, most, points) = compare::factors(first, other)?;
        // The faster one is who does more; nobody reads 0.006 times well.
        let (least, most, fast, slow) = match most < 1.0 {
            true => (1.0 / most, 1.0 / least, &names[0], name),
            false => (least, most, name, &names[0]),
        };
        let (least, most) = (short(least), short(most));
        let times = if least == most { most } else { format!("{least} to {most}") };
        let over = counted(points, "point");
        Some(format!("{fast} does {times} times the images/s of {slow}, over {over}."))
    };
    named.filter_map(said).collect()
}

/// All groups, by kind, then series, then platform.
pub fn groups(results: &[Results]) -> Vec<PointGroup<'_>> {
    let mut groups: Vec<PointGroup> = vec![];
    for (platform, (result, platform_name)) in results.iter().zip(platform_names(results)).enumerate() {
        for point in &result.points {
            let series = series(point, result);
            let known = groups.iter_mut().find(|group| {
                group.platform == platform && group.kind == point.kind && group.series == series
            });
            match known {
                Some(group) => group.points.push(point),
                None => groups.push(PointGroup {
                    platform,
                    platform_name: platform_name.clone(),
                    kind: point.kind,
                    series,
                    points: vec![point],
                }),
            }
        }
    }
    for group in &mut groups {
        group.points.sort_by(|a, b| order(a).partial_cmp(&order(b)).unwrap_or(std::cmp::Ordering::Equal));
    }
    groups.sort_by_cached_key(|group| {
        let hosts = group.points.iter().map(|point| point.settings.hosts).max();
        (group.kind, hosts > Some(1), natural(&group.series), group.platform)
    });
    groups
}

/// A name in pieces that sort as people do: "batch 64" before "batch 256".
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut pieces: Vec<(String, u64)> = vec![(String::new(), 0)];
    let mut digits = false;
    for c in name.chars() {
        if let (Some((_, number)), Some(digit)) = (pieces.last_mut(), c.to_digit(10)) {
            *number = number.saturating_mul(10).saturating_add(u64::from(digit));
            digits = true;
            continue;
        }
        if digits {
            pieces.push((String::new(), 0));
            digits = false;
        }
        if let Some((text, _)) = pieces.last_mut() {
            text.push(c);
        }
    }
    pieces
}

/// The serial part of every series of a kind, or why there is none; equal reasons once.
pub fn serial(results: &[Results], kind: Kind) -> Vec<String> {
    let mut lines: Vec<String> = vec![];
    let mut reasons: Vec<(&str, Vec<String>)> = vec![];
    for (result, platform) in results.iter().zip(platform_names(results)) {
        for serial in result.serial.iter().filter(|serial| serial.kind == kind) {
            let name = [platform.as_str(), serial.series.as_str()];
            let skipped = usize::from(results.len() == 1);
            let name: Vec<&str> = name.into_iter().skip(skipped).filter(|part| !part.is_empty()).collect();
            let name = name.join(" · ");
            let of = if name.is_empty() { String::new() } else { format!(" of {name}") };
            match serial.part {
                Some(fit) => lines.push(format!(
                    "Serial part{of}: {} ({} to {}), by Amdahl’s law over {}.",
                    percent(fit.value),
                    percent(fit.interval.0),
                    percent(fit.interval.1),
                    counted(fit.points + 1, "number") + " of ranks"
                )),
                None => match reasons.iter_mut().find(|known| known.0 == serial.reason) {
                    Some(known) => known.1.push(name),
                    None => reasons.push((&serial.reason, vec![name])),
                },
            }
        }
    }
    for (reason, names) in reasons {
        let of = match names.concat().is_empty() {
            true => String::new(),
            false => format!(" of {}", names.join(", ")),
        };
        lines.push(format!("No serial part{of} is given: {reason}."));
    }
    lines
}

/// All points of a study as a report lists them: by kind, series and what is varied, numbers by their size.
pub fn in_order(results: &Results) -> Vec<&Point> {
    groups(std::slice::from_ref(results)).into_iter().flat_map(|group| group.points).collect()
}

/// Points of many hosts are a curve apart from those of one host, also where a study gave them the same name.
fn series(point: &Point, result: &Results) -> String {
    let nodes = || result.points.iter().filter(|other| other.kind == Kind::Nodes);
    let alike = |other: &&Point| other.series == point.series;
    let hosts = |many: bool| nodes().filter(alike).any(|p| (p.settings.hosts > 1) == many);
    if point.kind != Kind::Nodes || !(hosts(true) && hosts(false)) {
        return point.series.clone();
    }
    let place = if point.settings.hosts > 1 { "many hosts" } else { "one host" };
    if nodes().all(|other| alike(&other)) { place.into() } else { format!("{place} · {}", point.series) }
}

fn order(point: &Point) -> (usize, usize, usize, usize, usize, f64, &str, &str, f64) {
    let s = &point.settings;
    (
        s.ranks,
        s.hosts,
        s.batch_per_rank,
        s.accumulation,
        s.threads_per_rank,
        s.data_fraction,
        &s.optimizer,
        &s.precision,
        s.stage(),
    )
}

impl PointGroup<'_> {
    /// With the platform's name where there are several.
    pub fn title(&self, platforms: usize) -> String {
        match (platforms > 1, self.series.is_empty()) {
            (false, _) => self.series.clone(),
            (true, true) => self.platform_name.clone(),
            (true, false) => format!("{} · {}", self.platform_name, self.series),
        }
    }
}

pub fn kind_title(kind: Kind) -> &'static str {
    match kind {
        Kind::Strong => "Strong scaling",
        Kind::Weak => "Weak scaling",
        Kind::FixedPerRank => "Fixed batch per rank",
        Kind::Batch => "Batch size",
        Kind::Accumulation => "Gradient accumulation",
        Kind::Optimizer => "Optimizers",
        Kind::Precision => "Precision",
        Kind::Zero => "Stages of ZeRO",
        Kind::Nodes => "Many hosts against one host",
        Kind::Grid => "Grid",
    }
}

/// What is held constant.
pub fn kind_sentence(kind: Kind) -> &'static str {
    match kind {
        Kind::Strong => "The same images per epoch and the same global batch, over more ranks.",
        Kind::Weak => "The data grows with the ranks: each has the same number of images per epoch.",
        Kind::FixedPerRank => {
            "The same images in all and a fixed batch per rank: the global batch grows with the ranks."
        }
        Kind::Batch => "The same data in batches of different size.",
        Kind::Accumulation => "More micro-steps between two all-reduces.",
        Kind::Optimizer => "The same work under different optimizers.",
        Kind::Precision => "The same work in different precision.",
        Kind::Zero => {
            "The same work, with ranks that divide nothing (stage 0), what the optimizer keeps (1), gradients too (2), parameters \
             too (3)."
        }
        Kind::Nodes => "One rank on each of many hosts against many ranks on one.",
        Kind::Grid => "Settings as the study's file asks.",
    }
}

/// What points of a kind differ in.
pub enum Varies {
    Number(&'static str, fn(&Settings) -> f64),
    Name(&'static str),
}

pub fn varies(kind: Kind) -> Varies {
    match kind {
        Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes => {
            Varies::Number("ranks", |s| s.ranks as f64)
        }
        Kind::Batch => Varies::Number("batch per rank (images)", |s| s.batch_per_rank as f64),
        Kind::Accumulation => Varies::Number("micro-steps per step", |s| s.accumulation as f64),
        Kind::Optimizer => Varies::Name("optimizer"),
        Kind::Precision => Varies::Name("precision"),
        Kind::Zero => Varies::Number("stage of ZeRO", Settings::stage),
        Kind::Grid => Varies::Name("settings"),
    }
}

/// A point's place on the axis, in a word or two.
pub fn label(point: &Point, group: &PointGroup) -> String {
    let s = &point.settings;
    match (varies(group.kind), group.kind) {
        (Varies::Number(_, of), _) => grouped(of(s)),
        (_, Kind::Optimizer) => s.optimizer.clone(),
        (_, Kind::Precision) => s.precision.clone(),
        _ => {
            let all: Vec<&Settings> = group.points.iter().map(|p| &p.settings).collect();
            let differing = settings(s, &all);
            let words: Vec<String> =
                differing.into_iter().map(|(_, value)| value).filter(|value| !value.is_empty()).collect();
            if words.is_empty() { counted(s.ranks, "rank") } else { words.join(", ") }
        }
    }
}

/// The same in a sentence: "4 ranks".
pub fn described(point: &Point, group: &PointGroup) -> String {
    let s = &point.settings;
    match group.kind {
        Kind::Strong | Kind::Weak | Kind::FixedPerRank => counted(s.ranks, "rank"),
        Kind::Nodes => format!("{} on {}", counted(s.ranks, "rank"), counted(s.hosts, "host")),
        Kind::Batch => format!("batch {}", s.batch_per_rank),
        Kind::Accumulation => counted(s.accumulation, "micro-step"),
        Kind::Zero => format!("stage {}", s.stage()),
        _ => label(point, group),
    }
}

/// Settings with their values in words, as (name, text).
fn words(s: &Settings) -> Vec<(&'static str, String)> {
    let mut words = vec![
        ("ranks", counted(s.ranks, "rank")),
        ("hosts", counted(s.hosts, "host")),
        ("threads per rank", format!("{} per rank", counted(s.threads_per_rank, "thread"))),
        ("batch", format!("batch {} per rank", s.batch_per_rank)),
        ("accumulation", format!("accumulation {}", s.accumulation)),
        ("global batch", format!("global batch {}", s.global_batch)),
        ("task", s.task.clone()),
        ("model", s.model.clone()),
        ("image size", format!("{} px", s.image_size)),
        ("data", s.data.clone()),
        ("part of the data", format!("{} of the data", percent(s.data_fraction))),
        ("images per epoch", format!("{} images per epoch", grouped(s.images_per_epoch as f64))),
        ("epochs", counted(s.epochs as usize, "epoch")),
        ("optimizer", s.optimizer.clone()),
        ("precision", s.precision.clone()),
        ("device", s.device.clone()),
        ("communication", format!("communication over {}", s.comm)),
    ];
    words.extend(unsettled(s));
    words
}

/// Those of a point that are not the same in all of them.
pub fn settings(s: &Settings, all: &[&Settings]) -> Vec<(&'static str, String)> {
    let others: Vec<_> = all.iter().map(|other| words(other)).collect();
    let differs = |i: usize, text: &str| others.iter().any(|other| other[i].1 != text);
    words(s)
        .into_iter()
        .enumerate()
        .filter(|(i, (_, text))| differs(*i, text))
        .map(|(_, word)| word)
        .collect()
}

/// Those that are the same in all.
pub fn common_settings(all: &[&Settings]) -> Vec<(&'static str, String)> {
    let Some(first) = all.first() else { return vec![] };
    let differing = settings(first, all);
    words(first).into_iter().filter(|word| !word.1.is_empty() && !differing.contains(word)).collect()
}

pub fn measured(point: &Point) -> impl Iterator<Item = (usize, &Measured)> {
    point.runs.iter().filter_map(|run| match &run.outcome {
        Outcome::Done(measured) => Some((run.repeat, measured.as_ref())),
        Outcome::Failed { .. } => None,
    })
}

pub fn errors(point: &Point) -> impl Iterator<Item = (usize, &str)> {
    point.runs.iter().filter_map(|run| match &run.outcome {
        Outcome::Failed { error } => Some((run.repeat, error.as_str())),
        Outcome::Done(_) => None,
    })
}

/// Errors of runs, each once with the runs that had it.
pub fn failures(point: &Point) -> Vec<(String, &str)> {
    let mut out: Vec<(Vec<String>, &str)> = vec![];
    for (repeat, error) in errors(point) {
        let run = (repeat + 1).to_string();
        match out.iter_mut().find(|known| known.1 == error) {
            Some(known) => known.0.push(run),
            None => out.push((vec![run], error)),
        }
    }
    let named =
        |runs: Vec<String>| format!("run{} {}", if runs.len() == 1 { "" } else { "s" }, runs.join(", "));
    out.into_iter().map(|(runs, error)| (named(runs), error)).collect()
}

/// Equal names once, with how many there are.
pub fn counted_names(names: &[String]) -> Vec<String> {
    let mut out: Vec<(usize, &String)> = vec![];
    for name in names {
        match out.iter_mut().find(|known| known.1 == name) {
            Some(known) => known.0 += 1,
            None => out.push((1, name)),
        }
    }
    out.into_iter().map(|(n, name)| if n == 1 { name.clone() } else { format!("{n} × {name}") }).collect()
}

pub fn oversubscribed(point: &Point) -> bool {
    point.flags.contains(&Flag::Oversubscribed)
}

pub fn unequal(point: &Point) -> Option<&str> {
    point.flags.iter().find_map(|flag| match flag {
        Flag::UnequalWork(what) => Some(what.as_str()),
        _ => None,
    })
}

/// Signs beside a point's name: † has more threads than cores, ≠ did other work.
pub fn signs(point: &Point) -> String {
    let dagger = if oversubscribed(point) { "†" } else { "" };
    let unequal = if unequal(point).is_some() { "≠" } else { "" };
    let space = if dagger.is_empty() && unequal.is_empty() { "" } else { "\u{a0}" };
    format!("{space}{dagger}{unequal}")
}

/// What flags say, for tips and tables.
pub fn flags(point: &Point) -> Vec<String> {
    let runs = |repeats: &[usize]| repeats.iter().map(|r| (r + 1).to_string()).collect::<Vec<_>>().join(", ");
    point
        .flags
        .iter()
        .map(|flag| match flag {
            Flag::Oversubscribed => "† more threads than cores".to_string(),
            Flag::UnequalWork(what) => format!("≠ unequal work: {what}"),
            Flag::Outliers(repeats) => format!("far from the others: run {}", runs(repeats)),
            Flag::Failed(repeats) => format!("failed: run {}", runs(repeats)),
        })
        .collect()
}

/// Median, and the interval or the number of samples behind it.
pub fn estimate(e: &Estimate, text: impl Fn(f64) -> String) -> String {
    match e.interval {
        Some((low, high)) => format!("{} ({} to {})", text(e.median), text(low), text(high)),
        None => text(e.median),
    }
}

/// What a point came to besides its times: name, class of its element, estimate, and how that is written.
pub type Besides<'a> = (String, &'static str, &'a Estimate, fn(f64) -> String);

fn named<'a>(
    name: &str,
    class: &'static str,
    estimate: &'a Option<Estimate>,
    text: fn(f64) -> String,
) -> Option<Besides<'a>> {
    estimate.as_ref().map(|estimate| (name.to_string(), class, estimate, text))
}

pub fn besides(summary: &Summary) -> Vec<Besides<'_>> {
    let Usage {
        cpu_utilisation,
        gpu_utilisation,
        gpu_load,
        memory_bytes,
        planned_bytes,
        gpu_memory_bytes,
        watts,
        gpu_watts,
    } = &summary.usage;
    let score =
        summary.score.as_ref().map(|score| (score.name.clone(), "score", &score.value, numbers::score as _));
    let watt: fn(f64) -> String = |x| format!("{} W", short(x));
    let all = [
        score,
        named("CPU", "cpu-utilisation", cpu_utilisation, percent),
        named("GPU computing", "gpu-utilisation", gpu_utilisation, percent),
        named("GPU load", "gpu-load", gpu_load, percent),
        named("memory", "memory-bytes", memory_bytes, bytes),
        named("planned for a rank", "planned-bytes", planned_bytes, bytes),
        named("memory of a GPU", "gpu-memory-bytes", gpu_memory_bytes, bytes),
        named("processors", "watts", watts, watt),
        named("a GPU", "gpu-watts", gpu_watts, watt),
    ];
    all.into_iter().flatten().collect()
}

/// The samples of an estimate in a line.
pub fn samples(e: &Estimate, text: impl Fn(f64) -> String) -> String {
    const LISTED: usize = 12;
    let mut all: Vec<String> = e.samples.iter().take(LISTED).map(|x| text(*x)).collect();
    if e.samples.len() > LISTED {
        all.push(format!("… {} in all", e.samples.len()));
    }
    format!("{}: {}", if e.samples.len() == 1 { "one run" } else { "runs" }, all.join(" · "))
}

/// What a point came to, in lines, for tips.
pub fn story(point: &Point, name: &str) -> String {
    let mut lines = vec![name.to_string()];
    match &point.summary {
        None => lines.push("nothing measured".into()),
        Some(summary) => {
            lines.push(format!("{} per epoch", estimate(&summary.epoch_seconds, seconds)));
            lines.push(samples(&summary.epoch_seconds, seconds));
            lines.push(format!("{} images/s", short(summary.images_per_second.median)));
            let wall = summary.parts.wall();
            let synchronising = (summary.parts.communication + summary.parts.wait) / wall;
            if synchronising.is_finite() {
                lines.push(format!("{} of it communication and waiting", percent(synchronising)));
            }
        }
    }
    lines.extend(flags(point));
    lines.extend(errors(point).take(1).map(|(_, error)| error.to_string()));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_sort_by_their_size() {
        let mut names =
            ["vit-b/16 · batch 256", "vit-b/16 · batch 64", "16 ranks", "2 ranks", "vit-b/8", "a"];
        names.sort_by_cached_key(|name| natural(name));
        assert_eq!(
            names,
            ["2 ranks", "16 ranks", "a", "vit-b/8", "vit-b/16 · batch 64", "vit-b/16 · batch 256"]
        );
    }
}
