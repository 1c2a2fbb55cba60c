//! Changes of an image's values that leave its pixels where they are, as PIL makes them.

use crate::Image;

/// PIL's blend of a degenerate value with the real one. Beyond 1 a factor extrapolates; the result is cut to a byte.
fn blend(degenerate: u8, value: u8, factor: f32) -> u8 {
    let (from, to) = (f32::from(degenerate), f32::from(value));
    (from + factor * (to - from)) as u8
}

/// Luma in 1/65536, rounded.
fn gray([r, g, b]: [u8; 3]) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}

/// Every byte through the same table.
fn map(image: &mut Image, table: impl Fn(u8) -> u8) {
    let table: [u8; 256] = std::array::from_fn(|value| table(value as u8));
    image.pixels.iter_mut().for_each(|byte| *byte = table[usize::from(*byte)]);
}

/// A table for each channel, made of its histogram.
fn map_channels(image: &mut Image, table: impl Fn(&[u32; 256]) -> [u8; 256]) {
    let channels = image.channels.max(1);
    for channel in 0..channels {
        let bytes = || image.pixels.iter().skip(channel).step_by(channels);
        let mut histogram = [0; 256];
        bytes().for_each(|&byte| histogram[usize::from(byte)] += 1);
        let table = table(&histogram);
        image
            .pixels
            .iter_mut()
            .skip(channel)
            .step_by(channels)
            .for_each(|byte| *byte = table[usize::from(*byte)]);
    }
}

pub(super) fn brightness(factor: f32, image: &mut Image) {
    map(image, |value| blend(0, value, factor));
}

/// Gray images have none.
pub(super) fn saturation(factor: f32, image: &mut Image) {
    if image.channels == 3 {
        let (pixels, _) = image.pixels.as_chunks_mut::<3>();
        for pixel in pixels {
            let gray = gray(*pixel);
            *pixel = pixel.map(|value| blend(gray, value, factor));
        }
    }
}

/// Away from the mean of the gray image.
pub(super) fn contrast(factor: f32, image: &mut Image) {
    let sum: u64 = if image.channels == 3 {
        image.pixels.as_chunks::<3>().0.iter().map(|&pixel| u64::from(gray(pixel))).sum()
    } else {
        image.pixels.iter().copied().map(u64::from).sum()
    };
    let count = (image.width * image.height).max(1);
    let mean = (sum as f64 / count as f64 + 0.5) as u8;
    map(image, |value| blend(mean, value, factor));
}

/// Away from a smoothed image: a pixel five times, its eight neighbours once. Pixels at the edge stay as they are.
pub(super) fn sharpness(factor: f32, image: &mut Image, spare: &mut Image) {
    let (width, height, channels) = (image.width, image.height, image.channels);
    if width < 3 || height < 3 {
        return;
    }
    let stride = width * channels;
    spare.reset(width, height, channels).copy_from_slice(&image.pixels);
    for y in 1..height - 1 {
        let row = |y: usize| &image.pixels[y * stride..][..stride];
        let (above, here, below) = (row(y - 1), row(y), row(y + 1));
        let out = &mut spare.pixels[y * stride + channels..][..stride - 2 * channels];
        for (i, out) in out.iter_mut().enumerate() {
            let three = |row: &[u8]| -> u32 {
                [i, i + channels, i + 2 * channels].into_iter().map(|i| u32::from(row[i])).sum()
            };
            let value = here[i + channels];
            let sum = three(above) + three(here) + three(below) + 4 * u32::from(value);
            // Rounded to the nearest; halves do not occur with 13 parts.
            let smooth = (2 * sum + 13) / 26;
            *out = blend(smooth as u8, value, factor);
        }
    }
    std::mem::swap(image, spare);
}

/// Keeps the upper `bits` of each byte.
pub(super) fn posterize(bits: u32, image: &mut Image) {
    let mask = !(255u32 >> bits.min(8)) as u8;
    image.pixels.iter_mut().for_each(|byte| *byte &= mask);
}

/// Inverts what is not below a threshold.
pub(super) fn solarize(threshold: f32, image: &mut Image) {
    map(image, |value| if f32::from(value) < threshold { value } else { 255 - value });
}

/// Stretches each channel over all of 0..=255.
pub(super) fn auto_contrast(image: &mut Image) {
    map_channels(image, |histogram| {
        let low = histogram.iter().position(|&n| n > 0).unwrap_or(0);
        let high = histogram.iter().rposition(|&n| n > 0).unwrap_or(0);
        if high <= low {
            return std::array::from_fn(|value| value as u8);
        }
        let scale = 255.0 / (high - low) as f64;
        let offset = -(low as f64) * scale;
        std::array::from_fn(|value| (value as f64 * scale + offset) as u8)
    });
}

/// Spreads the values of each channel so that all are about equally frequent.
pub(super) fn equalize(image: &mut Image) {
    map_channels(image, |histogram| {
        let total: u32 = histogram.iter().sum();
        let last = histogram.iter().rev().find(|&&n| n > 0).copied().unwrap_or(0);
        let step = (total - last) / 255;
        if step == 0 {
            return std::array::from_fn(|value| value as u8);
        }
        let mut below = step / 2;
        std::array::from_fn(|value| {
            let level = below / step;
            below += histogram[value];
            level.min(255) as u8
        })
    });
}
