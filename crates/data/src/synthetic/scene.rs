//! One image: where its figure stands, how it is lit, and the pixels that follow.

use super::figure::Figure;
use crate::random::{Stream, key, noise};

/// Half the image's width is one unit of place, and of a figure's radius.
const RADIUS: (f32, f32) = (0.6, 0.9);
const COMPOSED_RADIUS: (f32, f32) = (0.7, 0.9);
/// Small enough that horizontal stripes stay nearer to the horizontal, by far.
const MAX_TILT_HALF_TANGENT: f32 = 0.15;
/// The difference of figure and ground in each channel, of a range of one.
const CONTRAST: (f32, f32) = (0.35, 0.9);
const MAX_SHADING: f32 = 0.1;
const NOISE: (f32, f32) = (0.01, 0.08);

/// Pixels are painted in strips that fit the stack: shape first, then channel by channel.
const STRIP: usize = 64;

pub(super) struct Scene {
    figure: Figure,
    centre: (f32, f32),
    radius: f32,
    /// Cosine and sine.
    tilt: (f32, f32),
    /// −1 mirrors the figure left to right.
    mirror: f32,
    /// Flag: the figure is brighter than the ground: in all channels, as light would have it.
    bright: bool,
    figure_shading: Wave,
    ground_shading: Wave,
    noise: f32,
    /// Colours and noise are functions of this and of the channel, however many there are.
    key: u64,
}

impl Scene {
    pub(super) fn new(figure: Figure, key: u64) -> Self {
        let mut stream = Stream::new(key);
        let (low, high) = if figure.is_composed() { COMPOSED_RADIUS } else { RADIUS };
        let radius = stream.between(low, high);
        let room = 1.0 - radius;
        Self {
            figure,
            centre: (stream.between(-room, room), stream.between(-room, room)),
            radius,
            tilt: direction(stream.between(-MAX_TILT_HALF_TANGENT, MAX_TILT_HALF_TANGENT)),
            mirror: if stream.coin() { -1.0 } else { 1.0 },
            bright: stream.coin(),
            figure_shading: Wave::new(&mut stream),
            ground_shading: Wave::new(&mut stream),
            noise: stream.between(NOISE.0, NOISE.1),
            key,
        }
    }

    /// Paints planes of `image_size`² bytes, one for each channel: `out` is (C, H, W).
    pub(super) fn paint(&self, image_size: usize, channels: usize, out: &mut [u8]) {
        let mut bytes = [0; STRIP];
        for row in 0..image_size {
            for column in (0..image_size).step_by(STRIP) {
                let width = STRIP.min(image_size - column);
                let strip = self.trace(image_size, row, column, width);
                let start = row * image_size + column;
                for channel in 0..channels {
                    let ink = Ink::new(self.key, channel, self.bright);
                    ink.apply(&strip, self.noise, start, &mut bytes[..width]);
                    let places = out[start * channels + channel..].iter_mut().step_by(channels);
                    places.zip(&bytes[..width]).for_each(|(place, byte)| *place = *byte);
                }
            }
        }
    }

    /// Computes what all channels share of `width` pixels of a row.
    fn trace(&self, image_size: usize, row: usize, column: usize, width: usize) -> Strip {
        let pixel = 2.0 / image_size as f32;
        let edge = self.radius / pixel;
        let y = 1.0 - (row as f32 + 0.5) * pixel;
        let dy = (y - self.centre.1) / self.radius;
        let (cos, sin) = self.tilt;
        let mut strip = Strip { cover: [0.0; STRIP], shade: [0.0; STRIP] };
        for i in 0..width {
            let x = ((column + i) as f32 + 0.5) * pixel - 1.0;
            let dx = (x - self.centre.0) / self.radius;
            let (u, v) = (self.mirror * (cos * dx + sin * dy), cos * dy - sin * dx);
            let cover = (0.5 - self.figure.distance(u, v) * edge).clamp(0.0, 1.0);
            let (ground, figure) = (self.ground_shading.at(x, y), self.figure_shading.at(x, y));
            strip.cover[i] = cover;
            strip.shade[i] = ground + (figure - ground) * cover;
        }
        strip
    }
}

struct Strip {
    /// Share of the pixel that the figure covers, in 0..=1.
    cover: [f32; STRIP],
    shade: [f32; STRIP],
}

/// The colours of one channel.
struct Ink {
    figure: f32,
    ground: f32,
    noise_key: u32,
}

