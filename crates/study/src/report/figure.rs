//! A figure before it is laid out: what is drawn, with its numbers. Its table (CSV) holds just what is drawn.

use super::chart::{self, Columns, Lines, Rows, Waterfall};
use super::escape;
use super::measure;
use super::numbers::exact;
use super::scene::{Anchor, Ink, Item, MARGIN, Scene};

/// As wide as text on a desktop, and on a phone.
pub const WIDE: f64 = 720.0;
pub const NARROW: f64 = 342.0;

#[derive(Clone, Debug)]
pub struct Figure {
    /// Part of file names: small letters, digits and hyphens.
    pub id: String,
    /// What it belongs to: a kind of study.
    pub section: String,
    /// What it holds constant; a page says so above its figures.
    pub context: String,
    pub title: String,
    /// What the figure shows and how to read it.
    pub note: String,
    pub legend: Vec<Key>,
    pub panels: Vec<Panel>,
}

#[derive(Clone, Debug)]
pub struct Key {
    pub ink: Ink,
    pub name: String,
}

#[derive(Clone, Debug)]
pub struct Panel {
    pub title: String,
    pub chart: Chart,
}

#[derive(Clone, Debug)]
pub enum Chart {
    Columns(Columns),
    Lines(Lines),
    Rows(Rows),
    Waterfall(Waterfall),
}

/// How sure a number is: an interval, or the samples themselves where they are too few for one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    pub interval: Option<(f64, f64)>,
    pub samples: Vec<f64>,
}

impl Spread {
    pub fn largest(&self) -> f64 {
        self.values().fold(0.0, f64::max)
    }

    /// All that is to be seen: the interval, or the samples.
    pub fn values(&self) -> impl Iterator<Item = f64> {
        let shown = match self.interval {
            Some((low, high)) => vec![low, high],
            None => self.samples.clone(),
        };
        shown.into_iter().filter(|x| x.is_finite())
    }
}

const TITLE: f64 = 17.0;
const NOTE: f64 = 11.5;
const KEY: f64 = 12.0;
const GAP: f64 = 28.0;

impl Figure {
    pub fn scene(&self, width: f64) -> Scene {
        let mut items = vec![];
        let columns = self.columns(width);
        let room = (width - GAP * (columns - 1) as f64) / columns as f64;
        let shared = self.shared_names(room);
        let keys = shared.as_ref().unwrap_or(&self.legend);
        let mut y = legend(keys, width, &mut items);
        let named = shared.is_none();
        for row in self.panels.chunks(columns) {
            let height = row.iter().map(|panel| panel.height(room, columns)).fold(0.0, f64::max);
            for (i, panel) in row.iter().enumerate() {
                panel.draw((i as f64 * (room + GAP), y, room, height), named, &mut items);
            }
            y += height + 20.0;
        }
        let height = (y - 20.0).max(1.0);
        let (frame, above, below) = self.frame(width, height);
        let (id, title) = (self.id.clone(), self.full_title());
        Scene { id, title, description: self.description(), width, height, items, frame, above, below }
    }

    /// Names of lines that don't fit at their ends, for a legend of all panels.
    fn shared_names(&self, room: f64) -> Option<Vec<Key>> {
        let lines = || {
            self.panels.iter().filter_map(|panel| match &panel.chart {
                Chart::Lines(lines) => Some(lines),
                _ => None,
            })
        };
        if lines().all(|lines| lines.names_fit(room)) {
            return None;
        }
        let mut keys: Vec<Key> = vec![];
        for series in lines().flat_map(|lines| &lines.series).filter(|series| !series.name.is_empty()) {
            match keys.iter().find(|key| key.ink == series.ink || key.name == series.name) {
                // The same look or name for different things: each panel has to say its own.
                Some(known) if known.ink != series.ink || known.name != series.name => return None,
                Some(_) => {}
                None => keys.push(Key { ink: series.ink, name: series.name.clone() }),
            }
        }
        (!keys.is_empty()).then_some(keys)
    }

    /// For a figure that stands alone.
    pub fn full_title(&self) -> String {
        if self.section.is_empty() { self.title.clone() } else { format!("{}: {}", self.section, self.title) }
    }

    /// Too much for one column of a printed page.
    pub fn is_large(&self) -> bool {
        self.panels.iter().map(|panel| panel.height(NARROW, 1)).sum::<f64>() > 600.0
    }

    /// Panels in a row.
    fn columns(&self, width: f64) -> usize {
        let whole = self.panels.iter().any(|panel| matches!(panel.chart, Chart::Rows(_)));
        match self.panels.len() {
            _ if whole || width < 500.0 => 1,
            0 | 1 => 1,
            3 | 6 if self.panels.iter().all(Panel::is_slim) => 3,
            _ => 2,
        }
    }

    fn frame(&self, width: f64, height: f64) -> (Vec<Item>, f64, f64) {
        let mut frame = vec![];
        let title = measure::wrap(&self.full_title(), TITLE, true, width);
        let above = MARGIN + 24.0 * title.len() as f64 + 6.0;
        for (i, line) in title.into_iter().enumerate() {
            let y = MARGIN + TITLE + 24.0 * i as f64 - above;
            frame.push(Item::text(0.0, y, Anchor::Start, TITLE, Ink::Text, line).bold());
        }
        let note = measure::wrap(&format!("{} {}", self.context, self.note), NOTE, false, width);
        let below = 16.0 * note.len() as f64 + 8.0 + MARGIN;
        for (i, line) in note.into_iter().enumerate() {
            let y = height + 22.0 + 16.0 * i as f64;
            frame.push(Item::text(0.0, y, Anchor::Start, NOTE, Ink::Muted, line));
        }
        (frame, above, below)
    }

