//! A colour for each class, the same in every picture.
//!
//! Of a grid of colours, each class takes the one that is farthest from those of the classes before it. So a few classes look as
//! different as can be, and many still differ.

use super::IGNORED;
use std::sync::LazyLock;

const LEVELS: [u8; 9] = [0, 32, 64, 96, 128, 159, 191, 223, 255];
/// Colours without a part above this are too dark to be seen on a dark picture, and those without a part below the other too
/// pale to be told from white.
const DARK: u8 = 90;
const PALE: u8 = 150;
const FIRST: [u8; 3] = [213, 43, 43];

static COLOURS: LazyLock<[[u8; 3]; 256]> = LazyLock::new(|| {
    let parts = LEVELS.iter();
    let pairs = parts.flat_map(|&r| LEVELS.iter().map(move |&g| (r, g)));
    let grid = pairs.flat_map(|(r, g)| LEVELS.iter().map(move |&b| [r, g, b]));
    // With the distance to the nearest colour that is taken. Black is: it means ignored.
    let seen = |c: &[u8; 3]| c.iter().any(|&part| part > DARK) && c.iter().any(|&part| part < PALE);
    let grid = grid.filter(seen);
    let mut left: Vec<([u8; 3], u32)> = grid.map(|colour| (colour, apart(colour, [0; 3]))).collect();
    let mut colours = [[0; 3]; 256];
    let mut next = FIRST;
    for colour in &mut colours[..usize::from(IGNORED)] {
        *colour = next;
        left.iter_mut().for_each(|(other, nearest)| *nearest = (*nearest).min(apart(*other, next)));
        let farthest = left.iter().max_by_key(|(_, nearest)| *nearest);
        next = farthest.map_or(FIRST, |(colour, _)| *colour);
    }
    colours
});

/// Green counts most, as eyes have it.
fn apart(a: [u8; 3], b: [u8; 3]) -> u32 {
    let square = |i: usize| u32::from(a[i].abs_diff(b[i])).pow(2);
    2 * square(0) + 4 * square(1) + 3 * square(2)
}

/// Colour of a class; black for [`IGNORED`].
pub fn colour(label: u8) -> [u8; 3] {
    COLOURS[usize::from(label)]
}

/// Colours of all labels.
pub fn colours() -> &'static [[u8; 3]; 256] {
    &COLOURS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_classes_look_alike() {
        let nearest = |classes: usize| {
            let pairs = (0..classes).flat_map(|a| (0..a).map(move |b| (a as u8, b as u8)));
            pairs.map(|(a, b)| apart(colour(a), colour(b)).isqrt()).min().unwrap()
        };
        assert!(nearest(10) > 200, "{}", nearest(10));
        assert!(nearest(150) > 60, "{}", nearest(150));
        assert!(nearest(255) > 50, "{}", nearest(255));
        assert_eq!(colour(IGNORED), [0; 3]);
    }
}
