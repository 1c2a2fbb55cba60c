//! The answer of a study in one sentence for each kind: of the one series there is, of one that is named, or of all from the least
//! to the most.

use super::{base_of, over_ranks};
use crate::limiter::counted;
use crate::results::{Estimate, Kind, Point, Results};

/// Series that are listed one by one.
const LISTED: usize = 6;

pub fn answer(results: &Results) -> String {
    let mut kinds: Vec<Kind> = results.points.iter().map(|point| point.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let said: Vec<String> = kinds.into_iter().filter_map(|kind| answer_of(results, kind)).collect();
    if said.is_empty() { "No run succeeded.".to_string() } else { said.join(" ") }
}

fn answer_of(results: &Results, kind: Kind) -> Option<String> {
    let all = by_series(results.points.iter().filter(|point| point.kind == kind));
    let measured: Vec<Vec<&Point>> =
        all.iter().map(|points| done(points)).filter(|p| !p.is_empty()).collect();
    if measured.is_empty() {
        return None;
    }
    let said = match over_ranks(kind) {
        _ if kind == Kind::Zero => stages(&measured),
        true => scaled(results, &measured, all.len()).unwrap_or_else(|| rates(&measured.concat(), all.len())),
        false => fastest(kind, &measured),
    };
    Some(format!("{}: {said}.", kind.name()))
}

/// Points of each series, in the order in which series appear.
fn by_series<'a>(points: impl Iterator<Item = &'a Point>) -> Vec<Vec<&'a Point>> {
    let mut series: Vec<Vec<&Point>> = vec![];
    for point in points {
        match series.iter_mut().find(|known| known[0].series == point.series) {
            Some(known) => known.push(point),
            None => series.push(vec![point]),
        }
    }
    series
}

fn done<'a>(points: &[&'a Point]) -> Vec<&'a Point> {
    points.iter().copied().filter(|point| point.summary.is_some()).collect()
}

fn rate(point: &Point) -> f64 {
    point.summary.as_ref().map_or(0.0, |summary| summary.images_per_second.median)
}

/// How a series scales, at its most ranks.
struct Scaled<'a> {
    point: &'a Point,
    base: &'a Point,
    speedup: &'a Estimate,
    efficiency: f64,
}

