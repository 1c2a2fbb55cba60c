//! Figures and pieces of the live page.

use super::build::{self, part_row, parts_legend};
use super::chart::{Across, Dot, Lines, Rows, Series, Up};
use super::escape::markup;
use super::figure::{Chart, Figure, Panel, Spread};
use super::numbers::short;
pub use super::numbers::{bytes, counted, date, grouped, percent, score, seconds};
use super::scene::Ink;
use super::{html, page, table};
use crate::results::Results;
use records::{FIGURES, METRICS, Parts, Scale};

const SCRIPT: &str = include_str!("page/live.js");
const STYLE: &str = include_str!("page/live.css");

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
    let mut out = page::head("vitesse", true).replace("</head>", &format!("<style>{STYLE}</style>\n</head>"));
    out.push_str(
        "<body>\n<header><p class=\"kicker\"><a id=\"home\" href=\"../../\" hidden>← all runs</a><span id=\"kind\">vitesse · live</span></p>\
         <h1 id=\"title\">…</h1><p class=\"summary\" id=\"about\"></p>\
         <progress id=\"share\" max=\"1\" value=\"0\" aria-label=\"Progress\"></progress>\
         <p class=\"meta\" id=\"state\" role=\"status\">asking…</p>\
         <p id=\"find\" hidden><input type=\"search\" aria-label=\"Find runs by name, model, data or state\" \
         placeholder=\"Find by name, model, data or state\"></p></header>\n\
         <main><section id=\"now\"></section><section id=\"figures\"></section><section id=\"log\"></section>\
         <section id=\"facts\"></section></main>\n",
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

/// A figure with the curves of the metrics that its charts have, if any has points.
fn curves(figure: &records::Figure, all: &[Curve]) -> Option<Figure> {
    let drawn: Vec<(&records::Chart, Vec<Series>)> =
        figure.charts.iter().map(|chart| (chart, chart_series(chart, all))).collect();
    let series = || drawn.iter().flat_map(|(_, series)| series);
    series().next()?;
    let mut note = vec!["By step.".to_string()];
    if series().any(|line| line.faint) {
        note.push(
            "Faint: every step, or the mean of neighbours where there are many; in front of it, smoothed."
                .into(),
        );
    }
    if series().any(|line| line.name == VALIDATION) {
        note.push(format!("Dots are evaluations{}.", best(figure, all)));
    }
    let panel = |(chart, series): (&records::Chart, Vec<Series>)| {
        let lines = Lines {
            across: Across::Whole,
            x_title: "step".into(),
            y_title: chart_name(chart),
            up: up(chart.scale),
            series,
            ideal: None,
        };
        Panel { title: chart.title.into(), chart: Chart::Lines(lines) }
    };
    let panels = drawn.into_iter().filter(|(_, series)| !series.is_empty()).map(panel).collect();
    Some(plain(figure.id, figure.title, &note.join(" "), vec![], panels))
}

fn up(scale: Scale) -> Up {
    match scale {
        Scale::Free => Up::Free,
        Scale::Share => Up::Accuracy,
        Scale::Part => Up::Share,
        Scale::Amount => Up::Amount,
        Scale::Bytes => Up::Bytes,
    }
}

const VALIDATION: &str = "validation";
/// Evaluations that are marked; a line through more has no dots.
const MARKED: usize = 32;

/// The curves of a chart: what is noisy smoothed, with all its points behind, and evaluations marked.
fn chart_series(chart: &records::Chart, all: &[Curve]) -> Vec<Series> {
    let mut series = vec![];
    let up = up(chart.scale);
    for (declared, points) in METRICS.iter().zip(all).filter(|(_, points)| !points.is_empty()) {
        let Some(curve) = declared.curve.filter(|curve| curve.chart == chart.id) else { continue };
        let ink = Ink::Series(match curve.name {
            "training" | "" => 0,
            VALIDATION => 1,
            _ => series.len(),
        });
        let said = if curve.name.is_empty() { chart_name(chart) } else { curve.name.to_string() };
        match smoothed(points).filter(|_| curve.smooth) {
            Some(smooth) => {
                series.push(Series { faint: true, ..line("", &said, ink, points, up, None) });
                series.push(line(curve.name, &said, ink, &smooth, up, Some(points)));
            }
            None if curve.name == VALIDATION && points.len() > MARKED => {
                series.push(line("", &said, ink, points, up, None));
                // Marks of their own, the first and the last among them: a line through some would be another line.
                let every = |i: usize| points[i * (points.len() - 1) / (MARKED - 1)];
                let name = |i: usize| if i + 1 == MARKED { curve.name } else { "" };
                series.extend((0..MARKED).map(|i| line(name(i), &said, ink, &vec![every(i)], up, None)));
            }
            None => series.push(line(curve.name, &said, ink, points, up, None)),
        }
    }
    series
}

/// What a chart is called where its figure says it.
fn chart_name(chart: &records::Chart) -> String {
    let figure = FIGURES.iter().find(|figure| figure.charts.iter().any(|one| one.id == chart.id));
    let title = if chart.title.is_empty() { figure.map_or("", |figure| figure.title) } else { chart.title };
    title.to_lowercase()
}

/// The best evaluation of a figure, where larger or smaller is better.
fn best(figure: &records::Figure, all: &[Curve]) -> String {
    let evaluated = |curve: &records::Curve| {
        curve.name == VALIDATION && figure.charts.iter().any(|chart| chart.id == curve.chart)
    };
    let evaluations =
        METRICS.iter().zip(all).find(|(declared, _)| declared.curve.as_ref().is_some_and(evaluated));
    let Some((_, points)) = evaluations.filter(|(_, points)| points.len() > 1) else { return String::new() };
    let larger = figure.charts.iter().any(|chart| chart.scale == Scale::Share);
    let better =
        |a: &&(f64, f64), b: &&(f64, f64)| if larger { a.1.total_cmp(&b.1) } else { b.1.total_cmp(&a.1) };
    points.iter().max_by(better).map_or(String::new(), |(step, value)| {
        let value = if larger { score(*value) } else { short(*value) };
        format!("; the best is {value}, after step {}", grouped(*step))
    })
}

/// Shorter curves are shown as they are.
const FEW: usize = 48;

/// A curve whose points are means of their neighbours on both sides, so that nothing is late: a neighbour counts half as much at a distance of a
/// fortieth of the curve. None if there are few.
fn smoothed(curve: &Curve) -> Option<Curve> {
    if curve.len() < FEW {
        return None;
    }
    let keep = 0.5f64.powf(40.0 / curve.len() as f64);
    let sums = |values: &mut dyn Iterator<Item = f64>| {
        let sum = values.scan((0.0, 0.0), |sum, y| {
            *sum = (keep * sum.0 + y, keep * sum.1 + 1.0);
            Some(*sum)
        });
        sum.collect::<Vec<(f64, f64)>>()
    };
    let before = sums(&mut curve.iter().map(|point| point.1));
    let mut after = sums(&mut curve.iter().rev().map(|point| point.1));
    after.reverse();
    // The point itself is in both.
    let mean = |i: usize| (before[i].0 + after[i].0 - curve[i].1) / (before[i].1 + after[i].1 - 1.0);
    Some(curve.iter().enumerate().map(|(i, point)| (point.0, mean(i))).collect())
}

/// A line with its name at its end; `said` is what tips call it, `raw` the values that were smoothed.
fn line(name: &str, said: &str, ink: Ink, curve: &Curve, up: Up, raw: Option<&Curve>) -> Series {
    let text = |y: f64| match up {
        Up::Accuracy => score(y),
        Up::Share => percent(y),
        Up::Bytes => bytes(y),
        _ => short(y),
    };
    let dots = curve.iter().enumerate().map(|(i, (x, y))| Dot {
        x: *x,
        y: *y,
        spread: Spread::default(),
        hollow: false,
        tip: match raw.and_then(|raw| raw.get(i)) {
            Some((_, measured)) => format!("{said}, step {x:.0}\n{}, smoothed {}", text(*measured), text(*y)),
            None => format!("{said}, step {x:.0}\n{}", text(*y)),
        },
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

/// What a run or study is, and everything that its configuration says, folded away.
pub fn facts(rows: &[(&str, String)], all: &[(String, String)]) -> String {
    let row = |(name, text): (&str, &str)| format!("<dt>{}</dt><dd>{}</dd>", markup(name), markup(text));
    let rows: String = rows.iter().map(|(name, text)| row((name, text))).collect();
    let all: String = all.iter().map(|(name, text)| row((name, text))).collect();
    let folded = match all.is_empty() {
        true => String::new(),
        false => format!(
            "<details><summary>All settings (config.json)</summary><dl class=\"all\">{all}</dl></details>"
        ),
    };
    format!("<h3>What runs here</h3><dl>{rows}</dl>{folded}")
}

/// A run or study in a list.
pub struct Listed<'a> {
    /// Where its page is.
    pub href: String,
    pub name: &'a str,
    /// How it is: in a word, and more.
    pub word: &'a str,
    pub state: String,
    /// From 0 to 1.
    pub share: f64,
    pub about: String,
    pub numbers: String,
}

/// A list of runs, and the way to the pages before and after; `none`: what is said of an empty one.
pub fn list(runs: &[Listed<'_>], before: Option<String>, after: Option<String>, none: &str) -> String {
    let item = |run: &Listed<'_>| {
        format!(
            "<li class=\"is-{}\"><a href=\"{}\">{}</a> <span class=\"how\">{}</span><small>{}</small><small>{}</small>\
             <progress max=\"1\" value=\"{:.4}\" aria-hidden=\"true\"></progress></li>",
            markup(run.word),
            markup(&run.href),
            markup(run.name),
            markup(&run.state),
            markup(&run.about),
            markup(&run.numbers),
            run.share
        )
    };
    if runs.is_empty() {
        return format!("<p class=\"lead\">{}</p>", markup(none));
    }
    let link = |href: Option<String>, text| {
        href.map_or(String::new(), |href| format!("<a href=\"{}\">{text}</a>", markup(&href)))
    };
    let pages = link(before, "← newer") + &link(after, "older →");
    let items: String = runs.iter().map(item).collect();
    format!("<ol class=\"runs\">{items}</ol><nav aria-label=\"Pages\">{pages}</nav>")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_smoothed_and_a_level_is_kept() {
        let noisy: Curve = (0..200).map(|i| (i as f64, if i % 2 == 0 { 1.0 } else { 3.0 })).collect();
        let smooth = smoothed(&noisy).unwrap();
        assert!(smooth.iter().all(|(_, y)| (y - 2.0).abs() < 0.2), "{smooth:?}");
        let slope: Curve = (0..200).map(|i| (i as f64, i as f64)).collect();
        let late = smoothed(&slope).unwrap()[50..150].iter().map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(late < 0.1, "{late} steps; a mean of what came before would be 7 late");
        let level: Curve = (0..100).map(|i| (i as f64, 0.7)).collect();
        assert!(smoothed(&level).unwrap().iter().all(|(_, y)| (y - 0.7).abs() < 1e-12));
        assert_eq!(smoothed(&level[..47].to_vec()), None);
    }

    #[test]
    fn evaluations_are_marked_however_many_there_are() {
        let loss = METRICS.iter().position(|one| one.metric == records::Metric::EvalLoss).unwrap();
        for many in [1, 5, 32, 33, 240] {
            let mut all = vec![vec![]; METRICS.len()];
            all[loss] = (0..many).map(|i| (10.0 * (i + 1) as f64, 2.0 / (i + 1) as f64)).collect();
            let series = chart_series(&FIGURES[0].charts[0], &all);
            // A line with more dots than these is drawn without them.
            let marked: usize = series.iter().map(|line| line.dots.len()).filter(|dots| *dots <= 32).sum();
            assert_eq!(marked, many.min(32));
            let last = series.last().unwrap();
            assert!(last.name == VALIDATION && last.dots.last().unwrap().x == 10.0 * many as f64);
        }
    }
}
