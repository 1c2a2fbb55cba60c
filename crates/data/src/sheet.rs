//! A sheet of pictures with captions, as PNG: what a person looks at to see what a model sees.

use crate::{CropBox, DataError, Image, Interpolation, Resizer};
use font8x8::UnicodeFonts;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

const GAP: usize = 6;
/// Height of a line of text, and width of a letter.
const LINE: usize = 10;
const LETTER: usize = 8;
const PAPER: u8 = 255;
const INK: u8 = 30;

/// Cells of one size, filled row by row.
pub struct Sheet {
    columns: usize,
    /// Side of a picture.
    side: usize,
    /// Lines of text under each picture.
    lines: usize,
    cells: Vec<(Image, Vec<String>)>,
}

impl Sheet {
    pub fn new(columns: usize, side: usize, lines: usize) -> Self {
        Sheet { columns: columns.max(1), side, lines, cells: vec![] }
    }

    /// Adds a picture, resized to fit its cell. Of captions that are too long the beginning is shown.
    pub fn add(&mut self, image: &Image, captions: Vec<String>) {
        let longest = image.width.max(image.height).max(1);
        let fit = |side: usize| (side * self.side).div_ceil(longest).max(1);
        let mut cell = Image::default();
        let (crop, to) = (CropBox::whole(image), (fit(image.width), fit(image.height)));
        Resizer::new().resize(image, crop, to, Interpolation::Bilinear, &mut cell);
        self.cells.push((cell, captions));
    }

    /// Draws and writes the sheet. Refuses to replace a file.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        let sheet = self.draw();
        let file = File::options().write(true).create_new(true).open(path);
        let file = file.map_err(|error| DataError::file(path, error))?;
        let mut encoder = png::Encoder::new(BufWriter::new(file), sheet.width as u32, sheet.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        let written = encoder.write_header().and_then(|mut png| png.write_image_data(&sheet.pixels));
        written.map_err(|error| DataError::file(path, error))
    }

    fn draw(&self) -> Image {
        let (cell_width, cell_height) = (self.side + GAP, self.side + self.lines * LINE + GAP);
        let rows = self.cells.len().div_ceil(self.columns);
        let columns = self.columns.min(self.cells.len().max(1));
        let mut sheet = Image::default();
        sheet.reset(columns * cell_width + GAP, rows * cell_height + GAP, 3).fill(PAPER);
        for (place, (image, captions)) in self.cells.iter().enumerate() {
            let left = GAP + place % self.columns * cell_width;
            let top = GAP + place / self.columns * cell_height;
            paste(image, &mut sheet, left, top);
            for (line, caption) in captions.iter().take(self.lines).enumerate() {
                let top = top + self.side + 2 + line * LINE;
                for (letter, shown) in caption.chars().take(self.side / LETTER).enumerate() {
                    write_letter(shown, &mut sheet, left + letter * LETTER, top);
                }
            }
        }
        sheet
    }
}

/// Gray and coloured pictures; of more channels the first three are shown.
fn paste(image: &Image, sheet: &mut Image, left: usize, top: usize) {
    for y in 0..image.height {
        for x in 0..image.width {
            let from = (y * image.width + x) * image.channels;
            let to = ((top + y) * sheet.width + left + x) * 3;
            for channel in 0..3 {
                let channel_there = channel.min(image.channels.saturating_sub(1));
                sheet.pixels[to + channel] = image.pixels[from + channel_there];
            }
        }
    }
}

/// Letters the font lacks are shown as question marks.
fn write_letter(letter: char, sheet: &mut Image, left: usize, top: usize) {
    let fonts =
        [font8x8::BASIC_FONTS.get(letter), font8x8::LATIN_FONTS.get(letter), font8x8::BASIC_FONTS.get('?')];
    let Some(glyph) = fonts.into_iter().flatten().next() else { return };
    for (y, bits) in glyph.into_iter().enumerate() {
        for x in (0..LETTER).filter(|x| bits >> x & 1 == 1) {
            let to = ((top + y) * sheet.width + left + x) * 3;
            if let Some(pixel) = sheet.pixels.get_mut(to..to + 3) {
                pixel.fill(INK);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_and_letters_are_where_they_belong() {
        let mut sheet = Sheet::new(2, 16, 1);
        let red = Image { width: 4, height: 2, channels: 3, pixels: [200, 0, 0].repeat(8) };
        let gray = Image { width: 1, height: 1, channels: 1, pixels: vec![90] };
        sheet.add(&red, vec!["a".into(), "not shown".into()]);
        sheet.add(&gray, vec!["é".into()]);
        sheet.add(&gray, vec![]);
        let drawn = sheet.draw();
        assert_eq!((drawn.width, drawn.height), (2 * 22 + 6, 2 * 32 + 6));
        let pixel = |x: usize, y: usize| &drawn.pixels[(y * drawn.width + x) * 3..][..3];
        assert_eq!(pixel(GAP, GAP), [200, 0, 0]);
        assert_eq!(pixel(GAP + 15, GAP + 7), [200, 0, 0]);
        assert_eq!(pixel(GAP, GAP + 8), [PAPER; 3], "a wide picture leaves its cell's foot free");
        assert_eq!(pixel(GAP + 22, GAP + 15), [90; 3]);
        let inked = |left: usize| (left..left + 8).any(|x| (24..34).any(|y| pixel(x, y) == [INK; 3]));
        assert!(inked(GAP) && inked(GAP + 22) && !inked(GAP + 9));
    }

    #[test]
    fn a_file_is_not_replaced() {
        let path = std::env::temp_dir().join(format!("vitesse-sheet-{}.png", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let sheet = Sheet::new(1, 8, 0);
        sheet.save(&path).unwrap();
        assert!(sheet.save(&path).unwrap_err().to_string().contains("File exists"));
        std::fs::remove_file(&path).unwrap();
    }
}
