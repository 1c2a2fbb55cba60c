//! Drawing what happens to one sample.

use super::beta::{exp, ln};
use super::ops::{Op, OpKind, Ops};
use super::{Geometry, Mix, RandAugment, Transform};
use crate::CropBox;
use crate::random::{Stream, key};

/// Everything random about one sample, as plain data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The part of the image that is resized to the output's size.
    pub region: CropBox,
    /// How far right and down the output's window lies on the resized image; pixels outside of the image are 0.
    pub shift: (i32, i32),
    pub flip: bool,
    pub ops: Ops,
    /// What is set to 0 after normalisation.
    pub erase: Option<Rect>,
    /// Drawn for the pair: both of its members have the same.
    pub mix: Mix,
}

/// Pixels of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rect {
    pub left: u32,
    pub top: u32,
    pub width: u32,
    pub height: u32,
}

impl Rect {
    /// The rectangle's rows in every channel of a sample (C, S, S); what lies outside of it is left out.
    pub(super) fn rows(self, size: usize, sample: &mut [f32]) -> impl Iterator<Item = &mut [f32]> {
        let span = |start: u32, len: u32| {
            (start as usize).min(size)..(start as usize).saturating_add(len as usize).min(size)
        };
        let (rows, columns) = (span(self.top, self.height), span(self.left, self.width));
        let lines = sample.chunks_exact_mut(size).enumerate();
        lines
            .filter(move |(line, _)| rows.contains(&(line % size)))
            .map(move |(_, row)| &mut row[columns.clone()])
    }
}

/// Keeps these draws apart from whatever else is drawn from a run's seed.
const AUGMENT: u64 = 0x6175_676d_656e_7400;

/// One stream for each purpose, so that turning one setting on leaves the other draws as they were.
const CROP: u64 = 1;
const FLIP: u64 = 2;
const OPS: u64 = 3;
const ERASE: u64 = 4;
const MIX: u64 = 5;

/// torchvision's defaults, which its presets use.
const ERASE_SCALE: (f64, f64) = (0.02, 0.33);
const ERASE_RATIO: (f64, f64) = (0.3, 3.3);
/// How often a rectangle that does not fit is drawn again.
const ATTEMPTS: usize = 10;

impl Choice {
    /// Nothing random: the whole image as it is.
    pub fn plain(width: usize, height: usize) -> Self {
        Self {
            region: whole(width, height),
            shift: (0, 0),
            flip: false,
            ops: Ops::default(),
            erase: None,
            mix: Mix::Off,
        }
    }
}

impl Transform {
    /// What happens to the sample at `position` of `epoch`, an image of `width` × `height` pixels.
    ///
    /// Settings are those that [`Transform::check`] lets pass. The pair's mix is drawn whether or not the sample has a
    /// partner: who applies it knows.
    pub fn choose(&self, seed: u64, epoch: u64, position: usize, (width, height): (usize, usize)) -> Choice {
        let stream =
            |purpose, number: usize| Stream::new(key(&[seed, AUGMENT, purpose, epoch, number as u64]));
        let size = self.size as u32;
        let mut choice = Choice::plain(width, height);
        match self.geometry {
            Geometry::Resize => {}
            Geometry::CenterCrop { resize } => choice.region = centre(width, height, resize, self.size),
            Geometry::PadCrop { padding } => choice.shift = shift(padding, &mut stream(CROP, position)),
            Geometry::RandomResizedCrop { scale, ratio } => {
                choice.region = resized_crop(width, height, scale, ratio, &mut stream(CROP, position));
            }
        }
        choice.flip = self.flip > 0.0 && stream(FLIP, position).unit() < self.flip;
        if let Some(settings) = self.rand_augment {
            choice.ops = rand_augment(settings, self.size, &mut stream(OPS, position));
        }
        if self.erase > 0.0 {
            choice.erase = erase(self.erase, size, &mut stream(ERASE, position));
        }
        if self.mixes() {
            choice.mix = Mix::draw(self.mixup, self.cutmix, size, &mut stream(MIX, position / 2));
        }
        choice
    }
}

fn whole(width: usize, height: usize) -> CropBox {
    CropBox { left: 0.0, top: 0.0, width: width as f64, height: height as f64 }
}

