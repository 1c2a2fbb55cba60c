//! Files of JPEG, PNG and WebP become pixels.
//!
//! A format module reads two things. `inspect` walks the file's structure without decoding it: size, orientation, and
//! whether the file is all there. `pixels` then lets a crate decode. Everything a header claims is checked in
//! between, so that a few broken bytes can't ask for a huge allocation.

mod exif;
mod jpeg;
mod layout;
mod png;
mod webp;

use crate::{DataError, Image};
use exif::Orientation;
use layout::Layout;
use std::path::Path;

/// Images that claim more pixels are refused.
pub const MAX_PIXELS: usize = 100_000_000;

/// Facts of a file's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    width: usize,
    height: usize,
    orientation: Orientation,
    /// The most pixels that the crate may be led to decode: a WebP holds frames besides its canvas.
    pixels: usize,
    /// End of its data in the file.
    end: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Jpeg,
    Png,
    WebP,
}

impl Format {
    /// Tells the format by content: extensions lie.
    fn of(bytes: &[u8]) -> Result<Self, String> {
        match bytes {
            [] => Err("the file is empty".into()),
            [0xff, 0xd8, 0xff, ..] => Ok(Format::Jpeg),
            _ if bytes.starts_with(b"\x89PNG\r\n\x1a\n") => Ok(Format::Png),
            _ if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") => Ok(Format::WebP),
            _ => Err("not an image that can be read here: JPEG, PNG and WebP are".into()),
        }
    }

    fn inspect(self, bytes: &[u8]) -> Result<Header, String> {
        match self {
            Format::Jpeg => jpeg::inspect(bytes),
            Format::Png => png::inspect(bytes),
            Format::WebP => webp::inspect(bytes),
        }
    }

    /// Replaces `out` by the pixels as they are stored, which may be of another layout than asked for.
    fn pixels(self, bytes: &[u8], header: &Header, out: &mut Vec<u8>) -> Result<Layout, String> {
        match self {
            Format::Jpeg => jpeg::pixels(bytes, header, out),
            Format::Png => png::pixels(bytes, header, out),
            Format::WebP => webp::pixels(bytes, out),
        }
    }
}

/// Replaces `out` by the image in `bytes`, upright, with 1 channel (gray) or 3 (RGB). `name` is for messages.
///
/// Conversions are PIL's: alpha is dropped, gray is its "L", 16 bits lose the lower 8. (Of 16-bit gray, PIL makes
/// white.)
pub fn decode(bytes: &[u8], name: &Path, channels: usize, out: &mut Image) -> Result<(), DataError> {
    decode_within(MAX_PIXELS, bytes, name, channels, out)
}

/// Replaces `out` by the image in a file, as [`decode`] does.
pub(crate) fn read_image(path: &Path, channels: usize, out: &mut Image) -> Result<(), DataError> {
    let bytes = std::fs::read(path).map_err(|error| DataError::file(path, error))?;
    decode(&bytes, path, channels, out)
}

/// [`decode`] with a limit of one's own.
pub fn decode_within(
    max_pixels: usize,
    bytes: &[u8],
    name: &Path,
    channels: usize,
    out: &mut Image,
) -> Result<(), DataError> {
    unnamed(max_pixels, bytes, channels, out).map_err(|problem| DataError::file(name, problem))
}

/// Width and height of an upright image, from its header.
pub fn dimensions(bytes: &[u8], name: &Path) -> Result<(usize, usize), DataError> {
    let header = Format::of(bytes).and_then(|format| format.inspect(bytes));
    let Header { width, height, orientation, .. } =
        header.map_err(|problem| DataError::file(name, problem))?;
    Ok(if orientation.swaps_axes() { (height, width) } else { (width, height) })
}

/// Returns whether [`decode`] gives images of this many channels.
pub fn supports_channels(channels: usize) -> bool {
    matches!(channels, 1 | 3)
}

fn unnamed(max_pixels: usize, bytes: &[u8], channels: usize, out: &mut Image) -> Result<(), String> {
    if !supports_channels(channels) {
        return Err(format!("images are read with 1 or 3 channels; {channels} were asked for"));
    }
    let format = Format::of(bytes)?;
    let header = inspected(format, max_pixels, bytes)?;
    let Header { width, height, orientation, .. } = header;
    let layout = format.pixels(bytes, &header, &mut out.pixels)?;
    let expected = width * height * layout.channels();
    if out.pixels.len() != expected {
        return Err(format!("decoded to {} bytes; its header claims {expected}", out.pixels.len()));
    }
    layout.convert(&mut out.pixels, channels);
    (out.width, out.height, out.channels) = (width, height, channels);
    orientation.apply(out);
    Ok(())
}

/// The header of an image that claims no more than is allowed.
fn inspected(format: Format, max_pixels: usize, bytes: &[u8]) -> Result<Header, String> {
    let header = format.inspect(bytes)?;
    let Header { width, height, pixels, .. } = header;
    if width == 0 || height == 0 {
        return Err(format!("claims to be {width}×{height} pixels"));
    }
    if pixels > max_pixels {
        return Err(format!("claims to hold {pixels} pixels ({width}×{height}); {max_pixels} are allowed"));
    }
    Ok(header)
}

/// Replaces `out` by the numbers in a mask (H, W), and gives its width and height: of a PNG with up to 8 bits the gray
/// values as they are stored, or the places in its palette. It is not turned, whatever its EXIF says.
pub fn decode_mask(bytes: &[u8], name: &Path, out: &mut Vec<u8>) -> Result<(usize, usize), DataError> {
    decode_mask_within(MAX_PIXELS, bytes, name, out)
}

/// [`decode_mask`] with a limit of one's own.
pub fn decode_mask_within(
    max_pixels: usize,
    bytes: &[u8],
    name: &Path,
    out: &mut Vec<u8>,
) -> Result<(usize, usize), DataError> {
    unnamed_mask(max_pixels, bytes, out).map_err(|problem| DataError::file(name, problem))
}

fn unnamed_mask(max_pixels: usize, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, usize), String> {
    let format = Format::of(bytes)?;
    if format != Format::Png {
        return Err("not a PNG; masks are read from no other files".into());
    }
    let header = inspected(format, max_pixels, bytes)?;
    let Header { width, height, .. } = header;
    png::numbers(bytes, &header, out)?;
    let (expected, found) = (width * height, out.len());
    if found != expected {
        return Err(format!("decoded to {found} labels; its header claims {expected}"));
    }
    Ok((width, height))
}

#[cfg(test)]
mod tests;
