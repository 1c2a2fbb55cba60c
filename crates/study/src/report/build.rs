//! From results to figures; each only where the results hold what it needs.

mod curves;
mod efficiency;
mod parts;
mod platforms;
mod scaling;
mod utilisation;

use super::figure::{Figure, Key, Panel, Spread};
use super::points::{self, PointGroup};
use super::scene::Ink;
use crate::results::{Estimate, Kind, Results};
pub use parts::{legend as parts_legend, named as parts_named, row as part_row};

/// All figures of some results, in the order of reading. More results than one are different platforms.
pub fn figures(results: &[Results]) -> Vec<Figure> {
    let groups = points::groups(results);
    let mut kinds: Vec<Kind> = groups.iter().map(|group| group.kind).collect();
    kinds.dedup();
    let mut figures = vec![];
    for kind in kinds {
        let of_kind: Vec<&PointGroup> = groups.iter().filter(|group| group.kind == kind).collect();
        let study = Study { kind, groups: of_kind, platforms: results.len() };
        figures.extend(scaling::times(&study));
        figures.extend(scaling::accuracy(&study));
        figures.extend(scaling::speedup(&study));
        figures.extend(scaling::efficiency(&study));
        figures.extend(efficiency::falls(&study));
        figures.extend(efficiency::rows(&study));
        figures.extend(platforms::compared(&study));
        figures.extend(curves::curves(&study));
        figures.extend(utilisation::utilisation(&study));
        figures.extend(utilisation::memory_and_power(&study));
        figures.extend(parts::by_point(&study));
        figures.extend(parts::by_rank(&study));
    }
    figures
}

/// The groups of a kind.
struct Study<'a> {
    kind: Kind,
    groups: Vec<&'a PointGroup<'a>>,
    platforms: usize,
}

impl Study<'_> {
    fn id(&self, figure: &str) -> String {
        format!("{}-{figure}", self.kind.name())
    }

    fn section(&self) -> String {
        points::kind_title(self.kind).into()
    }

    fn context(&self) -> String {
        points::kind_sentence(self.kind).into()
    }

    /// A figure of the kind.
    fn figure(&self, id: &str, title: &str, note: String, legend: Vec<Key>, panels: Vec<Panel>) -> Figure {
        let (section, context) = (self.section(), self.context());
        Figure { id: self.id(id), section, context, title: title.into(), note, legend, panels }
    }

    /// A group's colour is the same in all figures of a kind.
    fn ink(&self, group: &PointGroup) -> Ink {
        let same = |other: &&&PointGroup| other.platform == group.platform && other.series == group.series;
        Ink::Series(self.groups.iter().position(|other| same(&other)).unwrap_or(0))
    }

    /// What a group's line is called; nothing where there is only one.
    fn name(&self, group: &PointGroup) -> String {
        if self.groups.len() == 1 { String::new() } else { group.title(self.platforms) }
    }

    /// What the signs in a figure of these points mean.
    fn signs(&self) -> String {
        let points = || self.groups.iter().flat_map(|group| &group.points);
        let mut out = String::new();
        if points().any(|point| points::oversubscribed(point)) {
            out.push_str(" † More threads than cores.");
        }
        if points().any(|point| points::unequal(point).is_some()) {
            out.push_str(" ≠ Other work than the first point of its series.");
        }
        out
    }

    /// How the spread of runs is drawn.
    fn spread_sentence(&self) -> &'static str {
        let summaries = self.groups.iter().flat_map(|group| &group.points).filter_map(|p| p.summary.as_ref());
        let (mut intervals, mut dots) = (false, false);
        for summary in summaries {
            match summary.epoch_seconds.interval {
                Some(_) => intervals = true,
                None => dots |= summary.epoch_seconds.samples.len() > 1,
            }
        }
        match (intervals, dots) {
            (true, true) => {
                " Whiskers: 95% interval of the median; dots: single runs, where there are fewer than five."
            }
            (true, false) => " Whiskers: 95% interval of the median.",
            (false, true) => " Dots: single runs; fewer than five have no interval.",
            (false, false) => "",
        }
    }
}

fn spread(estimate: &Estimate) -> Spread {
    Spread { interval: estimate.interval, samples: estimate.samples.clone() }
}

fn key(ink: Ink, name: &str) -> Key {
    Key { ink, name: name.into() }
}
