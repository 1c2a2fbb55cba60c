//! Carrying out what was chosen for one sample.

use super::Transform;
use super::choice::Choice;
use crate::{CropBox, DataError, Image, Resizer};

/// Prepares samples; keeps tables and memory between them. One for each thread.
pub struct Preparer {
    transform: Transform,
    /// Normalised value of each byte of each channel.
    tables: Vec<[f32; 256]>,
    resizer: Resizer,
    sized: Image,
    bytes: Image,
    spare: Image,
}

impl Preparer {
    pub fn new(transform: Transform) -> Result<Self, DataError> {
        transform.check()?;
        let table =
            |(mean, std): (&f32, &f32)| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std);
        let tables = transform.mean.iter().zip(&transform.std).map(table).collect();
        let (sized, bytes, spare) = Default::default();
        Ok(Self { transform, tables, resizer: Resizer::new(), sized, bytes, spare })
    }

    pub fn transform(&self) -> &Transform {
        &self.transform
    }

    /// Carries a choice out as far as bytes go, before normalisation: a sample (S, S, C).
    pub fn prepare_bytes(&mut self, image: &Image, choice: &Choice, out: &mut [u8]) -> Result<(), DataError> {
        self.check(image, choice, out.len())?;
        let Transform { size, interpolation, .. } = self.transform;
        let resized = (choice.resized.0 as usize, choice.resized.1 as usize);
        self.resizer.resize(image, choice.region, resized, interpolation, &mut self.sized);
        window(&self.sized, size, choice.shift, choice.flip, &mut self.bytes);
        for op in choice.ops.as_slice() {
            op.apply(&mut self.bytes, &mut self.spare);
        }
        out.copy_from_slice(&self.bytes.pixels);
        Ok(())
    }

    /// Normalised value of each byte of each channel.
    pub(super) fn levels(&self) -> impl Iterator<Item = f32> {
        self.tables.iter().flatten().copied()
    }

    /// Turns an image into a normalised sample (C, S, S). Mixing takes two, and is left to [`super::Mix::apply`].
    pub fn prepare(&mut self, image: &Image, choice: &Choice, out: &mut [f32]) -> Result<(), DataError> {
        self.check(image, choice, out.len())?;
        let Transform { size, interpolation, .. } = self.transform;
        let resized = (choice.resized.0 as usize, choice.resized.1 as usize);
        let fits = choice.region == CropBox::whole(image) && (image.width, image.height) == resized;
        if !fits {
            self.resizer.resize(image, choice.region, resized, interpolation, &mut self.sized);
        }
        let source = if fits { image } else { &self.sized };
        if choice.ops.as_slice().is_empty() {
            normalise(source, size, choice.shift, choice.flip, &self.tables, out);
        } else {
            window(source, size, choice.shift, choice.flip, &mut self.bytes);
            for op in choice.ops.as_slice() {
                op.apply(&mut self.bytes, &mut self.spare);
            }
            normalise(&self.bytes, size, (0, 0), false, &self.tables, out);
        }
        if let Some(rect) = choice.erase {
            rect.rows(size, out).for_each(|row| row.fill(0.0));
        }
        Ok(())
    }

    fn check(&self, image: &Image, choice: &Choice, found_out: usize) -> Result<(), DataError> {
        let &Image { width, height, channels: found, ref pixels } = image;
        let channels = self.transform.channels;
        if found != channels || pixels.is_empty() || pixels.len() != width * height * found {
            return Err(DataError::Pixels { width, height, found, channels });
        }
        let (expected, found) = (self.transform.sample_len(), found_out);
        if found != expected {
            return Err(DataError::BufferLength { buffer: "sample", expected, found });
        }
        let CropBox { left, top, width, height } = choice.region;
        let (image_width, image_height) = (image.width, image.height);
        let inside =
            |start: f64, len: f64, full: usize| start >= 0.0 && len > 0.0 && start + len <= full as f64;
        if !(inside(left, width, image_width) && inside(top, height, image_height)) {
            return Err(DataError::Region { left, top, width, height, image_width, image_height });
        }
        Ok(())
    }
}

/// View of an output line onto an input line: how much of it comes before the input, where that is read from, and how
/// much is taken.
struct Look {
    before: usize,
    from: usize,
    taken: usize,
}

/// A line of `size` that begins `shift` after the beginning of a line of `len`.
fn look(shift: i32, size: usize, len: usize) -> Look {
    let off = shift.unsigned_abs() as usize;
    let (before, from) = if shift < 0 { (off.min(size), 0) } else { (0, off.min(len)) };
    Look { before, from, taken: (size - before).min(len - from) }
}

impl Look {
    /// Mirrored, what was missing on one side is missing on the other.
    fn mirrored(self, flip: bool, size: usize) -> Self {
        if flip { Self { before: size - self.before - self.taken, ..self } } else { self }
    }
}

/// One pass over an image (H, W, C): takes a window of it, mirrors it, normalises, and parts the channels.
fn normalise(
    image: &Image,
    size: usize,
    shift: (i32, i32),
    flip: bool,
    tables: &[[f32; 256]],
    out: &mut [f32],
) {
    let channels = image.channels;
    let rows = look(shift.1, size, image.height);
    let columns = look(shift.0, size, image.width).mirrored(flip, size);
    for (channel, (plane, table)) in out.chunks_exact_mut(size * size).zip(tables).enumerate() {
        let (top, rest) = plane.split_at_mut(rows.before * size);
        let (middle, bottom) = rest.split_at_mut(rows.taken * size);
        top.fill(table[0]);
        bottom.fill(table[0]);
        let lines = image.pixels.chunks_exact(image.width * channels).skip(rows.from);
        for (line, out) in lines.zip(middle.chunks_exact_mut(size)) {
            let (left, rest) = out.split_at_mut(columns.before);
            let (out, right) = rest.split_at_mut(columns.taken);
            left.fill(table[0]);
            right.fill(table[0]);
            let pixels = &line[columns.from * channels..][..columns.taken * channels];
            match channels {
                1 => look_up::<1>(pixels, channel, flip, table, out),
                3 => look_up::<3>(pixels, channel, flip, table, out),
                n => {
                    let values = pixels.chunks_exact(n).map(|pixel| table[usize::from(pixel[channel])]);
                    if flip { assign(out, values.rev()) } else { assign(out, values) }
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

/// Takes a window of bytes and mirrors it, for what comes between the geometry and the normalisation.
fn window(image: &Image, size: usize, shift: (i32, i32), flip: bool, out: &mut Image) {
    let channels = image.channels;
    let rows = look(shift.1, size, image.height);
    let columns = look(shift.0, size, image.width).mirrored(flip, size);
    let out = out.reset(size, size, channels);
    out.fill(0);
    let lines = image.pixels.chunks_exact(image.width * channels).skip(rows.from).take(rows.taken);
    for (line, out) in lines.zip(out.chunks_exact_mut(size * channels).skip(rows.before)) {
        let line = &line[columns.from * channels..][..columns.taken * channels];
        let out = &mut out[columns.before * channels..][..columns.taken * channels];
        if flip {
            let pixels = line.chunks_exact(channels).rev();
            out.chunks_exact_mut(channels).zip(pixels).for_each(|(out, pixel)| out.copy_from_slice(pixel));
        } else {
            out.copy_from_slice(line);
        }
    }
}
