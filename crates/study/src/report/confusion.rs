//! A confusion matrix as a picture: a row for each class, a column for each class that it was taken for. Shade is the share of the row;
//! hits and mistakes have colours of their own. Counts are written where cells have room for them.

use super::ReportError;
use super::measure::{fit, width};
use super::paper::Paper;
use super::scene::{Anchor, Ink, Item, Scene};
use super::{png, svg};

/// A confusion matrix.
pub struct Matrix<'a> {
    /// A row for each class.
    pub rows: &'a [Vec<u64>],
    /// Names of all classes.
    pub names: &'a [String],
    /// What was evaluated, in a line.
    pub note: &'a str,
}

/// Least and largest side of a cell, and about that of all cells together.
const CELLS: (f64, f64) = (1.0, 54.0);
const SIDE: f64 = 900.0;
/// Least side of a cell that has its count in it, and of one that has a label beside it.
const COUNTED: f64 = 26.0;
const LABELLED: f64 = 8.5;
/// Largest size of letters, in cells and labels.
const LETTERS: f64 = 11.0;
/// Room for the names of classes at most.
const NAMES: f64 = 170.0;
/// Heights of title, note and the columns' labels.
const HEAD: f64 = 86.0;
const FOOT: f64 = 34.0;
/// A cell that is not empty is seen, however few its images.
const FAINTEST: f64 = 0.12;

const HIT: Ink = Ink::Series(0);
const MISTAKE: Ink = Ink::Series(1);

