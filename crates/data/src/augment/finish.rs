//! What the host leaves to a device: bytes, and numbers that say what becomes of them.
//!
//! [`Finish::of`] divides a transform. Where all images have one small size and no operation on bytes comes after the
//! resizing, they are handed over as they were read; otherwise the host goes on until they are bytes of the size that a model
//! reads. From there a device takes windows, mirrors, normalises, erases and mixes. [`Finish::apply`] is what it must come to:
//! bit for bit what [`super::Preparer`] and [`Mix`] make of the same choices.
//!
//! A row of choices is all that is known of one place of a batch:
//!
//! | numbers | mean |
//! |---|---|
//! | 0..14 | the sample itself |
//! | 14..28 | its partner, where they are mixed |
//! | 28..34 | 0: not mixed, 1: blended, 2: with a patch of the partner; the bits of λ; the patch |
//!
//! A sample is: which of the pixels; for columns, then for rows, (the first row of the table of taps, how many pixels the
//! resized axis has, the first pixel that is seen); the window's shift right and down; whether it is mirrored; and what is
//! erased. A rectangle is (left, top, width, height).

use super::choice::{Choice, Rect};
use super::{Geometry, Mix, Preparer, Transform};
use crate::resize::{AxisTaps, weighted};
use crate::{CropBox, DataError, Dataset, Image};

/// Numbers of a row of choices.
pub const CHOICES: usize = 2 * SIDE + 6;
/// Numbers of a sample.
const SIDE: usize = 14;

/// The longest side that a device resizes.
const LONGEST: usize = 128;
/// Bytes of one channel, rows resized and columns not yet: a device keeps two of them in fast memory.
const NARROWED: usize = 23 << 10;
/// Beyond any image, and far from overflowing.
const FAR: i32 = 1 << 16;

/// One sample as a device is told of it.
pub(crate) type Side = [i32; SIDE];

/// Part of a transform that a device does.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Height and width of what a model reads.
    pub size: usize,
    pub channels: usize,
    /// Width of the images that the host hands over.
    pub width: usize,
    pub height: usize,
    /// Images of the set if all of them lie on the device, and none comes with a batch.
    pub resident: Option<usize>,
    mixes: bool,
    way: Way,
    levels: Vec<f32>,
    taps: Vec<i32>,
    row: usize,
}

/// Who does what to the bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The host does all of it.
    Host,
    /// The device takes a window of what was resized, of all images in the same way.
    Same { across: Axis, down: Axis },
    /// The device resizes a part of each image; there is a table for every length.
    Parts,
}

/// One axis: the first row of its table, resized pixels, the first pixel that is seen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    row: usize,
    resized: usize,
    start: usize,
}

impl Axis {
    fn numbers(self) -> [i32; 3] {
        [self.row as i32, self.resized as i32, self.start as i32]
    }
}

impl Finish {
    /// Divides a transform of the images of a set between host and device.
    pub fn of(transform: &Transform, set: &dyn Dataset) -> Result<Self, DataError> {
        let levels = Preparer::new(transform.clone())?.levels().collect();
        let &Transform { size, channels, .. } = transform;
        let mixes = transform.mixes();
        let mut finish = Finish {
            size,
            channels,
            width: size,
            height: size,
            resident: None,
            mixes,
            way: Way::Host,
            levels,
            taps: vec![],
            row: 0,
        };
        if let Some(source) = set.size().filter(|_| transform.rand_augment.is_none_or(|r| r.ops == 0)) {
            finish.leave(transform, source);
        }
        Ok(finish)
    }

    /// For a set that lies on the device: choices name its images by their numbers.
    pub fn with_resident(self, images: usize) -> Self {
        Self { resident: (self.way != Way::Host).then_some(images), ..self }
    }

    /// Returns whether bytes are handed over as they were read.
    pub fn takes_originals(&self) -> bool {
        self.way != Way::Host
    }

