//! Drawing what happens to one pair.

use super::photometric::Distortion;
use super::transform::fitted;
use super::{IGNORED, MaskTransform};
use crate::Sample;
use crate::random::{Stream, key};

/// Everything random about one sample, as plain data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskChoice {
    /// Width and height that the whole pair is resized to.
    pub resized: (u32, u32),
    /// Place of the crop in that: from the left and from the top. What the crop reaches beyond is padding.
    pub place: (u32, u32),
    pub flip: bool,
    pub distortion: Distortion,
}

/// Keeps these draws apart from whatever else is drawn from a run's seed.
const SEGMENT: u64 = 0x7365_676d_656e_7400;

/// One stream for each purpose, so that turning one setting on leaves the other draws as they were.
const RESIZE: u64 = 1;
const CROP: u64 = 2;
const FLIP: u64 = 3;
const COLOUR: u64 = 4;

/// Draws of a crop until no class has too much of it.
const ATTEMPTS: usize = 10;

impl MaskTransform {
    /// Draws what happens to the sample at `position` of `epoch`. Settings are those that [`MaskTransform::check`] lets pass.
    pub fn choose(&self, seed: u64, epoch: u64, position: usize, pair: &Sample) -> MaskChoice {
        let stream = |purpose| Stream::new(key(&[seed, SEGMENT, purpose, epoch, position as u64]));
        let ratio = match self.ratio {
            (low, high) if low < high => low + (high - low) * stream(RESIZE).unit(),
            (low, _) => low,
        };
        let scaled = |side: usize| ((side as f64 * ratio) as usize).max(1);
        let resized = fitted((pair.image.width, pair.image.height), (scaled(self.fit.0), scaled(self.fit.1)));
        MaskChoice {
            resized: (resized.0 as u32, resized.1 as u32),
            place: self.place(resized, pair, &mut stream(CROP)),
            flip: self.flip > 0.0 && stream(FLIP).unit() < self.flip,
            distortion: if self.distort {
                Distortion::draw(&mut stream(COLOUR))
            } else {
                Distortion::default()
            },
        }
    }

    /// The last cut that is drawn is taken, whatever it shows.
    fn place(&self, (width, height): (usize, usize), pair: &Sample, stream: &mut Stream) -> (u32, u32) {
        let (across, down) = (width.saturating_sub(self.width), height.saturating_sub(self.height));
        if !self.random_place {
            return ((across / 2) as u32, (down / 2) as u32);
        }
        let mut draw = || {
            let top = stream.below(down as u64 + 1);
            (stream.below(across as u64 + 1) as u32, top as u32)
        };
        let mut place = draw();
        if self.max_share < 1.0 {
            for _ in 0..ATTEMPTS {
                if self.is_varied((width, height), place, pair) {
                    break;
                }
                place = draw();
            }
        }
        place
    }

    /// Returns whether a cut shows two classes at least, and none of them on too much of it.
    fn is_varied(&self, resized: (usize, usize), place: (u32, u32), pair: &Sample) -> bool {
        let columns = runs(nearest(pair.image.width, resized.0, place.0, self.width));
        let rows = runs(nearest(pair.image.height, resized.1, place.1, self.height));
        let mut counts = [0u64; 256];
        for (row, times) in rows {
            let line = &pair.mask[row * pair.image.width..][..pair.image.width];
            columns.iter().for_each(|&(column, across)| counts[usize::from(line[column])] += across * times);
        }
        counts[usize::from(IGNORED)] = 0;
        let (most, all) = (counts.iter().max().copied().unwrap_or(0), counts.iter().sum::<u64>());
        most < all && (most as f64) < self.max_share * all as f64
    }
}

/// For each pixel of a cut of `size`, `place` after the beginning of an axis that was resized from `from` to `to` pixels: the
/// original pixel at its centre. Ends where the axis does.
pub(super) fn nearest(from: usize, to: usize, place: u32, size: usize) -> impl Iterator<Item = usize> {
    let place = (place as usize).min(to);
    // floor((i + 1/2) · from / to), in whole numbers.
    (place..to.min(place + size)).map(move |i| ((2 * i + 1) * from / (2 * to)).min(from - 1))
}

/// The labels of an image of (width, height) that was resized `to` another size: each is that of the original pixel at the new
/// one's centre.
pub fn resized_mask(mask: &[u8], from: (usize, usize), to: (usize, usize)) -> Vec<u8> {
    let columns: Vec<usize> = nearest(from.0, to.0, 0, to.0).collect();
    let rows = nearest(from.1, to.1, 0, to.1).map(|row| &mask[row * from.0..][..from.0]);
    rows.flat_map(|line| columns.iter().map(|&column| line[column])).collect()
}

/// Equal neighbours, and how many there are.
fn runs(values: impl Iterator<Item = usize>) -> Vec<(usize, u64)> {
    let mut runs: Vec<(usize, u64)> = vec![];
    for value in values {
        match runs.last_mut() {
            Some((last, times)) if *last == value => *times += 1,
            _ => runs.push((value, 1)),
        }
    }
    runs
}
