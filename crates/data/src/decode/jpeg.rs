//! JPEG, by zune-jpeg.

use super::Header;
use super::exif::Orientation;
use super::layout::Layout;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

const TRUNCATED: &str = "truncated: this JPEG ends before its end marker";

const END: u8 = 0xd9;

/// Walks all segments to the end marker. A decoder left to itself would paint what is missing gray.
pub(super) fn inspect(bytes: &[u8]) -> Result<Header, String> {
    let mut found = Found::default();
    let mut at = 2;
    loop {
        match next_marker(bytes, &mut at).ok_or(TRUNCATED)? {
            END => break,
            // Markers that stand alone: restarts, and "temporary".
            0xd0..=0xd7 | 0x01 => {}
            marker => {
                let &[high, low] = bytes.get(at..at + 2).ok_or(TRUNCATED)? else {
                    return Err(TRUNCATED.into());
                };
                let length = usize::from(u16::from_be_bytes([high, low])).max(2);
                found.segment(marker, bytes.get(at + 2..at + length).ok_or(TRUNCATED)?)?;
                at += length;
            }
        }
    }
    let (width, height) = found.size.ok_or("broken JPEG: has no frame header")?;
    Ok(Header { width, height, orientation: found.orientation, pixels: width * height, end: at - 2 })
}

#[derive(Default)]
struct Found {
    size: Option<(usize, usize)>,
    orientation: Orientation,
}

impl Found {
    fn segment(&mut self, marker: u8, segment: &[u8]) -> Result<(), String> {
        match marker {
            // Start of frame, of any coding; 0xc4, 0xc8 and 0xcc are tables.
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                let &[_, h1, h0, w1, w0, ..] = segment else {
                    return Err("broken JPEG: its frame header is too short".into());
                };
                let side = |high, low| usize::from(u16::from_be_bytes([high, low]));
                if self.size.replace((side(w1, w0), side(h1, h0))).is_some() {
                    return Err("broken JPEG: has two frame headers".into());
                }
            }
            0xe1 if segment.starts_with(b"Exif\0\0") => self.orientation = Orientation::from_exif(segment),
            _ => {}
        }
        Ok(())
    }
}

/// The next marker's code, leaving `at` behind it. What lies before is skipped: fill bytes, or the coded data after a
/// scan's header, in which 0xff is followed by 0.
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

/// Put between the last scan and the end marker: ones, which no Huffman code consists of. (A zero after 0xff says
/// that it is data.)
///
/// Where a scan is too short, the crate takes zeros for what is missing (0.5.15), and these mean something. Ones make
/// it fail.
const NO_CODE: [[u8; 2]; 16] = [[0xff, 0]; 16];

pub(super) fn pixels(bytes: &[u8], header: &Header, out: &mut Vec<u8>) -> Result<Layout, String> {
    let bytes = &[&bytes[..header.end], NO_CODE.as_flattened(), &[0xff, END]].concat();
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
