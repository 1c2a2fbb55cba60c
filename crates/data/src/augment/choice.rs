//! Drawing what happens to one sample.

use super::beta::{exp, ln};
use super::ops::{Op, OpKind, Ops};
use super::{Geometry, Mix, RandAugment, Transform};
use crate::CropBox;
use crate::random::{Stream, key};

/// Everything random about one sample, as plain data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The part of the image that is resized, to this width and height.
    pub region: CropBox,
    pub resized: (u32, u32),
    /// Distance right and down of the output's window on the resized part; pixels outside of it are 0.
    pub shift: (i32, i32),
    pub flip: bool,
    pub ops: Ops,
    /// Rectangle that is set to 0 after normalisation.
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
/// Draws of a rectangle until one fits.
const ATTEMPTS: usize = 10;

impl Choice {
    /// Nothing random: the whole of an image of `width` × `height`, resized to a square.
    pub fn plain(size: usize, (width, height): (usize, usize)) -> Self {
        Self {
            region: CropBox { left: 0.0, top: 0.0, width: width as f64, height: height as f64 },
            resized: (size as u32, size as u32),
            shift: (0, 0),
            flip: false,
            ops: Ops::default(),
            erase: None,
            mix: Mix::Off,
        }
    }
}

impl Transform {
    /// Draws what happens to the sample at `position` of `epoch`, an image of `source` (width, height) pixels.
    ///
    /// Settings are those that [`Transform::check`] lets pass. The pair's mix is drawn whether or not the sample has a
    /// partner: who applies it knows.
    pub fn choose(&self, seed: u64, epoch: u64, position: usize, source: (usize, usize)) -> Choice {
        let stream =
            |purpose, number: usize| Stream::new(key(&[seed, AUGMENT, purpose, epoch, number as u64]));
        let size = self.size as u32;
        let mut choice = Choice::plain(self.size, source);
        match self.geometry {
            Geometry::Resize => {}
            Geometry::CenterCrop { resize } => choice.take_centre(source, resize, self.size),
            Geometry::PadCrop { padding } => choice.shift = shift(padding, &mut stream(CROP, position)),
            Geometry::RandomResizedCrop { scale, ratio } => {
                choice.region = resized_crop(source, scale, ratio, &mut stream(CROP, position));
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

impl Choice {
    /// The centre of the image once its short side is resized to `resize`.
    fn take_centre(&mut self, (width, height): (usize, usize), resize: usize, size: usize) {
        let short = width.min(height);
        let (across, down) = (middle(width, short, resize, size), middle(height, short, resize, size));
        let ((left, width), (top, height)) = (across.source, down.source);
        self.region = CropBox { left, top, width, height };
        self.resized = (across.resized as u32, down.resized as u32);
        self.shift = (across.shift as i32, down.shift as i32);
    }
}

/// Along one side of an image: what is read, as (start, length), to how many pixels it is resized, and where among these
/// the output begins.
pub(crate) struct Part {
    pub(crate) source: (f64, f64),
    pub(crate) resized: usize,
    pub(crate) shift: usize,
}

/// torchvision resizes the whole image to whole pixels, cutting off what the long side has beyond, and cuts the middle
/// out of that, rounding halves to even.
fn middle(side: usize, short: usize, resize: usize, size: usize) -> Part {
    // A long side may be so long that the product needs more than 64 bits.
    let full = (resize as u128 * side as u128 / short.max(1) as u128) as usize;
    let begin = (full.saturating_sub(size) as f64 / 2.0).round_ties_even() as usize;
    Part::of(side, full, begin, size)
}

impl Part {
    /// Pixels `begin..begin + size` of a side that would be resized to `full` pixels. Only they are resized, by the same
    /// scale, with a margin as wide as a filter reaches: pixels must see the neighbours they would have seen.
    pub(crate) fn of(side: usize, full: usize, begin: usize, size: usize) -> Self {
        let scale = side as f64 / full as f64;
        let margin = (2.0 * (1.0 / scale).max(1.0)).ceil() as usize + 1;
        let (low, high) = (begin.saturating_sub(margin), full.min(begin + size + margin));
        let start = low as f64 * scale;
        // Rounding must not push the far edge out of the image.
        let end = (high as f64 * scale).min(side as f64);
        Part { source: (start, end - start), resized: high - low, shift: begin - low }
    }
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
    (width, height): (usize, usize),
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

/// Draws a rectangle to erase. As in torchvision, one that spans the image is drawn again, and the ratio is that of height
/// to width.
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