impl<'a> Scaled<'a> {
    /// None if nothing of the series could be compared with its base.
    fn of(series: &[&'a Point], results: &'a Results) -> Option<Self> {
        let compared = series.iter().copied().filter_map(|point| {
            let summary = point.summary.as_ref()?;
            let (speedup, efficiency) = (summary.speedup.as_ref()?, summary.efficiency.as_ref()?.median);
            let base = base_of(point, &results.points).filter(|base| base.id != point.id)?;
            Some(Scaled { point, base, speedup, efficiency })
        });
        compared.max_by_key(|scaled| scaled.point.settings.ranks)
    }

    fn speedup(&self) -> String {
        let sure =
            self.speedup.interval.map_or(String::new(), |(low, high)| format!(" [{low:.2}, {high:.2}]"));
        let ranks = counted(self.point.settings.ranks, "rank");
        let times =
            format!("{:.2}{sure} times the images of {}", self.speedup.median, self.base.settings.ranks);
        format!("{ranks} do {times}")
    }

    fn limiter(&self) -> Option<String> {
        self.point.limiter.as_ref().map(|limiter| brief(&limiter.sentence))
    }
}

/// The first clause of a limiter's sentence without what stands in brackets: the tables have all of it.
fn brief(sentence: &str) -> String {
    let clause = sentence.split("; ").next().unwrap_or_default();
    let mut text = String::new();
    for part in clause.split(" (") {
        text.push_str(part.split_once(')').map_or(part, |(_, after)| after));
    }
    text
}

fn scaled(results: &Results, series: &[Vec<&Point>], all: usize) -> Option<String> {
    let scaled: Vec<Scaled> = series.iter().filter_map(|points| Scaled::of(points, results)).collect();
    let least = scaled.iter().min_by(|a, b| a.efficiency.total_cmp(&b.efficiency))?;
    let most = scaled.iter().max_by(|a, b| a.efficiency.total_cmp(&b.efficiency))?;
    if let [one] = &scaled[..] {
        let named = if all > 1 { format!("{}: ", one.point.series) } else { String::new() };
        let limiter = one.limiter().map_or(String::new(), |limiter| format!("; {limiter}"));
        return Some(format!(
            "{named}{} in the same time, an efficiency of {:.2}{limiter}",
            one.speedup(),
            one.efficiency
        ));
    }
    let end =
        |scaled: &Scaled| format!("{:.2} ({}: {})", scaled.efficiency, scaled.point.series, scaled.speedup());
    let some = if scaled.len() < all {
        format!("{} of {all} series", scaled.len())
    } else {
        format!("{all} series")
    };
    let limiter =
        least.limiter().map_or(String::new(), |limiter| format!("; {}: {limiter}", least.point.series));
    Some(format!("over {some}, efficiencies from {} to {}{limiter}", end(least), end(most)))
}

/// Where there is nothing to compare, or nothing that may be.
fn rates(points: &[&Point], all: usize) -> String {
    let named = |point: &Point| {
        let ranks = counted(point.settings.ranks, "rank");
        if all > 1 { format!("{}, {ranks}", point.series) } else { ranks }
    };
    let least = points.iter().copied().min_by(|a, b| rate(a).total_cmp(&rate(b)));
    let most = points.iter().copied().max_by(|a, b| rate(a).total_cmp(&rate(b)));
    match (least, most) {
        (Some(least), Some(most)) if points.len() > 1 => format!(
            "{:.1} ({}) to {:.1} images/s ({}); no point may be compared with its base, as noted",
            rate(least),
            named(least),
            rate(most),
            named(most)
        ),
        (Some(one), _) => format!("{:.1} images/s ({})", rate(one), named(one)),
        _ => String::new(),
    }
}

/// Memory and cost of each stage of ZeRO against the lowest, at the most ranks, of each series that has as many.
fn stages(series: &[Vec<&Point>]) -> String {
    let ranks = |points: &[&Point]| points[0].settings.ranks;
    let most = series.iter().map(|points| ranks(points)).max().unwrap_or(0);
    let largest: Vec<&Vec<&Point>> = series.iter().filter(|points| ranks(points) == most).collect();
    let compared = largest.iter().filter_map(|points| Some((points[0], above_lowest(points)?)));
    let compared: Vec<(&Point, String)> = compared.collect();
    match &compared[..] {
        [] => fastest(Kind::Zero, series),
        [(_, stages)] if largest.len() == 1 => format!("over {}, {stages}", counted(most, "rank")),
        several => {
            let named =
                several.iter().take(LISTED).map(|(point, stages)| format!("{}: {stages}", point.series));
            let more = several.len().saturating_sub(LISTED);
            let more = (more > 0).then(|| format!("and {more} more series"));
            named.chain(more).collect::<Vec<_>>().join("; ")
        }
    }
}

/// Memory and cost of the stages of a series against its lowest; None if no stage could be compared.
fn above_lowest(points: &[&Point]) -> Option<String> {
    let summary = |point: &Point| point.summary.clone();
    let bytes = |point: &Point| Some(summary(point)?.usage.planned_bytes?.median);
    let least = points.iter().copied().min_by(|a, b| a.settings.stage().total_cmp(&b.settings.stage()));
    let of = |point: &&Point| {
        let memory = match (bytes(point), least.and_then(bytes)) {
            (Some(here), Some(base)) => format!(" with {:.0}% of the memory", 100.0 * here / base),
            _ => String::new(),
        };
        let speed = summary(point)?.speedup?;
        let sure = speed.interval.map_or(String::new(), |(low, high)| format!(" [{low:.2}, {high:.2}]"));
        Some(format!("stage {} {:.2}{sure} times the images/s{memory}", point.settings.stage(), speed.median))
    };
    let base = least.map_or(0.0, |point| point.settings.stage());
    let above = points.iter().filter(|point| point.settings.stage() > base);
    let said: Vec<String> = above.filter_map(of).collect();
    (!said.is_empty()).then(|| format!("against stage {base}: {}", said.join("; ")))
}

fn fastest(kind: Kind, series: &[Vec<&Point>]) -> String {
    let of = |points: &Vec<&Point>| {
        let best = points.iter().max_by(|a, b| rate(a).total_cmp(&rate(b)))?;
        let settings = &best.settings;
        let what = match kind {
            Kind::Batch => format!("batch {}", settings.batch_per_rank),
            Kind::Accumulation => format!("accumulation {}", settings.accumulation),
            Kind::Optimizer => settings.optimizer.clone(),
            Kind::Zero => format!("stage {}", settings.stage()),
            _ => settings.precision.clone(),
        };
        Some(format!("{what} is fastest, {:.1} images/s ({})", rate(best), best.series))
    };
    let mut said: Vec<String> = series.iter().take(LISTED).filter_map(of).collect();
    if series.len() > LISTED {
        said.push(format!("and {} more series", series.len() - LISTED));
    }
    said.join("; ")
}

#[cfg(test)]
mod tests {
    use super::brief;

    #[test]
    fn a_headline_names_causes_without_their_arithmetic() {
        let sentence = "31% of the time is lost against 1 rank: 20% slower computing (an image takes a rank 1.29 times as long: ranks \
             share caches), 10% idle between pieces of work; other programs use the cores: 84% of the time";
        assert_eq!(
            brief(sentence),
            "31% of the time is lost against 1 rank: 20% slower computing, 10% idle between pieces of work"
        );
        assert_eq!(brief("computing takes 92% of the step"), "computing takes 92% of the step");
    }
}