    /// Leaves geometry to the device, if that can do it.
    fn leave(&mut self, transform: &Transform, (width, height): (usize, usize)) {
        let Choice { region, resized, .. } = transform.choose(0, 0, 0, (width, height));
        let resized = (resized.0 as usize, resized.1 as usize);
        let CropBox { left, top, width: across, height: down } = region;
        let parts = matches!(transform.geometry, Geometry::RandomResizedCrop { .. });
        let whole = (left, top, across, down) == (0.0, 0.0, width as f64, height as f64);
        let small = width.max(height) <= LONGEST && height * resized.0.max(self.size) <= NARROWED;
        if !parts && whole && (width, height) == resized {
            let axis = |len| Axis { row: 0, resized: len, start: 0 };
            self.way = Way::Same { across: axis(width), down: axis(height) };
        } else if !small || width == 0 || height == 0 {
            return;
        } else if parts {
            let how = transform.interpolation;
            let lengths = 1..=width.max(height);
            let tables: Vec<_> = lengths.map(|n| AxisTaps::new(0.0, n as f64, n, self.size, how)).collect();
            self.put(&tables);
            self.way = Way::Parts;
        } else {
            let how = transform.interpolation;
            let axis = |start, len, within, to| AxisTaps::new(start, len, within, to, how);
            let tables = [axis(left, across, width, resized.0), axis(top, down, height, resized.1)];
            self.put(&tables);
            let across = Axis { row: 0, resized: resized.0, start: tables[0].start };
            let down = Axis { row: resized.0, resized: resized.1, start: tables[1].start };
            self.way = Way::Same { across, down };
        }
        (self.width, self.height) = (width, height);
    }

    fn put(&mut self, tables: &[AxisTaps]) {
        let runs = || tables.iter().flat_map(|table| &table.runs);
        self.row = 2 + runs().map(|(_, weights)| weights.len()).max().unwrap_or(0);
        for (first, weights) in runs() {
            let end = self.taps.len() + self.row;
            self.taps.extend([*first as i32, weights.len() as i32]);
            self.taps.extend_from_slice(weights);
            self.taps.resize(end, 0);
        }
    }

    /// Normalised value of each byte of each channel: (C, 256).
    pub fn levels(&self) -> &[f32] {
        &self.levels
    }

    /// The weights of the resizing, if there is one: rows of (first pixel, number of weights, weights).
    pub fn taps(&self) -> &[i32] {
        &self.taps
    }

    /// Rows of the taps, and numbers of each.
    pub fn taps_shape(&self) -> Option<[usize; 2]> {
        (self.row > 0).then(|| [self.taps.len() / self.row, self.row])
    }

    /// Bytes of one image (H, W, C).
    pub fn image_len(&self) -> usize {
        self.width * self.height * self.channels
    }

    /// Images among the pixels: those of a batch and, where samples are mixed, partners that belong to other batches; or all
    /// of a set.
    pub fn images(&self, batch: usize) -> usize {
        self.resident.unwrap_or(batch + if self.mixes { 2 } else { 0 })
    }

    /// Does the host's part: fills in the bytes of an image, and gives what is left to do.
    pub(crate) fn begin(
        &self,
        preparer: &mut Preparer,
        image: &Image,
        choice: &Choice,
        out: &mut [u8],
    ) -> Result<Side, DataError> {
        if self.way == Way::Host {
            preparer.prepare_bytes(image, choice, out)?;
        } else if (image.width, image.height, image.channels) == (self.width, self.height, self.channels)
            && image.pixels.len() == out.len()
        {
            out.copy_from_slice(&image.pixels);
        } else {
            let &Image { width, height, channels: found, .. } = image;
            return Err(DataError::Pixels { width, height, found, channels: self.channels });
        }
        Ok(self.side(choice))
    }

