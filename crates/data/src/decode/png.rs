//! PNG, by the png crate.

use super::Header;
use super::exif::Orientation;
use super::layout::Layout;
use ::png::{BitDepth, ColorType, Decoder, Limits, Reader, Transformations};
use std::io::Cursor;

/// Tables and buffers that don't grow with the image.
const FIXED_MEMORY: usize = 4 << 20;

/// The size stands in the first chunk; the orientation, if any, in a later one.
pub(super) fn inspect(bytes: &[u8]) -> Result<Header, String> {
    const TRUNCATED: &str = "truncated: this PNG ends within its header";
    let mut at = 8;
    let (kind, header, next) = chunk(bytes, at).ok_or(TRUNCATED)?;
    let &[w3, w2, w1, w0, h3, h2, h1, h0, ..] = header else { return Err(TRUNCATED.into()) };
    if kind != b"IHDR" {
        return Err("broken PNG: does not begin with its header".into());
    }
    let width = u32::from_be_bytes([w3, w2, w1, w0]) as usize;
    let height = u32::from_be_bytes([h3, h2, h1, h0]) as usize;
    let mut orientation = Orientation::default();
    at = next;
    while let Some((kind, data, next)) = chunk(bytes, at) {
        match kind {
            b"eXIf" => orientation = Orientation::from_exif(data),
            // The crate panics at palettes of one or two bytes (0.18.1).
            b"PLTE" if data.is_empty() || data.len() % 3 != 0 || data.len() > 3 * 256 => {
                return Err(format!("broken PNG: its palette has {} bytes", data.len()));
            }
            _ => {}
        }
        at = next;
    }
    Ok(Header { width, height, orientation, pixels: width.saturating_mul(height), end: bytes.len() })
}

/// A chunk's name and data, and where the next one begins.
fn chunk(bytes: &[u8], at: usize) -> Option<(&[u8], &[u8], usize)> {
    let &[l3, l2, l1, l0] = bytes.get(at..at + 4)? else { return None };
    let length = u32::from_be_bytes([l3, l2, l1, l0]) as usize;
    let data = at + 8;
    Some((bytes.get(at + 4..data)?, bytes.get(data..data.checked_add(length)?)?, data + length + 4))
}

pub(super) fn pixels(bytes: &[u8], header: &Header, out: &mut Vec<u8>) -> Result<Layout, String> {
    // Palettes become colours; 1, 2, 4 and 16 bits become 8.
    let mut reader = open(bytes, header, Transformations::normalize_to_color8())?;
    let layout = match reader.output_color_type().0 {
        ColorType::Grayscale => Layout::Gray,
        ColorType::GrayscaleAlpha => Layout::GrayAlpha,
        ColorType::Rgba => Layout::Rgba,
        ColorType::Rgb | ColorType::Indexed => Layout::Rgb,
    };
    let size = reader.output_buffer_size().ok_or("is too large")?;
    out.resize(size, 0);
    reader.next_frame(out).map_err(broken)?;
    Ok(layout)
}

/// Replaces `out` by a number for each pixel: its gray value as it is stored, or its place in the palette.
pub(super) fn numbers(bytes: &[u8], header: &Header, out: &mut Vec<u8>) -> Result<(), String> {
    let mut reader = open(bytes, header, Transformations::IDENTITY)?;
    let (kind, depth) = reader.output_color_type();
    if !matches!(kind, ColorType::Grayscale | ColorType::Indexed) {
        return Err("a mask in colours; labels are gray values, or places in a palette".into());
    }
    let bits = match depth {
        BitDepth::Sixteen => return Err("a mask with 16 bits for a label; 8 at most are read".into()),
        depth => depth as usize,
    };
    let size = reader.output_buffer_size().ok_or("is too large")?;
    out.resize(size, 0);
    reader.next_frame(out).map_err(broken)?;
    if bits < 8 {
        *out = unpacked(out, header.width, bits);
    }
    Ok(())
}

/// Lines begin with a byte of their own; the first pixel has a byte's highest bits.
fn unpacked(packed: &[u8], width: usize, bits: usize) -> Vec<u8> {
    let line = (width * bits).div_ceil(8).max(1);
    let number = |line: &[u8], x: usize| {
        let shift = 8 - bits - x * bits % 8;
        line[x * bits / 8] >> shift & ((1 << bits) - 1)
    };
    packed.chunks_exact(line).flat_map(|line| (0..width).map(move |x| number(line, x))).collect()
}

fn open<'a>(
    bytes: &'a [u8],
    header: &Header,
    transformations: Transformations,
) -> Result<Reader<Cursor<&'a [u8]>>, String> {
    let limits = Limits { bytes: header.pixels.saturating_mul(8) + FIXED_MEMORY };
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(transformations);
    decoder.read_info().map_err(broken)
}

fn broken(error: ::png::DecodingError) -> String {
    format!("broken PNG: {error}")
}
