//! The ten shapes, as distances to their outlines.
//!
//! Coordinates: x to the right, y up, the shape centred and about one unit in radius. A distance
//! is negative inside; it only has to be right near the outline, where it smooths the edge.

/// The order is that of the first ten classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Disc,
    Ring,
    Square,
    Triangle,
    Star,
    Cross,
    HorizontalStripes,
    VerticalStripes,
    Crescent,
    Heart,
}

impl Shape {
    pub(crate) const ALL: [Shape; 10] = [
        Shape::Disc,
        Shape::Ring,
        Shape::Square,
        Shape::Triangle,
        Shape::Star,
        Shape::Cross,
        Shape::HorizontalStripes,
        Shape::VerticalStripes,
        Shape::Crescent,
        Shape::Heart,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Shape::Disc => "disc",
            Shape::Ring => "ring",
            Shape::Square => "square",
            Shape::Triangle => "triangle",
            Shape::Star => "star",
            Shape::Cross => "cross",
            Shape::HorizontalStripes => "horizontal stripes",
            Shape::VerticalStripes => "vertical stripes",
            Shape::Crescent => "crescent",
            Shape::Heart => "heart",
        }
    }

    #[inline]
    pub(crate) fn distance(self, x: f32, y: f32) -> f32 {
        match self {
            Shape::Disc => length(x, y) - 0.9,
            Shape::Ring => (length(x, y) - 0.7).abs() - 0.2,
            Shape::Square => square(x, y, 0.8),
            Shape::Triangle => triangle(x, y),
            Shape::Star => star(x, y),
            Shape::Cross => cross(x, y),
            Shape::HorizontalStripes => stripes(x, y),
            Shape::VerticalStripes => stripes(y, x),
            Shape::Crescent => crescent(x, y),
            Shape::Heart => heart(x, y),
        }
    }
}

pub(crate) fn length(x: f32, y: f32) -> f32 {
    (x * x + y * y).sqrt()
}

pub(super) fn square(x: f32, y: f32, half: f32) -> f32 {
    x.abs().max(y.abs()) - half
}

fn rectangle(x: f32, y: f32, half_width: f32, half_height: f32) -> f32 {
    (x.abs() - half_width).max(y.abs() - half_height)
}

/// Equilateral, on its base, corners one unit from the centre.
fn triangle(x: f32, y: f32) -> f32 {
    const SIN_60: f32 = 0.866_025_4;
    (x.abs() * SIN_60 + y * 0.5).max(-y) - 0.5
}

fn cross(x: f32, y: f32) -> f32 {
    rectangle(x, y, 0.95, 0.28).min(rectangle(x, y, 0.28, 0.95))
}

/// Three bars that together fill a square of half-width 0.85.
fn stripes(x: f32, y: f32) -> f32 {
    let from_nearest_bar = y.abs().min((y.abs() - 0.68).abs());
    rectangle(x, from_nearest_bar, 0.85, 0.17)
}

/// A disc less a smaller one; it hangs about 0.2 to one side, which the shift undoes.
fn crescent(x: f32, y: f32) -> f32 {
    let x = x - 0.2;
    (length(x, y) - 0.95).max(0.78 - length(x - 0.45, y))
}

/// Five points: folding the plane along the star's mirror axes leaves one half of the upper point,
/// whose edge is a straight line from the tip at 1.05 to the notch at 0.45 from the centre.
fn star(x: f32, y: f32) -> f32 {
    const COS_36: f32 = 0.809_017;
    const SIN_36: f32 = 0.587_785_25;
    const TIP: f32 = 1.05;
    const EDGE_NORMAL: (f32, f32) = (0.933036, 0.359784);
    let (mut x, mut y) = (x.abs(), y);
    for _ in 0..2 {
        let beyond_axis = (x * COS_36 - y * SIN_36).max(0.0);
        x = (x - 2.0 * beyond_axis * COS_36).abs();
        y += 2.0 * beyond_axis * SIN_36;
    }
    x * EDGE_NORMAL.0 + (y - TIP) * EDGE_NORMAL.1
}

/// A square on its corner, and a disc on the middle of each upper side.
fn heart(x: f32, y: f32) -> f32 {
    const SCALE: f32 = 0.8;
    const SQRT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
    let (x, y) = (x.abs() / SCALE, y / SCALE + 0.1);
    let square_on_corner = (x + y.abs() - 1.0) * SQRT_HALF;
    let disc_on_side = length(x - 0.5, y - 0.5) - SQRT_HALF;
    square_on_corner.min(disc_on_side) * SCALE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inside(shape: Shape, x: f32, y: f32) -> bool {
        shape.distance(x, y) < 0.0
    }

    #[test]
    fn shapes_hold_the_points_they_should() {
        let solid = [Shape::Disc, Shape::Square, Shape::Triangle, Shape::Star, Shape::Cross, Shape::Heart];
        assert!(solid.into_iter().all(|shape| inside(shape, 0.0, 0.0)));
        assert!(!inside(Shape::Ring, 0.0, 0.0) && inside(Shape::Ring, 0.7, 0.0));
        assert!(inside(Shape::Triangle, 0.0, 0.9) && !inside(Shape::Triangle, 0.0, -0.6));
        assert!(inside(Shape::Star, 0.0, 1.0) && !inside(Shape::Star, 0.0, -0.6));
        assert!(inside(Shape::Cross, 0.9, 0.0) && !inside(Shape::Cross, 0.5, 0.5));
        assert!(inside(Shape::HorizontalStripes, 0.8, 0.0) && !inside(Shape::HorizontalStripes, 0.0, 0.34));
        assert!(inside(Shape::VerticalStripes, 0.0, 0.8) && !inside(Shape::VerticalStripes, 0.34, 0.0));
        assert!(inside(Shape::Crescent, -0.5, 0.0) && !inside(Shape::Crescent, 0.5, 0.0));
        assert!(!inside(Shape::Heart, 0.0, 0.95) && inside(Shape::Heart, 0.4, 0.8));
    }

    /// A scene places a figure by its radius; a shape much beyond it would be cut off.
    #[test]
    fn shapes_stay_within_their_radius() {
        for shape in Shape::ALL {
            for step in 0..360 {
                let (sin, cos) = (step as f32).to_radians().sin_cos();
                assert!(!inside(shape, 1.25 * cos, 1.25 * sin), "{shape:?} at {step} degrees");
            }
        }
    }

    #[test]
    fn the_star_is_the_same_after_a_fifth_of_a_turn() {
        let (sin, cos) = 72f32.to_radians().sin_cos();
        for (x, y) in [(0.1, 0.9), (0.5, 0.2), (-0.3, -0.7), (0.0, -0.4)] {
            let turned = Shape::Star.distance(x * cos - y * sin, x * sin + y * cos);
            assert!((Shape::Star.distance(x, y) - turned).abs() < 1e-5);
        }
    }
}