    /// Numbers that tell a device what to do with a sample, of which the place is not known yet.
    pub(crate) fn side(&self, choice: &Choice) -> Side {
        let whole = Axis { row: 0, resized: self.size, start: 0 };
        let (across, down) = match self.way {
            Way::Host => (whole, whole),
            Way::Same { across, down } => (across, down),
            Way::Parts => {
                let part = |start: f64, len: f64| {
                    let row = (len as usize).saturating_sub(1) * self.size;
                    Axis { row, resized: self.size, start: start as usize }
                };
                let CropBox { left, top, width, height } = choice.region;
                (part(left, width), part(top, height))
            }
        };
        let done = self.way == Way::Host;
        let ((right, below), flip) = if done { ((0, 0), false) } else { (choice.shift, choice.flip) };
        let shift = |by: i32| by.clamp(-FAR, FAR);
        let [x0, x1, x2] = across.numbers();
        let [y0, y1, y2] = down.numbers();
        let [left, top, width, height] = choice.erase.map_or([0; 4], numbers);
        let (right, below) = (shift(right), shift(below));
        [0, x0, x1, x2, y0, y1, y2, right, below, i32::from(flip), left, top, width, height]
    }

    /// Writes a row: a sample at its place among the pixels, and its partner if they are mixed.
    pub(crate) fn write(own: (&Side, usize), partner: (&Side, usize), mix: Mix, row: &mut [i32]) {
        let placed = |(side, place): (&Side, usize), out: &mut [i32]| {
            out.copy_from_slice(side);
            out[0] = place as i32;
        };
        let (own_row, rest) = row.split_at_mut(SIDE);
        let (partner_row, mixed) = rest.split_at_mut(SIDE);
        placed(own, own_row);
        placed(partner, partner_row);
        let lambda = mix.lambda().to_bits() as i32;
        mixed.copy_from_slice(&match mix {
            Mix::Off => [0; 6],
            Mix::Blend { .. } => [1, lambda, 0, 0, 0, 0],
            Mix::Patch { patch, .. } => {
                let [left, top, width, height] = numbers(patch);
                [2, lambda, left, top, width, height]
            }
        });
    }

    /// The row of a place without a sample: all of it is erased.
    pub(crate) fn write_blank(&self, row: &mut [i32]) {
        let size = self.size as u32;
        let erase = Some(Rect { left: 0, top: 0, width: size, height: size });
        let plain = Choice::plain(self.size, (self.width, self.height));
        let side = self.side(&Choice { erase, ..plain });
        Self::write((&side, 0), (&side, 0), Mix::Off, row);
    }

