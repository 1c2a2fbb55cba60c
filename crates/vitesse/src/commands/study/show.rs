//! What a study shows: its plan, how far it is, and what it came to.

use crate::layout;
use crate::signals::Signals;
use crate::table::megabytes;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use records::FACTORS;
use serde_json::json;
use std::io::IsTerminal;
use study::compare::Comparison;
use study::engine::Events;
use study::grid::Planned;
use study::results::{Estimate, Kind, Outcome, Point, Results, Run, Settings};
use study::spec::Study;
use study::{factors, report};
use text::many;
use text::printable::line;

/// `needs`: what there is to see to before it can run.
pub fn plan(study: &Study, points: &[Planned], needs: &[String], as_json: bool) {
    let each: Option<f64> = points.iter().map(|point| point.estimate).sum();
    let all = each.map(|seconds| seconds * study.repeats as f64);
    if as_json {
        return println!(
            "{}",
            json!({"study": study, "points": points, "estimated_seconds": all, "needs": needs})
        );
    }
    heading(&study.name, &study.title, points.first().map(|point| point.kind));
    // Without hosts and images per epoch where there is no room for them.
    let narrow = layout::narrower_than(92);
    let mut kind = None;
    for point in points {
        if kind.replace(point.kind) != Some(point.kind) {
            println!("{}", point.kind.holds());
            match narrow {
                true => println!(
                    "  {:>5} {:>7} {:>7} {:>6} {:>6} {:>11}  series",
                    "ranks", "threads", "batch", "global", "steps", "estimate"
                ),
                false => println!(
                    "  {:>5} {:>5} {:>7} {:>14} {:>6} {:>12} {:>6} {:>11}  series",
                    "ranks",
                    "hosts",
                    "threads",
                    "batch per rank",
                    "global",
                    "images/epoch",
                    "steps",
                    "estimate"
                ),
            }
        }
        let s = &point.settings;
        let batch = if s.accumulation == 1 {
            s.batch_per_rank.to_string()
        } else {
            format!("{} × {}", s.batch_per_rank, s.accumulation)
        };
        let estimate = point.estimate.map_or("?".to_string(), time);
        let more = if point.oversubscribed { " (oversubscribed)" } else { "" };
        let series = placed(&point.series, place(point.kind, s));
        if narrow {
            println!(
                "  {:>5} {:>7} {batch:>7} {:>6} {:>6} {estimate:>11}  {}{more}",
                s.ranks,
                s.threads_per_rank,
                s.global_batch,
                s.steps,
                line(&series)
            );
            continue;
        }
        println!(
            "  {:>5} {:>5} {:>7} {batch:>14} {:>6} {:>12} {:>6} {estimate:>11}  {}{more}",
            s.ranks,
            s.hosts,
            s.threads_per_rank,
            s.global_batch,
            s.images_per_epoch,
            s.steps,
            line(&series)
        );
    }
    let runs = points.len() * study.repeats;
    let all = all.map_or("as long as it takes: the device's speed is not known yet".to_string(), |s| {
        format!("about {}", time(s))
    });
    println!(
        "{} × {} = {}, {all}",
        many(points.len(), "point"),
        many(study.repeats, "repeat"),
        many(runs, "run")
    );
    needs.iter().for_each(|need| println!("note: {}", line(need)));
}

/// What is asked, unless the first kind of points says so below.
fn heading(name: &str, title: &str, kind: Option<Kind>) {
    if kind.is_none_or(|kind| kind.holds() != title) {
        println!("{}: {}", line(name), line(title));
    }
}

/// 95 → "1 min 35 s".
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 60.0 => format!("{s:.0} s"),
        s if s < 3600.0 => format!("{:.0} min {:.0} s", (s / 60.0).floor(), s % 60.0),
        s => format!("{:.0} h {:.0} min", (s / 3600.0).floor(), (s % 3600.0 / 60.0).floor()),
    }
}

/// A bar over all runs and one inside the run on a terminal, a line per run elsewhere.
pub struct Progress<'a> {
    signals: &'a Signals,
    repeats: usize,
    quiet: bool,
    bars: Option<Bars>,
    runs: usize,
    done: usize,
    /// Said once.
    last_error: Option<String>,
}

struct Bars {
    all: ProgressBar,
    one: ProgressBar,
}

