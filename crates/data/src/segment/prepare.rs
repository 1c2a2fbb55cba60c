//! Carrying out what was chosen for one pair.

use super::choice::{MaskChoice, nearest};
use super::{IGNORED, MaskTransform};
use crate::augment::Part;
use crate::{CropBox, DataError, Image, Interpolation, Resizer, Sample};

/// Prepares samples; keeps memory between them. One for each thread.
pub struct MaskPreparer {
    transform: MaskTransform,
    resizer: Resizer,
    sized: Image,
    cut: Vec<u8>,
}

impl MaskPreparer {
    pub fn new(transform: MaskTransform) -> Result<Self, DataError> {
        transform.check()?;
        let (sized, cut) = Default::default();
        Ok(Self { transform, resizer: Resizer::new(), sized, cut })
    }

    pub fn transform(&self) -> &MaskTransform {
        &self.transform
    }

    /// Carries a choice out as far as bytes go, before normalisation: `pixels` (H, W, C) and labels `mask` (H, W). Gives
    /// the rows and columns that hold the image; beyond them pixels are 0 and labels are ignored.
    ///
    /// Images are resized as PIL does it, by triangles and, where they shrink, antialiased. A label is that of the original
    /// pixel at the new one's centre.
    pub fn prepare(
        &mut self,
        pair: &Sample,
        choice: &MaskChoice,
        pixels: &mut [u8],
        mask: &mut [u8],
    ) -> Result<[i32; 2], DataError> {
        self.check(pair, choice, pixels.len(), mask.len())?;
        let (width, height) = (choice.resized.0 as usize, choice.resized.1 as usize);
        let (left, top) = (choice.place.0 as usize, choice.place.1 as usize);
        let columns = self.transform.width.min(width - left);
        let rows = self.transform.height.min(height - top);

        let across = Part::of(pair.image.width, width, left, columns);
        let down = Part::of(pair.image.height, height, top, rows);
        self.cut_image(&pair.image, [&across, &down], (columns, rows));
        choice.distortion.apply(pair.image.channels, &mut self.cut);

        let channels = pair.image.channels;
        pixels.fill(0);
        let lines = pixels.chunks_exact_mut(self.transform.width * channels);
        for (out, line) in lines.zip(self.cut.chunks_exact(columns * channels)) {
            copy(out.chunks_exact_mut(channels), line.chunks_exact(channels), choice.flip, |out, pixel| {
                out.copy_from_slice(pixel);
            });
        }

        mask.fill(IGNORED);
        let from: Vec<usize> = nearest(pair.image.width, width, choice.place.0, columns).collect();
        let lines = mask.chunks_exact_mut(self.transform.width);
        for (out, row) in lines.zip(nearest(pair.image.height, height, choice.place.1, rows)) {
            let line = &pair.mask[row * pair.image.width..][..pair.image.width];
            copy(out.iter_mut(), from.iter(), choice.flip, |out, &column| *out = line[column]);
        }
        Ok([rows as i32, columns as i32])
    }

    /// Resizes what the cut shows, and takes it.
    fn cut_image(&mut self, image: &Image, [across, down]: [&Part; 2], (columns, rows): (usize, usize)) {
        let ((left, width), (top, height)) = (across.source, down.source);
        let region = CropBox { left, top, width, height };
        let to = (across.resized, down.resized);
        self.resizer.resize(image, region, to, Interpolation::Bilinear, &mut self.sized);
        let channels = image.channels;
        self.cut.clear();
        let lines = self.sized.pixels.chunks_exact(self.sized.width * channels).skip(down.shift).take(rows);
        lines.for_each(|line| {
            self.cut.extend_from_slice(&line[across.shift * channels..][..columns * channels]);
        });
    }

    fn check(
        &self,
        pair: &Sample,
        choice: &MaskChoice,
        found_pixels: usize,
        found_mask: usize,
    ) -> Result<(), DataError> {
        let &Image { width, height, channels: found, ref pixels } = &pair.image;
        let channels = self.transform.channels;
        if found != channels || pixels.is_empty() || pixels.len() != width * height * found {
            return Err(DataError::Pixels { width, height, found, channels });
        }
        let area = self.transform.area();
        for (buffer, expected, found) in [
            ("the mask of an image", width * height, pair.mask.len()),
            ("sample", area * channels, found_pixels),
            ("mask", area, found_mask),
        ] {
            if found != expected {
                return Err(DataError::BufferLength { buffer, expected, found });
            }
        }
        let (resized, place) = (choice.resized, choice.place);
        if place.0 >= resized.0 || place.1 >= resized.1 {
            let ((left, top), (image_width, image_height)) = (place, resized);
            let (width, height) = (self.transform.width as f64, self.transform.height as f64);
            let (left, top) = (f64::from(left), f64::from(top));
            let (image_width, image_height) = (image_width as usize, image_height as usize);
            return Err(DataError::Region { left, top, width, height, image_width, image_height });
        }
        Ok(())
    }
}

/// Copies what there is to the beginning of a line, mirrored or not.
fn copy<O, P>(
    out: impl Iterator<Item = O>,
    from: impl DoubleEndedIterator<Item = P>,
    flip: bool,
    mut assign: impl FnMut(O, P),
) {
    if flip {
        out.zip(from.rev()).for_each(|(out, pixel)| assign(out, pixel));
    } else {
        out.zip(from).for_each(|(out, pixel)| assign(out, pixel));
    }
}

/// Last part of a transform, on the host or on a device: normalise what is image, and set the padding to 0.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskFinish {
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    levels: Vec<f32>,
}

impl MaskFinish {
    pub fn of(transform: &MaskTransform) -> Result<Self, DataError> {
        transform.check()?;
        let by_channel = transform.mean.iter().zip(&transform.std);
        let levels =
            by_channel.flat_map(|(mean, std)| (0..256).map(move |byte| (byte as f32 / 255.0 - mean) / std));
        let &MaskTransform { height, width, channels, .. } = transform;
        Ok(MaskFinish { height, width, channels, levels: levels.collect() })
    }

    /// Copy for another size.
    pub fn sized(&self, height: usize, width: usize) -> Self {
        Self { height, width, ..self.clone() }
    }

    /// Normalised value of each byte of each channel: (C, 256).
    pub fn levels(&self) -> &[f32] {
        &self.levels
    }

    /// Finishes one sample: from bytes (H, W, C), of which `extent` (rows, columns) are image, to `out` (C, H, W).
    pub fn apply(&self, pixels: &[u8], extent: [i32; 2], out: &mut [f32]) {
        let [rows, columns] = extent.map(|side| usize::try_from(side).unwrap_or(0));
        let (width, channels) = (self.width, self.channels);
        let columns = columns.min(width);
        out.fill(0.0);
        let planes = out.chunks_exact_mut(self.height * width).zip(self.levels.chunks_exact(256));
        for (channel, (plane, levels)) in planes.enumerate() {
            let lines = plane.chunks_exact_mut(width).zip(pixels.chunks_exact(width * channels));
            for (out, line) in lines.take(rows) {
                let bytes = line.iter().skip(channel).step_by(channels);
                out[..columns]
                    .iter_mut()
                    .zip(bytes)
                    .for_each(|(out, &byte)| *out = levels[usize::from(byte)]);
            }
        }
    }
}
