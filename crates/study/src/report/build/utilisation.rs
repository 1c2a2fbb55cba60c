//! How busy the processors were.

use super::{Study, middle};
use crate::report::chart::{Across, Dot, Lines, Series, Up};
use crate::report::figure::{Chart, Figure, Panel, Spread};
use crate::report::numbers::percent;
use crate::report::points::{self, Group, Varies};
use crate::results::{Measured, Point};

type Of = fn(&Measured) -> Option<f64>;

pub const CPU: (&str, Of) = ("CPU", |measured| measured.cpu_utilisation);
pub const GPU: (&str, Of) = ("GPU", |measured| measured.gpu_utilisation);

pub fn utilisation(study: &Study) -> Option<Figure> {
    let panels: Vec<Panel> = [CPU, GPU].into_iter().filter_map(|which| panel(study, which)).collect();
    if panels.is_empty() {
        return None;
    }
    let note = "Busy share of the cores that a run had, and of its GPUs, over the steps that count. Dots: single runs; \
                lines go through the middle run.";
    Some(Figure {
        id: study.id("utilisation"),
        section: study.section(),
        context: study.context(),
        title: "utilisation".into(),
        note: note.into(),
        legend: vec![],
        panels,
    })
}

pub fn panel(study: &Study, (name, of): (&str, Of)) -> Option<Panel> {
    let Varies::Number(x_title, x) = points::varies(study.kind) else { return None };
    let mut series: Vec<Series> = study
        .groups
        .iter()
        .map(|group| Series {
            name: study.name(group),
            ink: study.ink(group),
            dashed: false,
            faint: false,
            dots: group.points.iter().filter_map(|point| dot(point, group, name, of, x)).collect(),
        })
        .collect();
    series.retain(|line| !line.dots.is_empty());
    if series.is_empty() {
        return None;
    }
    let across = Across::Doubling;
    let chart = Lines { across, x_title: x_title.into(), up: Up::Share, series, ideal: None };
    Some(Panel { title: format!("{name} utilisation"), chart: Chart::Lines(chart) })
}

fn dot(
    point: &Point,
    group: &Group,
    name: &str,
    of: Of,
    x: fn(&crate::results::Settings) -> f64,
) -> Option<Dot> {
    let samples: Vec<f64> = points::measured(point).filter_map(|(_, measured)| of(measured)).collect();
    let y = middle(&samples)?;
    let runs: Vec<String> = samples.iter().map(|x| percent(*x)).collect();
    let head = points::described(point, group);
    let tip = format!("{head}\n{name} {}\nruns: {}", percent(y), runs.join(" · "));
    let hollow = points::oversubscribed(point);
    let note = points::flags(point).join("; ");
    Some(Dot { x: x(&point.settings), y, spread: Spread { interval: None, samples }, hollow, tip, note })
}
