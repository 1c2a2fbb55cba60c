//! Carrying out what was chosen for one sample.

use super::choice::Choice;
use super::{Geometry, Transform};
use crate::{CropBox, DataError, Image, Resizer};

/// Prepares samples; keeps tables and memory between them. One for each thread.
pub struct Preparer {
    transform: Transform,
    /// What each byte of each channel becomes.
    tables: Vec<[f32; 256]>,
    resizer: Resizer,
    cut: Image,
    sized: Image,
    spare: Image,
}

impl Preparer {
    pub fn new(transform: Transform) -> Result<Self, DataError> {
        transform.check()?;
        let table =
            |(mean, std): (&f32, &f32)| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std);
        let tables = transform.mean.iter().zip(&transform.std).map(table).collect();
        let (cut, sized, spare) = Default::default();
        Ok(Self { transform, tables, resizer: Resizer::new(), cut, sized, spare })
    }

    pub fn transform(&self) -> &Transform {
        &self.transform
    }

    /// Turns an image into a normalised sample (C, S, S). Mixing takes two, and is left to [`super::Mix::apply`].
    pub fn prepare(&mut self, image: &Image, choice: &Choice, out: &mut [f32]) -> Result<(), DataError> {
        self.check(image, out)?;
        let size = self.transform.size;
        let fits = is_whole(choice.region, image) && (image.width, image.height) == (size, size);
        if !fits {
            self.fit(image, choice.region);
        }
        let source = if fits { image } else { &self.sized };
        if choice.ops.as_slice().is_empty() {
            normalise(source, choice.shift, choice.flip, &self.tables, out);
        } else {
            window(source, choice.shift, choice.flip, &mut self.cut);
            for op in choice.ops.as_slice() {
                op.apply(&mut self.cut, &mut self.spare);
            }
            normalise(&self.cut, (0, 0), false, &self.tables, out);
        }
        if let Some(rect) = choice.erase {
            rect.rows(size, out).for_each(|row| row.fill(0.0));
        }
        Ok(())
    }

    fn check(&self, image: &Image, out: &[f32]) -> Result<(), DataError> {
        let &Image { width, height, channels: found, ref pixels } = image;
        let channels = self.transform.channels;
        if found != channels || pixels.is_empty() || pixels.len() != width * height * found {
            return Err(DataError::Pixels { width, height, found, channels });
        }
        let (expected, found) = (self.transform.sample_len(), out.len());
        if found != expected {
            return Err(DataError::BufferLength { buffer: "sample", expected, found });
        }
        Ok(())
    }

    /// Resizes a part of the image into `sized`.
    ///
    /// The edge pixels of a random part must not see their neighbours outside, as torchvision cuts it out before it is
    /// resized. A centre crop is cut from the resized image, and its edge pixels do see them.
    fn fit(&mut self, image: &Image, region: CropBox) {
        let Transform { size, interpolation: how, geometry, .. } = self.transform;
        let (resizer, to, out) = (&mut self.resizer, (size, size), &mut self.sized);
        match geometry {
            Geometry::CenterCrop { .. } => resizer.resize_within(image, region, to, how, out),
            _ => resizer.resize(image, region, to, how, out),
        }
    }
}

fn is_whole(region: CropBox, image: &Image) -> bool {
    region == CropBox { left: 0.0, top: 0.0, width: image.width as f64, height: image.height as f64 }
}

/// How a line of the output looks onto one of the input, moved by `shift`: columns before, taken and after.
struct Look {
    before: usize,
    from: usize,
    taken: usize,
}

fn look(shift: i32, size: usize) -> Look {
    let off = (shift.unsigned_abs() as usize).min(size);
    let taken = size - off;
    if shift < 0 { Look { before: off, from: 0, taken } } else { Look { before: 0, from: off, taken } }
}

/// One pass over a square image (S, S, C): moves, mirrors, normalises, and parts the channels.
fn normalise(image: &Image, shift: (i32, i32), flip: bool, tables: &[[f32; 256]], out: &mut [f32]) {
    let size = image.width;
    // Mirrored, what was missing on one side is missing on the other.
    let columns = look(shift.0, size);
    let before = if flip { size - columns.before - columns.taken } else { columns.before };
    let rows = look(shift.1, size);
    for (channel, (plane, table)) in out.chunks_exact_mut(size * size).zip(tables).enumerate() {
        let (top, rest) = plane.split_at_mut(rows.before * size);
        let (middle, bottom) = rest.split_at_mut(rows.taken * size);
        top.fill(table[0]);
        bottom.fill(table[0]);
        let lines = image.pixels.chunks_exact(size * image.channels).skip(rows.from);
        for (line, out) in lines.zip(middle.chunks_exact_mut(size)) {
            let (left, rest) = out.split_at_mut(before);
            let (out, right) = rest.split_at_mut(columns.taken);
            left.fill(table[0]);
            right.fill(table[0]);
            let pixels = &line[columns.from * image.channels..][..columns.taken * image.channels];
            match image.channels {
                1 => look_up::<1>(pixels, channel, flip, table, out),
                3 => look_up::<3>(pixels, channel, flip, table, out),
                n => {
                    let bytes = pixels.chunks_exact(n).map(|pixel| table[usize::from(pixel[channel])]);
                    if flip { assign(out, bytes.rev()) } else { assign(out, bytes) }
                }
            }
        }
    }
}

fn look_up<const C: usize>(pixels: &[u8], channel: usize, flip: bool, table: &[f32; 256], out: &mut [f32]) {
    let channel = channel.min(C - 1);
    let values = pixels.as_chunks::<C>().0.iter().map(|pixel| table[usize::from(pixel[channel])]);
    if flip { assign(out, values.rev()) } else { assign(out, values) }
}

fn assign(out: &mut [f32], values: impl Iterator<Item = f32>) {
    out.iter_mut().zip(values).for_each(|(out, value)| *out = value);
}

/// Moves and mirrors bytes, for what comes between the geometry and the normalisation.
fn window(image: &Image, shift: (i32, i32), flip: bool, out: &mut Image) {
    let (size, channels) = (image.width, image.channels);
    let (columns, rows) = (look(shift.0, size), look(shift.1, size));
    let before = if flip { size - columns.before - columns.taken } else { columns.before };
    let out = out.reset(size, size, channels);
    out.fill(0);
    let lines = image.pixels.chunks_exact(size * channels).skip(rows.from).take(rows.taken);
    for (line, out) in lines.zip(out.chunks_exact_mut(size * channels).skip(rows.before)) {
        let line = &line[columns.from * channels..][..columns.taken * channels];
        let out = &mut out[before * channels..][..columns.taken * channels];
        if flip {
            let pixels = line.chunks_exact(channels).rev();
            out.chunks_exact_mut(channels).zip(pixels).for_each(|(out, pixel)| out.copy_from_slice(pixel));
        } else {
            out.copy_from_slice(line);
        }
    }
}
