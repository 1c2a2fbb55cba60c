//! Figures and pieces of the live page.

use super::build::{self, part_row, parts_legend};
use super::chart::{Across, Dot, Lines, Rows, Series, Up};
use super::escape::markup;
use super::figure::{Chart, Figure, Panel, Spread};
pub use super::numbers::counted;
use super::numbers::{percent, short};
use super::scene::Ink;
use super::{html, page, table};
use crate::results::Results;
use records::{FIGURES, METRICS, Parts, Scale};

const SCRIPT: &str = include_str!("page/live.js");

/// Points of step and value.
pub type Curve = Vec<(f64, f64)>;

/// The time of a rank over some steps.
pub struct Rank {
    pub rank: usize,
    pub steps: usize,
    pub seconds: Parts,
}

/// What the page shows of a run.
pub struct RunCurves {
    /// Of every metric, in their order.
    pub curves: Vec<Curve>,
    pub ranks: Vec<Rank>,
}

/// The page itself; it asks for all it shows.
pub fn page() -> String {
    let mut out = page::head("vitesse", true);
    out.push_str(
        "<body>\n<header><p class=\"kicker\">vitesse · live</p><h1 id=\"title\">…</h1><p class=\"summary\" id=\"about\"></p>\
         <progress id=\"share\" max=\"1\" value=\"0\" aria-label=\"Progress\"></progress>\
         <p class=\"meta\" id=\"state\" role=\"status\">asking…</p></header>\n\
         <main><section id=\"now\"></section><section id=\"figures\"></section><section id=\"log\"></section></main>\n",
    );
    out.push_str(&format!("<script>{}\n{SCRIPT}</script>\n</body>\n</html>\n", page::FIGURES));
    out
}

pub fn run_figures(run: &RunCurves) -> Vec<Figure> {
    let mut figures: Vec<Figure> = FIGURES.iter().filter_map(|figure| curves(figure, &run.curves)).collect();
    let rows: Vec<_> = run
        .ranks
        .iter()
        .filter_map(|rank| {
            let name = format!("rank {}", rank.rank);
            let mean = rank.seconds.map(|seconds| seconds / rank.steps.max(1) as f64);
            part_row(name.clone(), &name, &mean, false, String::new())
        })
        .collect();
    if !rows.is_empty() {
        let panels = vec![Panel { title: String::new(), chart: Chart::Rows(Rows { rows }) }];
        let note = "Shares of a mean step of each rank, over the last steps.";
        figures.push(plain("ranks", "Where the time goes", note, parts_legend(), panels));
    }
    figures
}

fn plain(id: &str, title: &str, note: &str, legend: Vec<super::figure::Key>, panels: Vec<Panel>) -> Figure {
    let (section, context) = (String::new(), String::new());
    Figure { id: id.into(), section, context, title: title.into(), note: note.into(), legend, panels }
}

/// A figure with the curves of the metrics that name it, if any has points.
fn curves(figure: &records::Figure, all: &[Curve]) -> Option<Figure> {
    let up = match figure.scale {
        Scale::Free => Up::Free,
        Scale::Share => Up::Accuracy,
        Scale::Amount => Up::Amount,
    };
    let (mut series, mut longest) = (vec![], 0);
    for (declared, points) in METRICS.iter().zip(all).filter(|(_, points)| !points.is_empty()) {
        let Some(curve) = declared.curve.filter(|curve| curve.figure == figure.id) else { continue };
        let ink = match curve.name {
            "training" => 0,
            "validation" => 1,
            _ => series.len(),
        };
        series.push(line(curve.name, Ink::Series(ink), points, up));
        longest = longest.max(points.len());
    }
    if series.is_empty() {
        return None;
    }
    let note = if longest > 100 { "By step; of many steps the mean of neighbours." } else { "By step." };
    let chart = Lines {
        across: Across::Whole,
        x_title: "step".into(),
        y_title: figure.title.into(),
        up,
        series,
        ideal: None,
    };
    let panels = vec![Panel { title: String::new(), chart: Chart::Lines(chart) }];
    Some(plain(figure.id, figure.title, note, vec![], panels))
}

fn line(name: &str, ink: Ink, curve: &Curve, up: Up) -> Series {
    let text = |y: f64| if up == Up::Accuracy { percent(y) } else { short(y) };
    let dots = curve.iter().map(|(x, y)| Dot {
        x: *x,
        y: *y,
        spread: Spread::default(),
        hollow: false,
        tip: format!("{name}, step {x:.0}\n{}", text(*y)),
        note: String::new(),
    });
    Series { name: name.into(), ink, dashed: false, faint: false, dots: dots.collect() }
}

pub fn fragments(figures: &[Figure]) -> String {
    figures.iter().map(html::figure).collect()
}

/// Above what is shown of the run of a study that goes on.
pub fn now(which: &str) -> String {
    format!("<h2>Running now</h2><p class=\"lead\">{}</p>", markup(which))
}

pub fn log(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    format!("<h3>Last lines</h3><pre class=\"log\">{}</pre>", markup(&lines.join("\n")))
}

/// Table and figures of a study that goes on.
pub fn study(results: &Results) -> String {
    let results = std::slice::from_ref(results);
    let failures = table::failures(results);
    let failed = match failures.is_empty() {
        true => String::new(),
        false => format!("<h2>Failed runs</h2><ul class=\"failed\">{failures}</ul>"),
    };
    format!("{}{failed}<h2>Figures</h2>{}", table::tables(results), fragments(&build::figures(results)))
}
