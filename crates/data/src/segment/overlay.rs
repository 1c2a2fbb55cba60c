//! Masks as pictures.

use super::{IGNORED, palette};
use crate::drawing::{self, LETTER, PAPER};
use crate::{DataError, Image};
use std::path::Path;

const GAP: usize = 6;
/// Letters grow with pictures of more pixels than this.
const PLAIN: usize = 700;
/// Smaller pictures are shown larger.
const SMALLEST: usize = 256;

/// A class in a picture, with the share of the labelled pixels it has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    pub label: u8,
    pub share: f64,
}

/// Classes that a mask shows, the largest first. Ignored pixels are left out.
pub fn shares(mask: &[u8]) -> Vec<Share> {
    let mut counts = [0usize; 256];
    mask.iter().for_each(|&label| counts[usize::from(label)] += 1);
    counts[usize::from(IGNORED)] = 0;
    let all = counts.iter().sum::<usize>().max(1) as f64;
    let mut shares: Vec<Share> = (0..=IGNORED)
        .filter(|&label| counts[usize::from(label)] > 0)
        .map(|label| Share { label, share: counts[usize::from(label)] as f64 / all })
        .collect();
    shares.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.label.cmp(&b.label)));
    shares
}

/// An image with its mask laid over: classes in their colours, outlines in full strength, ignored pixels in dim gray.
pub fn overlay(image: &Image, mask: &[u8]) -> Result<Image, DataError> {
    let &Image { width, height, channels, ref pixels } = image;
    let (expected, found) = (width * height, mask.len());
    if found != expected || channels == 0 || pixels.len() != expected * channels {
        return Err(DataError::BufferLength { buffer: "mask", expected, found });
    }
    let mut out = Image::default();
    let painted = out.reset(width, height, 3);
    for (place, (out, pixel)) in painted.chunks_exact_mut(3).zip(pixels.chunks_exact(channels)).enumerate() {
        let label = mask[place];
        let differs = |there: bool, other: usize| there && mask[other] != label;
        let (x, y) = (place % width, place / width);
        let outline = differs(x + 1 < width, place + 1) || differs(y + 1 < height, place + width);
        let colour = palette::colour(label);
        for (channel, out) in out.iter_mut().enumerate() {
            let value = u16::from(pixel[channel.min(channels - 1)]);
            *out = match label {
                IGNORED => (pixel.iter().map(|&v| u16::from(v)).sum::<u16>() / channels as u16 / 2) as u8,
                _ if outline => colour[channel],
                _ => ((value + u16::from(colour[channel])) / 2) as u8,
            };
        }
    }
    Ok(out)
}

/// The overlay with a legend of class names beside it, the largest first.
pub fn picture(image: &Image, mask: &[u8], names: &[String]) -> Result<Image, DataError> {
    let laid = enlarged(overlay(image, mask)?);
    let scale = laid.width.max(laid.height).div_ceil(PLAIN);
    let (swatch, line) = (LETTER * scale, (LETTER + 4) * scale);
    let shares = shares(mask);
    let entry = |Share { label, share }: &Share| {
        let name = names.get(usize::from(*label)).map_or_else(|| label.to_string(), String::clone);
        format!("{name} {}", percent(*share))
    };
    let mut entries: Vec<(Option<u8>, String)> = shares.iter().map(|s| (Some(s.label), entry(s))).collect();
    // As many as fit beside the picture, and a dozen at least.
    let room = ((laid.height + GAP) / line).max(12);
    if entries.len() > room {
        let more = entries.len() - room + 1;
        entries.truncate(room - 1);
        entries.push((None, format!("and {more} more")));
    }
    let letters = entries.iter().map(|(_, text)| text.chars().count()).max().unwrap_or(0);
    let legend = swatch + scale * GAP + letters * LETTER * scale;
    let mut sheet = Image::default();
    let height = laid.height.max(entries.len() * line) + 2 * GAP;
    sheet.reset(laid.width + legend + 3 * GAP, height, 3).fill(PAPER);
    drawing::paste(&laid, &mut sheet, GAP, GAP);
    let left = laid.width + 2 * GAP;
    for (place, (label, text)) in entries.iter().enumerate() {
        let top = GAP + place * line;
        if let Some(label) = label {
            drawing::swatch(&mut sheet, (left, top), swatch, palette::colour(*label));
        }
        drawing::write(text, &mut sheet, left + swatch + scale * GAP, top, scale);
    }
    Ok(sheet)
}

/// A share as text; what is there is never shown as nothing.
pub fn percent(share: f64) -> String {
    match 100.0 * share {
        p if p < 0.1 => "<0.1%".to_string(),
        p if p < 10.0 => format!("{p:.1}%"),
        p => format!("{p:.0}%"),
    }
}

/// Whole times as large, so that a small picture can be looked at.
fn enlarged(image: Image) -> Image {
    let times = (SMALLEST / image.width.max(image.height).max(1)).max(1);
    if times == 1 {
        return image;
    }
    let mut out = Image::default();
    let width = image.width * times;
    for (place, pixel) in out.reset(width, image.height * times, 3).chunks_exact_mut(3).enumerate() {
        let from = (place / width / times * image.width + place % width / times) * 3;
        pixel.copy_from_slice(&image.pixels[from..from + 3]);
    }
    out
}

/// Writes the overlay with its legend.
pub fn save_picture(image: &Image, mask: &[u8], names: &[String], path: &Path) -> Result<(), DataError> {
    drawing::save(&picture(image, mask, names)?, path)
}

/// Writes labels as a PNG with a palette, whose numbers are the labels: a mask as [`super::masks`] reads it. Refuses to
/// replace a file.
pub fn save_mask(mask: &[u8], size: (usize, usize), path: &Path) -> Result<(), DataError> {
    let (expected, found) = (size.0 * size.1, mask.len());
    if found != expected {
        return Err(DataError::BufferLength { buffer: "mask", expected, found });
    }
    drawing::save_indexed(mask, size, palette::colours(), path)
}