impl Matrix<'_> {
    pub fn svg(&self) -> String {
        svg::file(&self.scene(), &Paper::screen())
    }

    pub fn png(&self) -> Result<Vec<u8>, ReportError> {
        png::file(&self.scene(), &Paper::screen())
    }

    fn cell(&self) -> f64 {
        (SIDE / self.rows.len().max(1) as f64).clamp(CELLS.0, CELLS.1)
    }

    fn name(&self, class: usize) -> String {
        self.names.get(class).cloned().unwrap_or_else(|| format!("class {class}"))
    }

    fn scene(&self) -> Scene {
        let (count, cell) = (self.rows.len() as f64, self.cell());
        let labels: Vec<(usize, String)> = self.labelled().map(|class| (class, self.label(class))).collect();
        let room =
            labels.iter().map(|(_, label)| width(label, self.letters(), false)).fold(40.0, f64::max) + 8.0;
        let (left, top) = (room.max(60.0), HEAD);
        let side = count * cell;
        let title = "Confusion matrix";
        let (legend, end) = legend(left, top + side + 22.0);
        let whole = (left + side).max(end);
        let mut items = vec![
            Item::text(0.0, 18.0, Anchor::Start, 16.0, Ink::Text, title).bold(),
            Item::text(0.0, 37.0, Anchor::Start, 12.0, Ink::Muted, fit(self.note, 12.0, false, whole)),
            Item::text(left, top - 26.0, Anchor::Start, 11.0, Ink::Muted, "predicted class →"),
            Item::text(left - 8.0, top - 26.0, Anchor::End, 11.0, Ink::Muted, "class ↓"),
            Item::Rect { x: left, y: top, w: side, h: side, ink: Ink::Grid, opacity: 0.45 },
        ];
        for (class, label) in &labels {
            let y = top + (*class as f64 + 0.5) * cell + 0.35 * self.letters();
            items.push(Item::text(left - 6.0, y, Anchor::End, self.letters(), Ink::Text, label.clone()));
        }
        items.extend(self.columns(left, top));
        for (class, row) in self.rows.iter().enumerate() {
            items.extend(self.row(class, row, (left, top)));
        }
        items.extend(legend);
        let description = format!("{count} classes. {}", self.note);
        let (width, height) = (whole, top + side + FOOT);
        let (frame, above, below) = (vec![], 8.0, 4.0);
        Scene {
            id: "confusion".into(),
            title: title.into(),
            description,
            width,
            height,
            items,
            frame,
            above,
            below,
        }
    }

    fn letters(&self) -> f64 {
        (self.cell() - 1.0).clamp(7.5, LETTERS)
    }

    /// Classes that have a label: all, or as many as there is room for.
    fn labelled(&self) -> impl Iterator<Item = usize> + use<> {
        let step = (LABELLED / self.cell()).ceil().max(1.0) as usize;
        (0..self.rows.len()).step_by(step)
    }

    /// A class beside its row: with its number where columns have numbers alone.
    fn label(&self, class: usize) -> String {
        let name =
            if self.names_columns() { self.name(class) } else { format!("{} {class}", self.name(class)) };
        fit(&name, self.letters(), false, NAMES)
    }

    /// True where columns are wide enough for names.
    fn names_columns(&self) -> bool {
        self.cell() >= 40.0
    }

    /// Names above the columns, or numbers where there is no room for names.
    fn columns(&self, left: f64, top: f64) -> Vec<Item> {
        let cell = self.cell();
        let widest = width(&self.rows.len().to_string(), self.letters(), false) + 5.0;
        let step = if self.names_columns() { 1 } else { fives((widest / cell).ceil() as usize) };
        let label = |class: usize| match self.names_columns() {
            true => fit(&self.name(class), LETTERS - 1.0, false, cell - 4.0),
            false => class.to_string(),
        };
        let item = |class: usize| {
            let x = left + (class as f64 + 0.5) * cell;
            Item::text(x, top - 6.0, Anchor::Middle, self.letters(), Ink::Text, label(class))
        };
        (0..self.rows.len()).step_by(step).map(item).collect()
    }

    /// The cells of a row that aren't empty.
    fn row(&self, class: usize, row: &[u64], (left, top): (f64, f64)) -> Vec<Item> {
        let (cell, images) = (self.cell(), row.iter().sum::<u64>().max(1) as f64);
        let gap = if cell >= 6.0 { 1.0 } else { 0.0 };
        let mut items = vec![];
        for (other, &count) in row.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (x, y) = (left + other as f64 * cell, top + class as f64 * cell);
            let opacity = FAINTEST + (1.0 - FAINTEST) * count as f64 / images;
            let ink = if other == class { HIT } else { MISTAKE };
            items.push(Item::Rect { x, y, w: cell - gap, h: cell - gap, ink, opacity });
            let text = count.to_string();
            if cell >= COUNTED && width(&text, LETTERS, false) <= cell - 4.0 {
                let ink = if opacity > 0.65 { Ink::Paper } else { Ink::Text };
                let at = (x + 0.5 * (cell - gap), y + 0.5 * cell + 4.0);
                items.push(Item::text(at.0, at.1, Anchor::Middle, LETTERS, ink, text));
            }
        }
        items
    }
}

/// The least of 1, 5, 10, 50, 100, … that is no less than `step`.
fn fives(step: usize) -> usize {
    let tens = (0..).map(|power| 10usize.pow(power));
    tens.flat_map(|ten| [ten, 5 * ten]).find(|nice| *nice >= step).unwrap_or(step)
}

