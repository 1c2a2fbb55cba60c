//! Where the efficiency went: a waterfall for the most ranks of every series, and a row for every point.

use super::{Study, key, spread};
use crate::factors::{waits_for, waterfall};
use crate::report::chart::{Row, Rows, Step, Waterfall};
use crate::report::figure::{Chart, Figure, Panel};
use crate::report::numbers::percent;
use crate::report::points::{self, PointGroup};
use crate::report::scene::Ink;
use crate::results::{Estimate, Kind, Point};
use records::FACTORS;

const LEFT: &str = "efficiency";
/// Of the factors, in their order.
const INKS: [Ink; 4] = [Ink::Data, Ink::Wait, Ink::Optimizer, Ink::Communication];

fn efficiency(point: &Point) -> Option<&Estimate> {
    point.summary.as_ref()?.efficiency.as_ref()
}

/// Order of a series: by ranks, then by the stage of ZeRO.
fn place(point: &Point) -> (usize, u64) {
    (point.settings.ranks, point.settings.stage() as u64)
}

/// Points that lost something against another: the first of a series is what they are compared with.
fn compared<'a>(group: &PointGroup<'a>) -> Vec<&'a Point> {
    let told =
        group.points.iter().copied().filter(|point| efficiency(point).is_some() && point.factors.is_some());
    let first = group.points.iter().map(|point| place(point)).min();
    let over_ranks = |point: &&Point| first.is_some_and(|(ranks, _)| point.settings.ranks > ranks);
    told.filter(|point| over_ranks(point) || group.kind == Kind::Zero && Some(place(point)) > first).collect()
}

pub fn falls(study: &Study) -> Option<Figure> {
    let mut panels = vec![];
    for group in &study.groups {
        let Some(point) = compared(group).into_iter().max_by_key(|point| place(point)) else {
            continue;
        };
        let title = [study.name(group), points::described(point, group)];
        let title = title.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ");
        panels.extend(fall(point).map(|chart| Panel { title, chart: Chart::Waterfall(chart) }));
    }
    let zero = |group: &&PointGroup| group.kind == Kind::Zero;
    let end = match (study.groups.iter().all(zero), study.groups.iter().any(zero)) {
        (true, _) => "at the highest stage of each series",
        (_, true) => "at the most ranks of each series, and at the highest stage of ZeRO",
        _ => "at the most ranks of each series",
    };
    let note = format!(
        "From 100% down to the parallel efficiency {end}; losses in percentage points. Computation scaling: \
         an image takes a rank longer (compute, optimizer, waiting for images, idling). Load balance: a rank that is slow over all \
         steps. Synchronisation: whoever is slow in a step alone. Transfer: communication that nothing hides. The factors multiply to \
         the efficiency.{}",
        study.spread_sentence()
    );
    (!panels.is_empty()).then(|| study.figure("waterfall", "where the efficiency went", note, vec![], panels))
}

fn fall(point: &Point) -> Option<Waterfall> {
    let (factors, measured) = (point.factors.as_ref()?, efficiency(point)?);
    let steps = waterfall(factors)?.into_iter().zip(FACTORS.iter().zip(INKS));
    let steps = steps.filter_map(|((name, from, to), (factor, ink))| {
        let estimate = (factor.of)(factors)?;
        let mut tip = vec![name.to_string(), points::estimate(estimate, percent)];
        tip.push(format!("from {} to {}", percent(from), percent(to)));
        tip.push(points::samples(estimate, percent));
        if matches!(name, "load balance" | "synchronisation") {
            tip.extend(waits_for(factors));
        }
        let (factor, short, spread) = (estimate.median, factor.short, spread(estimate));
        Some(Step { name, short, ink, from, to, factor, spread, tip: tip.join("\n") })
    });
    let tip = [LEFT.to_string(), points::estimate(measured, percent), points::samples(measured, percent)];
    let end = Step {
        name: LEFT,
        short: LEFT,
        ink: Ink::Compute,
        from: 0.0,
        to: measured.median,
        factor: measured.median,
        spread: spread(measured),
        tip: tip.join("\n"),
    };
    Some(Waterfall { y_title: "share of ideal speed (%)".into(), steps: steps.collect(), end })
}

/// The same for every point: what is left, and what each factor takes, to 100%.
pub fn rows(study: &Study) -> Option<Figure> {
    let mut panels = vec![];
    for group in &study.groups {
        let rows: Vec<Row> = compared(group).into_iter().filter_map(|point| row(point, group)).collect();
        if !rows.is_empty() {
            panels.push(Panel { title: group.title(study.platforms), chart: Chart::Rows(Rows { rows }) });
        }
    }
    let mut legend = vec![key(Ink::Compute, LEFT)];
    legend.extend(
        FACTORS.iter().zip(INKS).rev().map(|(factor, ink)| key(ink, &format!("lost to {}", factor.name))),
    );
    let note = format!(
        "The same for every point: from the right, what computation scaling, load balance, synchronisation and transfer take away from \
         100%, and on the left what is left. What a factor gains is in the table alone.{}",
        study.signs()
    );
    (!panels.is_empty()).then(|| study.figure("losses", "efficiency, point by point", note, legend, panels))
}

fn row(point: &Point, group: &PointGroup) -> Option<Row> {
    let (factors, measured) = (point.factors.as_ref()?, efficiency(point)?);
    let name = points::described(point, group);
    let fall = waterfall(factors)?;
    let mut parts = vec![(LEFT, Ink::Compute, measured.median)];
    let lost = fall.iter().zip(INKS).rev();
    // A gain leaves its place to what is lost after it.
    parts.extend(lost.map(|((name, from, to), ink)| (*name, ink, (from.min(1.0) - to.min(1.0)).max(0.0))));
    let mut tip = vec![name.clone(), format!("efficiency {}", points::estimate(measured, percent))];
    let told = FACTORS.iter().filter_map(|factor| Some((factor.name, (factor.of)(factors)?)));
    tip.extend(told.map(|(name, estimate)| format!("{name} {}", points::estimate(estimate, percent))));
    tip.extend(waits_for(factors));
    let note = points::flags(point).join("; ");
    Some(Row {
        label: format!("{name}{}", points::signs(point)),
        parts,
        pale: false,
        tip: tip.join("\n"),
        note,
    })
}