impl Ink {
    fn new(scene: u64, channel: usize, bright: bool) -> Self {
        let mut stream = Stream::new(key(&[scene, channel as u64]));
        let contrast = stream.between(CONTRAST.0, CONTRAST.1);
        let dark = stream.between(0.0, 1.0 - contrast);
        let light = dark + contrast;
        let (figure, ground) = if bright { (light, dark) } else { (dark, light) };
        Self { figure, ground, noise_key: stream.bits() as u32 }
    }

    /// `start` is the place of the strip's first pixel in its plane, so that noise differs by pixel.
    fn apply(&self, strip: &Strip, noise_level: f32, start: usize, out: &mut [u8]) {
        let counter = self.noise_key.wrapping_add(start as u32);
        for (i, byte) in out.iter_mut().enumerate() {
            let colour = self.ground + (self.figure - self.ground) * strip.cover[i];
            let grain = noise_level * noise(counter.wrapping_add(i as u32));
            *byte = ((colour + strip.shade[i] + grain).clamp(0.0, 1.0) * 255.0 + 0.5) as u8;
        }
    }
}

/// A slow triangle wave across the image.
pub(crate) struct Wave {
    direction: (f32, f32),
    phase: f32,
    height: f32,
}

impl Wave {
    pub(crate) fn new(stream: &mut Stream) -> Self {
        let (cos, sin) = direction(stream.between(-1.0, 1.0));
        let frequency = stream.between(0.2, 1.5);
        Self {
            direction: (cos * frequency, sin * frequency),
            // Far enough above zero that truncation rounds down everywhere in the image.
            phase: stream.between(8.0, 9.0),
            height: stream.between(0.0, MAX_SHADING),
        }
    }

    #[inline]
    pub(crate) fn at(&self, x: f32, y: f32) -> f32 {
        let turns = self.phase + self.direction.0 * x + self.direction.1 * y;
        let fraction = turns - (turns as i32) as f32;
        self.height * (4.0 * (fraction - 0.5).abs() - 1.0)
    }
}

/// Cosine and sine of an angle given by the tangent of its half. Unlike `sin_cos` this rounds the
/// same way on every platform.
pub(crate) fn direction(half_tangent: f32) -> (f32, f32) {
    let square = half_tangent * half_tangent;
    ((1.0 - square) / (1.0 + square), 2.0 * half_tangent / (1.0 + square))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_have_length_one() {
        for half_tangent in [-1.0, -0.3, 0.0, 0.5, 1.0f32] {
            let (cos, sin) = direction(half_tangent);
            let angle = 2.0 * half_tangent.atan();
            assert!((cos - angle.cos()).abs() < 1e-6 && (sin - angle.sin()).abs() < 1e-6);
        }
    }

    #[test]
    fn figure_and_ground_differ_in_every_channel() {
        for channel in 0..1000 {
            let bright = channel % 2 == 0;
            let ink = Ink::new(7, channel, bright);
            assert_eq!(ink.figure > ink.ground, bright);
            assert!((ink.figure - ink.ground).abs() >= CONTRAST.0 - 1e-6);
            assert!((0.0..=1.0).contains(&ink.figure) && (0.0..=1.0).contains(&ink.ground));
        }
    }

    #[test]
    fn waves_stay_within_their_height() {
        let mut stream = Stream::new(5);
        for _ in 0..100 {
            let wave = Wave::new(&mut stream);
            for (x, y) in [(-1.0, -1.0), (1.0, 1.0), (0.3, -0.9), (-1.0, 1.0)] {
                assert!(wave.at(x, y).abs() <= wave.height);
            }
        }
    }

    /// Compares a scene with the same in more pixels: but for noise, each block of the larger image averages to the
    /// pixel of the smaller one, nearly so at edges.
    #[test]
    fn a_scene_looks_the_same_at_any_size() {
        let scene = Scene { noise: 0.0, ..Scene::new(Figure::of_class(4), 11) };
        let (mut small, mut large) = (vec![0; 32 * 32], vec![0; 128 * 128]);
        scene.paint(32, 1, &mut small);
        scene.paint(128, 1, &mut large);
        let mut difference = 0;
        for (place, &pixel) in small.iter().enumerate() {
            let (row, column) = (place / 32 * 4, place % 32 * 4);
            let block = (0..16).map(|i| u32::from(large[(row + i / 4) * 128 + column + i % 4]));
            difference += (block.sum::<u32>() / 16).abs_diff(u32::from(pixel));
        }
        assert!(difference < 2 * 32 * 32, "{difference} in all, more than 2 per pixel");
    }
}