/// Shades and what they mean; and where that ends, to the right.
fn legend(left: f64, y: f64) -> (Vec<Item>, f64) {
    let mut items = vec![];
    let mut x = left;
    for (what, ink) in [("right", HIT), ("mistaken", MISTAKE)] {
        for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
            let opacity = FAINTEST + (1.0 - FAINTEST) * share;
            items.push(Item::Rect { x, y: y - 9.0, w: 14.0, h: 11.0, ink, opacity });
            x += 15.0;
        }
        let text = format!("{what}: 0–100% of its row");
        items.push(Item::text(x + 4.0, y, Anchor::Start, 10.5, Ink::Muted, text.clone()));
        x += 4.0 + width(&text, 10.5, false) + 18.0;
    }
    (items, x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(classes: usize) -> Vec<Vec<u64>> {
        let count = |label: usize, other: usize| match (label * 7 + other * 13) % 11 {
            _ if label == other => 40 + label as u64 % 9,
            0 => 1 + (label % 5) as u64,
            _ => 0,
        };
        (0..classes).map(|label| (0..classes).map(|other| count(label, other)).collect()).collect()
    }

    fn texts(scene: &Scene) -> Vec<(f64, f64, Anchor, f64, String)> {
        let text = |item: &Item| match item {
            Item::Text { x, y, anchor, size, text, .. } => Some((*x, *y, *anchor, *size, text.clone())),
            _ => None,
        };
        scene.items.iter().filter_map(text).collect()
    }

    /// Of every text, the box that it fills.
    fn boxes(scene: &Scene) -> Vec<(f64, f64, f64, f64, String)> {
        let of = |(x, y, anchor, size, text): (f64, f64, Anchor, f64, String)| {
            let w = width(&text, size, false);
            let x = match anchor {
                Anchor::Start => x,
                Anchor::Middle => x - w / 2.0,
                Anchor::End => x - w,
            };
            (x, y - 0.75 * size, x + w, y, text)
        };
        texts(scene).into_iter().map(of).collect()
    }

    #[test]
    fn texts_never_overlap_and_stay_within() {
        for classes in [2, 10, 12, 25, 30, 100, 365] {
            let (rows, names) = (rows(classes), (0..classes).map(|i| format!("a long name of class {i}")));
            let (names, note) = (names.collect::<Vec<_>>(), "2,000 images · top-1 71.40%");
            let scene = Matrix { rows: &rows, names: &names, note }.scene();
            let boxes = boxes(&scene);
            for (i, a) in boxes.iter().enumerate() {
                assert!(a.0 >= -1.0 && a.2 <= scene.width + 1.0 && a.3 <= scene.height, "{classes}: {a:?}");
                for b in &boxes[i + 1..] {
                    let apart = a.2 <= b.0 || b.2 <= a.0 || a.3 <= b.1 || b.3 <= a.1;
                    assert!(apart, "{classes} classes: {a:?} over {b:?}");
                }
            }
        }
    }

    #[test]
    fn counts_and_names_are_there_where_there_is_room() {
        let names: Vec<String> = (0..10).map(|i| format!("c{i}")).collect();
        let rows_of_ten = rows(10);
        let small = Matrix { rows: &rows_of_ten, names: &names, note: "note" }.scene();
        let said: Vec<String> = texts(&small).into_iter().map(|text| text.4).collect();
        assert_eq!(said.iter().filter(|text| *text == "c3").count(), 2, "a row and a column");
        assert!(said.contains(&"43".to_string()) && said.contains(&"note".to_string()));
        let rows = rows(100);
        let large = Matrix { rows: &rows, names: &[], note: "note" };
        let said: Vec<String> = texts(&large.scene()).into_iter().map(|text| text.4).collect();
        assert_eq!(said.iter().filter(|text| text.starts_with("class ") && text.ends_with(" 42")).count(), 1);
        assert!(said.contains(&"95".to_string()) && !said.contains(&"96".to_string()), "every fifth column");
        assert!(large.svg().starts_with("<svg") && large.png().unwrap().starts_with(b"\x89PNG"));
    }

    #[test]
    fn empty_cells_are_not_drawn() {
        let rows = vec![vec![3, 0], vec![1, 0]];
        let scene = Matrix { rows: &rows, names: &[], note: "" }.scene();
        let cells = scene.items.iter().filter(|item| matches!(item, Item::Rect { w, .. } if *w == 53.0));
        let inks: Vec<Ink> =
            cells.map(|item| if let Item::Rect { ink, .. } = item { *ink } else { Ink::Text }).collect();
        assert_eq!(inks, [HIT, MISTAKE]);
    }
}
