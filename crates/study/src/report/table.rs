//! All points as tables of HTML: a short row each, and below it one with the rest, which a page with script opens on demand. Every number
//! stands twice: rounded for people, and in full as the value of its element.

use super::build::parts_named;
use super::escape::markup;
use super::numbers::{bytes, exact, percent, seconds, short};
use super::points::{self, PointGroup};
use crate::factors::waits_for;
use crate::results::{Cause, Estimate, Kind, OfKind, Point, Results, Settings, Summary};
use records::{FACTORS, Factors};
use std::fmt::Write;

/// A table for each kind, with the serial part of its series below.
pub fn tables(results: &[Results]) -> String {
    let groups = points::groups(results);
    let mut kinds: Vec<Kind> = groups.iter().map(|group| group.kind).collect();
    kinds.dedup();
    let mut out = String::new();
    for kind in kinds {
        let of_kind: Vec<&PointGroup> = groups.iter().filter(|group| group.kind == kind).collect();
        table(&mut out, kind, &of_kind, results.len());
        out.push_str(&serial_parts(results, kind));
    }
    out
}

/// What a table shows, so that it has no empty columns.
struct Shown {
    series: bool,
    related: bool,
    divided: bool,
}

impl Shown {
    fn columns(&self) -> usize {
        3 + usize::from(self.series) + if self.related { 2 } else { 0 } + if self.divided { 4 } else { 0 }
    }
}

fn table(out: &mut String, kind: Kind, groups: &[&PointGroup], platforms: usize) {
    let all = || groups.iter().flat_map(|group| &group.points);
    let related = all().filter_map(|p| p.summary.as_ref()).any(|s| s.speedup.is_some());
    let parallel = |point: &Point| point.factors.is_some() && point.settings.ranks > 1;
    let titles: Vec<String> = groups.iter().map(|group| group.title(platforms)).collect();
    let shown = Shown { series: titles.len() > 1, related, divided: all().any(|point| parallel(point)) };
    let one = if shown.series { String::new() } else { titles.concat() };
    let title = [points::kind_title(kind).to_string(), one];
    let title: Vec<String> = title.into_iter().filter(|part| !part.is_empty()).collect();
    let _ = write!(
        out,
        "<table class=\"points{}\" data-kind=\"{}\"><caption>{}<small>{}</small></caption><thead><tr>",
        if shown.divided { " wide" } else { "" },
        kind.name(),
        markup(&title.join(" · ")),
        points::kind_sentence(kind)
    );
    if shown.series {
        out.push_str("<th scope=\"col\" class=\"name\" data-sort=\"place\">series</th>");
    }
    let head = |out: &mut String, name: &str, title: &str| {
        let title = if title.is_empty() { String::new() } else { format!(" title=\"{title}\"") };
        let _ = write!(out, "<th scope=\"col\" data-sort=\"value\"{title}>{name}</th>");
    };
    out.push_str("<th scope=\"col\" class=\"name\" data-sort=\"place\">point</th>");
    head(out, "time per epoch", "");
    head(out, "images/s", "");
    if related {
        head(out, "speedup", "");
        head(out, "efficiency", "");
    }
    if shown.divided {
        FACTORS.iter().for_each(|factor| head(out, factor.short, factor.name));
    }
    out.push_str("</tr></thead>");
    for (group, title) in groups.iter().zip(&titles) {
        let settings: Vec<&Settings> = group.points.iter().map(|point| &point.settings).collect();
        group.points.iter().for_each(|point| rows(out, point, (group, title), &settings, &shown));
    }
    out.push_str("</table>\n");
}

