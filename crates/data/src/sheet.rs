//! A sheet of pictures with captions, as PNG: what a person looks at to see what a model sees.

use crate::drawing::{self, LETTER, PAPER};
use crate::{CropBox, DataError, Image, Interpolation, Resizer};
use std::path::Path;

const GAP: usize = 6;
/// Height of a line of text.
const LINE: usize = 10;

/// A line under a picture, with a colour that it explains, or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caption {
    pub colour: Option<[u8; 3]>,
    pub text: String,
}

impl From<String> for Caption {
    fn from(text: String) -> Self {
        Caption { colour: None, text }
    }
}

/// Cells of one size, filled row by row.
pub struct Sheet {
    columns: usize,
    /// Side of a picture.
    side: usize,
    /// Lines of text under each picture.
    lines: usize,
    cells: Vec<(Image, Vec<Caption>)>,
}

impl Sheet {
    pub fn new(columns: usize, side: usize, lines: usize) -> Self {
        Sheet { columns: columns.max(1), side, lines, cells: vec![] }
    }

    /// Adds a picture, resized to fit its cell. Of captions that are too long the beginning is shown.
    pub fn add(&mut self, image: &Image, captions: Vec<impl Into<Caption>>) {
        let longest = image.width.max(image.height).max(1);
        let fit = |side: usize| (side * self.side).div_ceil(longest).max(1);
        let mut cell = Image::default();
        let (crop, to) = (CropBox::whole(image), (fit(image.width), fit(image.height)));
        Resizer::new().resize(image, crop, to, Interpolation::Bilinear, &mut cell);
        self.cells.push((cell, captions.into_iter().map(Into::into).collect()));
    }

    /// Draws and writes the sheet.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        drawing::save(&self.draw(), path)
    }

    fn draw(&self) -> Image {
        let (cell_width, cell_height) = (self.side + GAP, self.side + self.lines * LINE + GAP);
        let rows = self.cells.len().div_ceil(self.columns);
        let columns = self.columns.min(self.cells.len().max(1));
        let mut sheet = Image::default();
        sheet.reset(columns * cell_width + GAP, rows * cell_height + GAP, 3).fill(PAPER);
        for (place, (image, captions)) in self.cells.iter().enumerate() {
            let left = GAP + place % self.columns * cell_width;
            let cell_left = left;
            let top = GAP + place / self.columns * cell_height;
            drawing::paste(image, &mut sheet, left, top);
            for (line, caption) in captions.iter().take(self.lines).enumerate() {
                let top = top + self.side + 2 + line * LINE;
                let left = match caption.colour {
                    Some(colour) => {
                        drawing::swatch(&mut sheet, (left, top), LETTER, colour);
                        left + LETTER + 3
                    }
                    None => left,
                };
                let room = self.side.saturating_sub(left - cell_left) / LETTER;
                let shown: String = caption.text.chars().take(room).collect();
                drawing::write(&shown, &mut sheet, left, top, 1);
            }
        }
        sheet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drawing::INK;

    #[test]
    fn pictures_and_letters_are_where_they_belong() {
        let mut sheet = Sheet::new(2, 16, 1);
        let red = Image { width: 4, height: 2, channels: 3, pixels: [200, 0, 0].repeat(8) };
        let gray = Image { width: 1, height: 1, channels: 1, pixels: vec![90] };
        sheet.add(&red, vec!["a".to_string(), "not shown".to_string()]);
        sheet.add(&gray, vec!["é".to_string()]);
        sheet.add(&gray, Vec::<String>::new());
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
    fn a_file_is_replaced() {
        let folder = testing::Folder::new("sheet");
        let path = folder.file("sheet.png", b"another");
        Sheet::new(1, 8, 0).save(&path).unwrap();
        assert!(std::fs::read(&path).unwrap().starts_with(b"\x89PNG"));
    }
}
