//! Time per epoch, speedup, efficiency, accuracy.

use super::{Study, key, spread};
use crate::report::chart::{Across, Column, Columns, Dot, Lines, Segment, Series, Up};
use crate::report::figure::{Chart, Figure, Panel, Spread};
use crate::report::numbers::{percent, score as score_text, short};
use crate::report::points::{self, PointGroup, Varies};
use crate::report::scene::Ink;
use crate::results::{Estimate, Kind, Point, Score, Settings, Summary};

const RANKS: fn(&Settings) -> f64 = |settings| settings.ranks as f64;

/// Time per epoch, with the part in which ranks communicate and wait on top.
pub fn times(study: &Study) -> Option<Figure> {
    let top = study.groups.iter().map(|group| top_of(group)).fold(0.0, f64::max);
    if top <= 0.0 {
        return None;
    }
    let x_title = match points::varies(study.kind) {
        Varies::Number(name, _) | Varies::Name(name) => name.to_string(),
    };
    // Columns begin at nothing, so that no logarithm helps the short ones.
    let least = study.groups.iter().map(|group| top_of(group)).filter(|top| *top > 0.0).fold(top, f64::min);
    let apart = top / least > 20.0;
    let panels = study
        .groups
        .iter()
        .map(|group| {
            let columns = group.points.iter().map(|point| column(point, group)).collect();
            let title = group.title(study.platforms);
            let top = if apart { top_of(group) } else { top };
            Panel { title, chart: Chart::Columns(Columns { top, x_title: x_title.clone(), columns }) }
        })
        .collect();
    let note = format!(
        "On top, in orange, the part in which ranks reduce gradients or wait for each other: their share of a mean step.{}{}{}",
        if apart { " Each panel has a scale of its own." } else { "" },
        study.spread_sentence(),
        study.signs()
    );
    Some(study.figure(
        "time",
        "time per epoch",
        note,
        vec![
            key(Ink::Compute, "computing, data and the rest"),
            key(Ink::Communication, "synchronisation: communication and waiting"),
        ],
        panels,
    ))
}

/// The longest time per epoch of a group, with what is drawn above it.
fn top_of(group: &PointGroup) -> f64 {
    let times = group.points.iter().filter_map(|point| Some(&point.summary.as_ref()?.epoch_seconds));
    let tops = times.map(|time| spread(time).largest().max(time.median));
    tops.filter(|top| top.is_finite()).fold(0.0, f64::max)
}

fn column(point: &Point, group: &PointGroup) -> Column {
    let label = points::label(point, group) + &points::signs(point);
    let tip = points::story(point, &points::described(point, group));
    let note = points::flags(point).join("; ");
    let pale = points::oversubscribed(point);
    let Some(Summary { epoch_seconds, parts, .. }) = &point.summary else {
        let (segments, spread) = (vec![], Spread::default());
        return Column { label, segments, total: 0.0, spread, pale, tip, note };
    };
    let total = epoch_seconds.median;
    let share = (parts.communication + parts.wait) / parts.wall();
    let synchronising = if share.is_finite() { (share * total).clamp(0.0, total.max(0.0)) } else { 0.0 };
    let segments = vec![
        Segment { name: "rest", ink: Ink::Compute, seconds: total - synchronising },
        Segment { name: "synchronisation", ink: Ink::Communication, seconds: synchronising },
    ];
    Column { label, segments, total, spread: spread(epoch_seconds), pale, tip, note }
}

/// Numbers of ranks and the like double from mark to mark; stages of ZeRO are counted.
pub fn across(study: &Study) -> Across {
    if study.kind == Kind::Zero { Across::Even } else { Across::Doubling }
}

/// Images/s against the lowest stage of ZeRO, over the same ranks.
fn against_the_lowest_stage(study: &Study) -> Option<Figure> {
    let mut series = ratios(study, Settings::stage, |summary| summary.speedup.as_ref(), |_| true, percent);
    series.retain(|line| line.dots.len() > 1);
    let xs = || series.iter().flat_map(|line| line.dots.iter().map(|dot| dot.x));
    let (low, high) = (xs().fold(f64::INFINITY, f64::min), xs().fold(0.0, f64::max));
    let note = format!(
        "Images/s of each stage for those of the lowest; what is missing to 100% is what the stage costs.{}{}",
        study.spread_sentence(),
        hollow(&series)
    );
    let (across, ideal) = (across(study), Some(("as fast".to_string(), vec![(low, 1.0), (high, 1.0)])));
    let (x_title, y_title) = ("stage of ZeRO".into(), "speed".into());
    let chart = Lines { across, x_title, y_title, up: Up::Share, series, ideal };
    (!chart.series.is_empty())
        .then(|| one_panel(study, "speed", "speed against the lowest stage", note, chart))
}

