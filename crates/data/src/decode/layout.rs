//! From the pixels a file holds to those that were asked for, in place.

/// Meaning of the bytes of one pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Gray,
    GrayAlpha,
    Rgb,
    Rgba,
}

impl Layout {
    pub(super) fn channels(self) -> usize {
        match self {
            Layout::Gray => 1,
            Layout::GrayAlpha => 2,
            Layout::Rgb => 3,
            Layout::Rgba => 4,
        }
    }

    /// To gray (1 channel) or RGB (3).
    pub(super) fn convert(self, pixels: &mut Vec<u8>, channels: usize) {
        match (self, channels) {
            (Layout::Gray, 1) | (Layout::Rgb, 3) => {}
            (Layout::Gray, _) => gray_to_rgb(pixels),
            (Layout::GrayAlpha, 1) => shrink(pixels, |&[gray, _]| [gray]),
            (Layout::GrayAlpha, _) => {
                shrink(pixels, |&[gray, _]| [gray]);
                gray_to_rgb(pixels);
            }
            (Layout::Rgb, _) => shrink(pixels, |&[r, g, b]| [luma(r, g, b)]),
            (Layout::Rgba, 1) => shrink(pixels, |&[r, g, b, _]| [luma(r, g, b)]),
            (Layout::Rgba, _) => shrink(pixels, |&[r, g, b, _]| [r, g, b]),
        }
    }
}

/// PIL's "L": ITU-R 601 weights in 16 bits.
fn luma(r: u8, g: u8, b: u8) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}

/// Maps pixels of `FROM` bytes to `TO` bytes, no more than `FROM`: what is written was read already.
fn shrink<const FROM: usize, const TO: usize>(pixels: &mut Vec<u8>, map: impl Fn(&[u8; FROM]) -> [u8; TO]) {
    let count = pixels.len() / FROM;
    for i in 0..count {
        let mut from = [0; FROM];
        from.copy_from_slice(&pixels[i * FROM..][..FROM]);
        pixels[i * TO..][..TO].copy_from_slice(&map(&from));
    }
    pixels.truncate(count * TO);
}

/// Converts from the last pixel to the first, so that nothing is overwritten before it is read.
fn gray_to_rgb(pixels: &mut Vec<u8>) {
    let count = pixels.len();
    pixels.resize(count * 3, 0);
    for i in (0..count).rev() {
        let gray = pixels[i];
        pixels[i * 3..][..3].fill(gray);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_becomes_gray_and_rgb() {
        let converted = |layout: Layout, pixels: &[u8], channels| {
            let mut pixels = pixels.to_vec();
            layout.convert(&mut pixels, channels);
            pixels
        };
        assert_eq!(converted(Layout::Gray, &[1, 2], 1), [1, 2]);
        assert_eq!(converted(Layout::Gray, &[1, 2], 3), [1, 1, 1, 2, 2, 2]);
        assert_eq!(converted(Layout::GrayAlpha, &[1, 9, 2, 9], 1), [1, 2]);
        assert_eq!(converted(Layout::GrayAlpha, &[1, 9, 2, 9], 3), [1, 1, 1, 2, 2, 2]);
        assert_eq!(converted(Layout::Rgb, &[1, 2, 3, 4, 5, 6], 3), [1, 2, 3, 4, 5, 6]);
        assert_eq!(converted(Layout::Rgba, &[1, 2, 3, 9, 4, 5, 6, 9], 3), [1, 2, 3, 4, 5, 6]);
        // PIL: Image.new("RGB", (1, 1), c).convert("L") for c = (255, 0, 0), (0, 255, 0), (0, 0, 255), (10, 200, 30)
        let colours = [255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 200, 30];
        assert_eq!(converted(Layout::Rgb, &colours, 1), [76, 150, 29, 124]);
        assert_eq!(converted(Layout::Rgba, &[255, 255, 255, 0], 1), [255]);
    }
}
