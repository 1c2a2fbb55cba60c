//! WebP, by the image-webp crate.

use super::Header;
use super::exif::Orientation;
use super::layout::Layout;
use image_webp::{DecodingError, WebPDecoder};
use std::io::Cursor;

const TRUNCATED: &str = "truncated: this WebP ends before its stated length";

/// Walks all chunks. The crate allocates by the size that a frame claims before it compares that with the canvas
/// (0.2.4), so the largest of all claims counts.
pub(super) fn inspect(bytes: &[u8]) -> Result<Header, String> {
    let &[_, _, _, _, s0, s1, s2, s3, _, _, _, _, ref chunks @ ..] = bytes else {
        return Err(TRUNCATED.into());
    };
    // A padding byte at the end is often missing.
    if u32::from_le_bytes([s0, s1, s2, s3]) as usize > bytes.len() - 8 + 1 {
        return Err(TRUNCATED.into());
    }
    let mut found = Found::default();
    found.chunks(chunks)?;
    let (width, height) = found.canvas.or(found.frame).ok_or("broken WebP: holds no image")?;
    Ok(Header { width, height, orientation: found.orientation, pixels: found.pixels, end: bytes.len() })
}

#[derive(Default)]
struct Found {
    canvas: Option<(usize, usize)>,
    frame: Option<(usize, usize)>,
    orientation: Orientation,
    pixels: usize,
}

impl Found {
    fn chunks(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while let [a, b, c, d, l0, l1, l2, l3, rest @ ..] = bytes {
            let length = u32::from_le_bytes([*l0, *l1, *l2, *l3]) as usize;
            let data = rest.get(..length).ok_or(TRUNCATED)?;
            self.chunk(&[*a, *b, *c, *d], data)?;
            // Chunks of odd length are padded, but for some last ones.
            bytes = rest.get(length + length % 2..).unwrap_or_default();
        }
        Ok(())
    }

    fn chunk(&mut self, kind: &[u8; 4], data: &[u8]) -> Result<(), String> {
        match kind {
            b"VP8X" => {
                let &[_, _, _, _, w0, w1, w2, h0, h1, h2, ..] = data else { return Err(TRUNCATED.into()) };
                let size = (three_bytes(w0, w1, w2) + 1, three_bytes(h0, h1, h2) + 1);
                self.canvas.get_or_insert(size);
                self.claim(size);
            }
            b"VP8 " => {
                let &[_, _, _, _, _, _, w0, w1, h0, h1, ..] = data else { return Err(TRUNCATED.into()) };
                let side = |low, high| usize::from(u16::from_le_bytes([low, high]) & 0x3fff);
                self.frame(side(w0, w1), side(h0, h1));
            }
            b"VP8L" => {
                let &[_, b0, b1, b2, b3, ..] = data else { return Err(TRUNCATED.into()) };
                let bits = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
                self.frame((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1);
            }
            b"ANMF" => {
                let &[_, _, _, _, _, _, w0, w1, w2, h0, h1, h2, ..] = data else {
                    return Err(TRUNCATED.into());
                };
                self.claim((three_bytes(w0, w1, w2) + 1, three_bytes(h0, h1, h2) + 1));
                self.chunks(data.get(16..).unwrap_or_default())?;
            }
            b"EXIF" => self.orientation = Orientation::from_exif(data),
            _ => {}
        }
        Ok(())
    }

    fn frame(&mut self, width: usize, height: usize) {
        self.frame.get_or_insert((width, height));
        self.claim((width, height));
    }

    fn claim(&mut self, (width, height): (usize, usize)) {
        self.pixels = self.pixels.max(width.saturating_mul(height));
    }
}

fn three_bytes(low: u8, middle: u8, high: u8) -> usize {
    u32::from_le_bytes([low, middle, high, 0]) as usize
}

/// Decodes the image; of an animation, the first frame.
pub(super) fn pixels(bytes: &[u8], out: &mut Vec<u8>) -> Result<Layout, String> {
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(broken)?;
    let layout = if decoder.has_alpha() { Layout::Rgba } else { Layout::Rgb };
    let size = decoder.output_buffer_size().ok_or("is too large")?;
    out.resize(size, 0);
    decoder.read_image(out).map_err(broken)?;
    Ok(layout)
}

fn broken(error: DecodingError) -> String {
    format!("broken WebP: {error}")
}
