//! A figure before it is laid out: what is drawn, with its numbers. Its table (CSV) holds just what is drawn.

use super::chart::{self, Columns, Lines, Rows};
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
        let mut y = legend(&self.legend, width, &mut items);
        let columns = self.columns(width);
        let room = (width - GAP * (columns - 1) as f64) / columns as f64;
        for row in self.panels.chunks(columns) {
            let height = row.iter().map(|panel| panel.height(room, columns)).fold(0.0, f64::max);
            for (i, panel) in row.iter().enumerate() {
                panel.draw(i as f64 * (room + GAP), y, room, height, &mut items);
            }
            y += height + 20.0;
        }
        let height = (y - 20.0).max(1.0);
        let (frame, above, below) = self.frame(width, height);
        let (id, title) = (self.id.clone(), self.full_title());
        Scene { id, title, description: self.description(), width, height, items, frame, above, below }
    }

    /// For a figure that stands alone.
    pub fn full_title(&self) -> String {
        if self.section.is_empty() { self.title.clone() } else { format!("{}: {}", self.section, self.title) }
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

    fn head(&self) -> f64 {
        if self.title.is_empty() { 6.0 } else { 26.0 }
    }

    fn height(&self, width: f64, columns: usize) -> f64 {
        self.head()
            + match &self.chart {
                Chart::Rows(rows) => rows.height(width),
                _ if columns == 1 && width > 500.0 => 300.0,
                _ => 232.0,
            }
    }

    fn draw(&self, x: f64, y: f64, width: f64, height: f64, items: &mut Vec<Item>) {
        if !self.title.is_empty() {
            let title = measure::fit(&self.title, 13.0, true, width);
            items.push(Item::text(x, y + 13.0, Anchor::Start, 13.0, Ink::Text, title).bold());
        }
        let place = chart::Place { x, y: y + self.head(), width, height: height - self.head() };
        match &self.chart {
            Chart::Columns(columns) => columns.draw(place, items),
            Chart::Lines(lines) => lines.draw(place, items),
            Chart::Rows(rows) => rows.draw(place, items),
        }
    }

    fn said(&self) -> Vec<String> {
        match &self.chart {
            Chart::Columns(columns) => columns.said(),
            Chart::Lines(lines) => lines.said(),
            Chart::Rows(rows) => rows.said(),
        }
    }

    fn rows(&self) -> Vec<TableRow> {
        match &self.chart {
            Chart::Columns(columns) => columns.table(),
            Chart::Lines(lines) => lines.table(),
            Chart::Rows(rows) => rows.table(),
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
        let name = measure::fit(&key.name, KEY, false, width - 18.0);
        let wide = 18.0 + measure::width(&name, KEY, false) + 18.0;
        if x > 0.0 && x + wide - 18.0 > width {
            (x, y) = (0.0, y + 20.0);
        }
        items.push(Item::Rect { x, y: y + 3.0, w: 11.0, h: 11.0, ink: key.ink, opacity: 1.0 });
        items.push(Item::text(x + 17.0, y + 13.0, Anchor::Start, KEY, Ink::Text, name));
        x += wide;
    }
    y + 34.0
}
