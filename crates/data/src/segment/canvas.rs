//! What a model says of windows, put together.
//!
//! K classes; logits are (H, W, K).

use crate::DataError;

/// Logits at some resolution, of whatever area.
#[derive(Clone, Copy, Debug)]
pub struct Grid<'a> {
    pub width: usize,
    pub height: usize,
    pub classes: usize,
    pub logits: &'a [f32],
}

impl Grid<'_> {
    pub(super) fn check(&self) -> Result<(), DataError> {
        let (expected, found) = (self.width * self.height * self.classes, self.logits.len());
        if found == expected && found > 0 {
            return Ok(());
        }
        Err(DataError::BufferLength { buffer: "logits", expected, found })
    }

    /// Adds the logits of a cell, times `weight`.
    #[inline]
    pub(super) fn add(&self, x: usize, y: usize, weight: f32, scores: &mut [f32]) {
        if weight == 0.0 {
            return;
        }
        let cell = &self.logits[(y * self.width + x) * self.classes..][..self.classes];
        scores.iter_mut().zip(cell).for_each(|(score, logit)| *score += weight * logit);
    }
}

/// Logits of an image, as sums over the windows that see a pixel.
#[derive(Clone, Debug)]
pub struct Canvas {
    width: usize,
    height: usize,
    classes: usize,
    sums: Vec<f32>,
    /// Windows that saw a pixel: (H, W).
    times: Vec<u32>,
}

impl Canvas {
    /// For an image of (width, height).
    pub fn new((width, height): (usize, usize), classes: usize) -> Self {
        let area = width * height;
        Canvas { width, height, classes, sums: vec![0.0; area * classes], times: vec![0; area] }
    }

    /// Makes room for another image, reusing memory.
    pub fn clear(&mut self, (width, height): (usize, usize)) {
        (self.width, self.height) = (width, height);
        self.sums.clear();
        self.sums.resize(width * height * self.classes, 0.0);
        self.times.clear();
        self.times.resize(width * height, 0);
    }

    /// Adds what was said of a window of `size` (width, height) pixels at `place`. Logits of a coarser grid are interpolated, as
    /// PyTorch does it without aligned corners; what lies beyond the image is left out.
    pub fn add(&mut self, place: (usize, usize), size: (usize, usize), grid: &Grid) -> Result<(), DataError> {
        grid.check()?;
        if grid.classes != self.classes {
            let (expected, found) = (self.classes, grid.classes);
            return Err(DataError::BufferLength { buffer: "logits of a pixel", expected, found });
        }
        let columns = Taps::new(size.0, grid.width as f64 / size.0 as f64, grid.width);
        let rows = Taps::new(size.1, grid.height as f64 / size.1 as f64, grid.height);
        for (row, y) in rows.iter().zip(place.1..self.height) {
            for (column, x) in columns.iter().zip(place.0..self.width) {
                let pixel = y * self.width + x;
                self.times[pixel] += 1;
                let sums = &mut self.sums[pixel * self.classes..][..self.classes];
                for (gy, down) in row.ends() {
                    column.ends().iter().for_each(|&(gx, across)| grid.add(gx, gy, across * down, sums));
                }
            }
        }
        Ok(())
    }

    /// The most probable class of every pixel of the original image of (width, height): averages are interpolated to it. Of
    /// equal logits the first wins.
    pub fn labels(&self, original: (usize, usize)) -> Result<Vec<u8>, DataError> {
        if let Some(pixel) = self.times.iter().position(|&times| times == 0) {
            let (x, y) = (pixel % self.width, pixel / self.width);
            let problem = format!("no window has seen column {x}, row {y}");
            return Err(DataError::Setting { setting: "windows", problem });
        }
        let columns = Taps::new(original.0, self.width as f64 / original.0 as f64, self.width);
        let rows = Taps::new(original.1, self.height as f64 / original.1 as f64, self.height);
        let sums = Grid { width: self.width, height: self.height, classes: self.classes, logits: &self.sums };
        let mut scores = vec![0.0; self.classes];
        let mut labels = Vec::with_capacity(original.0 * original.1);
        for row in rows.iter() {
            for column in columns.iter() {
                scores.fill(0.0);
                for (y, down) in row.ends() {
                    for (x, across) in column.ends() {
                        let share = across * down / self.times[y * self.width + x] as f32;
                        sums.add(x, y, share, &mut scores);
                    }
                }
                labels.push(largest(&scores));
            }
        }
        Ok(labels)
    }
}

/// The first of the largest.
pub(super) fn largest(scores: &[f32]) -> u8 {
    let first = (1..scores.len()).fold(0, |best, i| if scores[i] > scores[best] { i } else { best });
    first as u8
}

/// Along an axis: for each output pixel the two neighbours it lies between.
pub(super) struct Taps(Vec<Tap>);

#[derive(Clone, Copy)]
pub(super) struct Tap {
    low: usize,
    high: usize,
    /// Of the higher one.
    share: f32,
}

impl Taps {
    /// `scale` input pixels for each of `to` output pixels; the input ends after `within`.
    pub(super) fn new(to: usize, scale: f64, within: usize) -> Self {
        let last = within.max(1) - 1;
        let tap = |i: usize| {
            let at = ((i as f64 + 0.5) * scale - 0.5).clamp(0.0, last as f64);
            let low = at as usize;
            Tap { low, high: (low + 1).min(last), share: (at - low as f64) as f32 }
        };
        Taps((0..to).map(tap).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Tap> + '_ {
        self.0.iter().copied()
    }
}

impl Tap {
    /// Places and weights. Both may be the same place, and a weight may be 0.
    #[inline]
    pub(super) fn ends(self) -> [(usize, f32); 2] {
        [(self.low, 1.0 - self.share), (self.high, self.share)]
    }
}