/// A point: its row and what explains it, in a body of their own, so that they stay together.
fn rows(
    out: &mut String,
    point: &Point,
    (group, series): (&PointGroup, &str),
    all: &[&Settings],
    shown: &Shown,
) {
    let name = points::described(point, group);
    let words = points::settings(&point.settings, all).into_iter().map(|(_, text)| text);
    let words: Vec<String> = words.filter(|text| !name.split(" on ").any(|part| part == text)).collect();
    let _ = write!(
        out,
        "<tbody data-series=\"{}\"><tr class=\"point\" data-point=\"{}\" data-platform=\"{}\">",
        markup(series),
        markup(&point.id),
        group.platform
    );
    if shown.series {
        let _ = write!(out, "<td class=\"name series\">{}</td>", markup(series));
    }
    let _ = write!(
        out,
        "<td class=\"name\" title=\"{}\">{}{}</td>",
        markup(&words.join(" · ")),
        markup(&name),
        points::signs(point)
    );
    match &point.summary {
        Some(summary) => numbers(out, summary, point.factors.as_ref(), shown),
        None => {
            let columns = shown.columns() - 1 - usize::from(shown.series);
            let _ = write!(out, "<td colspan=\"{columns}\" class=\"bad\">nothing measured</td>");
        }
    }
    let _ = write!(
        out,
        "</tr><tr class=\"says\"><td colspan=\"{}\">{}</td></tr></tbody>",
        shown.columns(),
        details(point, &words)
    );
}

fn numbers(out: &mut String, summary: &Summary, factors: Option<&Factors>, shown: &Shown) {
    cell(out, "time per epoch", "epoch-seconds", Some(&summary.epoch_seconds), seconds);
    cell(out, "images/s", "images-per-second", Some(&summary.images_per_second), short);
    if shown.related {
        cell(out, "speedup", "speedup", summary.speedup.as_ref(), short);
        cell(out, "efficiency", "efficiency", summary.efficiency.as_ref(), percent);
    }
    if shown.divided {
        for factor in FACTORS {
            cell(out, factor.short, factor.key, factors.and_then(factor.of), percent);
        }
    }
}

/// The median alone; interval and runs are said below and when pointed at.
fn cell(out: &mut String, name: &str, class: &str, estimate: Option<&Estimate>, text: fn(f64) -> String) {
    let _ = match estimate {
        None => write!(out, "<td data-name=\"{name}\">–</td>"),
        Some(estimate) => write!(
            out,
            "<td data-name=\"{name}\" title=\"{}\">{}</td>",
            markup(&points::samples(estimate, text)),
            number(class, estimate.median, &text(estimate.median))
        ),
    };
}

/// What explains a point: limiter, flags, losses, intervals, account of time, and all else that was measured.
fn details(point: &Point, words: &[String]) -> String {
    let mut out = String::new();
    let mut says: Vec<String> = point.limiter.iter().map(|limiter| markup(&limiter.sentence)).collect();
    says.extend(point.factors.as_ref().and_then(waits_for).map(|who| markup(&who)));
    says.extend(
        points::flags(point).iter().map(|flag| format!("<span class=\"bad\">{}</span>", markup(flag))),
    );
    if !says.is_empty() {
        let _ = write!(out, "<p>{}</p>", says.join(" · "));
    }
    let mut list = vec![];
    if let Some(summary) = &point.summary {
        list.extend(intervals(summary, point.factors.as_ref()));
        let wall = summary.parts.wall();
        let shares = parts_named(&summary.parts).map(|(name, _, time)| (name, time / wall));
        let shares = shares.into_iter().filter(|(_, share)| *share >= 0.0005);
        list.push((
            "account of a step",
            joined(shares.map(|(name, share)| format!("{name} {}", percent(share)))),
        ));
        let of_kind = |one: &OfKind| {
            let hidden = (one.seconds - one.exposed).max(0.0);
            let (exposed, hidden) = (seconds(one.exposed), seconds(hidden));
            format!("{} {}, {exposed} exposed, {hidden} hidden", one.kind.replace('_', "-"), bytes(one.bytes))
        };
        list.push(("collectives of a step", joined(summary.collectives.iter().map(of_kind))));
    }
    let lost = point.limiter.iter().flat_map(|limiter| &limiter.lost);
    let lost = lost.filter(|lost| lost.share.abs() >= 0.005);
    let lost = joined(lost.map(|lost| format!("{} {}", cause(lost.cause), percent(lost.share))));
    list.push(("lost against the base", lost));
    let besides = point.summary.as_ref().map_or_else(Vec::new, points::besides);
    let besides = besides.into_iter().map(|(name, class, estimate, text)| {
        let sure = estimate
            .interval
            .map_or(String::new(), |(low, high)| format!(" ({} to {})", text(low), text(high)));
        format!("{} {}{sure}", markup(&name), number(class, estimate.median, &text(estimate.median)))
    });
    list.push(("besides", besides.collect::<Vec<_>>().join(" · ")));
    list.push(("settings", markup(&words.join(" · "))));
    list.retain(|(_, text)| !text.is_empty());
    let rows = list.iter().map(|(name, text)| format!("<dt>{name}</dt><dd>{text}</dd>"));
    let _ = write!(out, "<dl>{}</dl>", rows.collect::<String>());
    out
}

