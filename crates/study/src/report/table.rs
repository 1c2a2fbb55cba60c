//! All points as tables of HTML. Every number stands twice: rounded for people, and in full as the value of its element.

use super::escape::markup;
use super::numbers::{exact, percent, seconds, short};
use super::points::{self, PointGroup};
use crate::results::{Estimate, Point, Results, Settings};
use std::fmt::Write;

/// A table for each group.
pub fn tables(results: &[Results]) -> String {
    let groups = points::groups(results);
    let mut out = String::new();
    for group in &groups {
        table(&mut out, group, results.len());
    }
    out
}

fn table(out: &mut String, group: &PointGroup, platforms: usize) {
    let title = [points::kind_title(group.kind).to_string(), group.title(platforms)];
    let title: Vec<String> = title.into_iter().filter(|part| !part.is_empty()).collect();
    let related = group.points.iter().filter_map(|p| p.summary.as_ref()).any(|s| s.speedup.is_some());
    let more = if related { "<th>speedup</th><th>efficiency</th><th>serial part</th>" } else { "" };
    let _ = write!(
        out,
        "<table><caption>{}<small>{}</small></caption><thead><tr><th>point</th><th>time per epoch</th><th>images/s</th>\
         {more}</tr></thead><tbody>",
        markup(&title.join(" · ")),
        points::kind_sentence(group.kind)
    );
    let all: Vec<&Settings> = group.points.iter().map(|point| &point.settings).collect();
    group.points.iter().for_each(|point| row(out, point, group, &all, related));
    out.push_str("</tbody></table>\n");
}

fn row(out: &mut String, point: &Point, group: &PointGroup, all: &[&Settings], related: bool) {
    let name = points::described(point, group);
    let words = points::settings(&point.settings, all).into_iter().map(|(_, text)| text);
    let words: Vec<String> = words.filter(|text| !name.split(" on ").any(|part| part == text)).collect();
    let _ = write!(
        out,
        "<tr class=\"point\" data-point=\"{}\" data-platform=\"{}\"><td>{}{}<small>{}</small></td>",
        markup(&point.id),
        group.platform,
        markup(&name),
        points::signs(point),
        markup(&words.join(" · "))
    );
    match &point.summary {
        Some(summary) => {
            cell(out, "time per epoch", "epoch-seconds", Some(&summary.epoch_seconds), seconds);
            cell(out, "images/s", "images-per-second", Some(&summary.images_per_second), short);
            if related {
                cell(out, "speedup", "speedup", summary.speedup.as_ref(), short);
                cell(out, "efficiency", "efficiency", summary.efficiency.as_ref(), percent);
                let fraction = summary.serial_fraction.map(|x| number("serial-fraction", x, &percent(x)));
                let fraction = fraction.unwrap_or_else(|| "–".into());
                let _ = write!(out, "<td data-name=\"serial part\">{fraction}</td>");
            }
            out.push_str("</tr>");
        }
        None => {
            let columns = if related { 5 } else { 2 };
            let _ = write!(out, "<td colspan=\"{columns}\" class=\"bad\">nothing measured</td></tr>");
        }
    }
    let besides = point.summary.as_ref().map_or_else(Vec::new, points::besides);
    let besides = besides.into_iter().map(|(name, class, estimate, text)| {
        let sure = estimate
            .interval
            .map_or(String::new(), |(low, high)| format!(" ({} to {})", text(low), text(high)));
        format!("{} {}{sure}", markup(&name), number(class, estimate.median, &text(estimate.median)))
    });
    let mut says: Vec<String> = point.limiter.iter().map(|limiter| markup(&limiter.sentence)).collect();
    says.extend(
        points::flags(point).iter().map(|flag| format!("<span class=\"bad\">{}</span>", markup(flag))),
    );
    let columns = if related { 6 } else { 3 };
    let _ = write!(
        out,
        "<tr class=\"says\"><td colspan=\"{columns}\">{}<small>{}</small></td></tr>",
        says.join(" · "),
        besides.collect::<Vec<_>>().join(" · ")
    );
}

fn cell(out: &mut String, name: &str, class: &str, estimate: Option<&Estimate>, text: fn(f64) -> String) {
    let Some(estimate) = estimate else {
        let _ = write!(out, "<td data-name=\"{name}\">–</td>");
        return;
    };
    let below = match estimate.interval {
        Some((low, high)) => format!(
            "{} to {}",
            number(&format!("{class}-low"), low, &text(low)),
            number(&format!("{class}-high"), high, &text(high))
        ),
        None if estimate.samples.len() == 1 => "one run".into(),
        None => format!("{} runs", estimate.samples.len()),
    };
    // The first estimate tells how many runs there are; the others had the same.
    let below = if estimate.interval.is_none() && class != "epoch-seconds" { String::new() } else { below };
    let small = if below.is_empty() { below } else { format!("<small>{below}</small>") };
    let _ = write!(
        out,
        "<td data-name=\"{name}\" title=\"{}\">{}{small}</td>",
        markup(&points::samples(estimate, text)),
        number(class, estimate.median, &text(estimate.median))
    );
}

fn number(class: &str, x: f64, text: &str) -> String {
    format!("<data class=\"{class}\" value=\"{}\">{}</data>", exact(x), markup(text))
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