impl<'a> Progress<'a> {
    pub fn new(signals: &'a Signals, repeats: usize, quiet: bool) -> Self {
        let bars = (!quiet && std::io::stdout().is_terminal()).then(|| {
            let style = |template: &str| {
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
            };
            let both = MultiProgress::new();
            let all = both.add(ProgressBar::new(0)).with_style(style("{bar:16} run {pos}/{len} · {msg}"));
            let one = both.add(ProgressBar::new(0)).with_style(style("{bar:16} step {pos}/{len} · {msg}"));
            Bars { all, one }
        });
        Progress { signals, repeats, quiet, bars, runs: 0, done: 0, last_error: None }
    }

    fn line(&self, text: &str) {
        match &self.bars {
            _ if self.quiet => {}
            Some(bars) => bars.all.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }
}

fn left(seconds: Option<f64>) -> String {
    seconds.map_or(String::new(), |seconds| format!("{} left", time(seconds)))
}

impl Events for Progress<'_> {
    fn started(&mut self, runs: usize, done: usize, seconds: Option<f64>) {
        (self.runs, self.done) = (runs, done);
        let before = if done > 0 { format!(", {done} of them done before") } else { String::new() };
        let about = seconds.filter(|_| done < runs).map_or(String::new(), |s| format!("; about {}", time(s)));
        self.line(&format!("{}{before}{about}", many(runs, "run")));
        if let Some(bars) = &self.bars {
            bars.all.set_length(runs as u64);
            bars.all.set_position(done as u64);
            bars.all.set_message(left(seconds));
        }
    }

    fn begun(&mut self, point: &Planned, repeat: usize) {
        if let Some(bars) = &self.bars {
            bars.one.set_length(point.settings.steps);
            bars.one.set_position(0);
            bars.one.set_message(format!("{}, repeat {} of {}", point.id, repeat + 1, self.repeats));
        }
    }

    fn stepped(&mut self, step: u64, _steps: u64) {
        if let Some(bars) = &self.bars {
            bars.one.set_position(step);
        }
    }

    fn ended(&mut self, point: &Planned, run: &Run, seconds: Option<f64>) {
        self.done += 1;
        let what = match &run.outcome {
            Outcome::Done(measured) => format!("{:.1} images/s", measured.images_per_second),
            Outcome::Failed { error } if self.last_error.as_ref() == Some(error) => {
                "failed as before".to_string()
            }
            Outcome::Failed { error } => {
                self.last_error = Some(error.clone());
                format!("failed: {}", line(error))
            }
        };
        let left = left(seconds);
        let dot = if left.is_empty() { "" } else { " · " };
        self.line(&format!(
            "run {}/{} · {}, repeat {} · {what}{dot}{left}",
            self.done,
            self.runs,
            point.id,
            run.repeat + 1
        ));
        if let Some(bars) = &self.bars {
            bars.all.set_position(self.done as u64);
            bars.all.set_message(left);
        }
    }

    fn stop(&self) -> bool {
        self.signals.came().is_some()
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if let Some(bars) = &self.bars {
            bars.one.finish_and_clear();
            bars.all.finish_and_clear();
        }
    }
}

fn with_interval(estimate: Option<&Estimate>, digits: usize) -> String {
    let Some(estimate) = estimate else { return "–".to_string() };
    let middle = format!("{:.digits$}", estimate.median);
    match estimate.interval {
        Some((low, high)) => format!("{middle} [{low:.digits$}, {high:.digits$}]"),
        None => middle,
    }
}

pub fn results(results: &Results) {
    println!();
    // Medians alone where there is no room for their intervals.
    let narrow = layout::narrower_than(100);
    let (a, b) = if narrow { (9, 10) } else { (26, 20) };
    let number = |estimate: Option<&Estimate>, digits: usize| match estimate {
        Some(estimate) if narrow => format!("{:.digits$}", estimate.median),
        estimate => with_interval(estimate, digits),
    };
    let (points, mut kind) = (report::in_order(results), None);
    heading(&results.name, &results.title, points.first().map(|point| point.kind));
    for point in &points {
        if kind.replace(point.kind) != Some(point.kind) {
            println!("{}", point.kind.holds());
            println!(
                "  {:>5} {:>6} {:>a$} {:>b$} {:>b$}",
                "ranks", "global", "images/s", "speedup", "efficiency"
            );
        }
        let summary = point.summary.as_ref();
        println!(
            "  {:>5} {:>6} {:>a$} {:>b$} {:>b$}  {}",
            point.settings.ranks,
            point.settings.global_batch,
            number(summary.map(|s| &s.images_per_second), 1),
            number(summary.and_then(|s| s.speedup.as_ref()), 2),
            number(summary.and_then(|s| s.efficiency.as_ref()), 2),
            line(&named(point))
        );
        if let Some(limiter) = &point.limiter {
            println!("        {}", line(&limiter.sentence));
        }
        if let Some(who) = point.factors.as_ref().and_then(factors::waits_for) {
            println!("        {}", line(&who));
        }
    }
    efficiencies(&points, narrow);
    for serial in &results.serial {
        let of =
            if serial.series.is_empty() { String::new() } else { format!(" of {}", line(&serial.series)) };
        match serial.part {
            Some(fit) => println!(
                "serial part{of}: {:.1}% [{:.1}, {:.1}], by Amdahl's law",
                100.0 * fit.value,
                100.0 * fit.interval.0,
                100.0 * fit.interval.1
            ),
            None => println!("serial part{of}: none is given, as {}", line(&serial.reason)),
        }
    }
    results.warnings.iter().for_each(|warning| println!("note: {}", line(warning)));
    println!("{}", line(&results.summary));
}

