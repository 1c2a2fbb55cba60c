//! Time an epoch, speedup, efficiency, accuracy.

use super::{Study, key, middle, spread};
use crate::report::chart::{Across, Column, Columns, Dot, Lines, Segment, Series, Up};
use crate::report::figure::{Chart, Figure, Panel, Spread};
use crate::report::numbers::{percent, short};
use crate::report::points::{self, Group, Varies};
use crate::report::scene::Ink;
use crate::results::{Epoch, Estimate, Kind, Point, Settings, Summary};

const RANKS: fn(&Settings) -> f64 = |settings| settings.ranks as f64;

/// Time an epoch, with the part in which ranks exchange and wait on top.
pub fn times(study: &Study) -> Option<Figure> {
    let all = study.groups.iter().flat_map(|group| &group.points);
    let summaries = all.filter_map(|point| point.summary.as_ref());
    let top = summaries
        .map(|summary| spread(&summary.epoch_seconds).largest().max(summary.epoch_seconds.median))
        .filter(|x| x.is_finite())
        .fold(0.0, f64::max);
    if top <= 0.0 {
        return None;
    }
    let x_title = match points::varies(study.kind) {
        Varies::Number(name, _) | Varies::Name(name) => name.to_string(),
    };
    let panels = study
        .groups
        .iter()
        .map(|group| {
            let columns = group.points.iter().map(|point| column(point, group)).collect();
            let title = group.title(study.platforms);
            Panel { title, chart: Chart::Columns(Columns { top, x_title: x_title.clone(), columns }) }
        })
        .collect();
    let note = format!(
        "On top, in orange, the part in which ranks exchange gradients or wait for each other: their share of a mean step.{}{}",
        study.spread_sentence(),
        study.signs()
    );
    Some(Figure {
        id: study.id("time"),
        section: study.section(),
        context: study.context(),
        title: "time an epoch".into(),
        note,
        legend: vec![
            key(Ink::Compute, "computing, data and the rest"),
            key(Ink::Exchange, "synchronisation: exchange and waiting"),
        ],
        panels,
    })
}

fn column(point: &Point, group: &Group) -> Column {
    let label = points::label(point, group) + &points::signs(point);
    let tip = points::story(point, &points::described(point, group));
    let note = points::flags(point).join("; ");
    let pale = points::oversubscribed(point);
    let Some(Summary { epoch_seconds, parts, .. }) = &point.summary else {
        let (segments, spread) = (vec![], Spread::default());
        return Column { label, segments, total: 0.0, spread, pale, tip, note };
    };
    let total = epoch_seconds.median;
    let share = (parts.exchange + parts.wait) / points::wall(parts);
    let synchronising = if share.is_finite() { (share * total).clamp(0.0, total.max(0.0)) } else { 0.0 };
    let segments = vec![
        Segment { name: "rest", ink: Ink::Compute, seconds: total - synchronising },
        Segment { name: "synchronisation", ink: Ink::Exchange, seconds: synchronising },
    ];
    Column { label, segments, total, spread: spread(epoch_seconds), pale, tip, note }
}

pub fn speedup(study: &Study) -> Option<Figure> {
    let mut series = ratios(study, RANKS, |summary| summary.speedup.as_ref(), |_| true, short);
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
    let chart = Lines { across, x_title: "ranks".into(), up, series, ideal };
    Some(one_panel(study, "speedup", "speedup against ideal", note, chart))
}

pub fn efficiency(study: &Study) -> Option<Figure> {
    // More threads than cores say nothing of how well the work divides.
    let mut series = ratios(
        study,
        RANKS,
        |summary| summary.efficiency.as_ref(),
        |point| !points::oversubscribed(point),
        percent,
    );
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
    let chart = Lines { across, x_title: "ranks".into(), up: Up::Share, series, ideal };
    Some(one_panel(study, "efficiency", "parallel efficiency", note, chart))
}

fn one_panel(study: &Study, id: &str, title: &str, note: String, chart: Lines) -> Figure {
    let panels = vec![Panel { title: String::new(), chart: Chart::Lines(chart) }];
    Figure {
        id: study.id(id),
        section: study.section(),
        context: study.context(),
        title: title.into(),
        note,
        legend: vec![],
        panels,
    }
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
    let line = |group: &&'a Group<'a>| {
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

fn heading(study: &Study, group: &Group) -> String {
    let name = study.name(group);
    if name.is_empty() { String::new() } else { format!("{name} · ") }
}

/// What accuracy is counted as, in the order of preference.
pub fn score(epoch: &Epoch) -> Option<(&'static str, f64)> {
    let named = [
        ("mean IoU, held out", epoch.eval_miou),
        ("accuracy, held out", epoch.eval_top1),
        ("accuracy, training", epoch.top1),
    ];
    named.into_iter().find_map(|(name, score)| Some((name, score.filter(|x| x.is_finite())?)))
}

/// Accuracy after the last epoch against what was varied, where that isn't ranks alone.
pub fn accuracy(study: &Study) -> Option<Figure> {
    if !matches!(
        study.kind,
        Kind::Batch | Kind::Accumulation | Kind::Optimizer | Kind::Precision | Kind::Grid
    ) {
        return None;
    }
    let names: Vec<String> = {
        let mut names = vec![];
        for group in &study.groups {
            for point in &group.points {
                let label = points::label(point, group);
                if !names.contains(&label) {
                    names.push(label);
                }
            }
        }
        names
    };
    let varies = points::varies(study.kind);
    let place = |point: &Point, group: &Group| match &varies {
        Varies::Number(_, of) => of(&point.settings),
        Varies::Name(_) => {
            let label = points::label(point, group);
            names.iter().position(|name| *name == label).unwrap_or(0) as f64
        }
    };
    let mut what = None;
    let mut series = vec![];
    for group in &study.groups {
        let mut dots = vec![];
        for point in &group.points {
            let last = |curve: &[Epoch]| curve.last().and_then(score);
            let scores: Vec<(&str, f64)> =
                points::measured(point).filter_map(|(_, m)| last(&m.curve)).collect();
            let samples: Vec<f64> = scores.iter().map(|score| score.1).collect();
            let (Some(y), Some(first)) = (middle(&samples), scores.first()) else { continue };
            what.get_or_insert(first.0);
            let runs: Vec<String> = samples.iter().map(|x| percent(*x)).collect();
            let tip = format!(
                "{}{}\n{} {}\nruns: {}",
                heading(study, group),
                points::described(point, group),
                first.0,
                percent(y),
                runs.join(" · ")
            );
            let spread = Spread { interval: None, samples };
            let note = points::flags(point).join("; ");
            dots.push(Dot { x: place(point, group), y, spread, hollow: false, tip, note });
        }
        let (name, ink) = (study.name(group), study.ink(group));
        series.push(Series { name, ink, dashed: false, faint: false, dots });
    }
    series.retain(|line| !line.dots.is_empty());
    let what = what?;
    let (across, x_title) = match &varies {
        Varies::Number(name, _) => (Across::Doubling, name.to_string()),
        Varies::Name(name) => (Across::Names(names.clone()), name.to_string()),
    };
    let note = format!("{} after the last epoch, by run; lines go through the middle run.", capital(what));
    let chart = Lines { across, x_title, up: Up::Accuracy, series, ideal: None };
    Some(one_panel(study, "accuracy", "accuracy", note, chart))
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().collect::<String>() + chars.as_str())
}
