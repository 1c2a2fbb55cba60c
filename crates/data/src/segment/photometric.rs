//! Changes of colour, as mmsegmentation makes them with OpenCV.
//!
//! Values are computed as 32-bit floats and cut off to bytes after every step. Saturation and hue are changed in OpenCV's HSV of
//! bytes, in which the hue has 180 steps. From HSV values are rounded, as by OpenCV's plain code; its vector code cuts them off,
//! and is up to 1 below.

use crate::random::Stream;

/// Changes of a sample's colours, in this order. `None` leaves them as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distortion {
    /// Added to every value.
    pub brightness: Option<f32>,
    /// Every value is multiplied: before saturation and hue change, or after.
    pub contrast: Option<f32>,
    pub contrast_first: bool,
    /// The saturation is multiplied.
    pub saturation: Option<f32>,
    /// Added to the hue, in steps of two degrees.
    pub hue: Option<i32>,
}

const BRIGHTNESS: (f32, f32) = (-32.0, 32.0);
const CONTRAST: (f32, f32) = (0.5, 1.5);
const SATURATION: (f32, f32) = (0.5, 1.5);
/// Shift of the hue, from −18 to 17.
const HUE: i32 = 18;

const HUES: i32 = 180;

impl Distortion {
    /// Each at even odds.
    pub(super) fn draw(stream: &mut Stream) -> Self {
        // All are drawn, so that none depends on whether another takes place.
        let mut factor = |(low, high)| {
            let value = stream.between(low, high);
            stream.coin().then_some(value)
        };
        let (brightness, contrast) = (factor(BRIGHTNESS), factor(CONTRAST));
        let saturation = factor(SATURATION);
        let hue = stream.below(2 * HUE as u64) as i32 - HUE;
        let hue = stream.coin().then_some(hue);
        Distortion { brightness, contrast, contrast_first: stream.coin(), saturation, hue }
    }

    /// Changes pixels of (R, G, B); of other numbers of channels only brightness and contrast change.
    pub fn apply(&self, channels: usize, pixels: &mut [u8]) {
        let Distortion { brightness, contrast, contrast_first, saturation, hue } = *self;
        let scaled = |pixels: &mut [u8], factor: Option<f32>| {
            if let Some(factor) = factor {
                map(pixels, |value| converted(value, factor, 0.0));
            }
        };
        if let Some(brightness) = brightness {
            map(pixels, |value| converted(value, 1.0, brightness));
        }
        if contrast_first {
            scaled(pixels, contrast);
        }
        if channels == 3 {
            if let Some(factor) = saturation {
                let table: [u8; 256] = std::array::from_fn(|value| converted(value as u8, factor, 0.0));
                in_hsv(pixels, |[h, s, v]| [h, table[usize::from(s)], v]);
            }
            if let Some(steps) = hue {
                in_hsv(pixels, |[h, s, v]| [(i32::from(h) + steps).rem_euclid(HUES) as u8, s, v]);
            }
        }
        if !contrast_first {
            scaled(pixels, contrast);
        }
    }
}

/// Cut off to a byte, not rounded.
fn converted(value: u8, factor: f32, more: f32) -> u8 {
    (f32::from(value) * factor + more).clamp(0.0, 255.0) as u8
}

fn map(pixels: &mut [u8], change: impl Fn(u8) -> u8) {
    let table: [u8; 256] = std::array::from_fn(|value| change(value as u8));
    pixels.iter_mut().for_each(|byte| *byte = table[usize::from(*byte)]);
}

fn in_hsv(pixels: &mut [u8], change: impl Fn([u8; 3]) -> [u8; 3]) {
    for pixel in pixels.as_chunks_mut::<3>().0 {
        *pixel = to_rgb(change(TO_HSV.convert(*pixel)));
    }
}

/// Reciprocals in 1/4096.
struct ToHsv {
    of_value: [i32; 256],
    of_difference: [i32; 256],
}

const SHIFT: u32 = 12;

static TO_HSV: ToHsv = ToHsv::new();

impl ToHsv {
    const fn new() -> Self {
        let mut tables = ToHsv { of_value: [0; 256], of_difference: [0; 256] };
        let mut i = 1;
        while i < 256 {
            // Rounded quotients; halves go to the even one, but there are none here that matter.
            tables.of_value[i as usize] = (2 * (255 << SHIFT) + i) / (2 * i);
            tables.of_difference[i as usize] = (2 * (HUES << SHIFT) + 6 * i) / (12 * i);
            i += 1;
        }
        tables
    }

    fn convert(&self, [r, g, b]: [u8; 3]) -> [u8; 3] {
        let [red, green, blue] = [r, g, b].map(i32::from);
        let value = red.max(green).max(blue);
        let difference = value - red.min(green).min(blue);
        let rounded = |product: i32| (product + (1 << (SHIFT - 1))) >> SHIFT;
        let saturation = rounded(difference * self.of_value[value as usize]);
        let sixths = if value == red {
            green - blue
        } else if value == green {
            blue - red + 2 * difference
        } else {
            red - green + 4 * difference
        };
        let hue = rounded(sixths * self.of_difference[difference as usize]);
        let hue = if hue < 0 { hue + HUES } else { hue };
        [hue as u8, saturation as u8, value as u8]
    }
}

fn to_rgb([h, s, v]: [u8; 3]) -> [u8; 3] {
    let (saturation, value) = (f32::from(s) * (1.0 / 255.0), f32::from(v) * (1.0 / 255.0));
    let hue = f32::from(h) * (6.0 / HUES as f32);
    let sector = hue as usize;
    let part = hue - sector as f32;
    let low = value * (1.0 - saturation);
    let falling = value * (1.0 - saturation * part);
    let rising = value * (1.0 - saturation * (1.0 - part));
    let rgb = match sector {
        0 => [value, rising, low],
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        _ => [value, low, falling],
    };
    rgb.map(|x| (x * 255.0).round_ties_even() as u8)
}