    /// In words, for those who don't see the figure.
    fn description(&self) -> String {
        const LONGEST: usize = 900;
        let mut out = self.note.clone();
        for panel in &self.panels {
            let said: Vec<String> = panel.said();
            let title = if panel.title.is_empty() { String::new() } else { format!("{}: ", panel.title) };
            out.push_str(&format!(" {title}{}.", said.join("; ")));
            if out.len() > LONGEST {
                let cut: String = out.chars().take(LONGEST).collect();
                return cut + "… The table has all numbers.";
            }
        }
        out
    }

    /// What is drawn as a table, every number with all its digits.
    pub fn csv(&self) -> String {
        let mut out = String::from("panel,series,x,value,low,high,samples,note\n");
        for panel in &self.panels {
            for row in panel.rows() {
                let samples: Vec<String> = row.spread.samples.iter().map(|x| exact(*x)).collect();
                let (low, high) = row
                    .spread
                    .interval
                    .map_or((String::new(), String::new()), |(low, high)| (exact(low), exact(high)));
                let value = row.value.map_or(String::new(), exact);
                let cells = [
                    escape::csv(&panel.title),
                    escape::csv(&row.series),
                    escape::csv(&row.x),
                    value,
                    low,
                    high,
                    samples.join(" "),
                    escape::csv(&row.note),
                ];
                out.push_str(&cells.join(","));
                out.push('\n');
            }
        }
        out
    }
}

/// A row of a figure's table.
#[derive(Clone, Debug)]
pub struct TableRow {
    pub series: String,
    pub x: String,
    pub value: Option<f64>,
    pub spread: Spread,
    pub note: String,
}

impl Panel {
    /// Few columns, so that three panels fit side by side.
    fn is_slim(&self) -> bool {
        matches!(&self.chart, Chart::Columns(columns) if columns.columns.len() <= 4)
    }

    /// The title in lines, and the height that it takes.
    fn head(&self, width: f64) -> (Vec<String>, f64) {
        // The title of an axis that says the same is enough.
        let same = matches!(&self.chart, Chart::Lines(lines) if lines.y_title == self.title);
        let lines = if same { vec![] } else { measure::wrap(&self.title, 13.0, true, width) };
        let height = if lines.is_empty() { 6.0 } else { 10.0 + 16.0 * lines.len() as f64 };
        (lines, height)
    }

    fn height(&self, width: f64, columns: usize) -> f64 {
        self.head(width).1
            + match &self.chart {
                Chart::Rows(rows) => rows.height(width),
                _ if columns == 1 && width > 500.0 => 320.0,
                _ if columns == 1 => 222.0,
                _ => 252.0,
            }
    }

    fn draw(&self, (x, y, width, height): (f64, f64, f64, f64), named: bool, items: &mut Vec<Item>) {
        let (title, head) = self.head(width);
        for (i, line) in title.into_iter().enumerate() {
            let at = y + 13.0 + 16.0 * i as f64;
            items.push(Item::text(x, at, Anchor::Start, 13.0, Ink::Text, line).bold());
        }
        let place = chart::Place { x, y: y + head, width, height: height - head };
        match &self.chart {
            Chart::Columns(columns) => columns.draw(place, items),
            Chart::Lines(lines) => lines.draw(place, named, items),
            Chart::Rows(rows) => rows.draw(place, items),
            Chart::Waterfall(waterfall) => waterfall.draw(place, items),
        }
    }

    fn said(&self) -> Vec<String> {
        match &self.chart {
            Chart::Columns(columns) => columns.said(),
            Chart::Lines(lines) => lines.said(),
            Chart::Rows(rows) => rows.said(),
            Chart::Waterfall(waterfall) => waterfall.said(),
        }
    }

    fn rows(&self) -> Vec<TableRow> {
        match &self.chart {
            Chart::Columns(columns) => columns.table(),
            Chart::Lines(lines) => lines.table(),
            Chart::Rows(rows) => rows.table(),
            Chart::Waterfall(waterfall) => waterfall.table(),
        }
    }
}

/// Draws the legend in as many rows as it needs; returns where what follows may begin.
fn legend(keys: &[Key], width: f64, items: &mut Vec<Item>) -> f64 {
    if keys.is_empty() {
        return 0.0;
    }
    let (mut x, mut y) = (0.0, 0.0);
    for key in keys {
        let line = matches!(key.ink, Ink::Series(_));
        let before = if line { 36.0 } else { 20.0 };
        let names = measure::wrap(&key.name, KEY, false, width - before);
        let longest = names.iter().map(|name| measure::width(name, KEY, false)).fold(0.0, f64::max);
        let wide = before + longest + 18.0;
        if x > 0.0 && x + wide - 18.0 > width {
            (x, y) = (0.0, y + 20.0);
        }
        if line {
            let (points, ink) = (vec![(x, y + 8.5), (x + 28.0, y + 8.5)], key.ink);
            items.push(Item::Line { points, ink, width: 2.0, dash: ink.dash(), opacity: 1.0 });
            items.push(Item::marker((x + 14.0, y + 8.5), ink, false));
        } else {
            items.extend(Item::filled((x, y + 2.0, 14.0, 12.0), key.ink, 1.0));
        }
        let more = names.len().saturating_sub(1) as f64;
        for (i, name) in names.into_iter().enumerate() {
            let at = y + 13.0 + 16.0 * i as f64;
            items.push(Item::text(x + before - 3.0, at, Anchor::Start, KEY, Ink::Text, name));
        }
        y += 16.0 * more;
        x += wide;
    }
    y + 34.0
}
