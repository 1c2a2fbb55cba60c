//! JPEG, by zune-jpeg.

use super::Header;
use super::exif::Orientation;
use super::layout::Layout;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

const TRUNCATED: &str = "truncated: this JPEG ends before its end marker";

/// Walks all segments to the end marker. A decoder left to itself would paint what is missing gray.
pub(super) fn inspect(bytes: &[u8]) -> Result<Header, String> {
    let mut header: Option<Header> = None;
    let mut orientation = Orientation::default();
    let mut at = 2;
    loop {
        let marker = next_marker(bytes, &mut at).ok_or(TRUNCATED)?;
        match marker {
            END => break,
            // Markers that stand alone: restarts, and "temporary".
            0xd0..=0xd7 | 0x01 => continue,
            _ => {}
        }
        let length =
            bytes.get(at..at + 2).map(|b| usize::from(u16::from_be_bytes([b[0], b[1]]))).ok_or(TRUNCATED)?;
        let segment = bytes.get(at + 2..at + length.max(2)).ok_or(TRUNCATED)?;
        at += length.max(2);
        match marker {
            // Start of frame, of any coding; 0xc4, 0xc8 and 0xcc are tables.
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                let &[_, h1, h0, w1, w0, ..] = segment else {
                    return Err("its frame header is too short".into());
                };
                let (width, height) = (u16::from_be_bytes([w1, w0]), u16::from_be_bytes([h1, h0]));
                let (width, height) = (usize::from(width), usize::from(height));
                if header.is_some() {
                    return Err("holds two frame headers".into());
                }
                header = Some(Header { width, height, orientation, pixels: width * height });
            }
            0xe1 if segment.starts_with(b"Exif\0\0") => orientation = Orientation::from_exif(segment),
            _ => {}
        }
    }
    let header = header.ok_or("has no frame header")?;
    Ok(Header { orientation, ..header })
}

const END: u8 = 0xd9;

/// The next marker's code, leaving `at` behind it. What lies before is skipped: fill bytes, or the coded data after a scan's
/// header, in which 0xff is followed by 0.
fn next_marker(bytes: &[u8], at: &mut usize) -> Option<u8> {
    loop {
        *at += bytes.get(*at..)?.iter().position(|&byte| byte == 0xff)? + 1;
        match *bytes.get(*at)? {
            0xff => {}
            0 => *at += 1,
            marker => {
                *at += 1;
                return Some(marker);
            }
        }
    }
}

pub(super) fn pixels(bytes: &[u8], out: &mut Vec<u8>) -> Result<Layout, String> {
    // Strict: an error rather than gray pixels where the data is broken. The size was checked by us.
    let options = DecoderOptions::new_fast()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX));
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(broken)?;
    let (space, layout) = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => (ColorSpace::Luma, Layout::Gray),
        _ => (ColorSpace::RGB, Layout::Rgb),
    };
    decoder.set_options(options.jpeg_set_out_colorspace(space));
    let size = decoder.output_buffer_size().ok_or("is too large")?;
    out.resize(size, 0);
    decoder.decode_into(out).map_err(broken)?;
    Ok(layout)
}

/// The crate's messages may hold several lines.
fn broken(error: impl std::fmt::Debug) -> String {
    let message = format!("{error:?}").split_whitespace().collect::<Vec<_>>().join(" ");
    format!("broken JPEG: {message}")
}
