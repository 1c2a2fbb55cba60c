//! Which way up: the one EXIF field that changes pixels.

use crate::Image;

/// EXIF's numbers 1 to 8, as what has to be done: mirror left to right, then turn clockwise by quarters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Orientation {
    mirrored: bool,
    quarters: u8,
}

impl Orientation {
    /// Reads the orientation from EXIF's TIFF structure, with or without the "Exif\0\0" before it. Unreadable EXIF means upright: it is
    /// common, and no reason to refuse an image.
    pub(super) fn from_exif(exif: &[u8]) -> Self {
        let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
        orientation_field(tiff).map_or(Self::default(), Self::from_number)
    }

    fn from_number(number: u16) -> Self {
        let (mirrored, quarters) = match number {
            2 => (true, 0),
            3 => (false, 2),
            4 => (true, 2),
            5 => (true, 3),
            6 => (false, 1),
            7 => (true, 1),
            8 => (false, 3),
            _ => (false, 0),
        };
        Self { mirrored, quarters }
    }

    pub(super) fn swaps_axes(self) -> bool {
        self.quarters % 2 == 1
    }

    /// Makes the image upright.
    pub(super) fn apply(self, image: &mut Image) {
        if self == Self::default() {
            return;
        }
        let Image { width, height, channels, .. } = *image;
        let stored = std::mem::take(&mut image.pixels);
        let (to_width, to_height) = if self.swaps_axes() { (height, width) } else { (width, height) };
        let upright = image.reset(to_width, to_height, channels);
        for (at, pixel) in upright.chunks_exact_mut(channels).enumerate() {
            let (x, y) = (at % to_width, at / to_width);
            let (from_x, from_y) = match self.quarters {
                0 => (x, y),
                1 => (y, height - 1 - x),
                2 => (width - 1 - x, height - 1 - y),
                _ => (width - 1 - y, x),
            };
            let from_x = if self.mirrored { width - 1 - from_x } else { from_x };
            pixel.copy_from_slice(&stored[(from_y * width + from_x) * channels..][..channels]);
        }
    }
}

/// The number of tag 0x0112 in the first directory.
fn orientation_field(tiff: &[u8]) -> Option<u16> {
    let little_endian = match tiff.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes = [*tiff.get(at)?, *tiff.get(at.checked_add(1)?)?];
        Some(if little_endian { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let (first, second) = (usize::from(short(4)?), usize::from(short(6)?));
    let directory = if little_endian { second << 16 | first } else { first << 16 | second };
    let entries = usize::from(short(directory)?);
    // An entry is 12 bytes: tag, type, count (4), and a value that stands here as it is a single short.
    (0..entries)
        .map(|entry| directory + 2 + entry * 12)
        .find(|&at| short(at) == Some(0x0112))
        .and_then(|at| short(at + 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of one entry at offset 8.
    fn tiff(orientation: u16, little_endian: bool) -> Vec<u8> {
        let short = |x: u16| if little_endian { x.to_le_bytes() } else { x.to_be_bytes() };
        let long = |x: u32| if little_endian { x.to_le_bytes() } else { x.to_be_bytes() };
        let mut bytes = if little_endian { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
        bytes.extend(long(8));
        bytes.extend([short(1), short(0x0112), short(3)].concat());
        bytes.extend(long(1));
        bytes.extend([short(orientation), short(0)].concat());
        bytes.extend(long(0));
        bytes
    }

    #[test]
    fn the_field_is_found_in_both_byte_orders() {
        for number in 1..=8 {
            for little_endian in [false, true] {
                let mut exif = b"Exif\0\0".to_vec();
                exif.extend(tiff(number, little_endian));
                assert_eq!(Orientation::from_exif(&exif), Orientation::from_number(number));
                assert_eq!(Orientation::from_exif(&exif[6..]), Orientation::from_number(number));
            }
        }
    }

    #[test]
    fn broken_exif_means_upright() {
        let whole = tiff(6, true);
        for end in 0..whole.len() - 6 {
            assert_eq!(Orientation::from_exif(&whole[..end]), Orientation::default());
        }
        let mut far = whole;
        far[4..8].fill(0xff);
        assert_eq!(Orientation::from_exif(&far), Orientation::default());
    }

    /// What PIL's ImageOps.exif_transpose makes of a b c / d e f.
    #[test]
    fn all_eight_turn_the_image_as_exif_says() {
        let upright =
            ["abc def", "cba fed", "fed cba", "def abc", "ad be cf", "da eb fc", "fc eb da", "cf be ad"];
        for (number, rows) in (1..).zip(upright) {
            let mut image = Image { width: 3, height: 2, channels: 1, pixels: b"abcdef".to_vec() };
            Orientation::from_number(number).apply(&mut image);
            let found: Vec<_> = image.pixels.chunks(image.width).map(String::from_utf8_lossy).collect();
            assert_eq!(found.join(" "), rows, "orientation {number}");
        }
    }
}
