//! Draws a sheet of the synthetic set as a PPM picture: a row for each class.
//!
//! `cargo run -p data --example contact_sheet -- sheet.ppm [image size] [classes]`

use data::{Dataset, Split, Synthetic, SyntheticSpec};
use std::error::Error;

const COLUMNS: usize = 10;
const GAP: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: contact_sheet FILE.ppm [IMAGE_SIZE] [CLASSES]")?;
    let image_size = arguments.next().map_or(Ok(32), |size| size.parse())?;
    let classes = arguments.next().map_or(Ok(10), |classes| classes.parse())?;
    let len = COLUMNS * classes;
    let set = Synthetic::new(SyntheticSpec {
        split: Split::Train,
        len,
        image_size,
        channels: 3,
        classes,
        seed: 0,
    })?;
    std::fs::write(&path, sheet(&set)?)?;
    for (row, name) in set.class_names().iter().enumerate() {
        println!("row {row}: {name}");
    }
    Ok(())
}

fn sheet(set: &dyn Dataset) -> Result<Vec<u8>, Box<dyn Error>> {
    let size = set.image_size();
    let cell = size + GAP;
    let (width, height) = (COLUMNS * cell, set.classes() * cell);
    let mut picture = format!("P6 {width} {height} 255\n").into_bytes();
    let header = picture.len();
    picture.resize(header + width * height * 3, 255);

    let mut shown = vec![0; set.classes()];
    let mut image = vec![0; set.image_len()];
    for index in 0..set.len() {
        set.read(index, &mut image)?;
        let row = set.label(index);
        let (top, left) = (row * cell, shown[row] * cell);
        shown[row] += 1;
        for (place, &byte) in image.iter().enumerate() {
            let (channel, y, x) = (place / (size * size), place / size % size, place % size);
            picture[header + ((top + y) * width + left + x) * 3 + channel] = byte;
        }
    }
    Ok(picture)
}