fn joined(texts: impl Iterator<Item = String>) -> String {
    markup(&texts.collect::<Vec<_>>().join(" · "))
}

/// Every estimate with its interval, or how many runs there are.
fn intervals(summary: &Summary, factors: Option<&Factors>) -> Vec<(&'static str, String)> {
    type Of<'a> = (&'static str, &'static str, Option<&'a Estimate>, fn(f64) -> String);
    let times: [Of; 4] = [
        ("time per epoch", "epoch-seconds", Some(&summary.epoch_seconds), seconds),
        ("images/s", "images-per-second", Some(&summary.images_per_second), short),
        ("speedup", "speedup", summary.speedup.as_ref(), short),
        ("efficiency", "efficiency", summary.efficiency.as_ref(), percent),
    ];
    let divided =
        FACTORS.iter().map(|f| (f.name, f.key, factors.and_then(f.of), percent as fn(f64) -> String));
    let written = |(name, class, estimate, text): Of| {
        let estimate = estimate?;
        let (low, high) = estimate.interval?;
        let end = |end: &str, x: f64| number(&format!("{class}-{end}"), x, &text(x));
        Some(format!("{name} {} ({} to {})", text(estimate.median), end("low", low), end("high", high)))
    };
    let all: Vec<String> = times.into_iter().chain(divided).filter_map(written).collect();
    let runs = summary.images_per_second.samples.len();
    match (all.is_empty(), runs) {
        (true, 1) => vec![("runs", "one run".to_string())],
        (true, n) => vec![("runs", format!("{n} runs: too few for an interval"))],
        (false, n) => vec![("95% intervals", format!("{} · {n} runs", all.join(" · ")))],
    }
}

fn cause(cause: Cause) -> &'static str {
    match cause {
        Cause::Compute => "slower computing",
        Cause::Data => "waiting for images",
        Cause::Communication => "communication",
        Cause::Straggler => "waiting for the slowest rank",
        Cause::Waiting => "waiting for whoever is slow in a step",
        Cause::TinyBatch => "tiny batch",
        Cause::TooLittleWork => "padding",
        Cause::Oversubscribed => "shared cores",
        Cause::Optimizer => "optimizer",
        Cause::Idle => "idle",
        Cause::Unexplained => "unexplained",
    }
}

fn number(class: &str, x: f64, text: &str) -> String {
    format!("<data class=\"{class}\" value=\"{}\">{}</data>", exact(x), markup(text))
}

/// The serial part of each series of a kind, or why there is none.
fn serial_parts(results: &[Results], kind: Kind) -> String {
    let lines: Vec<String> = points::serial(results, kind).iter().map(|line| markup(line)).collect();
    if lines.is_empty() { String::new() } else { format!("<p class=\"serial\">{}</p>\n", lines.join("<br>")) }
}

/// Runs that failed, with what they said.
pub fn failures(results: &[Results]) -> String {
    let mut out = String::new();
    for group in &points::groups(results) {
        for point in &group.points {
            for (runs, error) in points::failures(point) {
                let place = [
                    points::kind_title(group.kind).to_string(),
                    group.title(results.len()),
                    points::described(point, group),
                    runs,
                ];
                let place: Vec<String> = place.into_iter().filter(|part| !part.is_empty()).collect();
                let (place, error) = (markup(&place.join(" · ")), markup(error));
                let _ = write!(out, "<li>{place}<br><code>{error}</code></li>");
            }
        }
    }
    out
}
