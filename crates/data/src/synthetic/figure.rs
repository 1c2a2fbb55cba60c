//! From a class to what is drawn: a shape, how many copies of it, and what surrounds them.

use super::shape::{Shape, length, square};
use std::fmt;

/// Centres of the copies, and the size of each, in a figure of radius one.
struct Arrangement {
    centres: &'static [(f32, f32)],
    scale: f32,
}

/// Indexed by the number of copies, less one.
const ARRANGEMENTS: [Arrangement; 4] = [
    Arrangement { centres: &[(0.0, 0.0)], scale: 1.0 },
    Arrangement { centres: &[(-0.52, 0.0), (0.52, 0.0)], scale: 0.46 },
    Arrangement { centres: &[(0.0, 0.5), (-0.5, -0.42), (0.5, -0.42)], scale: 0.42 },
    Arrangement { centres: &[(-0.48, 0.48), (0.48, 0.48), (-0.48, -0.48), (0.48, -0.48)], scale: 0.42 },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    None,
    Round,
    Square,
}

const FRAMES: [Frame; 3] = [Frame::None, Frame::Round, Frame::Square];

/// Number of different figures, and so of classes.
pub(super) const COUNT: usize = Shape::ALL.len() * ARRANGEMENTS.len() * FRAMES.len();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Figure {
    shape: Shape,
    copies: usize,
    frame: Frame,
}

impl Figure {
    /// `class` counts through the shapes first, then the numbers of copies, then the frames.
    pub(super) fn of_class(class: usize) -> Self {
        let group = class / Shape::ALL.len();
        Self {
            shape: Shape::ALL[class % Shape::ALL.len()],
            copies: group % ARRANGEMENTS.len() + 1,
            frame: FRAMES[group / ARRANGEMENTS.len() % FRAMES.len()],
        }
    }

    /// A figure with small parts needs more room for them to be seen.
    pub(super) fn is_composed(&self) -> bool {
        self.copies > 1 || self.frame != Frame::None
    }

    /// Distance to the outline, negative inside, in units of the figure's radius.
    #[inline]
    pub(super) fn distance(&self, x: f32, y: f32) -> f32 {
        const FRAME_HALF_WIDTH: f32 = 0.07;
        match self.frame {
            Frame::None => self.content(x, y, 1.0),
            Frame::Round => {
                let frame = (length(x, y) - 1.0).abs() - FRAME_HALF_WIDTH;
                frame.min(self.content(x, y, 0.72))
            }
            Frame::Square => {
                let frame = square(x, y, 0.93).abs() - FRAME_HALF_WIDTH;
                frame.min(self.content(x, y, 0.78))
            }
        }
    }

    #[inline]
    fn content(&self, x: f32, y: f32, scale: f32) -> f32 {
        if self.copies == 1 {
            return self.shape.distance(x / scale, y / scale) * scale;
        }
        let Arrangement { centres, scale: copy } = ARRANGEMENTS[self.copies - 1];
        let distances = centres
            .iter()
            .map(|(cx, cy)| self.shape.distance((x / scale - cx) / copy, (y / scale - cy) / copy));
        distances.fold(f32::INFINITY, f32::min) * copy * scale
    }
}

/// The class's name: "heart", "heart x3", "heart x3 in a round frame".
impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shape.name())?;
        if self.copies > 1 {
            write!(f, " x{}", self.copies)?;
        }
        match self.frame {
            Frame::None => Ok(()),
            Frame::Round => f.write_str(" in a round frame"),
            Frame::Square => f.write_str(" in a square frame"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_a_name_of_its_own() {
        let mut names: Vec<String> = (0..COUNT).map(|c| Figure::of_class(c).to_string()).collect();
        assert_eq!(names[9], "heart");
        assert_eq!(names[29], "heart x3");
        assert_eq!(names[COUNT - 1], "heart x4 in a square frame");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), COUNT);
    }

    /// Compares the areas figures cover on a grid: no two classes may look alike.
    #[test]
    fn no_two_figures_cover_the_same_points() {
        let covered = |class| {
            let figure = Figure::of_class(class);
            let grid = |i: i32| (i - 32) as f32 / 28.0;
            let points = (0..65).flat_map(|i| (0..65).map(move |j| (grid(j), grid(i))));
            points.map(|(x, y)| figure.distance(x, y) < 0.0).collect::<Vec<_>>()
        };
        let all: Vec<Vec<bool>> = (0..COUNT).map(covered).collect();
        for a in 0..COUNT {
            for b in 0..a {
                let differing = all[a].iter().zip(&all[b]).filter(|(p, q)| p != q).count();
                assert!(differing > 40, "classes {a} and {b} differ in {differing} of 4225 points");
            }
        }
    }
}
