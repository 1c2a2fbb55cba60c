//! Rows that are divided into shares of a whole.

use super::{Place, SMALL};
use crate::report::figure::{Spread, TableRow};
use crate::report::measure;
use crate::report::numbers::percent;
use crate::report::scene::{Anchor, Ink, Item};

#[derive(Clone, Debug)]
pub struct Rows {
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug)]
pub struct Row {
    pub label: String,
    /// Name and share of each part, 0 to 1.
    pub parts: Vec<(&'static str, Ink, f64)>,
    pub pale: bool,
    pub tip: String,
    pub note: String,
}

const PITCH: f64 = 27.0;
const BAR: f64 = 18.0;

impl Rows {
    pub fn height(&self, _width: f64) -> f64 {
        PITCH * self.rows.len() as f64 + 8.0
    }

    pub fn draw(&self, place: Place, items: &mut Vec<Item>) {
        let labels = self.rows.iter().map(|row| measure::width(&row.label, SMALL, false));
        let left = labels.fold(0.0, f64::max).min(0.4 * place.width) + 10.0;
        for (i, row) in self.rows.iter().enumerate() {
            let y = place.y + PITCH * i as f64;
            items.push(row.draw(place.x, y, left, place.width));
        }
    }

    pub fn said(&self) -> Vec<String> {
        self.rows
            .iter()
            .map(|row| {
                let parts: Vec<String> = row
                    .parts
                    .iter()
                    .filter(|part| part.2 >= 0.005)
                    .map(|(name, _, share)| format!("{name} {}", percent(*share)))
                    .collect();
                format!("{}: {}", row.label, parts.join(", "))
            })
            .collect()
    }

    pub fn table(&self) -> Vec<TableRow> {
        let mut rows = vec![];
        for row in &self.rows {
            for (name, _, share) in &row.parts {
                rows.push(TableRow {
                    series: (*name).into(),
                    x: row.label.clone(),
                    value: Some(*share),
                    spread: Spread::default(),
                    note: row.note.clone(),
                });
            }
        }
        rows
    }
}

impl Row {
    fn draw(&self, x: f64, y: f64, left: f64, width: f64) -> Item {
        let label = measure::fit(&self.label, SMALL, false, left - 10.0);
        let mut items = vec![Item::text(x + left - 10.0, y + 13.0, Anchor::End, SMALL, Ink::Text, label)];
        let (mut at, room) = (x + left, width - left);
        for (_, ink, share) in &self.parts {
            let wide = share.clamp(0.0, 1.0) * room;
            let opacity = if self.pale { 0.5 } else { 1.0 };
            items.extend(Item::filled((at, y, wide, BAR), *ink, opacity));
            let text = percent(*share);
            let room = measure::width(&text, SMALL, true) + 8.0;
            if wide > room + 2.0 && !self.pale {
                // Nothing of the pattern behind the number.
                items.push(Item::Rect { x: at + 2.0, y, w: room, h: BAR, ink: *ink, opacity });
                let ink = match ink {
                    Ink::Idle => Ink::Text,
                    Ink::Wait => Ink::Deep,
                    _ => Ink::Paper,
                };
                items.push(Item::text(at + 6.0, y + 13.0, Anchor::Start, SMALL, ink, text).bold());
            }
            at += wide;
        }
        let area = (x, y - 4.0, width, PITCH);
        Item::Mark { tip: self.tip.clone(), area, items }
    }
}
