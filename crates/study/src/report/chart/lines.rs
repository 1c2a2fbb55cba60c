//! Lines through measured points, named at their ends.

use super::axis::{self, Scale};
use super::{Place, SMALL, spread};
use crate::report::figure::{Spread, TableRow};
use crate::report::measure;
use crate::report::numbers::{Unit, bytes, grouped, percent, seconds, short, tick};
use crate::report::scene::{Anchor, Ink, Item};

#[derive(Clone, Debug)]
pub struct Lines {
    pub across: Across,
    pub x_title: String,
    /// What goes up; its unit is added.
    pub y_title: String,
    pub up: Up,
    pub series: Vec<Series>,
    /// What would be ideal: a dashed line, with its name.
    pub ideal: Option<(String, Vec<(f64, f64)>)>,
}

/// The axis across.
#[derive(Clone, Debug, PartialEq)]
pub enum Across {
    /// Ticks where points are; by powers of two.
    Doubling,
    /// Ticks where points are.
    Even,
    /// Round ticks.
    Whole,
    /// Names; points lie at 0, 1, 2, …
    Names(Vec<String>),
}

/// The axis up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Up {
    /// From nothing on.
    Ratio,
    Doubling,
    /// From 0 to 100%, or as far as points go.
    Share,
    /// Shares that need not begin at nothing.
    Accuracy,
    Time,
    /// Anything, not from nothing.
    Free,
    /// Anything, from nothing on.
    Amount,
    /// From nothing on.
    Bytes,
}

