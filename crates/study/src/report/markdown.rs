//! `report.md`: for a terminal or a pull request.

use super::escape::markdown as escaped;
use super::numbers::{counted, date, percent, seconds, short};
use super::points::{self, PointGroup};
use crate::factors::waits_for;
use crate::results::{Estimate, Point, Results};
use records::FACTORS;
use std::fmt::Write;

pub fn markdown(results: &[Results]) -> String {
    let mut out = String::new();
    let title = results.first().map_or("Scaling study", |first| first.title.as_str());
    let _ = writeln!(out, "# {}\n", escaped(title));
    for sentence in points::against(results) {
        let _ = writeln!(out, "{}\n", escaped(&sentence));
    }
    for (result, name) in results.iter().zip(points::platform_names(results)) {
        if results.len() > 1 {
            let _ = write!(out, "**{}.** ", escaped(&name));
        }
        let _ = writeln!(out, "{}\n", escaped(&result.summary));
        let platform = &result.platform;
        let mut about = vec![escaped(&name), escaped(&platform.cpu), counted(platform.cores, "core")];
        about.extend(points::counted_names(&platform.gpus).iter().map(|gpu| escaped(gpu)));
        about.push(date(result.started));
        let _ = writeln!(out, "{}\n", about.join(" · "));
        for warning in &result.warnings {
            let _ = writeln!(out, "> {}\n", escaped(warning));
        }
    }
    let groups = points::groups(results);
    for (i, group) in groups.iter().enumerate() {
        table(&mut out, group, results.len());
        if groups.get(i + 1).is_none_or(|next| next.kind != group.kind) {
            let serial = points::serial(results, group.kind);
            serial.iter().for_each(|line| _ = writeln!(out, "{}\n", escaped(line)));
        }
    }
    failures(&mut out, &groups, results.len());
    let _ = writeln!(
        out,
        "Medians over the runs of a point; in brackets the 95% interval, from five runs on. Bars are time per epoch, ▒ of it communication \
         and waiting. Efficiency = compute (computation scaling) × balance (load balance) × sync (synchronisation) × transfer. † more threads than cores, ≠ other work than the first point."
    );
    out
}

const BAR: f64 = 16.0;

fn table(out: &mut String, group: &PointGroup, platforms: usize) {
    let title = [points::kind_title(group.kind).to_string(), group.title(platforms)];
    let title: Vec<String> = title.into_iter().filter(|part| !part.is_empty()).map(|t| escaped(&t)).collect();
    let _ = writeln!(out, "## {}\n\n{}\n", title.join(" · "), points::kind_sentence(group.kind));
    out.push_str("| point | time per epoch | | images/s | speedup | efficiency | compute | balance | sync | transfer |\n");
    out.push_str("|:--|--:|:--|--:|--:|--:|--:|--:|--:|--:|\n");
    let summaries = group.points.iter().filter_map(|point| point.summary.as_ref());
    let longest = summaries.map(|summary| summary.epoch_seconds.median).fold(0.0, f64::max);
    for point in &group.points {
        row(out, point, group, longest);
    }
    out.push('\n');
    for point in &group.points {
        let name = escaped(&points::described(point, group));
        let mut says: Vec<String> = point.limiter.iter().map(|l| escaped(&l.sentence)).collect();
        says.extend(point.factors.as_ref().and_then(waits_for).map(|who| escaped(&who)));
        says.extend(points::flags(point).iter().map(|flag| escaped(flag)));
        let besides = point.summary.as_ref().map_or_else(Vec::new, points::besides);
        let written = |(name, _, estimate, text): points::Besides| {
            format!("{name} {}", points::estimate(estimate, text))
        };
        says.extend(besides.into_iter().map(|one| escaped(&written(one))));
        if !says.is_empty() {
            let _ = writeln!(out, "- {name}: {}", says.join(" · "));
        }
    }
    out.push('\n');
}

fn row(out: &mut String, point: &Point, group: &PointGroup, longest: f64) {
    let name = escaped(&points::described(point, group)) + &points::signs(point);
    let Some(summary) = &point.summary else {
        let _ = writeln!(out, "| {name} | nothing measured | | | | | | | | |");
        return;
    };
    let cell = |estimate: Option<&Estimate>, text: fn(f64) -> String| {
        estimate.map_or("–".into(), |e| points::estimate(e, text))
    };
    let divided = FACTORS.map(|factor| cell(point.factors.as_ref().and_then(factor.of), percent));
    let parts = &summary.parts;
    let share = (parts.communication + parts.wait) / parts.wall();
    let _ = writeln!(
        out,
        "| {name} | {} | {} | {} | {} | {} | {} |",
        cell(Some(&summary.epoch_seconds), seconds),
        bar(summary.epoch_seconds.median / longest, share),
        cell(Some(&summary.images_per_second), short),
        cell(summary.speedup.as_ref(), short),
        cell(summary.efficiency.as_ref(), percent),
        divided.join(" | ")
    );
}

/// A bar of a length from 0 to 1, of which a share at its end is of another kind.
fn bar(length: f64, share: f64) -> String {
    let whole = if length.is_finite() { (length.clamp(0.0, 1.0) * BAR).round() as usize } else { 0 };
    let end = if share.is_finite() { (share.clamp(0.0, 1.0) * whole as f64).round() as usize } else { 0 };
    "█".repeat(whole - end) + &"▒".repeat(end)
}

fn failures(out: &mut String, groups: &[PointGroup], platforms: usize) {
    let mut lines = vec![];
    for group in groups {
        for point in &group.points {
            lines.extend(points::failures(point).into_iter().map(|(runs, error)| {
                let place = [group.title(platforms), points::described(point, group), runs];
                let place: Vec<String> = place.into_iter().filter(|part| !part.is_empty()).collect();
                format!("- {}: {}", escaped(&place.join(" · ")), escaped(error))
            }));
        }
    }
    if !lines.is_empty() {
        let _ = writeln!(out, "## Failed runs\n\n{}\n", lines.join("\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_their_length_and_their_end() {
        assert_eq!(bar(1.0, 0.25), "█".repeat(12) + "▒▒▒▒");
        assert_eq!(bar(0.5, 0.0), "█".repeat(8));
        assert_eq!(bar(f64::NAN, f64::NAN), "");
    }
}
