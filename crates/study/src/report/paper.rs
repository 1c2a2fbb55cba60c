//! How large figures are on paper, and what stands around them.

use super::ReportError;
use super::figure::WIDE;
use super::scene::{Item, MARGIN, Scene};

/// Size of the text at axes, in a scene.
pub const TEXT: f64 = 11.5;
/// Points of a millimetre.
const MM: f64 = 72.0 / 25.4;
/// Narrower scenes have no room for axes.
const NARROWEST: f64 = 220.0;
/// Widest of all, in millimetres.
const WIDEST: f64 = 1000.0;

/// What a paper asks of figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wish {
    /// Millimetres from edge to edge.
    pub width: Option<f64>,
    /// Points, of the text at axes.
    pub font_size: Option<f64>,
    /// Title and note.
    pub title: bool,
}

/// How a scene becomes a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Paper {
    /// Width of the scene, in its own units, and the paper beside it.
    pub width: f64,
    pub margin: f64,
    /// Points of a unit of the scene.
    pub points: f64,
    pub titled: bool,
    /// A size was asked for, so that files state theirs.
    pub sized: bool,
}

impl Paper {
    /// As wide as text on a desktop, with title and note.
    pub fn screen() -> Self {
        Paper { width: WIDE, margin: MARGIN, points: 0.75, titled: true, sized: false }
    }

    /// The paper that is asked for. An error where text of that size does not fit that width.
    pub fn new(wish: Wish) -> Result<Self, ReportError> {
        let margin = if wish.title { MARGIN } else { 3.0 };
        let titled = wish.title;
        if wish.width.is_none() && wish.font_size.is_none() {
            return Ok(Paper { margin, titled, ..Self::screen() });
        }
        let size = wish.font_size.unwrap_or(8.0);
        let points = size / TEXT;
        let whole = wish.width.map_or(WIDE + 2.0 * margin, |width| width * MM / points);
        let width = whole - 2.0 * margin;
        if width < NARROWEST {
            let least = ((NARROWEST + 2.0 * margin) * points / MM).ceil();
            return Err(ReportError::Size(format!(
                "--width {}mm has no room for text of {size} pt: it takes {least}mm, or a smaller --font-size",
                wish.width.unwrap_or_default()
            )));
        }
        if whole * points > WIDEST * MM {
            return Err(ReportError::Size(format!("--width: more than {WIDEST}mm")));
        }
        Ok(Paper { width, margin, points, titled, sized: true })
    }

    /// What is to be seen of a scene: x, y, width and height.
    pub fn area(&self, scene: &Scene) -> (f64, f64, f64, f64) {
        let (above, below) =
            if self.titled { (scene.above, scene.below) } else { (self.margin, self.margin) };
        (-self.margin, -above, scene.width + 2.0 * self.margin, scene.height + above + below)
    }

    /// What is drawn of a scene.
    pub fn items<'a>(&self, scene: &'a Scene) -> impl Iterator<Item = &'a Item> + use<'a> {
        let frame: &[Item] = if self.titled { &scene.frame } else { &[] };
        scene.items.iter().chain(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_of_a_paper_has_room_for_its_text() {
        let wish = Wish { width: Some(85.0), font_size: Some(8.0), title: false };
        let paper = Paper::new(wish).unwrap();
        assert!((paper.points * TEXT - 8.0).abs() < 1e-9);
        assert!(((paper.width + 2.0 * paper.margin) * paper.points - 85.0 * MM).abs() < 1e-9);
        let refused = Paper::new(Wish { width: Some(30.0), ..wish }).unwrap_err().to_string();
        assert_eq!(
            refused,
            "--width 30mm has no room for text of 8 pt: it takes 56mm, or a smaller --font-size"
        );
        assert!(Paper::new(Wish { width: Some(56.0), ..wish }).is_ok());
    }
}
