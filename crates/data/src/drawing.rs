//! Pictures for people: pasting, writing, saving.

use crate::{DataError, Image};
use font8x8::UnicodeFonts;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Width and height of a letter.
pub(crate) const LETTER: usize = 8;
pub(crate) const PAPER: u8 = 255;
pub(crate) const INK: u8 = 30;
const RIM: u8 = 120;

/// Gray and coloured pictures; of more channels the first three are shown. What lies outside of the sheet is left out.
pub(crate) fn paste(image: &Image, sheet: &mut Image, left: usize, top: usize) {
    for y in 0..image.height.min(sheet.height.saturating_sub(top)) {
        for x in 0..image.width.min(sheet.width.saturating_sub(left)) {
            let from = (y * image.width + x) * image.channels;
            let to = ((top + y) * sheet.width + left + x) * 3;
            for channel in 0..3 {
                let channel_there = channel.min(image.channels.saturating_sub(1));
                sheet.pixels[to + channel] = image.pixels[from + channel_there];
            }
        }
    }
}

/// A filled rectangle.
pub(crate) fn fill(
    sheet: &mut Image,
    (left, top): (usize, usize),
    (width, height): (usize, usize),
    colour: [u8; 3],
) {
    for y in top..(top + height).min(sheet.height) {
        for x in left..(left + width).min(sheet.width) {
            sheet.pixels[(y * sheet.width + x) * 3..][..3].copy_from_slice(&colour);
        }
    }
}

/// A square of a colour, with a rim that shows it on any ground.
pub(crate) fn swatch(sheet: &mut Image, (left, top): (usize, usize), side: usize, colour: [u8; 3]) {
    fill(sheet, (left, top), (side, side), [RIM; 3]);
    fill(sheet, (left + 1, top + 1), (side.saturating_sub(2), side.saturating_sub(2)), colour);
}

/// A line of text, each pixel of its letters `scale` pixels wide and high.
pub(crate) fn write(text: &str, sheet: &mut Image, left: usize, top: usize, scale: usize) {
    for (place, letter) in text.chars().enumerate() {
        write_letter(letter, sheet, left + place * LETTER * scale, top, scale);
    }
}

/// Letters the font lacks are shown as question marks.
fn write_letter(letter: char, sheet: &mut Image, left: usize, top: usize, scale: usize) {
    let fonts =
        [font8x8::BASIC_FONTS.get(letter), font8x8::LATIN_FONTS.get(letter), font8x8::BASIC_FONTS.get('?')];
    let Some(glyph) = fonts.into_iter().flatten().next() else { return };
    for (y, bits) in glyph.into_iter().enumerate() {
        for x in (0..LETTER).filter(|x| bits >> x & 1 == 1) {
            fill(sheet, (left + x * scale, top + y * scale), (scale, scale), [INK; 3]);
        }
    }
}

/// Writes colours as PNG.
pub(crate) fn save(image: &Image, path: &Path) -> Result<(), DataError> {
    let mut encoder = encoder(image.width, image.height, path)?;
    encoder.set_color(png::ColorType::Rgb);
    finish(encoder, &image.pixels, path)
}

/// Writes numbers (H, W) as a PNG with a palette.
pub(crate) fn save_indexed(
    numbers: &[u8],
    (width, height): (usize, usize),
    palette: &[[u8; 3]],
    path: &Path,
) -> Result<(), DataError> {
    let mut encoder = encoder(width, height, path)?;
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_palette(palette.as_flattened().to_vec());
    finish(encoder, numbers, path)
}

type Encoder = png::Encoder<'static, BufWriter<File>>;

fn encoder(width: usize, height: usize, path: &Path) -> Result<Encoder, DataError> {
    let file = File::create(path);
    let file = file.map_err(|error| DataError::file(path, error))?;
    Ok(png::Encoder::new(BufWriter::new(file), width as u32, height as u32))
}

fn finish(encoder: Encoder, bytes: &[u8], path: &Path) -> Result<(), DataError> {
    let written = encoder.write_header().and_then(|mut png| png.write_image_data(bytes));
    written.map_err(|error| DataError::file(path, error))
}