pub fn speedup(study: &Study) -> Option<Figure> {
    if study.kind == Kind::Zero {
        return against_the_lowest_stage(study);
    }
    let mut series = ratios(study, RANKS, |summary| summary.speedup.as_ref(), |_| true, short);
    from_the_base(study, &mut series);
    series.retain(|line| line.dots.len() > 1);
    let (low, high) = ends(&series)?;
    // A series that begins later, at its own 1, has an ideal of its own.
    let own = |line: &Series| line.dots.first().is_some_and(|dot| dot.x > low && (dot.y - 1.0).abs() < 1e-9);
    let ideal =
        (!series.iter().any(own)).then(|| ("ideal".to_string(), vec![(low, 1.0), (high, high / low)]));
    // To 8 ranks a plain axis shows best what is missing; beyond, the first points would lie on each other.
    let wide = high / low > 8.0;
    let (across, up) = if wide { (Across::Doubling, Up::Doubling) } else { (Across::Even, Up::Ratio) };
    let log = if wide { " Both axes double from mark to mark." } else { "" };
    let note = format!(
        "How many times faster than the fewest ranks of the series. Dashed: every rank as good as the first.{log}{}{}",
        study.spread_sentence(),
        hollow(&series)
    );
    let chart = Lines { across, x_title: "ranks".into(), y_title: "speedup (×)".into(), up, series, ideal };
    Some(one_panel(study, "speedup", "speedup against ideal", note, chart))
}

pub fn efficiency(study: &Study) -> Option<Figure> {
    if study.kind == Kind::Zero {
        return None;
    }
    // More threads than cores say nothing of how well the work divides.
    let mut series = ratios(
        study,
        RANKS,
        |summary| summary.efficiency.as_ref(),
        |point| !points::oversubscribed(point),
        percent,
    );
    from_the_base(study, &mut series);
    series.retain(|line| line.dots.len() > 1);
    let (low, high) = ends(&series)?;
    let all = || study.groups.iter().flat_map(|group| &group.points);
    let left_out = all().filter(|point| points::oversubscribed(point) && point.summary.is_some()).count();
    let left_out = match left_out {
        0 => String::new(),
        1 => " One point with more threads than cores is left out.".into(),
        n => format!(" {n} points with more threads than cores are left out."),
    };
    let note = format!(
        "Speedup for each rank: 100% is ideal.{left_out}{}{}",
        study.spread_sentence(),
        hollow(&series)
    );
    let across = if high / low > 8.0 { Across::Doubling } else { Across::Even };
    let ideal = Some(("ideal".to_string(), vec![(low, 1.0), (high, 1.0)]));
    let chart = Lines {
        across,
        x_title: "ranks".into(),
        y_title: "parallel efficiency".into(),
        up: Up::Share,
        series,
        ideal,
    };
    Some(one_panel(study, "efficiency", "parallel efficiency", note, chart))
}

/// Ranks on many hosts are held against one rank on one host, which is where their line begins, too.
fn from_the_base(study: &Study, series: &mut [Series]) {
    let first = |line: &Series| line.dots.first().cloned();
    let base = series.iter().filter_map(first).min_by(|a, b| a.x.total_cmp(&b.x));
    let Some(base) = base.filter(|_| study.kind == Kind::Nodes) else { return };
    for line in series.iter_mut().filter(|line| first(line).is_some_and(|dot| dot.x > base.x)) {
        line.dots.insert(0, base.clone());
    }
}

fn one_panel(study: &Study, id: &str, title: &str, note: String, chart: Lines) -> Figure {
    let panels = vec![Panel { title: String::new(), chart: Chart::Lines(chart) }];
    study.figure(id, title, note, vec![], panels)
}

/// What hollow dots are, where there are some.
fn hollow(series: &[Series]) -> &'static str {
    let any = series.iter().flat_map(|line| &line.dots).any(|dot| dot.hollow);
    if any { " Hollow: more threads than cores, or unequal work." } else { "" }
}

