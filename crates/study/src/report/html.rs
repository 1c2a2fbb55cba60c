//! `report.html`.

use super::build;
use super::escape::{json_in_script, markup};
use super::figure::{Figure, NARROW, WIDE};
use super::numbers::{bytes, counted, date};
use super::points;
use super::svg;
use super::{page, table};
use crate::results::{Kind, Outcome, Results, Settings};
use serde_json::{Map, Value, json};
use std::fmt::Write;

const SCRIPT: &str = include_str!("page/report.js");

/// The page of one study, or of several against each other.
pub fn html(results: &[Results]) -> String {
    let figures = build::figures(results);
    let title = results.first().map_or("Scaling study", |first| first.title.as_str());
    let mut out = page::head(title, false);
    out.push_str("<body>\n");
    header(&mut out, results, title, &sections_of(results, &figures));
    out.push_str("<main>\n<section id=\"points\"><h2>All points</h2>\n");
    let _ = write!(out, "<p class=\"lead\">{}</p>", markup(&everywhere(results)));
    out.push_str(&table::tables(results));
    out.push_str("</section>\n");
    let failures = table::failures(results);
    if !failures.is_empty() {
        let _ = writeln!(out, "<section><h2>Failed runs</h2><ul class=\"failed\">{failures}</ul></section>");
    }
    sections(&mut out, results, &figures);
    out.push_str("</main>\n");
    footer(&mut out, results);
    scripts(&mut out, results, &figures);
    out.push_str("</body>\n</html>\n");
    out
}

fn header(out: &mut String, results: &[Results], title: &str, sections: &[Kind]) {
    let _ = write!(out, "<header><p class=\"kicker\">vitesse · scaling study</p><h1>{}</h1>", markup(title));
    let names = points::platform_names(results);
    for sentence in points::against(results) {
        let _ = write!(out, "<p class=\"summary\">{}</p>", markup(&sentence));
    }
    for (result, name) in results.iter().zip(&names) {
        let before = if results.len() > 1 { format!("<b>{}.</b> ", markup(name)) } else { String::new() };
        let _ = write!(out, "<p class=\"summary\">{before}{}</p>", markup(&result.summary));
    }
    for (result, name) in results.iter().zip(&names) {
        let platform = &result.platform;
        let mut about = vec![name.clone(), format!("host {}", platform.host), platform.cpu.clone()];
        about.push(counted(platform.cores, "core"));
        about.extend(points::counted_names(&platform.gpus));
        about.push(bytes(platform.memory_bytes as f64));
        about.push(date(result.started));
        about.push(format!("vitesse {}", result.version));
        let _ = write!(out, "<p class=\"meta\">{}</p>", markup(&about.join(" · ")));
    }
    let warnings: Vec<String> = results
        .iter()
        .zip(&names)
        .flat_map(|(result, name)| {
            let before = if results.len() > 1 { format!("{name}: ") } else { String::new() };
            result
                .warnings
                .iter()
                .map(move |warning| format!("<li>{}</li>", markup(&(before.clone() + warning))))
        })
        .collect();
    if !warnings.is_empty() {
        let _ = write!(out, "<ul class=\"warnings\" aria-label=\"Warnings\">{}</ul>", warnings.concat());
    }
    let links: Vec<String> = sections
        .iter()
        .map(|kind| format!("<a href=\"#{}\">{}</a>", kind.name(), points::kind_title(*kind)))
        .collect();
    let _ = writeln!(out, "<nav><a href=\"#points\">All points</a> {}</nav></header>", links.join(" "));
}

/// What all points have in common.
fn everywhere(results: &[Results]) -> String {
    let all: Vec<&Settings> =
        results.iter().flat_map(|result| result.points.iter().map(|point| &point.settings)).collect();
    let words: Vec<String> = points::common_settings(&all).into_iter().map(|(_, text)| text).collect();
    match words.is_empty() {
        true => String::new(),
        false => format!("Everywhere: {}.", words.join(" · ")),
    }
}