    /// Makes, as a device does, of pixels (P, H, W, C) and choices (B, 34): images (B, C, S, S). As plain as it can be; for tests,
    /// and for whoever wants to see what a model saw.
    pub fn apply(&self, pixels: &[u8], choices: &[i32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(choices.len() / CHOICES * self.channels * self.size * self.size);
        for row in choices.as_chunks::<CHOICES>().0 {
            let mut own = self.sample(pixels, &row[..SIDE]);
            let [kind, lambda, left, top, width, height] = row[2 * SIDE..] else {
                unreachable!("34 numbers")
            };
            if kind != 0 {
                let mut partner = self.sample(pixels, &row[SIDE..2 * SIDE]);
                let lambda = f32::from_bits(lambda as u32);
                let [left, top, width, height] = [left, top, width, height].map(|x| x as u32);
                let patch = Rect { left, top, width, height };
                let mix = if kind == 1 { Mix::Blend { lambda } } else { Mix::Patch { patch, lambda } };
                mix.apply(self.size, &mut own, &mut partner);
            }
            out.extend(own);
        }
        out
    }

    /// One sample, before it is mixed.
    fn sample(&self, pixels: &[u8], side: &[i32]) -> Vec<f32> {
        let &[image, x0, x1, x2, y0, y1, y2, right, below, flip, left, top, width, height] = side else {
            unreachable!("14 numbers")
        };
        let len = self.image_len();
        let image = &pixels[image as usize * len..][..len];
        let axis = |row: i32, resized: i32, start: i32| {
            let (row, resized, start) = (row as usize, resized as usize, start as usize);
            Axis { row, resized, start }
        };
        let resized = self.resized(image, axis(x0, x1, x2), axis(y0, y1, y2));
        let size = self.size as i32;
        let mut out = Vec::with_capacity(self.channels * self.size * self.size);
        for channel in 0..self.channels {
            for y in 0..size {
                for x in 0..size {
                    let (from_x, from_y) = (if flip != 0 { size - 1 - x } else { x } + right, y + below);
                    let inside = (0..x1).contains(&from_x) && (0..y1).contains(&from_y);
                    let at = || (from_y * x1 + from_x) as usize * self.channels + channel;
                    let byte = if inside { resized[at()] } else { 0 };
                    let erased = (left..left + width).contains(&x) && (top..top + height).contains(&y);
                    out.push(if erased { 0.0 } else { self.levels[channel * 256 + usize::from(byte)] });
                }
            }
        }
        out
    }

    /// Rows first, then columns.
    fn resized(&self, image: &[u8], across: Axis, down: Axis) -> Vec<u8> {
        let (width, height, channels) = (self.width, self.height, self.channels);
        if self.row == 0 {
            return image.to_vec();
        }
        let taps = |axis: Axis, i: usize| {
            let row = &self.taps[(axis.row + i) * self.row..][..self.row];
            (axis.start + row[0] as usize, &row[2..2 + row[1] as usize])
        };
        let mut narrowed = Vec::with_capacity(height * across.resized * channels);
        for y in 0..height {
            for (first, weights) in (0..across.resized).map(|x| taps(across, x)) {
                for channel in 0..channels {
                    let at = (y * width + first) * channels + channel;
                    narrowed.push(weighted(image[at..].iter().step_by(channels).copied(), weights));
                }
            }
        }
        let line = across.resized * channels;
        let mut out = Vec::with_capacity(down.resized * line);
        for (first, weights) in (0..down.resized).map(|y| taps(down, y)) {
            for at in 0..line {
                out.push(weighted(narrowed[first * line + at..].iter().step_by(line).copied(), weights));
            }
        }
        out
    }
}

fn numbers(rect: Rect) -> [i32; 4] {
    [rect.left, rect.top, rect.width, rect.height].map(|x| x as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Interpolation;

    struct Sized(Option<(usize, usize)>);

    impl Dataset for Sized {
        fn len(&self) -> usize {
            0
        }
        fn class_names(&self) -> &[String] {
            &[]
        }
        fn channels(&self) -> usize {
            3
        }
        fn name(&self, _: usize) -> String {
            String::new()
        }
        fn read(&self, _: usize, _: &mut crate::Sample) -> Result<(), DataError> {
            Ok(())
        }
        fn size(&self) -> Option<(usize, usize)> {
            self.0
        }
    }

    fn of(geometry: Geometry, source: Option<(usize, usize)>) -> Finish {
        let plain = Transform::evaluation(224, None, &[0.5; 3], &[0.5; 3], Interpolation::Bilinear);
        Finish::of(&Transform { geometry, ..plain }, &Sized(source)).unwrap()
    }

    #[test]
    fn small_images_of_one_size_are_handed_over_as_they_are() {
        let crop = Geometry::RandomResizedCrop { scale: (0.08, 1.0), ratio: (0.75, 1.4) };
        let pad = Geometry::PadCrop { padding: 28 };
        for (geometry, rows) in [(Geometry::Resize, 448), (pad, 448), (crop, 32 * 224)] {
            let finish = of(geometry, Some((32, 32)));
            assert_eq!((finish.width, finish.height, finish.image_len()), (32, 32, 3072));
            assert_eq!(finish.taps_shape().unwrap()[0], rows);
            for source in [None, Some((500, 375))] {
                let finish = of(geometry, source);
                assert_eq!((finish.width, finish.takes_originals(), finish.taps_shape()), (224, false, None));
            }
        }
        // What has its size already is only looked up.
        assert_eq!(of(pad, Some((224, 224))).taps_shape(), None);
        assert!(of(pad, Some((224, 224))).takes_originals());
    }

    #[test]
    fn a_place_without_a_sample_is_zero() {
        let finish = of(Geometry::Resize, Some((32, 32)));
        let mut row = [0; CHOICES];
        finish.write_blank(&mut row);
        assert!(finish.apply(&[7; 3072], &row).iter().all(|&x| x == 0.0));
    }
}
