//! The four kinds of charts: columns, lines, rows of shares, and waterfalls.

mod axis;
mod columns;
mod lines;
mod rows;
mod waterfall;

pub use columns::{Column, Columns, Segment};
pub use lines::{Across, Dot, Lines, Series, Up};
pub use rows::{Row, Rows};
pub use waterfall::{Step, Waterfall};

use super::figure::Spread;
use super::scene::{Ink, Item};

/// The room of a chart.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

/// Size of the text at axes.
const SMALL: f64 = 11.5;

/// An interval as a whisker, or samples as dots beside each other.
fn spread(spread: &Spread, x: f64, y: impl Fn(f64) -> f64, ink: Ink, items: &mut Vec<Item>) {
    if let Some((low, high)) = spread.interval.filter(|(low, high)| low.is_finite() && high.is_finite()) {
        let (bottom, top) = (y(low), y(high));
        items.push(Item::rule((x, bottom), (x, top), ink, 1.4));
        for end in [bottom, top] {
            items.push(Item::rule((x - 4.0, end), (x + 4.0, end), ink, 1.4));
        }
        return;
    }
    let samples: Vec<f64> = spread.samples.iter().copied().filter(|x| x.is_finite()).collect();
    if samples.len() < 2 {
        return;
    }
    // Beside each other, but never far from their place.
    let pitch = (14.0 / (samples.len() - 1) as f64).min(5.0);
    for (i, sample) in samples.iter().enumerate() {
        let aside = (i as f64 - (samples.len() - 1) as f64 / 2.0) * pitch;
        items.push(Item::Circle { x: x + aside, y: y(*sample), r: 2.2, ink, hollow: false, opacity: 0.75 });
    }
}