/// The part of the image that becomes the centre of it once the short side is resized to `resize`.
///
/// torchvision resizes to whole pixels, cutting the long side off, and cuts from a whole pixel, rounding halves to
/// even. Both scales are therefore those of the whole resized image.
fn centre(width: usize, height: usize, resize: usize, size: usize) -> CropBox {
    let short = width.min(height).max(1);
    // An image may be so long that the product needs more than 64 bits.
    let long = |side: usize| (resize as u128 * side as u128 / short as u128) as f64;
    let part = |side: usize| {
        let resized = if side == short { resize as f64 } else { long(side) };
        let scale = side as f64 / resized;
        let start = ((resized - size as f64) / 2.0).round_ties_even() * scale;
        // Rounding must not push the far edge out of the image.
        (start, (size as f64 * scale).min(side as f64 - start))
    };
    let ((left, width), (top, height)) = (part(width), part(height));
    CropBox { left, top, width, height }
}

fn shift(padding: usize, stream: &mut Stream) -> (i32, i32) {
    let mut draw = || stream.below(2 * padding as u64 + 1) as i32 - padding as i32;
    let down = draw();
    (draw(), down)
}

/// Width and height of a rectangle with a random share of `area` and a random ratio of width to height.
fn sides(area: f64, scale: (f64, f64), ratio: (f64, f64), stream: &mut Stream) -> (f64, f64) {
    let mut between = |low: f64, high: f64| low + (high - low) * stream.unit();
    let area = area * between(scale.0, scale.1);
    let ratio = exp(between(ln(ratio.0), ln(ratio.1)));
    ((area * ratio).sqrt().round_ties_even(), (area / ratio).sqrt().round_ties_even())
}

fn resized_crop(
    width: usize,
    height: usize,
    scale: (f64, f64),
    ratio: (f64, f64),
    stream: &mut Stream,
) -> CropBox {
    let (full_width, full_height) = (width as f64, height as f64);
    for _ in 0..ATTEMPTS {
        let (width, height) = sides(full_width * full_height, scale, ratio, stream);
        if (1.0..=full_width).contains(&width) && (1.0..=full_height).contains(&height) {
            let top = stream.below((full_height - height) as u64 + 1) as f64;
            let left = stream.below((full_width - width) as u64 + 1) as f64;
            return CropBox { left, top, width, height };
        }
    }
    // The largest part in the middle whose ratio is allowed.
    let found = full_width / full_height;
    let (width, height) = if found < ratio.0 {
        (full_width, (full_width / ratio.0).round_ties_even().max(1.0))
    } else if found > ratio.1 {
        ((full_height * ratio.1).round_ties_even().max(1.0), full_height)
    } else {
        (full_width, full_height)
    };
    let half = |space: f64| (space / 2.0).floor();
    CropBox { left: half(full_width - width), top: half(full_height - height), width, height }
}

fn rand_augment(RandAugment { ops, magnitude }: RandAugment, size: usize, stream: &mut Stream) -> Ops {
    let mut drawn = Ops::default();
    for _ in 0..ops {
        let kind = OpKind::ALL[stream.below(OpKind::ALL.len() as u64) as usize];
        let strength = kind.magnitude(magnitude, size);
        let sign = if kind.signed() && stream.coin() { -1.0 } else { 1.0 };
        drawn.push(Op { kind, magnitude: sign * strength });
    }
    drawn
}

/// As in torchvision, a rectangle that spans the image is drawn again, and the ratio is that of height to width.
fn erase(probability: f64, size: u32, stream: &mut Stream) -> Option<Rect> {
    if stream.unit() >= probability {
        return None;
    }
    let full = f64::from(size);
    for _ in 0..ATTEMPTS {
        let (height, width) = sides(full * full, ERASE_SCALE, ERASE_RATIO, stream);
        if height < full && width < full {
            let (width, height) = (width as u32, height as u32);
            let top = stream.below(u64::from(size - height) + 1) as u32;
            let left = stream.below(u64::from(size - width) + 1) as u32;
            return Some(Rect { left, top, width, height });
        }
    }
    None
}
