//! Decoded pixels.

/// Bytes of one image, pixel by pixel: (H, W, C).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    pub pixels: Vec<u8>,
}

impl Image {
    /// Gives the image another shape and hands out its pixels to be written; what they hold is left over from before.
    pub fn reset(&mut self, width: usize, height: usize, channels: usize) -> &mut [u8] {
        (self.width, self.height, self.channels) = (width, height, channels);
        self.pixels.resize(width * height * channels, 0);
        &mut self.pixels
    }
}