/// The fewest and the most of what lines go over.
fn ends(series: &[Series]) -> Option<(f64, f64)> {
    let xs = || series.iter().flat_map(|line| line.dots.iter().map(|dot| dot.x));
    let (low, high) = (xs().fold(f64::INFINITY, f64::min), xs().fold(0.0, f64::max));
    (low > 0.0 && high > low).then_some((low, high))
}

/// A line for each group.
pub fn ratios<'a>(
    study: &Study<'a>,
    x: fn(&Settings) -> f64,
    of: impl Fn(&'a Summary) -> Option<&'a Estimate>,
    counts: impl Fn(&Point) -> bool,
    text: impl Fn(f64) -> String + Copy,
) -> Vec<Series> {
    let line = |group: &&'a PointGroup<'a>| {
        let dots = group.points.iter().filter(|point| counts(point)).filter_map(|point| {
            let estimate = of(point.summary.as_ref()?).filter(|e| e.median.is_finite())?;
            let head = format!("{}{}", heading(study, group), points::described(point, group));
            let mut tip = vec![head, points::estimate(estimate, text), points::samples(estimate, text)];
            tip.extend(points::flags(point));
            Some(Dot {
                x: x(&point.settings),
                y: estimate.median,
                spread: spread(estimate),
                hollow: points::oversubscribed(point) || points::unequal(point).is_some(),
                tip: tip.join("\n"),
                note: points::flags(point).join("; "),
            })
        });
        Series {
            name: study.name(group),
            ink: study.ink(group),
            dashed: false,
            faint: false,
            dots: dots.collect(),
        }
    };
    study.groups.iter().map(line).collect()
}

fn heading(study: &Study, group: &PointGroup) -> String {
    let name = study.name(group);
    if name.is_empty() { String::new() } else { format!("{name} · ") }
}

/// Accuracy, or whatever the task is evaluated by, after the last epoch against what was varied.
pub fn accuracy(study: &Study) -> Option<Figure> {
    let scores = || study.groups.iter().flat_map(|group| &group.points).filter_map(|point| score(point));
    let what = scores().next()?.name.clone();
    let varies = points::varies(study.kind);
    let mut names: Vec<String> = vec![];
    for (point, group) in study.groups.iter().flat_map(|group| group.points.iter().map(move |p| (p, group))) {
        let label = points::label(point, group);
        if !names.contains(&label) {
            names.push(label);
        }
    }
    let mut series = vec![];
    for group in &study.groups {
        let mut dots = vec![];
        for point in &group.points {
            // What is evaluated by something else has no place on the same axis.
            let Some(value) = score(point).filter(|s| s.name == what).map(|s| &s.value) else { continue };
            let label = points::label(point, group);
            let x = match &varies {
                Varies::Number(_, of) => of(&point.settings),
                Varies::Name(_) => names.iter().position(|name| *name == label).unwrap_or(0) as f64,
            };
            let head = format!("{}{}", heading(study, group), points::described(point, group));
            let told = format!("{what}: {}", points::estimate(value, score_text));
            let tip = [head, told, points::samples(value, score_text)].join("\n");
            let note = points::flags(point).join("; ");
            dots.push(Dot { x, y: value.median, spread: spread(value), hollow: false, tip, note });
        }
        let (name, ink) = (study.name(group), study.ink(group));
        series.push(Series { name, ink, dashed: false, faint: false, dots });
    }
    series.retain(|line| !line.dots.is_empty());
    let (across, x_title) = match varies {
        Varies::Number(name, _) => (across(study), name.to_string()),
        Varies::Name(name) => (Across::Names(names), name.to_string()),
    };
    let note = format!(
        "{}, after the last epoch; runs of a point differ in their seed.{}",
        capital(&what),
        study.spread_sentence()
    );
    let title = what.split(',').next().unwrap_or(&what).to_string();
    let y_title = title.clone();
    let chart = Lines { across, x_title, y_title, up: Up::Accuracy, series, ideal: None };
    Some(one_panel(study, "accuracy", &title, note, chart))
}

fn score(point: &Point) -> Option<&Score> {
    point.summary.as_ref()?.score.as_ref()
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().collect::<String>() + chars.as_str())
}
