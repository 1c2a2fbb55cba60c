//! Columns in parts, each with its interval or samples.

use super::axis::{self, Scale};
use super::{Place, SMALL, spread};
use crate::report::figure::{Spread, TableRow};
use crate::report::measure;
use crate::report::numbers::Unit;
use crate::report::scene::{Anchor, Ink, Item};

/// Times.
#[derive(Clone, Debug)]
pub struct Columns {
    /// The largest number of all panels that are to be compared by eye.
    pub top: f64,
    pub x_title: String,
    pub columns: Vec<Column>,
}

#[derive(Clone, Debug)]
pub struct Column {
    pub label: String,
    /// From the bottom up, in seconds; none if nothing was measured.
    pub segments: Vec<Segment>,
    /// Their sum, as it was measured.
    pub total: f64,
    pub spread: Spread,
    /// Needs care: drawn pale.
    pub pale: bool,
    pub tip: String,
    pub note: String,
}

#[derive(Clone, Debug)]
pub struct Segment {
    pub name: &'static str,
    pub ink: Ink,
    pub seconds: f64,
}

/// Height of a line of a column's name, and how many it may have.
const LINE: f64 = 14.0;
const LINES: usize = 3;

impl Columns {
    pub fn draw(&self, place: Place, items: &mut Vec<Item>) {
        let unit = Unit::of_time(self.top);
        let ticks = axis::round_ticks(0.0, (self.top / unit.1).max(1e-9), 4);
        let digits = axis::tick_digits(&ticks);
        let labels: Vec<String> = ticks.iter().map(|tick| format!("{tick:.digits$}")).collect();
        let left = labels.iter().map(|text| measure::width(text, SMALL, false)).fold(0.0, f64::max) + 10.0;
        let slot = (place.width - left) / self.columns.len().max(1) as f64;
        let names: Vec<Vec<String>> =
            self.columns.iter().map(|column| name_lines(&column.label, slot)).collect();
        let more = LINE * (names.iter().map(Vec::len).max().unwrap_or(1).max(1) - 1) as f64;
        let (bottom, top) = (place.y + place.height - 42.0 - more, place.y + 36.0);
        let y_title = format!("time per epoch ({})", unit.0);
        items.push(Item::text(place.x, place.y + 11.0, Anchor::Start, SMALL, Ink::Muted, y_title));
        let high = ticks.last().copied().unwrap_or(1.0) * unit.1;
        let scale = Scale { low: 0.0, high, from: bottom, to: top, log: false };
        for (tick, text) in ticks.iter().zip(labels) {
            let y = scale.at(tick * unit.1);
            items.push(Item::rule((place.x + left, y), (place.x + place.width, y), Ink::Grid, 1.0));
            items.push(Item::text(place.x + left - 8.0, y + 4.0, Anchor::End, SMALL, Ink::Muted, text));
        }
        let numbers: Vec<String> = self.columns.iter().map(|column| unit.number(column.total)).collect();
        let fits = numbers.iter().all(|text| measure::width(text, SMALL, true) + 4.0 <= slot);
        for (i, (column, name)) in self.columns.iter().zip(names).enumerate() {
            let middle = place.x + left + slot * (i as f64 + 0.5);
            let number = fits.then_some(numbers[i].as_str());
            items.push(column.draw((middle, slot), &scale, number, name));
        }
        let (middle, y) = (place.x + left + (place.width - left) / 2.0, bottom + 38.0 + more);
        items.push(Item::text(middle, y, Anchor::Middle, SMALL, Ink::Muted, &self.x_title));
    }

    pub fn said(&self) -> Vec<String> {
        self.columns
            .iter()
            .map(|column| match column.segments.is_empty() {
                true => format!("{}: nothing measured", column.label),
                false => format!("{}: {}", column.label, crate::report::numbers::seconds(column.total)),
            })
            .collect()
    }

    pub fn table(&self) -> Vec<TableRow> {
        let row = |column: &Column, series: &str, value: Option<f64>, spread: Spread| TableRow {
            series: series.to_string(),
            x: column.label.clone(),
            value,
            spread,
            note: column.note.clone(),
        };
        let mut rows = vec![];
        for column in &self.columns {
            let measured = !column.segments.is_empty();
            rows.push(row(column, "all", measured.then_some(column.total), column.spread.clone()));
            for part in &column.segments {
                rows.push(row(column, part.name, Some(part.seconds), Spread::default()));
            }
        }
        rows
    }
}

/// A column's name under it, in a few lines where it is long.
fn name_lines(name: &str, slot: f64) -> Vec<String> {
    let mut lines = measure::wrap(name, SMALL, false, slot - 6.0);
    if lines.len() > LINES {
        lines.truncate(LINES);
        if let Some(last) = lines.last_mut() {
            *last = measure::fit(&format!("{last} and more"), SMALL, false, slot - 6.0);
        }
    }
    lines
}

impl Column {
    fn draw(
        &self,
        (middle, slot): (f64, f64),
        scale: &Scale,
        number: Option<&str>,
        name: Vec<String>,
    ) -> Item {
        let wide = (slot * 0.62).clamp(3.0, 56.0);
        let (bottom, mut from) = (scale.from, 0.0);
        let mut items = vec![];
        for part in &self.segments {
            let (low, high) = (scale.at(from), scale.at(from + part.seconds));
            let (x, opacity) = (middle - wide / 2.0, if self.pale { 0.45 } else { 1.0 });
            items.extend(Item::filled((x, high, wide, (low - high).max(0.0)), part.ink, opacity));
            from += part.seconds;
        }
        spread(&self.spread, middle, |x| scale.at(x), Ink::Text, &mut items);
        let highest = scale.at(self.spread.largest().max(self.total));
        match number {
            _ if self.segments.is_empty() => {
                items.push(
                    Item::text(middle, bottom - 6.0, Anchor::Middle, SMALL, Ink::Communication, "✕").bold(),
                );
            }
            Some(text) => items.push(
                Item::text(middle, highest - 7.0, Anchor::Middle, SMALL, Ink::Text, text).bold().halo(),
            ),
            None => {}
        }
        for (i, line) in name.into_iter().enumerate() {
            let y = bottom + 18.0 + LINE * i as f64;
            items.push(Item::text(middle, y, Anchor::Middle, SMALL, Ink::Text, line));
        }
        let area = (middle - slot / 2.0, scale.to - 14.0, slot, bottom + 24.0 - scale.to + 14.0);
        Item::Mark { tip: self.tip.clone(), area, items }
    }
}