impl Up {
    fn text(self, y: f64) -> String {
        match self {
            Up::Share | Up::Accuracy => percent(y),
            Up::Time => seconds(y),
            Up::Bytes => bytes(y),
            _ => short(y),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Series {
    /// At the end of the line; empty: no name.
    pub name: String,
    pub ink: Ink,
    pub dashed: bool,
    /// One of many, behind the others.
    pub faint: bool,
    pub dots: Vec<Dot>,
}

#[derive(Clone, Debug)]
pub struct Dot {
    pub x: f64,
    pub y: f64,
    pub spread: Spread,
    /// Needs care.
    pub hollow: bool,
    pub tip: String,
    pub note: String,
}

/// The most over the least, from which on an axis goes by powers of ten.
const SPAN: f64 = 30.0;
/// Where a line has more dots, it is drawn without them.
const DOTS: usize = 32;

impl Lines {
    /// Tells whether all names fit beside the ends of their lines, each at its place.
    pub fn names_fit(&self, width: f64) -> bool {
        let names = || self.series.iter().map(|series| series.name.as_str()).filter(|name| !name.is_empty());
        names().count() <= 5 && names().all(|name| measure::width(name, SMALL, true) <= 0.3 * width)
    }

    /// `named`: names stand at the ends of lines; otherwise a legend has them.
    pub fn draw(&self, place: Place, named: bool, items: &mut Vec<Item>) {
        let up = self.up_axis();
        let widest = |texts: &mut dyn Iterator<Item = &str>| {
            texts.map(|text| measure::width(text, SMALL, false)).fold(0.0, f64::max)
        };
        let left = widest(&mut up.labels.iter().map(String::as_str)) + 10.0;
        let names = self.series.iter().filter(|_| named).map(|series| series.name.as_str());
        let mut names = names.chain(self.ideal.iter().map(|ideal| ideal.0.as_str()));
        let room = (widest(&mut names) * 1.06).min(0.36 * place.width);
        let right = if room > 0.0 { room + 18.0 } else { 8.0 };
        let (bottom, top) = (place.y + place.height - 42.0, place.y + 34.0);
        let y_title =
            if up.unit.is_empty() { self.y_title.clone() } else { format!("{} ({})", self.y_title, up.unit) };
        let y_title = measure::fit(&y_title, SMALL, false, place.width);
        items.push(Item::text(place.x, place.y + 11.0, Anchor::Start, SMALL, Ink::Muted, y_title));
        let y = Scale { from: bottom, to: top, ..up.scale };
        for (tick, text) in up.ticks.iter().zip(up.labels) {
            let at = y.at(*tick);
            let ends = ((place.x + left, at), (place.x + place.width - right, at));
            items.push(Item::rule(ends.0, ends.1, Ink::Grid, 1.0));
            let x = place.x + left - 8.0;
            items.push(Item::text(x, at + 4.0, Anchor::End, SMALL, Ink::Muted, text));
        }
        let (from, to) = (place.x + left + 10.0, place.x + place.width - right - 6.0);
        let x = self.draw_across(from, to, bottom, items);
        let middle = (from + to) / 2.0;
        items.push(Item::text(middle, bottom + 38.0, Anchor::Middle, SMALL, Ink::Muted, &self.x_title));
        if let Some((_, line)) = &self.ideal {
            let points = line.iter().map(|(a, b)| (x.at(*a), y.at(*b))).collect();
            items.push(Item::Line { points, ink: Ink::Muted, width: 1.4, dash: &[5.0, 4.0], opacity: 1.0 });
        }
        let behind = self.series.iter().filter(|series| series.faint);
        let before = self.series.iter().filter(|series| !series.faint);
        let aside = self.aside();
        // Between names there is no way.
        if !matches!(self.across, Across::Names(_)) {
            behind.for_each(|series| series.draw_line(&x, &y, 0.0, items));
            before.clone().for_each(|series| series.draw_line(&x, &y, aside(series), items));
        }
        before.for_each(|series| series.draw_dots(&x, &y, aside(series), items));
        self.draw_names(&x, &y, (to + 16.0, room), named, items);
    }

    /// How far each series is drawn beside its place, so that none lies behind another.
    fn aside(&self) -> impl Fn(&Series) -> f64 {
        let mut inks: Vec<Ink> = vec![];
        let few = |series: &&Series| !series.faint && series.dots.len() <= DOTS;
        for series in self.series.iter().filter(few) {
            if !inks.contains(&series.ink) {
                inks.push(series.ink);
            }
        }
        let pitch = (18.0 / inks.len().max(1) as f64).min(4.0);
        let middle = inks.len().saturating_sub(1) as f64 / 2.0;
        move |series: &Series| {
            inks.iter().position(|ink| *ink == series.ink).map_or(0.0, |i| pitch * (i as f64 - middle))
        }
    }

    /// Draws ticks; returns the scale.
    fn draw_across(&self, from: f64, to: f64, bottom: f64, items: &mut Vec<Item>) -> Scale {
        let mut xs: Vec<f64> =
            self.series.iter().flat_map(|series| series.dots.iter().map(|dot| dot.x)).collect();
        xs.retain(|x| x.is_finite());
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let (low, high) = (xs.first().copied().unwrap_or(0.0), xs.last().copied().unwrap_or(1.0));
        let mut scale = Scale { low, high, from, to, log: self.across == Across::Doubling && low > 0.0 };
        let ticks: Vec<(f64, String)> = match &self.across {
            Across::Whole => {
                let mut ticks = axis::round_ticks(low, high, 5);
                ticks.retain(|x| x.fract() == 0.0 && *x >= low && *x <= high);
                ticks.into_iter().map(|x| (x, tick(x))).collect()
            }
            Across::Names(names) => {
                (scale.low, scale.high) = (-0.4, names.len() as f64 - 0.6);
                names.iter().enumerate().map(|(i, name)| (i as f64, name.clone())).collect()
            }
            Across::Doubling | Across::Even => xs.iter().map(|x| (*x, tick(*x))).collect(),
        };
        let most = (to - from) / ticks.len().max(1) as f64;
        let named = matches!(self.across, Across::Names(_));
        let cut = |text: &str| if named { measure::fit(text, SMALL, false, most) } else { text.to_string() };
        let ticks: Vec<(f64, String)> =
            ticks.into_iter().map(|(x, text)| (scale.at(x), cut(&text))).collect();
        let places: Vec<(f64, f64)> =
            ticks.iter().map(|(x, text)| (*x, measure::width(text, SMALL, false) / 2.0)).collect();
        items.push(Item::rule((from - 10.0, bottom), (to + 6.0, bottom), Ink::Muted, 1.0));
        for ((x, text), shown) in ticks.into_iter().zip(axis::apart(&places)) {
            items.push(Item::rule((x, bottom), (x, bottom + 4.0), Ink::Muted, 1.0));
            if shown {
                items.push(Item::text(x, bottom + 18.0, Anchor::Middle, SMALL, Ink::Text, text));
            }
        }
        scale
    }

    fn up_axis(&self) -> UpAxis {
        let dots = self.series.iter().flat_map(|series| &series.dots);
        let values = dots.flat_map(|dot| dot.spread.values().chain([dot.y]));
        let ideal = self.ideal.iter().flat_map(|(_, line)| line.iter().map(|point| point.1));
        let values: Vec<f64> = values.chain(ideal).filter(|y| y.is_finite()).collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low.is_finite() { (low, high) } else { (0.0, 1.0) };
        UpAxis::new(self.up, low, high)
    }

    /// At the last dot of each line, moved apart.
    fn draw_names(&self, x: &Scale, y: &Scale, (at, room): (f64, f64), named: bool, items: &mut Vec<Item>) {
        let mut names: Vec<(f64, f64, &str, Ink)> = vec![];
        for series in self.series.iter().filter(|series| named && !series.name.is_empty()) {
            if let Some(dot) = series.dots.last() {
                names.push((x.at(dot.x), y.at(dot.y), &series.name, series.ink));
            }
        }
        if let Some((name, line)) = &self.ideal
            && let Some(end) = line.last()
        {
            names.push((x.at(end.0), y.at(end.1), name, Ink::Muted));
        }
        let wanted: Vec<f64> = names.iter().map(|name| name.1).collect();
        let places = axis::pushed_apart(&wanted, 15.0, y.to, y.from);
        for ((_, _, name, ink), place) in names.into_iter().zip(places) {
            let name = measure::fit(name, SMALL, true, room);
            items.push(Item::text(at, place + 4.0, Anchor::Start, SMALL, ink, name).bold().halo());
        }
    }

    pub fn said(&self) -> Vec<String> {
        let named = self.series.iter().filter(|series| !series.faint);
        named
            .map(|series| {
                let first = series.dots.first();
                let last = series.dots.last().filter(|_| series.dots.len() > 1);
                let dots: Vec<String> = first
                    .into_iter()
                    .chain(last)
                    .map(|dot| format!("{} at {}", self.up.text(dot.y), self.x_text(dot.x)))
                    .collect();
                format!("{} {}", series.name, dots.join(", "))
            })
            .collect()
    }

    fn x_text(&self, x: f64) -> String {
        match &self.across {
            Across::Names(names) => names.get(x as usize).cloned().unwrap_or_default(),
            _ => format!("{x}"),
        }
    }

    pub fn table(&self) -> Vec<TableRow> {
        let mut rows = vec![];
        for series in &self.series {
            for dot in &series.dots {
                rows.push(TableRow {
                    series: series.name.clone(),
                    x: self.x_text(dot.x),
                    value: Some(dot.y),
                    spread: dot.spread.clone(),
                    note: dot.note.clone(),
                });
            }
        }
        rows
    }
}

impl Series {
    fn draw_line(&self, x: &Scale, y: &Scale, aside: f64, items: &mut Vec<Item>) {
        let points: Vec<(f64, f64)> =
            self.dots.iter().map(|dot| (x.at(dot.x) + aside, y.at(dot.y))).collect();
        if points.len() > 1 {
            let (width, opacity) = if self.faint { (1.2, 0.35) } else { (2.0, 1.0) };
            let dash = if self.dashed { &[5.0, 4.0] } else { self.ink.dash() };
            items.push(Item::Line { points, ink: self.ink, width, dash, opacity });
        }
    }

    fn draw_dots(&self, x: &Scale, y: &Scale, aside: f64, items: &mut Vec<Item>) {
        let many = self.dots.len() > DOTS;
        for dot in &self.dots {
            let (at, up) = (x.at(dot.x) + aside, y.at(dot.y));
            let mut inside = vec![];
            spread(&dot.spread, at, |value| y.at(value), self.ink, &mut inside);
            if !many {
                inside.push(Item::marker((at, up), self.ink, dot.hollow));
            }
            let half = if many { 5.0 } else { 12.0 };
            let area = (at - half, up - half, 2.0 * half, 2.0 * half);
            items.push(Item::Mark { tip: dot.tip.clone(), area, items: inside });
        }
    }
}

struct UpAxis {
    scale: Scale,
    ticks: Vec<f64>,
    labels: Vec<String>,
    unit: &'static str,
}

impl UpAxis {
    fn new(up: Up, low: f64, high: f64) -> UpAxis {
        let unit = match up {
            Up::Time => Unit::of_time(high),
            Up::Bytes => Unit::of_bytes(high),
            _ => Unit("", 1.0),
        };
        let (low, high) = (low / unit.1, high / unit.1);
        let log = matches!(up, Up::Time | Up::Amount | Up::Bytes) && low > 0.0 && high / low > SPAN;
        let ticks = match up {
            _ if log => axis::powers_of_ten(low, high),
            Up::Doubling => axis::powers_of_two(low, high),
            // Noise just above 1 needs no room of its own.
            Up::Share => axis::round_ticks(0.0, if high <= 1.05 { 1.0 } else { high }, 4),
            Up::Ratio | Up::Time | Up::Amount | Up::Bytes => axis::round_ticks(0.0, high.max(1e-9), 4),
            Up::Accuracy | Up::Free => {
                let flat = if high - low <= high.abs() * 1e-6 { (high.abs() * 0.1).max(1e-6) } else { 0.0 };
                axis::round_ticks(low - flat, high + flat, 4)
            }
        };
        let percent = matches!(up, Up::Share | Up::Accuracy);
        let factor = if percent { 100.0 } else { 1.0 };
        let digits = axis::tick_digits(&ticks.iter().map(|tick| tick * factor).collect::<Vec<_>>());
        let label = |tick: &f64| match percent {
            true => format!("{:.digits$}", tick * factor),
            false if log && *tick < 1000.0 => format!("{tick}"),
            false if tick.abs() >= 1000.0 => grouped(*tick),
            false => format!("{tick:.digits$}"),
        };
        let labels: Vec<String> = ticks.iter().map(label).collect();
        let named = if percent { "%" } else { unit.0 };
        let (low, high) = (ticks.first().copied().unwrap_or(0.0), ticks.last().copied().unwrap_or(1.0));
        let scale = Scale {
            low: low * unit.1,
            high: high * unit.1,
            from: 0.0,
            to: 0.0,
            log: log || up == Up::Doubling,
        };
        UpAxis { scale, ticks: ticks.into_iter().map(|tick| tick * unit.1).collect(), labels, unit: named }
    }
}
