//! One platform against another: the same series, measured in several places.

use super::{Study, scaling, utilisation};
use crate::report::chart::{Across, Series, Up};
use crate::report::figure::{Chart, Figure, Panel};
use crate::report::numbers::{percent, seconds, short};
use crate::report::points::{self, PointGroup, Varies};
use crate::results::{Estimate, Point, Summary};

/// A figure for every series that at least two platforms have.
pub fn compared(study: &Study) -> Vec<Figure> {
    let mut names: Vec<&str> = vec![];
    for group in &study.groups {
        if !names.contains(&group.series.as_str()) {
            names.push(&group.series);
        }
    }
    let mut figures = vec![];
    for (i, name) in names.into_iter().enumerate() {
        let groups: Vec<&PointGroup> =
            study.groups.iter().copied().filter(|group| group.series == name).collect();
        if groups.len() < 2 {
            continue;
        }
        // One platform is one line, so that its name alone tells it apart.
        let one = Study { kind: study.kind, groups, platforms: study.platforms };
        let panels = panels(&one);
        if panels.is_empty() {
            continue;
        }
        let title = if name.is_empty() { "platforms".to_string() } else { format!("platforms · {name}") };
        let note = format!(
            "The same settings on different platforms.{} Points with more threads than cores are left out of the efficiency.",
            study.spread_sentence()
        );
        figures.push(study.figure(&format!("platforms-{}", i + 1), &title, note, vec![], panels));
    }
    figures
}

/// A panel's title, its axis, what it shows, and how that is written.
type Compared = (&'static str, Up, fn(&Summary) -> Option<&Estimate>, fn(f64) -> String);

fn panels(study: &Study) -> Vec<Panel> {
    let Varies::Number(x_title, x) = points::varies(study.kind) else { return vec![] };
    let of: [Compared; 4] = [
        ("time per epoch", Up::Time, |s| Some(&s.epoch_seconds), seconds),
        ("images/s", Up::Amount, |s| Some(&s.images_per_second), short),
        ("speedup", Up::Ratio, |s| s.speedup.as_ref(), short),
        ("efficiency", Up::Share, |s| s.efficiency.as_ref(), percent),
    ];
    let mut panels = vec![];
    for (title, up, estimate, text) in of {
        let counts = |point: &Point| title != "efficiency" || !points::oversubscribed(point);
        let mut series = scaling::ratios(study, x, estimate, counts, text);
        rename(study, &mut series);
        series.retain(|line| !line.dots.is_empty());
        if series.len() > 1 {
            panels.push(utilisation::lines(Across::Doubling, (x_title, title), up, series));
        }
    }
    for which in utilisation::BUSY {
        panels.extend(utilisation::panel(study, which).map(|mut panel| {
            if let Chart::Lines(lines) = &mut panel.chart {
                rename(study, &mut lines.series);
            }
            panel
        }));
    }
    panels
}

/// Lines of a platform bear its name alone.
fn rename(study: &Study, series: &mut [Series]) {
    for line in series {
        if let Some(group) = study.groups.iter().find(|group| study.name(group) == line.name) {
            line.name = group.platform_name.clone();
        }
    }
}
