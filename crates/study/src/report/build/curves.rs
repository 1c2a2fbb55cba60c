//! Loss and accuracy, epoch by epoch.

use super::Study;
use crate::report::chart::{Across, Dot, Lines, Series, Up};
use crate::report::figure::{Chart, Figure, Panel, Spread};
use crate::report::numbers::{score, short};
use crate::report::points::{self, PointGroup};
use crate::report::scene::Ink;
use crate::results::Epoch;
use records::Metric;

/// A value of an epoch, and what it is called.
type Of = fn(&Epoch) -> Option<(&'static str, f64)>;

pub fn curves(study: &Study) -> Option<Figure> {
    let mut panels = vec![];
    for group in &study.groups {
        for (of, up) in [(loss as Of, Up::Free), (Epoch::score as Of, Up::Accuracy)] {
            let (series, what) = lines(group, of, up);
            if series.iter().any(|line| line.dots.len() > 1) {
                let title = [what.to_string(), study.name(group)];
                let title = title.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ");
                let chart = Lines {
                    across: Across::Whole,
                    x_title: "epoch".into(),
                    y_title: what.into(),
                    up,
                    series,
                    ideal: None,
                };
                panels.push(Panel { title, chart: Chart::Lines(chart) });
            }
        }
    }
    if panels.is_empty() {
        return None;
    }
    let measured = || study.groups.iter().flat_map(|group| &group.points).flat_map(|p| points::measured(p));
    let scored = measured().find_map(|(_, m)| Some(m.curve.last()?.score()?.0)).unwrap_or("accuracy");
    let repeats = study.groups.iter().flat_map(|group| &group.points);
    let repeats = repeats.map(|point| points::measured(point).count()).max().unwrap_or(0);
    let faint = if repeats > 1 { " Faint lines are the other runs of the same settings." } else { "" };
    let note = format!("Learning by epoch; a line for each point, its first run.{faint}");
    Some(study.figure("curves", &format!("loss and {scored} by epoch"), note, vec![], panels))
}

fn loss(epoch: &Epoch) -> Option<(&'static str, f64)> {
    let named = [("training loss", Metric::Loss), ("validation loss", Metric::EvalLoss)];
    named.into_iter().find_map(|(name, metric)| Some((name, epoch.get(metric).filter(|x| x.is_finite())?)))
}

/// The curves of a group, and what they show.
fn lines(group: &PointGroup, of: Of, up: Up) -> (Vec<Series>, &'static str) {
    let text = |y: f64| if up == Up::Accuracy { score(y) } else { short(y) };
    let (mut series, mut what) = (vec![], "");
    let mut drawn = 0;
    for point in &group.points {
        let name = points::described(point, group);
        let mut any = false;
        for (i, (repeat, measured)) in points::measured(point).enumerate() {
            let values = measured.curve.iter().filter_map(|epoch| Some((epoch.epoch, of(epoch)?)));
            let values: Vec<(u64, (&'static str, f64))> = values.collect();
            let Some((_, (called, _))) = values.first() else { continue };
            // Training loss and validation loss are not the same thing.
            if !what.is_empty() && what != *called {
                continue;
            }
            (what, any) = (called, true);
            let dots = values.iter().map(|(epoch, (_, y))| Dot {
                x: *epoch as f64,
                y: *y,
                spread: Spread::default(),
                hollow: false,
                tip: format!("{name}, run {}\nepoch {epoch}: {what} {}", repeat + 1, text(*y)),
                note: format!("run {}", repeat + 1),
            });
            series.push(Series {
                name: if i == 0 { name.clone() } else { String::new() },
                ink: Ink::Series(drawn),
                dashed: false,
                faint: i > 0,
                dots: dots.collect(),
            });
        }
        drawn += usize::from(any);
    }
    (series, what)
}