/// The series of a point, and its place there where that is no number of ranks; at a stage of ZeRO, with the memory of a rank.
fn named(point: &Point) -> String {
    let planned = point.summary.as_ref().and_then(|summary| summary.usage.planned_bytes.as_ref());
    let memory = planned.filter(|_| point.kind == Kind::Zero);
    let memory = memory.map(|bytes| format!(" · {} per rank", megabytes(bytes.median as usize)));
    placed(&point.series, place(point.kind, &point.settings)) + &memory.unwrap_or_default()
}

/// Where a point lies in its series, if that is no number of ranks.
fn place(kind: Kind, settings: &Settings) -> Option<String> {
    Some(match kind {
        Kind::Batch => format!("batch {}", settings.batch_per_rank),
        Kind::Accumulation => format!("accumulation {}", settings.accumulation),
        Kind::Optimizer => settings.optimizer.clone(),
        Kind::Precision => settings.precision.clone(),
        Kind::Zero => format!("stage {}", settings.stage()),
        _ => return None,
    })
}

fn placed(series: &str, place: Option<String>) -> String {
    place.map_or(series.to_string(), |place| format!("{series} · {place}"))
}

/// Where the efficiency of each point went: its factors, in percent.
fn efficiencies(points: &[&Point], narrow: bool) {
    let base = |point: &Point| {
        point.summary.as_ref()?.efficiency.as_ref().map(|e| e.interval.is_none() && e.median == 1.0)
    };
    let lost = |point: &&Point| base(point) == Some(false) && point.factors.is_some();
    if !points.iter().any(lost) {
        return;
    }
    println!("where the efficiency went, in percent:");
    let (wide, times) = if narrow { (8, " ") } else { (16, " × ") };
    let number = |estimate: Option<&Estimate>| match estimate {
        Some(estimate) if narrow => format!("{:.1}", 100.0 * estimate.median),
        estimate => percent(estimate),
    };
    let heads: Vec<String> = FACTORS.iter().map(|factor| format!("{:>wide$}", factor.short)).collect();
    println!(
        "  {:>5} {:>wide$} = {}",
        "ranks",
        if narrow { "effic." } else { "efficiency" },
        heads.join(times)
    );
    for point in points.iter().filter(|point| lost(point)) {
        let (summary, factors) = (point.summary.as_ref(), point.factors.as_ref());
        let cells = FACTORS.iter().map(|factor| format!("{:>wide$}", number(factors.and_then(factor.of))));
        println!(
            "  {:>5} {:>wide$} = {}  {}",
            point.settings.ranks,
            number(summary.and_then(|summary| summary.efficiency.as_ref())),
            cells.collect::<Vec<_>>().join(times),
            line(&named(point))
        );
    }
}

fn percent(estimate: Option<&Estimate>) -> String {
    let Some(estimate) = estimate else { return "–".to_string() };
    let whole = |x: f64| format!("{:.0}", 100.0 * x);
    match estimate.interval {
        Some((low, high)) => format!("{:.1} [{}, {}]", 100.0 * estimate.median, whole(low), whole(high)),
        None => format!("{:.1}", 100.0 * estimate.median),
    }
}

pub fn comparison(comparison: &Comparison) {
    if comparison.pairs.len() > 1 {
        comparison.pairs.iter().for_each(|pair| println!("{}: {}", line(&pair.id), line(&pair.sentence)));
    }
    let alone = comparison.left_out.iter().map(|id| line(id));
    alone.for_each(|id| println!("{id}: only in one of them, or not measured there"));
    println!("{}", line(&comparison.sentence));
}