fn belongs(figure: &Figure, kind: Kind) -> bool {
    figure.section == points::kind_title(kind)
}

/// Kinds that have figures, in the order of reading.
fn sections_of(results: &[Results], figures: &[Figure]) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = points::groups(results).iter().map(|group| group.kind).collect();
    kinds.dedup();
    kinds.retain(|kind| figures.iter().any(|figure| belongs(figure, *kind)));
    kinds
}

/// A section for each kind, with its figures.
fn sections(out: &mut String, results: &[Results], figures: &[Figure]) {
    for kind in sections_of(results, figures) {
        let (id, title, sentence) = (kind.name(), points::kind_title(kind), points::kind_sentence(kind));
        let _ = writeln!(out, "<section id=\"{id}\"><h2>{title}</h2><p class=\"lead\">{sentence}</p>");
        let of_kind = figures.iter().filter(|figure| belongs(figure, kind));
        out.push_str("<div class=\"figures\">\n");
        of_kind.for_each(|one| out.push_str(&figure(one)));
        out.push_str("</div></section>\n");
    }
}

/// A figure in both widths; the page shows the one that fits.
pub fn figure(figure: &Figure) -> String {
    format!(
        "<figure id=\"{}\"{}><h3>{}</h3>\n{}\n{}\n<figcaption>{}</figcaption></figure>\n",
        markup(&figure.id),
        if figure.is_large() { " class=\"large\"" } else { "" },
        markup(&capital(&figure.title)),
        svg::in_page(&figure.scene(WIDE), "wide"),
        svg::in_page(&figure.scene(NARROW), "narrow"),
        markup(&figure.note)
    )
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().collect::<String>() + chars.as_str())
}

fn footer(out: &mut String, results: &[Results]) {
    let _ = writeln!(
        out,
        "<footer><h2>How to read this</h2>\
         <p>Times are medians over the runs of a point, warm-up left out. From five runs on, the range beside a median is its 95% \
         interval; with fewer, the runs themselves are shown. Speedup is against the point of the fewest ranks of a series, of \
         stages of ZeRO against the lowest over the same ranks, and efficiency is speedup for each rank. It is the product of four factors, as in the POP model: computation scaling (useful \
         work that an image takes, against the base: compute, optimizer, waiting for images, idling), load balance (a rank that is slow \
         over all steps), synchronisation (whoever is slow in a step alone) and transfer (communication that nothing hides). The serial \
         part is a fit of Amdahl’s law to a series of strong scaling, with its 95% interval. † marks points with more threads than cores, ≠ points that did other work than the first of their \
         series; neither is compared in silence.</p>\
         <p>Point at a mark, tap it, or go to it by keyboard (Tab, then arrows) to see its runs. {} \
         Single steps are in results.json alone.</p>\
         <button type=\"button\" id=\"all-data\" hidden>All data of this page (JSON)</button></footer>",
        counted(results.iter().map(|r| r.points.len()).sum(), "point") + " in all."
    );
}

fn scripts(out: &mut String, results: &[Results], figures: &[Figure]) {
    let csv: Map<String, Value> = figures.iter().map(|f| (f.id.clone(), f.csv().into())).collect();
    let drawn = json!({ "style": svg::file_style(), "csv": csv });
    let results: Vec<Results> = results.iter().map(without_steps).collect();
    let results = serde_json::to_string(&results).unwrap_or_else(|_| "[]".into());
    for (id, text) in [("results", results), ("figures", drawn.to_string())] {
        let text = json_in_script(&text);
        let _ = writeln!(out, "<script type=\"application/json\" id=\"{id}\">{text}</script>");
    }
    let _ = writeln!(out, "<script>{}\n{SCRIPT}</script>", page::FIGURES);
}

/// A page needs no single steps, of which there may be very many.
fn without_steps(results: &Results) -> Results {
    let mut results = results.clone();
    for run in results.points.iter_mut().flat_map(|point| &mut point.runs) {
        if let Outcome::Done(measured) = &mut run.outcome {
            measured.step_seconds.clear();
        }
    }
    results
}
