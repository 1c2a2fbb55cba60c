//! A waterfall: from a whole down to what is left of it, a column for each step.

use super::axis::{self, Scale};
use super::{Place, SMALL, spread};
use crate::report::figure::{Spread, TableRow};
use crate::report::measure;
use crate::report::numbers::percent;
use crate::report::scene::{Anchor, Ink, Item};

#[derive(Clone, Debug)]
pub struct Waterfall {
    pub y_title: String,
    pub steps: Vec<Step>,
    /// What is left, as it was measured.
    pub end: Step,
}

#[derive(Clone, Debug)]
pub struct Step {
    pub name: &'static str,
    /// Where there is little room.
    pub short: &'static str,
    pub ink: Ink,
    /// Shares of the whole before and after.
    pub from: f64,
    pub to: f64,
    /// The factor between the two, and how sure it is.
    pub factor: f64,
    pub spread: Spread,
    pub tip: String,
}

impl Waterfall {
    pub fn draw(&self, place: Place, items: &mut Vec<Item>) {
        let columns = || self.steps.iter().chain([&self.end]);
        let high = columns().map(|step| step.from.max(step.to)).fold(1.0, f64::max);
        let high = self.end.spread.values().fold(high, f64::max).min(2.0);
        let ticks = axis::round_ticks(0.0, if high <= 1.05 { 1.0 } else { high }, 4);
        let labels: Vec<String> = ticks.iter().map(|tick| format!("{:.0}%", 100.0 * tick)).collect();
        let left = labels.iter().map(|text| measure::width(text, SMALL, false)).fold(0.0, f64::max) + 10.0;
        let slot = (place.width - left) / (self.steps.len() + 1) as f64;
        let words = || columns().flat_map(|step| step.name.split(' '));
        let fits = words().all(|word| measure::width(word, SMALL, false) <= slot - 4.0);
        let name = |step: &Step| if fits { step.name } else { step.short };
        let names: Vec<Vec<String>> =
            columns().map(|step| measure::wrap(name(step), SMALL, false, slot - 4.0)).collect();
        let lines = names.iter().map(Vec::len).max().unwrap_or(1);
        let (bottom, top) = (place.y + place.height - 10.0 - 14.0 * lines as f64, place.y + 34.0);
        let most = ticks.last().copied().unwrap_or(1.0).max(high);
        let y = Scale { low: 0.0, high: most, from: bottom, to: top, log: false };
        items.push(Item::text(place.x, place.y + 12.0, Anchor::Start, SMALL, Ink::Muted, &self.y_title));
        for (tick, text) in ticks.iter().zip(labels) {
            let at = y.at(*tick);
            items.push(Item::rule((place.x + left, at), (place.x + place.width, at), Ink::Grid, 1.0));
            items.push(Item::text(place.x + left - 8.0, at + 4.0, Anchor::End, SMALL, Ink::Muted, text));
        }
        let wide = (0.72 * slot).min(64.0);
        for (i, (step, name)) in columns().zip(names).enumerate() {
            let middle = place.x + left + slot * (i as f64 + 0.5);
            let last = i == self.steps.len();
            if !last {
                // What is left goes on to the next column.
                let at = y.at(step.to);
                let ends = ((middle - wide / 2.0, at), (middle + slot + wide / 2.0, at));
                items.push(Item::rule(ends.0, ends.1, Ink::Muted, 1.0));
            }
            items.push(step.draw((middle, slot, wide), &y, last, name));
        }
    }

    pub fn said(&self) -> Vec<String> {
        let steps = self.steps.iter().map(|step| format!("{} {}", step.name, percent(step.factor)));
        steps.chain([format!("left: {}", percent(self.end.to))]).collect()
    }

    pub fn table(&self) -> Vec<TableRow> {
        let row = |series: &str, step: &Step, value: f64, spread: Spread| TableRow {
            series: series.into(),
            x: step.name.into(),
            value: Some(value),
            spread,
            note: String::new(),
        };
        let mut rows = vec![];
        for step in &self.steps {
            rows.push(row("factor", step, step.factor, step.spread.clone()));
            rows.push(row("left", step, step.to, Spread::default()));
        }
        rows.push(row("left", &self.end, self.end.to, self.end.spread.clone()));
        rows
    }
}

impl Step {
    fn draw(&self, (middle, slot, wide): (f64, f64, f64), y: &Scale, last: bool, name: Vec<String>) -> Item {
        let (high, low) = (y.at(self.from.max(self.to)), y.at(self.from.min(self.to)));
        let mut items = vec![];
        // A factor of 1 still shows where it stands.
        let height = (low - high).max(1.5);
        items.extend(Item::filled((middle - wide / 2.0, high, wide, height), self.ink, 1.0));
        let mut above = high;
        if last {
            spread(&self.spread, middle, |x| y.at(x), Ink::Text, &mut items);
            above = above.min(y.at(self.spread.largest()));
        }
        let gain = if self.factor > 1.0 && !last { "+" } else { "" };
        let text = if last { percent(self.to) } else { format!("{gain}{}", points(self.to - self.from)) };
        items.push(Item::text(middle, above - 6.0, Anchor::Middle, SMALL, Ink::Text, text).bold().halo());
        for (i, line) in name.into_iter().enumerate() {
            let at = y.from + 16.0 + 14.0 * i as f64;
            items.push(Item::text(middle, at, Anchor::Middle, SMALL, Ink::Text, line));
        }
        let area = (middle - slot / 2.0, y.to - 14.0, slot, y.from - y.to + 30.0);
        Item::Mark { tip: self.tip.clone(), area, items }
    }
}

/// Percentage points with a sign, as a loss reads.
fn points(x: f64) -> String {
    let x = 100.0 * x;
    let digits = usize::from(x.abs() < 9.95 && x.abs() >= 0.05);
    format!("{x:.digits$}").replace('-', "−").replace("−0", if x.abs() < 0.05 { "0" } else { "−0" })
}
